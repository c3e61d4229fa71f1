"""CTC recognition by wav2vec 2.0: recordings in the host's memory → text, in batches, beside the device's limits.

A row for batches of one length, one for a mix of lengths where it is wanted, and one that sets beam search against the
greedy text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import stapes
from stapes.benchmarks import roofline
from stapes.benchmarks.ctc_loop import BeamLoop, GreedyLoop, Loop
from stapes.benchmarks.ctc_peer import TransformersLoop
from stapes.benchmarks.ctc_setup import (
    CtcSettings,
    CtcSubject,
    describe,
    equal_batches,
    mixed_batches,
    open_subject,
    seconds_of,
)
from stapes.benchmarks.records import CaseRow
from stapes.benchmarks.rounds import Case, Contender, measure
from stapes.benchmarks.run import Run
from stapes.decoding.ctc_beam import Fusion, PrefixBeamSearch
from stapes.decoding.ctc_fusion import TokenNGram, WordNGram
from stapes.decoding.ngram import read_arpa
from stapes.devices.backend import resolve
from stapes.errors import DeviceError, UsageError
from stapes.models.wav2vec2 import Wav2Vec2Config

_AUTO_SECONDS = {True: 3.0, False: 5.0}
"""How long a round is to take where the number of batches is left to us, on a GPU and on the CPU."""

_REPEATS = {True: 10, False: 2}
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Batches = list[list[np.ndarray]]


@dataclass(frozen=True)
class Work:
    """What a batch costs at least: ``operations`` of its matrix products, ``bytes`` read and written."""

    operations: float
    bytes: float


def work_of(config: Wav2Vec2Config, lengths: Sequence[int], size: int) -> Work:
    """Of recordings of so many samples, heard by a network whose numbers have ``size`` bytes.

    A convolution costs 2 · frames · kernel · inputs · outputs; a layer 2 T · (4 w² + 2 w m) and 4 T² w, where T are
    its frames, w its width and m that of its MLP. Bytes: weights once, and of what goes from product to product every
    number once written and once read.
    """
    operations, moved = 0.0, 0.0
    width, mlp = config.width, config.mlp_width
    for samples in lengths:
        count, inputs = samples, 1
        moved += 4 * samples
        for outputs, kernel, stride in zip(config.conv_channels, config.conv_kernels, config.conv_strides, strict=True):
            count = max(0, (count - kernel) // stride + 1)
            operations += 2 * count * kernel * inputs * outputs
            moved += 2 * size * count * outputs
            inputs = outputs
        operations += 2 * count * inputs * width + 2 * count * width * width // config.position_groups * (
            config.position_kernel
        )
        operations += config.layers * (2 * count * (4 * width**2 + 2 * width * mlp) + 4 * count**2 * width)
        operations += 2 * count * width * (config.vocab_size or 0)
        # The residual stream before and behind attention and MLP, normed for each; query, key, value; what is attended
        # to; the MLP's inner states.
        moved += 2 * size * count * config.layers * (4 * width + 3 * width + width + mlp)
    convolutions = sum(
        kernel * inputs * outputs
        for kernel, inputs, outputs in zip(
            config.conv_kernels, (1, *config.conv_channels), config.conv_channels, strict=False
        )
    )
    weights = convolutions + config.layers * (4 * width**2 + 2 * width * mlp)
    return Work(operations, moved + size * weights)


class CtcRun(Run):
    """The run and its file. Raises UsageError, ModelError and DeviceError for what cannot be measured here."""

    def __init__(
        self,
        settings: CtcSettings,
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
            "ctc",
            (),
            rounds=rounds,
            weights=describe(settings),
            audio={"corpus": "noise, seed 0", "sha256": None, "language": "en"},
            command=command,
            quick=quick,
            log=log,
        )

    def rows(self) -> Iterator[CaseRow]:
        """Measure; each row as soon as it is there."""
        for note in self.result.notes:
            self._log(note)
        settings = self._settings
        with roofline.on_device(self._where.torch):
            try:
                self._log(f"loading {settings.model}")
                subject = open_subject(settings, self._where)
                peaks = roofline.measure_peaks(subject.device, subject.dtype)
                self._log(
                    f"a copy moves {peaks.copy / 1e9:.4g} GB/s, a product does {peaks.product / 1e12:.4g} TFLOP/s"
                )
                ours = GreedyLoop(subject)
                peer = self._peer(subject)
                kinds = {"equal": equal_batches} | ({"mix": mixed_batches} if settings.mix else {})
                for work, make in kinds.items():
                    batches = self._batches(ours, make)
                    row = self._measure(work, subject, ours, peer, batches, peaks)
                    self.result.rows.append(row)
                    yield row
                if settings.beam is not None:
                    row = self._beam(subject, ours, settings.beam)
                    self.result.rows.append(row)
                    yield row
            except torch.OutOfMemoryError as error:
                raise DeviceError(f"{self._where.name} has too little memory for it: give a smaller --batch") from error

    def _peer(self, subject: CtcSubject) -> TransformersLoop | None:
        if self._settings.peer is None:
            return None
        self._log("loading the peer")
        peer = TransformersLoop(subject)
        self.result.notes.append(
            f"transformers {peer.version}: sdpa attention, the same weights and batches, waveforms normalised and "
            "labels found on the device, copies beside it, texts by our code"
        )
        return peer

    def _batches(self, loop: Loop, make: Callable[[int, float, int], Batches]) -> Batches:
        """As many as a round is to have."""
        settings = self._settings
        few = make(settings.batch, settings.seconds, 2)
        loop.transcribe(few)
        count = settings.batches
        if count is None:
            start = time.perf_counter()
            loop.transcribe(few)
            count = max(2, math.ceil(2 * _AUTO_SECONDS[self._is_gpu] / (time.perf_counter() - start)))
        batches = make(settings.batch, settings.seconds, count)
        self._log(f"{len(batches)} batches, {seconds_of(batches):.0f} s of sound")
        return batches

    def _measure(
        self,
        work: str,
        subject: CtcSubject,
        ours: GreedyLoop,
        peer: TransformersLoop | None,
        batches: Batches,
        peaks: roofline.Peaks,
    ) -> CaseRow:
        figures = self._network(subject, batches[len(batches) // 2], peaks)
        contenders = [self._contender("stapes", stapes.__version__, subject, ours, batches)]
        if peer is not None:
            peer.transcribe(batches)
            contenders.append(self._contender("transformers", peer.version, subject, peer, batches))
        row = measure(Case(self._facts(work, subject, batches), lambda: contenders), self._rounds, self._log)
        self._finish(row, subject, batches, peaks)
        row.ours.figures |= figures
        if peer is not None:
            row.ours.figures["different_texts"] = _different(ours.transcribe(batches), peer.transcribe(batches))
        return row

    def _network(self, subject: CtcSubject, batch: list[np.ndarray], peaks: roofline.Peaks) -> dict[str, float | None]:
        """One batch alone, from samples on the device to logits, and of it the convolutions."""
        encoder, device = subject.encoder, subject.device
        lengths = [len(recording) for recording in batch]
        samples = torch.from_numpy(np.concatenate(batch)).to(device)
        packing = encoder.pack(lengths)
        normalization = encoder.normalization(samples, packing)
        repeats = _REPEATS[self._is_gpu]
        work = lambda: encoder.packed_logits(samples, packing, None, normalization)  # noqa: E731
        whole = float(np.median(roofline.timed(device, work, repeats)))
        with torch.inference_mode():
            features = lambda: encoder.packed_features(samples, packing, None, normalization)  # noqa: E731
            front = float(np.median(roofline.timed(device, features, repeats)))
        least = work_of(subject.config, lengths, subject.dtype.itemsize)
        of_product = least.operations / whole / peaks.product
        self._log(
            f"a batch of {len(batch)} alone: {1e3 * whole:.4g} ms, of which convolutions {1e3 * front:.4g} ms; "
            f"{least.operations / whole / 1e12:.4g} TFLOP/s, {100 * of_product:.1f} % of the product; "
            f"{least.bytes / whole / 1e9:.4g} GB/s"
        )
        return {
            "network_seconds": whole,
            "front_seconds": front,
            "network_operations": least.operations,
            "network_bytes": least.bytes,
            "network_of_product": of_product,
            "network_of_copy": least.bytes / whole / peaks.copy,
            "copy_bytes_per_second": peaks.copy,
            "product_operations_per_second": peaks.product,
        }

    def _beam(self, subject: CtcSubject, ours: GreedyLoop, beam: int) -> CaseRow:
        """Beam search and greedy in turn, on the same batches."""
        settings = self._settings
        search = PrefixBeamSearch(subject.tokenizer.blank_id, beam, fusions=self._fusions(subject))
        loop = BeamLoop(subject, search)
        batches = self._batches(loop, equal_batches)
        facts = self._facts("beam", subject, batches) | {
            "beam": beam,
            "language_model": None if settings.language_model is None else settings.language_model.name,
        }
        contenders = [
            self._contender("stapes", stapes.__version__, subject, loop, batches, f"beam {beam}"),
            self._contender("stapes", stapes.__version__, subject, ours, batches, "greedy"),
        ]
        row = measure(Case(facts, lambda: contenders), self._rounds, self._log)
        self._finish(row, subject, batches, None)
        return row

    def _fusions(self, subject: CtcSubject) -> list[Fusion]:
        path = self._settings.language_model
        if path is None:
            return []
        model = read_arpa(path)
        try:
            return [TokenNGram(model, subject.tokenizer, device=subject.device)]
        except UsageError:  # it is not one of tokens
            return [WordNGram(model, subject.tokenizer, device=subject.device)]

    def _contender(
        self, system: str, version: str, subject: CtcSubject, loop: Loop, batches: Batches, options: str = ""
    ) -> Contender:
        def judge(texts: list[str]) -> Mapping[str, float | None]:
            return {"characters": float(sum(map(len, texts)))}

        def wait() -> None:
            if self._is_gpu:
                torch.cuda.synchronize(self._where.torch)

        return Contender(
            system=system,
            version=version,
            options=options,
            precision=_DTYPES[subject.dtype],
            run=lambda: loop.transcribe(batches),
            judge=judge,
            gpu=self._where.torch.index if self._is_gpu else None,
            prepare=wait,
        )

    def _facts(self, work: str, subject: CtcSubject, batches: Batches) -> dict[str, Any]:
        settings = self._settings
        return {
            "work": work,
            "device": self._where.backend,
            "device_name": self._where.name,
            "threads": settings.threads or torch.get_num_threads(),
            "precision": _DTYPES[subject.dtype],
            "batch": settings.batch,
            "seconds": settings.seconds,
            "batches": len(batches),
            "recordings": sum(map(len, batches)),
            "sound_seconds": round(seconds_of(batches), 2),
        }

    def _finish(self, row: CaseRow, subject: CtcSubject, batches: Batches, peaks: roofline.Peaks | None) -> None:
        """Rates of every system, and what part of the device's best they are."""
        chip = self._where.chip
        sheet = None if chip is None else chip.peak_tflops.get(_DTYPES[subject.dtype])
        operations = sum(
            work_of(subject.config, [len(recording) for recording in batch], subject.dtype.itemsize).operations
            for batch in batches
        )
        for system in row.systems:
            seconds = system.wall_seconds.median
            system.figures |= {
                "times_real_time": seconds_of(batches) / seconds,
                "mfu": None if sheet is None else operations / seconds / (1e12 * sheet),
                "of_product": None if peaks is None else operations / seconds / peaks.product,
            }


def _different(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Share of characters in which texts differ. With the same weights that is what near-ties in half precision do."""
    from difflib import SequenceMatcher

    same = total = 0
    for a, b in list(zip(ours, theirs, strict=True))[:32]:
        same += sum(block.size for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
        total += max(len(a), len(b))
    return 1 - same / total if total else 0.0
