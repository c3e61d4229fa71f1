"""``stapes quantize``: a model with weights of fewer bits, and what that costs in words."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stapes.audio.features import SAMPLE_RATE
from stapes.checkpoints import catalog
from stapes.checkpoints.load import model_type, open_checkpoint
from stapes.checkpoints.onnx_folder import MANIFEST, WEIGHTS, OnnxFolder, is_onnx, read_onnx_folder
from stapes.errors import ModelError, UsageError
from stapes.evaluation.corpora import Row, open_corpus
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.scoring import word_errors
from stapes.export.onnx import export_onnx, require
from stapes.export.sound import made_up_sound, speech
from stapes.export.target import RECORD, check_target, export_target
from stapes.inference.ctc_open import CTC_KINDS
from stapes.loading import load
from stapes.recognizer import Recognizer

Scheme = Literal["int8", "int8-static", "int8-weights", "int4", "fp8"]
"""The first two are for ONNX Runtime, with activations in 8 bits too; the others are weights for GPUs."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """What to make.

    manifest: a corpus (`evaluation.corpora.open_corpus`) that words are counted on, its first ``limit`` rows.
    calibration: one whose first ``calibration_rows`` rows show which layers suffer; None: the manifest's last ones, or
    made-up sound. sensitive: a layer whose output errs by more than this share of its size stays in float32; a kind of
    layer that more than this share of all errors comes from keeps 8 bits in int4, and 16 in fp8.
    max_wer_change: in points, absolute. full_range: weights to ±127, for CPUs with VNNI only.
    """

    scheme: Scheme = "int8"
    manifest: str | None = None
    limit: int = 60
    calibration: str | None = None
    calibration_rows: int = 6
    sensitive: float = 0.1
    max_wer_change: float = 0.3
    full_range: bool = False
    language: str | None = None


@dataclass(frozen=True, kw_only=True)
class Words:
    """How one of the two did on the manifest. ``wer``: in per cent. ``speed``: seconds of sound in a second."""

    wer: float
    words: int
    speed: float


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """What was made. ``errors``: weight → the error of its products, the worst first. ``kept``: those left alone.

    Of weights for GPUs, ``errors`` are those of kinds of layers, and ``kept`` are those with more bits than others.
    """

    folder: str
    model: str
    scheme: str
    bytes: int
    source_bytes: int
    errors: dict[str, float]
    kept: tuple[str, ...]
    before: Words | None = None
    after: Words | None = None

    @property
    def wer_change(self) -> float | None:
        """In points; None where no manifest was given."""
        return None if self.before is None or self.after is None else self.after.wer - self.before.wer

    def as_json(self) -> dict[str, Any]:
        """For one machine-readable result."""
        return {**asdict(self), "size_ratio": self.bytes / self.source_bytes, "wer_change": self.wer_change}


def quantize(
    name: str,
    location: catalog.Location,
    folder: Path,
    settings: QuantizeSettings,
    note: Callable[[str], None] = lambda _: None,
) -> QuantizeReport:
    """Write a model with weights of fewer bits into ``folder``, whole or not at all.

    Graphs that are not there yet are exported first. Raises ModelError where words suffer more than ``max_wer_change``,
    UsageError, OutputError.
    """
    check_target(folder, location.path)
    rows = open_corpus(settings.manifest).rows if settings.manifest is not None else []
    if settings.manifest is not None and not rows:
        raise UsageError(f"--manifest {settings.manifest} has no rows: name one that has")
    if settings.scheme in ("int8-weights", "int4", "fp8"):
        return _quantize_weights(name, location, folder, settings, rows, note)
    require("onnx", "onnxruntime")
    with tempfile.TemporaryDirectory() as place:
        source = location.path
        if not is_onnx(source):
            note("exporting in fp32")
            source = Path(place) / "fp32"
            export_onnx(name, location, source, note=note)
        exported = read_onnx_folder(source)
        if exported.scheme is not None or exported.dtype != "float32":
            raise UsageError(f"{name} was exported in {exported.scheme or exported.dtype}: quantise the fp32 one")
        with export_target(folder) as temporary, load(source, device="cpu", language=settings.language) as original:
            made, errors = _write(
                original, source, exported, temporary, settings, _calibration_rows(settings, rows), note
            )
            size, before = _size(temporary), _size(source)
            report = QuantizeReport(
                folder=str(folder),
                model=name,
                scheme=settings.scheme,
                bytes=size,
                source_bytes=before,
                errors=errors,
                kept=made.kept,
            )
            if rows:
                with load(temporary, device="cpu", language=settings.language) as smaller:
                    report = _compare(report, original, smaller, rows[: settings.limit], note)
                _refuse_beyond(report, settings)
    return report


def _quantize_weights(
    name: str,
    location: catalog.Location,
    folder: Path,
    settings: QuantizeSettings,
    rows: Sequence[Row],
    note: Callable[[str], None],
) -> QuantizeReport:
    from stapes.export.weight_only import as_on_a_gpu, write_weights

    if is_onnx(location.path) or model_type(location.path) in CTC_KINDS:
        raise UsageError(f"--scheme {settings.scheme} is for Whispers that are not exported: {name} is none")
    checkpoint = open_checkpoint(location.path, name, location.parts)
    if checkpoint.scheme is not None:
        raise UsageError(f"{name} is in {checkpoint.scheme} already: quantise the original")
    heard = _calibration_rows(settings, rows)
    if not heard:
        note("no recordings are given with --calibrate or --manifest: layers are judged by made-up sound")
    source = name if location.parts else location.path
    with export_target(folder) as temporary, load(source, device="cpu", offline=True) as original:
        clips = list(speech(heard)) if heard else [made_up_sound()]
        errors, kept, size, before = write_weights(
            checkpoint, original, clips, temporary, settings.scheme, settings.sensitive, note
        )
        report = QuantizeReport(
            folder=str(folder),
            model=name,
            scheme=settings.scheme,
            bytes=size,
            source_bytes=before,
            errors=errors,
            kept=kept,
        )
        if rows:
            with load(temporary, device="cpu") as smaller:
                if settings.scheme == "fp8":
                    as_on_a_gpu(smaller, temporary)
                report = _compare(report, original, smaller, rows[: settings.limit], note)
            _refuse_beyond(report, settings)
    return report


def _calibration_rows(settings: QuantizeSettings, rows: Sequence[Row]) -> Sequence[Row]:
    if settings.calibration is not None:
        return open_corpus(settings.calibration, limit=settings.calibration_rows).rows
    # Not those that words are counted on, where there are others.
    return rows[max(0, len(rows) - settings.calibration_rows) :]


def _write(
    original: Recognizer,
    source: Path,
    exported: OnnxFolder,
    folder: Path,
    settings: QuantizeSettings,
    rows: Sequence[Row],
    note: Callable[[str], None],
) -> tuple[OnnxFolder, dict[str, float]]:
    from stapes.export.calibration import Calibration, record
    from stapes.export.cpu import SUFFIX, fuse_int8
    from stapes.export.int8 import FULL, REDUCED, Rewriter, matrices
    from stapes.export.weights import WeightsFile, read_graphs

    if not rows:
        note("no recordings are given with --calibrate or --manifest: layers are judged by made-up sound")
    note("listening to what goes through each layer")
    static, largest = settings.scheme == "int8-static", FULL if settings.full_range else REDUCED
    plain = {graph: file for graph, file in exported.graphs.items() if not graph.endswith(SUFFIX)}
    calibration = Calibration(source, plain, record(original, speech(rows) if rows else [made_up_sound()]))
    errors = calibration.measure(largest, static=static)
    graphs = read_graphs(source, exported.graphs)
    weights = {name for graph in graphs.values() for name in matrices(graph)}
    # What nothing went through is not known to be safe in a range that nobody has seen.
    kept = {name for name in weights if errors.get(name, 1.0 if static else 0.0) > settings.sensitive}
    for file in source.iterdir():
        if file.name not in (MANIFEST, WEIGHTS, RECORD, *exported.graphs.values()) and file.is_file():
            shutil.copyfile(file, folder / file.name)
    with WeightsFile(folder) as file:
        for graph, model in graphs.items():
            rewriter = Rewriter(model, source, kept, largest)
            if static:
                rewriter.static(calibration.ranges.get(graph.removesuffix(SUFFIX), {}), calibration.smoothing)
            else:
                rewriter.dynamic()
            if graph.endswith(SUFFIX):
                fuse_int8(model)
            file.write(model, exported.graphs[graph], source)
    made = replace(exported, scheme=settings.scheme, kept=tuple(sorted(kept)))
    made.write(folder)
    ordered = dict(sorted(errors.items(), key=lambda item: -item[1]))
    return made, ordered


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _compare(
    report: QuantizeReport, before: Recognizer, after: Recognizer, rows: Sequence[Row], note: Callable[[str], None]
) -> QuantizeReport:
    note(f"counting words of {len(rows)} recordings, with fp32 and with {report.scheme}")
    recognizers, clips = (before, after), list(speech(rows))
    errors, seconds = [0, 0], [0.0, 0.0]
    words = 0
    for recognizer in recognizers:  # warm, before the clock
        recognizer.transcribe(clips[0], sample_rate=SAMPLE_RATE)
    for index, (row, pcm) in enumerate(zip(rows, clips, strict=True)):
        normalizer = choose("auto", row.language)
        reference = normalize(row.text, normalizer)
        words += len(reference.split())
        for which in (0, 1) if index % 2 else (1, 0):  # by turns, so that both meet the same machine
            started = time.perf_counter()
            text = (
                recognizers[which]
                .transcribe(pcm, sample_rate=SAMPLE_RATE, language=_language(recognizers[0], row))
                .text
            )
            seconds[which] += time.perf_counter() - started
            found = word_errors(reference, normalize(text, normalizer))
            errors[which] += found.substitutions + found.deletions + found.insertions
    sound = sum(map(len, clips)) / SAMPLE_RATE
    both = [
        Words(wer=100 * errors[which] / max(1, words), words=words, speed=sound / seconds[which]) for which in (0, 1)
    ]
    return replace(report, before=both[0], after=both[1])


def _language(recognizer: Recognizer, row: Row) -> str | None:
    return row.language if row.language is not None and recognizer.family.can_be_told(row.language) else None


def _refuse_beyond(report: QuantizeReport, settings: QuantizeSettings) -> None:
    change = report.wer_change
    assert change is not None
    assert report.before is not None
    assert report.after is not None
    if change > settings.max_wer_change:
        # Every layer loses a little by a fixed range, so that keeping the worst ones helps less than rows of their own.
        static = settings.scheme == "int8-static"
        instead = "take --scheme int8, whose activations are scaled row by row, or " if static else ""
        worst = ", ".join(f"{name} {error:.2f}" for name, error in list(report.errors.items())[:3])
        raise ModelError(
            f"{settings.scheme} makes {report.model} worse by {change:.2f} points ({report.before.wer:.2f} to "
            f"{report.after.wer:.2f} %), more than --max-wer-change {settings.max_wer_change:g}: nothing was written; "
            f"{instead}keep more layers with a smaller --sensitive (worst: {worst})"
        )
