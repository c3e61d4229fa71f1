"""On every mesh the loss, the gradients and the steps of one process; what cannot be shared out is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_corpus import trained, write_corpus
from mesh_work import CONFORMER, TOKENS, WAV2VEC2, config_of

from stapes.devices.backend import AttentionKernels, resolve
from stapes.errors import UsageError
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.progress import Silent
from stapes.training import setup
from stapes.training.config import ParallelOptions, TrainConfig
from stapes.training.mesh import MeshSizes, apply_mesh, mesh_sizes, parse_mesh
from stapes.training.mesh_rules import check_mesh
from stapes.training.objectives import Objective, SpectrogramObjective, Wav2Vec2Objective
from stapes.training.parallel import Processes
from stapes.training.pipeline import spread_layers

HERE = Path(__file__).parent


def run_on(processes: int, output: Path, *arguments: str) -> list[dict[str, Any]]:
    """What so many processes of `mesh_work` find."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "mesh_work.py"), str(processes), str(port), str(output), *arguments]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(output.read_text())


def check(found: list[dict[str, Any]], meshes: tuple[str, ...]) -> None:
    assert {each["mesh"] for each in found} == set(meshes)
    for each in found:
        assert max(each[name] for name in ("loss", "gradient", "norm", "rows")) < 1e-4, each
        assert not each["missing"], each


def test_two_processes_have_the_gradients_of_one_and_go_on_with_its_run(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path / "corpus", 24)
    trained(config_of(tmp_path / "alone", manifest, 10))
    trained(config_of(tmp_path / "shared", manifest, 2))
    meshes = ("tp=2", "tp=2,sp", "cp=2", "pp=2", "fsdp=2")
    check(run_on(2, tmp_path / "found.json", str(tmp_path / "shared"), str(manifest), *meshes), meshes)
    alone, shared = (
        torch.load(tmp_path / name / "checkpoints" / "step-10" / "state.pt", weights_only=True)
        for name in ("alone", "shared")
    )
    torch.testing.assert_close(shared["network"], alone["network"], rtol=1e-2, atol=3e-4)
    torch.testing.assert_close(shared["optimizer"]["average"], alone["optimizer"]["average"], rtol=1e-2, atol=3e-4)
    assert shared["optimizer"]["moments"].keys() == alone["optimizer"]["moments"].keys()
    expected, found = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("alone", "shared")
    )
    assert [each["step"] for each in found] == [each["step"] for each in expected]
    for key in ("loss", "gradient_norm", "learning_rate", "padding_share"):
        ours, theirs = ([each[key] for each in lines if key in each] for lines in (found, expected))
        assert ours == pytest.approx(theirs, rel=5e-3), key


def test_four_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    meshes = ("dp=2,tp=2", "fsdp=2,tp=2,sp", "dp=2,cp=2", "fsdp=2,pp=2", "dp=2,fsdp=2", "tp=2,pp=2,sp", "cp=4")
    check(run_on(4, tmp_path / "found.json", "", "", *meshes), meshes)


def wav2vec2() -> Objective:
    return Wav2Vec2Objective(Wav2Vec2(WAV2VEC2), TOKENS, torch.float32)


def conformer(**sizes: Any) -> Objective:
    config = CTCConfig(ConformerConfig(**{**vars(CONFORMER), **sizes}), 11)
    return SpectrogramObjective(CTC(config), TOKENS, torch.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=4,tp=2", MeshSizes(dp=4, tp=2)),
        ("tp=2,sp", MeshSizes(tp=2, sp=True)),
        ("dp=2, fsdp=4", MeshSizes(dp=2, fsdp=4, sharded=True)),
        ("pp=2,cp=1", MeshSizes(pp=2)),
    ],
)
def test_a_mesh_is_what_it_says(text: str, expected: MeshSizes) -> None:
    assert parse_mesh(text) == expected
    options = ParallelOptions()
    apply_mesh(options, expected)
    assert mesh_sizes(options, expected.processes) == expected
    assert parse_mesh(expected.text()) == expected


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=2,dp=2", "mp=2", "sp", "dp=2,sp", ""])
def test_a_mesh_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--parallel is"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (ParallelOptions(tp=2, cp=2), "does not divide 2 processes"),
        (ParallelOptions(sp=True), "set parallel.tp=2"),
        (ParallelOptions(tp=2, sp=True, cp=2), "both share out time"),
        (ParallelOptions(cp=2, pp=2), "use cp with fsdp"),
        (ParallelOptions(strategy="deepspeed", tp=2), "a mesh of its own"),
        (ParallelOptions(strategy="fsdp", shards=3), "which does not divide"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options: ParallelOptions, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        mesh_sizes(options, 4 if options.tp * options.cp * options.pp == 4 and "divide 2" not in reason else 2)


def test_what_a_network_cannot_do_is_refused() -> None:
    config = TrainConfig()
    check_mesh(wav2vec2(), config, MeshSizes(tp=2, pp=2))
    check_mesh(conformer(), config, MeshSizes(cp=8))
    refused: list[tuple[Objective, MeshSizes, str]] = [
        (wav2vec2(), MeshSizes(tp=8), "attention heads"),
        (wav2vec2(), MeshSizes(pp=8), "4 layers"),
        (conformer(heads=0), MeshSizes(cp=2), "convolutions alone"),
        (conformer(heads=0), MeshSizes(tp=2), "shares out attention heads"),
        (Objective(Wav2Vec2(WAV2VEC2), TOKENS, torch.float32), MeshSizes(cp=2), "use dp, fsdp or tp"),
    ]
    frozen = wav2vec2()
    frozen.network.requires_grad_(False)
    frozen.network.head.requires_grad_(True)  # pyright: ignore[reportOptionalMemberAccess]
    refused.append((frozen, MeshSizes(pp=2), "nothing to train"))
    for objective, sizes, reason in refused:
        with pytest.raises(UsageError, match=reason):
            check_mesh(objective, config, sizes)
    config.run.fp8 = True
    with pytest.raises(UsageError, match="does not go with tp"):
        check_mesh(wav2vec2(), config, MeshSizes(tp=2))


@pytest.mark.parametrize(
    ("chosen", "usable", "expected"),
    [
        ("flash", ("flash", "efficient", "math"), None),
        ("math", ("math",), "attention runs without a fused kernel"),
        ("flash", ("flash", "math"), "attention over padded batches"),
    ],
)
def test_a_gpu_without_fused_attention_is_told_of(
    monkeypatch: pytest.MonkeyPatch, chosen: str, usable: tuple[str, ...], expected: str | None
) -> None:
    refused = {"efficient": "its heads are too wide"}
    monkeypatch.setattr(setup, "attention_kernels", lambda *_: AttentionKernels(chosen, usable, refused))
    gpu = Processes(0, 1, replace(resolve("cpu"), backend="rocm"))
    notes: list[str] = []
    listener = Silent()
    monkeypatch.setattr(listener, "note", notes.append)
    setup._say_attention(wav2vec2(), gpu, "bf16", listener)
    assert len(notes) == (expected is not None)
    assert all(expected in note and "its heads are too wide" in note for note in notes if expected)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_follow_each_other_and_each_has_a_layer(stages: int) -> None:
    for objective in (wav2vec2(), conformer()):
        spread = spread_layers(objective.network, stages)
        assert len(spread) == 4
        assert spread == sorted(spread)
        assert set(spread) == set(range(stages))
