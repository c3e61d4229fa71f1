"""MLPerf's Whisper recipe: windows of at most 30 s in the host's memory → text, greedy, no timestamps, no fallback.

Beside the rate it says how much of the device that is: each part against what a large copy and a large product reach
on it in the same run, and the whole against the chip's data sheet.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

import stapes
from stapes.benchmarks import roofline
from stapes.benchmarks.anonymous import anonymous
from stapes.benchmarks.engine_loop import Written, exactly, time_encoder, time_step, transcribe_windows
from stapes.benchmarks.mlperf_setup import DTYPES, MlperfSettings, Subject, open_subject
from stapes.benchmarks.mlperf_windows import Windows, corpus_wer, noise_windows, packed_windows
from stapes.benchmarks.records import CaseRow
from stapes.benchmarks.rounds import Case, Contender, measure
from stapes.benchmarks.run import Run
from stapes.benchmarks.transcribe import describe_weights
from stapes.benchmarks.transformers_peer import TransformersPeer
from stapes.devices.backend import resolve
from stapes.errors import DeviceError, UsageError

LATENCY_SECONDS, LATENCY_TOKENS = 10, 30
_LATENCY_ROUNDS = {True: 20, False: 3}
_PART_REPEATS = {True: 10, False: 2}
_STEP_REPEATS = {True: 5, False: 1}
"""On a GPU, and on the CPU."""

_AUTO_SECONDS = 20.0
"""How long a round is to take where the number of windows is left to us."""


class MlperfRun(Run):
    """The run and its file: a row for the windows, and one for the latency of a single clip where it is wanted.

    Raises UsageError, ModelError and DeviceError for what cannot be measured here.
    """

    def __init__(
        self,
        settings: MlperfSettings,
        *,
        rounds: int,
        command: Sequence[str],
        quick: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings = settings
        self._where = resolve(settings.device)
        tokens = settings.most_tokens if settings.random else None
        super().__init__(
            "mlperf",
            (),
            rounds=rounds,
            weights=describe_weights(settings.model, tokens, settings.model_dir, offline=settings.offline),
            audio={},
            command=command,
            quick=quick,
            log=log,
        )
        self._is_gpu = self._where.backend != "cpu"
        self._is_crowded = False
        """Whether ours and the peer do not fit into the memory side by side."""

    def rows(self) -> Iterator[CaseRow]:
        """Measure; each row as soon as it is there."""
        for note in self.result.notes:
            self._log(note)
        with roofline.on_device(self._where.torch):
            self._log(f"loading {self._settings.model}")
            subject = open_subject(self._settings, self._where)
            self._log(f"{subject.slots} slots, {subject.encoder_batch} encoded together, {subject.precision}")
            try:
                windows = self._warm_up(subject)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"{self._where.name} has too little memory for {subject.slots} slots: give fewer, "
                    f"--slots {max(1, subject.slots // 2)}"
                ) from error
            figures = {**self._memory(), **self._parts(subject, windows)}
            peer, batch = self._open_peer(subject, windows) if self._settings.peer else (None, 0)
            case = self._throughput(subject, windows, peer, batch)
            row = measure(case, self._rounds, self._log)
            self._finish(row, subject, windows, figures)
            self.result.rows.append(row)
            yield row
            if self._settings.latency:
                case = self._latency(subject, windows, peer)
                row = measure(case, _LATENCY_ROUNDS[self._is_gpu], lambda line: None)
                for system in row.systems:
                    self._log(f"latency of {system.system}: {1e3 * system.wall_seconds.median:.1f} ms")
                self.result.rows.append(row)
                yield row

    def _warm_up(self, subject: Subject) -> Windows:
        """Get the windows, and hear so many that every graph and kernel is there when the clock runs."""
        settings, slots = self._settings, subject.slots
        if settings.manifest is not None:
            windows = packed_windows(settings.manifest, settings.language, settings.data)
            if settings.windows is not None:
                windows = windows.first(settings.windows)
        else:
            windows = noise_windows(settings.windows or 2 * slots)
        few, count = windows, len(windows.pcm)
        if settings.random:
            # With a fixed number of tokens the same numbers of slots come again and again, until the last ones.
            few = windows.first(min(count, 2 * slots + count % slots))
        self.result.audio = anonymous(windows.facts)
        for note in windows.notes:
            self._note(note)
        self._log(f"warming up with {len(few.pcm)} windows")
        subject.transcribe(few)
        if settings.manifest is None and settings.windows is None:
            start = time.perf_counter()
            subject.transcribe(few)
            rate = len(few.pcm) / (time.perf_counter() - start)
            windows = noise_windows(slots * max(2, math.ceil(_AUTO_SECONDS * rate / slots)))
        self._log(f"{len(windows.pcm)} windows, {windows.seconds:.0f} s of sound")
        return windows

    def _note(self, note: str) -> None:
        self.result.notes.append(note)
        self._log(note)

    def _memory(self) -> dict[str, float | None]:
        """Peaks since the process began, loading and graphs included; before any peer is there."""
        if not self._is_gpu:
            return {}
        device = self._where.torch
        free, total = torch.cuda.mem_get_info(device)
        found: dict[str, float | None] = {
            "allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
            "reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
            "driver_bytes": float(total - free),
        }
        self._log("memory: " + ", ".join(f"{name} {value:,.0f}" for name, value in found.items()))
        return found

    def _parts(self, subject: Subject, windows: Windows) -> dict[str, float | None]:
        """Encoder and decoder steps alone, against a large product and a large copy."""
        engine, config, settings = subject.engine, subject.config, self._settings
        slots = settings.step_slots or min(64, subject.slots)
        if slots > subject.slots:
            raise UsageError(f"--step-slots is {slots}, but there are {subject.slots} slots: give --slots {slots}")
        peaks = roofline.measure_peaks(engine.device, engine.dtype)
        self._log(f"a copy moves {peaks.copy / 1e9:.4g} GB/s, a product does {peaks.product / 1e12:.4g} TFLOP/s")

        encoder = time_encoder(engine, windows.first(subject.encoder_batch).pcm, _PART_REPEATS[self._is_gpu])
        operations = roofline.encoder_operations(config)
        of_product = operations / encoder.network / peaks.product
        self._log(
            f"encoder: {1e3 * encoder.network:.4g} ms a window ({1e3 * encoder.whole:.4g} from samples), "
            f"{operations / encoder.network / 1e12:.4g} TFLOP/s, {100 * of_product:.1f} % of the product"
        )

        pcm, repeats = windows.first(slots).pcm, _STEP_REPEATS[self._is_gpu]
        step = time_step(engine, pcm, subject.endless, subject.encoder_batch, settings.step_tokens, repeats)
        moved = roofline.step_bytes(
            config,
            step.windows,
            step.positions,
            weight_bytes=subject.weight_bytes,
            cache_bytes=engine.dtype.itemsize,
            memory_bytes=subject.memory_bytes,
        )
        of_copy = moved.total / step.seconds / peaks.copy
        self._log(
            f"decoder step of {step.windows} windows at {step.positions:g} tokens: {1e3 * step.seconds:.4g} ms, "
            f"{moved.total / 1e9:.4g} GB (weights {moved.weights / 1e9:.4g}, states {moved.memory / 1e9:.4g}, "
            f"text {moved.cache / 1e9:.4g}), {100 * of_copy:.1f} % of the copy"
        )
        return {
            "copy_bytes_per_second": peaks.copy,
            "product_operations_per_second": peaks.product,
            "encoder_seconds": encoder.whole,
            "encoder_network_seconds": encoder.network,
            "encoder_operations": float(operations),
            "memory_operations": float(roofline.memory_operations(config)),
            "encoder_of_product": of_product,
            "step_seconds": step.seconds,
            "step_windows": float(step.windows),
            "step_positions": step.positions,
            "step_bytes": moved.total,
            "step_of_copy": of_copy,
        }

    def _open_peer(self, subject: Subject, windows: Windows) -> tuple[TransformersPeer, int]:
        """The peer, and its best batch size."""
        settings = self._settings
        self._log("loading the peer")

        def make_room() -> bool:
            if self._is_crowded or not self._is_gpu:
                return False
            self._is_crowded = True
            self._note("both do not fit side by side: each gave its memory back before the other's turn")
            _clear(subject)
            return True

        def load() -> TransformersPeer:
            return TransformersPeer(
                None if settings.random else settings.model,
                subject.config,
                subject.tokenizer,
                self._where,
                subject.engine.dtype,
                language=settings.language,
                model_dir=settings.model_dir,
            )

        peer = None
        with suppress(torch.OutOfMemoryError):
            peer = load()
        if peer is None:  # what the error held is free by now
            make_room()
            peer = load()
        sizes = settings.peer_batches
        batch = peer.best_batch(
            windows.pcm, sizes, settings.most_tokens, exact=settings.random, make_room=make_room, log=self._log
        )
        self._note(
            f"transformers: sdpa attention, batch {batch}, the best of {', '.join(map(str, sizes))}; features by "
            f"{peer.features_by} on the device; texts by our tokenizer"
        )
        return peer, batch

    def _throughput(self, subject: Subject, windows: Windows, peer: TransformersPeer | None, batch: int) -> Case:
        settings = self._settings

        def prepare() -> None:
            if self._is_crowded and peer is not None:
                peer.free()
                subject.transcribe(windows.first(min(len(windows.pcm), 2 * subject.slots)))  # makes caches and graphs
            self._wait()

        def prepare_peer() -> None:
            if self._is_crowded:
                _clear(subject)
            self._wait()

        def judge(written: list[Written]) -> Mapping[str, float | None]:
            spoken = None if settings.random else windows.texts
            wer = corpus_wer(spoken, [each.text for each in written], settings.language)
            return {"tokens": float(sum(each.tokens for each in written)), "wer": wer}

        contenders = [self._ours(subject, lambda: subject.transcribe(windows), judge, prepare)]
        if peer is not None:
            contenders.append(
                self._theirs(
                    peer,
                    batch,
                    lambda: peer.transcribe(windows.pcm, batch, settings.most_tokens, exact=settings.random),
                    judge,
                    prepare_peer,
                )
            )
        facts = {
            **self._facts("windows"),
            "precision": subject.precision,
            "cache": "int8" if settings.int8_cache else subject.dtype,
            "slots": subject.slots,
            "encoder_batch": subject.encoder_batch,
            "tokens": settings.most_tokens,
            "windows": len(windows.pcm),
            "sound_seconds": round(windows.seconds, 2),
        }
        return Case(facts, lambda: contenders)

    def _latency(self, subject: Subject, windows: Windows, peer: TransformersPeer | None) -> Case:
        """One clip alone, from samples to text; it is padded to 30 s, as Whisper has it."""
        clip = [windows.pcm[0][: LATENCY_SECONDS * 16_000]]
        engine = subject.engine
        if self._is_crowded:
            _clear(subject)

        def run() -> list[Written]:
            with exactly(engine, LATENCY_TOKENS):
                return transcribe_windows(engine, subject.tokenizer, clip, subject.endless, 1)

        def judge(written: list[Written]) -> Mapping[str, float | None]:
            return {"tokens": float(written[0].tokens)}

        contenders = [self._ours(subject, run, judge, self._wait)]
        if peer is not None:
            alone = lambda: peer.transcribe(clip, 1, LATENCY_TOKENS, exact=True)  # noqa: E731
            contenders.append(self._theirs(peer, 1, alone, judge, self._wait))
        for contender in contenders * 2:
            contender.run()
        facts = {
            **self._facts("latency"),
            "precision": subject.precision,
            "cache": "int8" if self._settings.int8_cache else subject.dtype,
            "tokens": LATENCY_TOKENS,
            "sound_seconds": round(len(clip[0]) / 16_000, 2),
        }
        return Case(facts, lambda: contenders)

    def _ours(self, subject: Subject, run: Callable[[], Any], judge: Any, prepare: Callable[[], None]) -> Contender:
        return Contender(
            system="stapes",
            version=stapes.__version__,
            precision=subject.precision,
            run=run,
            judge=judge,
            gpu=self._where.torch.index if self._is_gpu else None,
            prepare=prepare,
        )

    def _theirs(
        self, peer: TransformersPeer, batch: int, run: Callable[[], Any], judge: Any, prepare: Callable[[], None]
    ) -> Contender:
        return Contender(
            system="transformers",
            version=peer.version,
            options=f"batch {batch}",
            precision=DTYPES[peer.dtype],
            run=run,
            judge=judge,
            gpu=self._where.torch.index if self._is_gpu else None,
            prepare=prepare,
        )

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._where.torch)

    def _facts(self, work: str) -> dict[str, Any]:
        return {
            "work": work,
            "device": self._where.backend,
            "device_name": self._where.name,
            "threads": self._settings.threads or torch.get_num_threads(),
        }

    def _finish(self, row: CaseRow, subject: Subject, windows: Windows, figures: Mapping[str, float | None]) -> None:
        """Rates of every system, and of ours what part of the device they are."""
        count = len(windows.pcm)
        for system in row.systems:
            seconds, tokens = system.wall_seconds.median, system.figures["tokens"] or 0.0
            system.figures |= {
                "windows_per_second": count / seconds,
                "sound_seconds_per_second": windows.seconds / seconds,
                "tokens_per_second": tokens / seconds,
                "mfu": self._mfu(subject, count, tokens, seconds),
            }
        share = count * (figures["encoder_seconds"] or 0.0) / row.ours.wall_seconds.median
        row.ours.figures |= {**figures, "encoder_share": min(1.0, share)}

    def _mfu(self, subject: Subject, windows: int, tokens: float, seconds: float) -> float | None:
        """Model operations of the run ÷ its time ÷ the dense peak of the data sheet; None where that is not known."""
        chip = self._where.chip
        peak = None if chip is None else chip.peak_tflops.get(subject.dtype)
        if peak is None:
            return None
        operations = windows * (
            roofline.encoder_operations(subject.config)
            + roofline.memory_operations(subject.config)
            + roofline.decoder_operations(subject.config, len(subject.request.prompt), round(tokens / windows))
        )
        return operations / seconds / (1e12 * peak)


def _clear(subject: Subject) -> None:
    """Give our caches and graphs back."""
    subject.engine.clear()
    gc.collect()
    torch.cuda.empty_cache()
