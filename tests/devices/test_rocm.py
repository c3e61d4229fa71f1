"""Safe defaults of ROCm, and the self-tests that any device can be asked to pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stapes.devices import rocm
from stapes.devices.backend import attention_kernels
from stapes.devices.kfd import KfdGpu

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What PyTorch was asked to multiply with."""
    asked: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", asked.append)
    return asked


@pytest.fixture
def radeon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preferred: list[str]) -> Path:
    """A ROCm build of PyTorch beside an RX 7900."""
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    monkeypatch.setattr(rocm, "read_gpus", lambda: [KfdGpu(1, "gfx1100", None, 128, None, False)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_nothing_is_set_without_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    environment: dict[str, str] = {}
    assert rocm.apply_defaults(environment) == environment == {}


def test_defaults_on_rocm(radeon: Path, preferred: list[str]) -> None:
    environment: dict[str, str] = {}
    assert rocm.apply_defaults(environment) == environment
    assert environment["MIOPEN_FIND_MODE"] == "FAST"
    assert Path(environment["MIOPEN_USER_DB_PATH"]).is_relative_to(radeon)
    assert Path(environment["MIOPEN_USER_DB_PATH"]).is_dir()
    assert environment["TORCH_BLAS_PREFER_HIPBLASLT"] == "1"
    assert preferred == ["hipblaslt"]
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert rocm.apply_defaults(environment) == {}  # a second call finds all set


def test_the_user_wins(radeon: Path, preferred: list[str]) -> None:
    environment = {
        "MIOPEN_FIND_MODE": "NORMAL",
        "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True",  # an old name of the same setting counts
        "TORCH_BLAS_PREFER_HIPBLASLT": "0",
        "MIOPEN_USER_DB_PATH": "/volume/miopen",
    }
    before = dict(environment)
    added = rocm.apply_defaults(environment)
    assert set(added) == {"MIOPEN_CUSTOM_CACHE_DIR"}
    assert environment == before | added
    assert preferred == []


def test_no_override_is_ever_set() -> None:
    for architectures in ([], ["gfx1030"], ["gfx1032"], ["gfx942"] * 8):
        assert not [name for name in rocm.defaults(architectures, Path("x")) if name.startswith("HSA_")]


def test_hipblaslt_only_where_every_gpu_has_it() -> None:
    def prefers(*architectures: str) -> bool:
        return "TORCH_BLAS_PREFER_HIPBLASLT" in rocm.defaults(list(architectures), Path("x"))

    assert prefers("gfx942", "gfx942")
    assert not prefers("gfx1030")
    assert not prefers("gfx1100", "gfx1036")
    assert not prefers()


def test_a_build_without_hipblaslt_keeps_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("has not been compiled with hipBLASLt")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", refuse)
    rocm._prefer_hipblaslt()


def test_a_home_that_cannot_be_written_to_is_left_to_miopen(radeon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (radeon / "stapes").write_text("a file where the folder should be")
    environment: dict[str, str] = {}
    rocm.apply_defaults(environment)
    assert "MIOPEN_USER_DB_PATH" not in environment
    assert environment["MIOPEN_FIND_MODE"] == "FAST"


@pytest.mark.parametrize("device", DEVICES)
def test_this_machine_passes_its_parity_test(device: str) -> None:
    results = rocm.check_parity(torch.device(device))
    assert len(results) == 3
    for result in results:
        assert result.passed, result
        assert result.error is not None
        assert result.error < rocm.TOLERANCE


def test_parity_notices_a_wrong_convolution_and_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.conv1d

    def wrong(x, *args, **kwargs):
        if x.shape[1] == 1 and x.dtype == torch.float32:
            raise RuntimeError("miopenStatusUnknownError\nand a stack")
        return right(x, *args, **kwargs) * (1.001 if x.dtype == torch.float32 else 1)

    monkeypatch.setattr(F, "conv1d", wrong)
    lstm, mel, wave = rocm.check_parity(torch.device("cpu"))
    assert lstm.passed
    assert not mel.passed
    assert mel.error == pytest.approx(1e-3, rel=0.1) or mel.error > 1e-3
    assert (wave.passed, wave.failure) == (False, "RuntimeError: miopenStatusUnknownError")


def test_parity_notices_an_lstm_that_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    right = nn.LSTM.forward

    def wrong(self, packed, *args):
        out, state = right(self, packed, *args)
        return (out._replace(data=out.data * float("nan")) if out.data.dtype == torch.float32 else out), state

    monkeypatch.setattr(nn.LSTM, "forward", wrong)
    assert [result.passed for result in rocm.check_parity(torch.device("cpu"))] == [False, True, True]


def test_self_tests_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    rocm.check_parity(torch.device("cpu"))
    assert torch.equal(torch.rand(3), wanted)


def test_graphs_need_a_gpu() -> None:
    agreed, reason = rocm.graphs_agree(torch.device("cpu"))
    assert not agreed
    assert reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_graphs_agree_on_this_gpu(dtype: torch.dtype) -> None:
    assert rocm.graphs_agree(torch.device("cuda"), dtype) == (
        True,
        "8 replays of a captured step are what eager computes",
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_that_ignores_its_inputs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: None)
    agreed, reason = rocm.graphs_agree(torch.device("cuda"))
    assert not agreed
    assert "differs from eager" in reason


@pytest.mark.parametrize("device", DEVICES)
def test_attention_kernels_are_found_by_asking(device: str) -> None:
    found = attention_kernels(torch.device(device), torch.float32)
    assert "math" in found.usable
    assert found.chosen in found.usable
    assert set(found.usable) | set(found.refused) == {"flash", "cudnn", "efficient", "math"}
    assert all(found.refused.values())


def test_attention_that_falls_to_math_is_seen() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernels(torch.device("cpu"), torch.float32).chosen == "math"
