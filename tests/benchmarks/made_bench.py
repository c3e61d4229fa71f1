"""Results of made-up runs."""

from __future__ import annotations

from typing import Any

from stapes.benchmarks.records import BenchResult, CaseRow, Ratio, Spread, SystemRow, Weights
from stapes.evaluation.results import CorpusFacts, Counts, Hallucination, Memory, ModelFacts, Rate, Result, Speed

MACHINE = {
    "fingerprint": "0123456789ab",
    "cpu": "AMD EPYC 9654 96-Core Processor",
    "cores": 96,
    "memory_bytes": 2**38,
    "gpus": [{"name": "AMD Instinct MI300X", "memory_bytes": 192 * 2**30, "backend": "rocm", "driver": "6.10"}],
    "os": "Debian GNU/Linux 12",
    "kernel": "6.1",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0"},
    "cuda": None,
    "rocm": "7.2",
    "threads": 96,
}


def bench(*rows: CaseRow, **changes: Any) -> BenchResult:
    values: dict[str, Any] = {
        "name": "transcribe",
        "command": ["stapes", "bench", "transcribe", "--model", "medium"],
        "stapes": "0.1.0",
        "commit": "a" * 40,
        "date": "2026-12-01T10:00:00+00:00",
        "machine": MACHINE,
        "load_average": 0.1,
        "weights": Weights(name="medium", kind="random", parameters=764_000_000, tokens=92),
        "audio": {"corpus": "librispeech:test", "sha256": "ab" * 32, "language": "en"},
        "rows": list(rows),
    }
    return BenchResult(**(values | changes))


def row(seconds: float, device: str = "cpu", ours: tuple[float, ...] = (2.0, 2.1, 1.9), **peers: float) -> CaseRow:
    """Peers take so many times as long as we do."""
    case = {
        "audio_seconds": seconds,
        "device": device,
        "device_name": "CPU" if device == "cpu" else "AMD Instinct MI300X",
        "precision": "fp32" if device == "cpu" else "fp16",
        "batch_size": 8,
        "threads": 96,
    }
    systems = [
        SystemRow(system="stapes", version="0.1.0", precision=case["precision"], wall_seconds=Spread.of([*ours]))
    ]
    ratios = []
    for place, (peer, factor) in enumerate(peers.items(), 1):
        times = [factor * each for each in ours]
        systems.append(
            SystemRow(system=peer, precision=case["precision"], wall_seconds=Spread.of(times), figures={"wer": 0.05})
        )
        ratios.append(Ratio(peer=peer, place=place, times_as_fast=Spread.of([factor] * len(ours))))
    return CaseRow(case=case, systems=systems, ratios=ratios)


def evaluation(model: ModelFacts, corpus: CorpusFacts, wer: Rate, cer: Rate, **changes: Any) -> Result:
    """An evaluation that never happened."""
    values: dict[str, Any] = {
        "command": ["stapes", "evaluate", "model", corpus.name],
        "stapes": "0.3.0",
        "commit": "b" * 40,
        "date": "2026-12-01T10:00:00+00:00",
        "machine": MACHINE,
        "system": "stapes",
        "options": {},
        "normalizer": "english",
        "counts": Counts(words=100, hits=90, substitutions=10, deletions=0, insertions=0),
        "failed": 0,
        "hallucination": Hallucination(),
        "breakdown": {},
        "speed": Speed(audio_seconds=3600.0, wall_seconds=36.0, real_time_factor=0.01, throughput=100.0),
        "memory": Memory(),
    }
    return Result(model=model, corpus=corpus, wer=wer, cer=cer, **(values | changes))
