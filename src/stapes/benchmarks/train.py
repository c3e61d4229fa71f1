"""Training steps of wav2vec 2.0: audio seconds per second, beside the device's limits and a peer.

The peer trains the same weights on the same recordings, in batches of the size at which it is fastest; a round is as
much sound for both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import stapes
from stapes.benchmarks import roofline
from stapes.benchmarks.records import CaseRow
from stapes.benchmarks.rounds import Case, Contender, measure
from stapes.benchmarks.run import Run
from stapes.benchmarks.train_peer import TransformersStep
from stapes.benchmarks.train_setup import OurStep, TrainSettings, describe, open_step
from stapes.benchmarks.train_work import training_operations
from stapes.devices.backend import resolve
from stapes.errors import DeviceError
from stapes.kernels.jit import refusals
from stapes.models.wav2vec2 import SAMPLE_RATE
from stapes.models.wav2vec2_pretraining import Wav2Vec2Pretraining

_AUTO_SECONDS = {True: 3.0, False: 1.0}
"""How long a round is to take where the number of steps is left to us, on a GPU and on the CPU."""

_WARM_UP = {True: 4, False: 1}
_TRIED = {True: 8, False: 1}
"""Steps that choose the peer's size of batches."""

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

_ALIKE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative difference of the first losses above which the two did not train the same network."""


@dataclass(frozen=True)
class _Timed:
    """A system that is warm: its step, and the recordings of one.

    ``first_loss``: of as many recordings as ours has in a step, before the first one. ``bytes``: that a step takes at
    most, beside what was there before.
    """

    step: OurStep | TransformersStep
    rows: int
    first_loss: float
    bytes: float | None


class TrainRun(Run):
    """The run and its file. Raises UsageError, ModelError and DeviceError for what cannot be measured here."""

    def __init__(
        self,
        settings: TrainSettings,
        *,
        rounds: int,
        command: Sequence[str],
        quick: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings = settings
        self._where = resolve(settings.device)
        self._is_gpu = self._where.backend != "cpu"
        super().__init__(
            "train",
            (),
            rounds=rounds,
            weights=describe(settings),
            audio={"corpus": "noise, seed 0", "sha256": None, "language": "en"},
            command=command,
            quick=quick,
            log=log,
        )

    def rows(self) -> Iterator[CaseRow]:
        """Measure the row of this run."""
        for note in self.result.notes:
            self._log(note)
        settings = self._settings
        with roofline.on_device(self._where.torch):
            try:
                ours = self._warm(lambda: open_step(settings, self._where), settings.batch)
                assert isinstance(ours.step, OurStep)
                for (kernel, _), why in refusals.items():
                    self._note(f"kernel {kernel} did not run: {why}")
                steps = self._steps(ours.step)
                figures: dict[str, float | None] = {"first_loss": ours.first_loss}
                peer = self._peer(ours, figures)
                peaks = roofline.measure_peaks(ours.step.device, ours.step.dtype)
                self._log(
                    f"a copy moves {peaks.copy / 1e9:.4g} GB/s, a product does {peaks.product / 1e12:.4g} TFLOP/s"
                )
                contenders = [self._contender("stapes", stapes.__version__, ours, steps * settings.batch)]
                if peer is not None:
                    assert isinstance(peer.step, TransformersStep)
                    version = peer.step.version
                    contenders.append(self._contender("transformers", version, peer, steps * settings.batch))
                facts = self._facts(ours.step, steps)
                row = measure(Case(facts, lambda: contenders), self._rounds, self._log)
            except torch.OutOfMemoryError as error:
                raise DeviceError(f"{self._where.name} has too little memory for it: give a smaller --batch") from error
        self._finish(row, [ours] if peer is None else [ours, peer], peaks)
        row.ours.figures |= figures
        self.result.rows.append(row)
        yield row

    def _note(self, note: str) -> None:
        self.result.notes.append(note)
        self._log(note)

    def _warm(self, make: Callable[[], OurStep | TransformersStep], rows: int) -> _Timed:
        """Load a system and make its first steps, which compile and find kernels."""
        before = torch.cuda.memory_allocated(self._where.torch) if self._is_gpu else 0
        step = make()
        first_loss = step.first_loss()
        if isinstance(step, TransformersStep):
            step.use_batches(rows)
        for _ in range(_WARM_UP[self._is_gpu]):
            step.step()
        if not self._is_gpu:
            return _Timed(step, rows, first_loss, None)
        torch.cuda.synchronize(self._where.torch)
        torch.cuda.reset_peak_memory_stats(self._where.torch)
        step.step()
        peak = torch.cuda.max_memory_allocated(self._where.torch) - before
        self._log(f"{type(step).__name__}: {rows} recordings a step take {peak / 1e9:.4g} GB at most")
        return _Timed(step, rows, first_loss, float(peak))

    def _steps(self, ours: OurStep) -> int:
        """As many as a round is to have, a multiple of 4: the peer's batches may be larger or smaller than ours."""
        if self._settings.steps is not None:
            return self._settings.steps
        count = _TRIED[self._is_gpu]
        seconds = self._time(ours, count) / count
        return max(4, 4 * math.ceil(_AUTO_SECONDS[self._is_gpu] / seconds / 4))

    def _peer(self, ours: _Timed, figures: dict[str, float | None]) -> _Timed | None:
        """The peer at the size of batches at which it is fastest."""
        settings, subject = self._settings, ours.step
        assert isinstance(subject, OurStep)
        if settings.peer is None:
            return None
        sizes = list(settings.peer_batches) or [settings.batch]
        opened = self._warm(lambda: TransformersStep(subject, settings.batch), sizes[0])
        peer = opened.step
        assert isinstance(peer, TransformersStep)
        own, theirs = ours.first_loss, opened.first_loss
        figures["peer_first_loss"] = theirs
        self._log(f"loss before the first step: {own:.6g}, the peer's {theirs:.6g}")
        if not abs(own - theirs) <= _ALIKE[subject.dtype] * abs(theirs):
            self._note(f"the losses of the two systems before the first step differ: {own:.6g} and {theirs:.6g}")
        best, fastest = sizes[0], math.inf
        for size in sizes if len(sizes) > 1 else ():
            try:
                peer.use_batches(size)
                self._time(peer, 2)
                seconds = self._time(peer, _TRIED[self._is_gpu]) / _TRIED[self._is_gpu] / size
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                self._log(f"the peer has no room for batches of {size}")
                continue
            self._log(f"the peer in batches of {size}: {settings.seconds / seconds:.0f} audio s/s")
            if seconds < fastest:
                best, fastest = size, seconds
        peer.use_batches(best)
        self._time(peer, 2)
        self._note(
            f"transformers {peer.version}: sdpa attention, the same weights, recordings, masks"
            + (" and negatives" if settings.task == "pretrain" else "")
            + f", in batches of {best} ({', '.join(map(str, sizes))} tried); fused AdamW, bf16 by autocast"
        )
        return _Timed(peer, best, theirs, opened.bytes if best == sizes[0] else None)

    def _time(self, step: OurStep | TransformersStep, count: int) -> float:
        """Seconds that so many steps take."""
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            step.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._where.torch)

    def _contender(self, system: str, version: str, timed: _Timed, recordings: int) -> Contender:
        def run() -> float:
            losses = [timed.step.step() for _ in range(max(1, round(recordings / timed.rows)))]
            return float(losses[-1])  # waits for the device

        def judge(loss: float) -> Mapping[str, float | None]:
            return {"last_loss": loss if math.isfinite(loss) else None}

        return Contender(
            system=system,
            version=version,
            options="" if timed.rows == self._settings.batch else f"batch {timed.rows}",
            precision=_DTYPES[timed.step.dtype],
            run=run,
            judge=judge,
            gpu=self._where.torch.index if self._is_gpu else None,
            prepare=self._wait,
        )

    def _facts(self, ours: OurStep, steps: int) -> dict[str, Any]:
        settings = self._settings
        options = settings.run_config.model
        return {
            "task": settings.task,
            "device": self._where.backend,
            "device_name": self._where.name,
            "threads": settings.threads or torch.get_num_threads(),
            "precision": _DTYPES[ours.dtype],
            "batch": settings.batch,
            "seconds": settings.seconds,
            "steps": steps,
            "frozen_front_end": settings.is_frozen,
            "fused": settings.fused,
            "compile": settings.compile,
            "dropout": options.dropout,
            "layer_drop": options.layer_drop,
        }

    def _finish(self, row: CaseRow, timed: Sequence[_Timed], peaks: roofline.Peaks) -> None:
        """Rates of every system, and what part of the device's best they are."""
        settings, chip = self._settings, self._where.chip
        ours = timed[0].step
        assert isinstance(ours, OurStep)
        sheet = None if chip is None else chip.peak_tflops.get(_DTYPES[ours.dtype])
        network = ours.network
        pretraining = network.config if isinstance(network, Wav2Vec2Pretraining) else None
        of_one = training_operations(
            settings.network_config,
            round(settings.seconds * SAMPLE_RATE),
            frozen=settings.is_frozen,
            pretraining=pretraining,
        )
        for system, each in zip(row.systems, timed, strict=True):
            recordings = max(1, round(row.case["steps"] * settings.batch / each.rows)) * each.rows
            seconds = system.wall_seconds.median
            rate = of_one * recordings / seconds
            system.figures |= {
                "audio_seconds_per_second": recordings * settings.seconds / seconds,
                "step_seconds": seconds * each.rows / recordings,
                "batch": float(each.rows),
                "operations_per_second": rate,
                "mfu": None if sheet is None else rate / (1e12 * sheet),
                "of_product": rate / peaks.product,
                "peak_step_bytes": each.bytes,
            }
