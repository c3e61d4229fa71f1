"""Several processes make the same steps as one: the same losses, the same weights, for DDP and for FSDP2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from made_corpus import small_config, trained, write_corpus

from stapes.errors import UsageError
from stapes.training.config import ParallelOptions, TrainConfig
from stapes.training.parallel import choose_strategy
from stapes.training.settings import to_toml

HERE = Path(__file__).parent
STEPS = 6


def config_for(folder: Path, manifest: Path, dev: Path, world_size: int) -> TrainConfig:
    """Steps that hold the same utterances whatever the number of processes, and nothing that is drawn by process."""
    config = small_config(folder, manifest, dev, STEPS)
    config.model.dropout = config.model.head_dropout = config.model.decoder_dropout = 0.0
    config.model.layers = 2
    config.model.decoder_layers, config.model.decoder_mlp_width = 1, 64
    config.objective.kind = "hybrid"
    config.optimizer.accumulate = 4 // world_size
    config.optimizer.ema, config.run.log_every, config.run.threads = 0.9, 1, 1
    config.run.evaluate_every = 3
    config.data.batch_seconds, config.optimizer.warmup_steps = 4.0, 1
    return config


def zero_work(folder: str, manifest: str, dev: str) -> None:
    """The same with DeepSpeed: ZeRO-2 and ZeRO-3 from the start, and from the middle of a run of one process."""
    from stapes.progress import Silent
    from stapes.training.parallel import processes
    from stapes.training.setup import open_run

    world_size = int(os.environ["WORLD_SIZE"])
    with processes("cpu", ParallelOptions()) as joined:
        for name, stage in (("zero-2", 2), ("zero-3", 3), ("resumed", 2)):
            config = config_for(Path(folder) / name, Path(manifest), Path(dev), world_size)
            config.optimizer.ema, config.optimizer.hold_steps = None, 100
            config.parallel.strategy, config.parallel.zero_stage = "deepspeed", stage
            open_run(config, joined, Silent(), resume=name == "resumed").run()


def work(folder: str, manifest: str, dev: str) -> None:
    """What each of several processes does: a run with DDP, one with FSDP2, one that goes on from the first's middle."""
    from stapes.progress import Silent
    from stapes.training.parallel import processes
    from stapes.training.setup import open_run

    world_size = int(os.environ["WORLD_SIZE"])
    config = config_for(Path(folder), Path(manifest), Path(dev), world_size)
    with processes("cpu", config.parallel) as joined:
        for name in ("ddp", "fsdp"):
            config = config_for(Path(folder) / name, Path(manifest), Path(dev), world_size)
            config.parallel.strategy = name  # pyright: ignore[reportAttributeAccessIssue]
            open_run(config, joined, Silent()).run()
        # What one process began, two end.
        config = config_for(Path(folder) / "resumed", Path(manifest), Path(dev), world_size)
        config.parallel.strategy = "fsdp"
        open_run(config, joined, Silent(), resume=True).run()


def words(function: str, *arguments: Path) -> list[str]:
    """A command that calls one of the functions above and leaves as ``stapes train`` does, see `stapes.cli.main`."""
    command = f"import os, sys; sys.path.insert(0, {str(HERE)!r}); import test_parallel; "
    return [
        sys.executable,
        "-c",
        f"{command}test_parallel.{function}(*sys.argv[1:]); os._exit(0)",
        *map(str, arguments),
    ]


def start(arguments: list[str], world_size: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    return [
        subprocess.Popen(
            arguments,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]


def figures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"step-{STEPS}" / "state.pt", weights_only=True)


def test_ddp_and_fsdp_make_the_steps_of_one_process(tmp_path: Path) -> None:
    manifest, dev = write_corpus(tmp_path / "corpus", 40), write_corpus(tmp_path / "dev", 5, seed=1)
    half = config_for(tmp_path / "resumed", manifest, dev, 1)
    half.run.steps = 3
    half.optimizer.hold_steps = 100  # the same learning rate whatever the number of steps
    trained(half)
    alone, _ = trained(config_for(tmp_path / "alone", manifest, dev, 1))
    del alone
    running = start(words("work", tmp_path, manifest, dev), world_size=2)
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    expected = figures(tmp_path / "alone")
    for name in ("ddp", "fsdp"):
        found = figures(tmp_path / name)
        assert [(each["step"], each["kind"]) for each in found] == [(each["step"], each["kind"]) for each in expected]
        for ours, theirs in zip(found, expected, strict=True):
            for key in {"loss", "gradient_norm", "wer", "cer", "padding_share"} & ours.keys():
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-4), (name, ours["step"], key)
        one, several = state_of(tmp_path / "alone"), state_of(tmp_path / name)
        torch.testing.assert_close(several["network"], one["network"], rtol=1e-2, atol=2e-4)
        torch.testing.assert_close(several["optimizer"]["average"], one["optimizer"]["average"], rtol=1e-2, atol=2e-4)
    # The result of sharded training is a model like any other.
    weights = state_of(tmp_path / "fsdp")["network"]
    assert all(tensor.shape for tensor in weights.values())
    resumed = figures(tmp_path / "resumed")
    assert [each["step"] for each in resumed if each["kind"] == "train"] == list(range(1, STEPS + 1))


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'stapes[deepspeed]'"
)
def test_zero_makes_the_steps_of_one_process(tmp_path: Path) -> None:
    manifest, dev = write_corpus(tmp_path / "corpus", 40), write_corpus(tmp_path / "dev", 5, seed=1)
    for name, steps in (("alone", STEPS), ("resumed", 3)):
        config = config_for(tmp_path / name, manifest, dev, 1)
        config.optimizer.ema, config.optimizer.hold_steps, config.run.steps = None, 100, steps
        trained(config)
    for process in start(words("zero_work", tmp_path, manifest, dev), world_size=2):
        _, said = process.communicate(timeout=400)  # parts of DeepSpeed are compiled at first use
        assert process.returncode == 0, said.decode()
    expected, one = figures(tmp_path / "alone"), state_of(tmp_path / "alone")
    for name in ("zero-2", "zero-3", "resumed"):
        steps = [each for each in figures(tmp_path / name) if each["kind"] == "train"]
        for ours, theirs in zip(steps, [each for each in expected if each["kind"] == "train"], strict=True):
            for key in ("loss", "gradient_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-4), (name, ours["step"], key)
        several = state_of(tmp_path / name)
        torch.testing.assert_close(several["network"], one["network"], rtol=1e-2, atol=3e-4)
        torch.testing.assert_close(several["optimizer"]["moments"], one["optimizer"]["moments"], rtol=2e-2, atol=1e-3)


def test_a_lost_process_ends_the_others_with_the_reason(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path / "corpus", 24)
    config = small_config(tmp_path / "run", manifest, steps=100_000)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "stapes", "train", "words", "--config", str(path), "--set", "run.epochs=none"]
    running = start(command, world_size=2)
    log = tmp_path / "run" / "metrics.jsonl"
    for _ in range(1200):
        if (log.exists() and log.stat().st_size) or running[0].poll() is not None:
            break
        time.sleep(0.05)
    running[1].kill()
    _, said = running[0].communicate(timeout=60)
    running[1].communicate()
    assert running[0].returncode == 3, said.decode()
    assert "another process of the job ended or stopped answering at step" in said.decode()


def test_strategies() -> None:
    assert choose_strategy(ParallelOptions(), 1) == "single"
    assert choose_strategy(ParallelOptions(), 8) == "ddp"
    assert choose_strategy(ParallelOptions(strategy="ddp"), 1) == "single"
    assert choose_strategy(ParallelOptions(strategy="fsdp"), 1) == "fsdp"
    with pytest.raises(UsageError, match="started 2 processes"):
        choose_strategy(ParallelOptions(strategy="single"), 2)
