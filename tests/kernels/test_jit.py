"""Where kernels cannot run, the reference does, and what went wrong is told once."""

from __future__ import annotations

import pytest
import torch

from stapes.audio.features import log_mel_spectrogram
from stapes.kernels import jit
from stapes.kernels.jit import launch_or, refusals

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(jit, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refusals.clear()
    yield
    refusals.clear()


def never() -> str:
    raise AssertionError("must not run")


def failing(error: Exception):
    def launch() -> str:
        raise error

    return launch


def test_the_kernel_runs_on_gpus_and_the_reference_on_the_cpu():
    assert launch_or("k", GPU, lambda: "kernel", never) == "kernel"
    assert launch_or("k", CPU, never, lambda: "reference") == "reference"


def test_without_triton_the_reference_runs(monkeypatch):
    monkeypatch.setattr(jit, "has_triton", lambda: False)
    assert launch_or("k", GPU, never, lambda: "reference") == "reference"


def test_a_refusal_is_logged_once_and_the_kernel_is_not_tried_again(caplog):
    for launch in (failing(RuntimeError("unsupported target: gfx1030\nmore")), never):
        assert launch_or("k", GPU, launch, lambda: "reference") == "reference"
    assert refusals == {("k", "cuda:0"): "RuntimeError: unsupported target: gfx1030"}
    assert len(caplog.records) == 1
    assert launch_or("another", GPU, lambda: "kernel", never) == "kernel"


def test_an_input_that_cannot_be_computed_is_no_refusal():
    with pytest.raises(ZeroDivisionError):
        launch_or("k", GPU, failing(ValueError("bad input")), lambda: 1 // 0)
    assert not refusals


def test_memory_that_runs_out_is_no_refusal():
    with pytest.raises(torch.OutOfMemoryError):
        launch_or("k", GPU, failing(torch.OutOfMemoryError("full")), never)
    assert not refusals


def test_the_interpreter_hides_no_mistake(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(IndexError):
        launch_or("k", CPU, failing(IndexError("mistake")), never)


def test_features_need_no_triton(monkeypatch):
    monkeypatch.setattr(jit, "has_triton", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert log_mel_spectrogram(torch.randn(1, 16_000)).shape == (1, 80, 100)
