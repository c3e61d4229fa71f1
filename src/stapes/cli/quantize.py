"""``stapes quantize MODEL --scheme int8``: the same model, smaller, and what it costs in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, to_json
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.export.quantize import QuantizeReport


_KEPT = {"int4": "8 bits", "fp8": "fp16"}
"""What the layers are in that few bits hurt, where that is not fp32."""


def quantize(
    model: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    scheme: Literal["int8", "int8-static", "int8-weights", "int4", "fp8"] = "int8",
    output_dir: Annotated[Path | None, Parameter(alias="-o")] = None,
    manifest: str | None = None,
    limit: int = 60,
    max_wer_change: float = 0.3,
    calibrate: str | None = None,
    sensitive: float = 0.1,
    full_range: bool = False,
    threads: int | None = None,
    model_dir: str | None = None,
    offline: bool = False,
    json: bool = False,
) -> int:
    """Write a model with weights of 8 or 4 bits as a folder that `transcribe --model FOLDER` opens.

    Layers that so few bits hurt are found by what goes through them and stay in fp32 (in 8 bits for int4, in fp16 for
    fp8). With --manifest both models transcribe the same recordings; one that gets worse by more than --max-wer-change
    is refused.

    For example:

        stapes quantize base --scheme int8 -o base-int8
        stapes quantize base -o base-int8 --manifest librispeech:test --max-wer-change 0.3
        stapes quantize medium --scheme int4 -o medium-int4 --manifest librispeech:test

    Exit code: 0 done, 2 wrong usage, 3 no such model, or words suffer too much.

    Parameters
    ----------
    model:
        Name, folder (an exported one in fp32, too), Hugging Face id or .pt file.
    scheme:
        int8: run by ONNX Runtime, activations in 8 bits too, scaled as they come, row by row. int8-static: in ranges
        found beforehand, which compilers for other hardware read. int8-weights, int4: weights of a Whisper in so many
        bits, for GPUs. fp8: in 8-bit floats, which the encoder is computed in on GPUs that multiply them.
    output_dir:
        The folder to write: a new or empty one, or an earlier export, which is replaced at the end.
    manifest:
        A manifest, or a corpus by name, to count words on.
    limit:
        Of the manifest, its first rows.
    max_wer_change:
        The most that the word error rate may rise, in points.
    calibrate:
        A manifest, or a corpus by name, whose first rows show what goes through each layer. Default: the manifest's
        last rows; without one, made-up sound.
    sensitive:
        A layer whose output errs by more than this share of its size stays in fp32. For int4 and fp8: a kind of layer
        that more than this share of all errors comes from keeps 8 and 16 bits.
    full_range:
        Finer weights, which CPUs with VNNI compute rightly and others may not.
    threads:
        CPU threads.
    model_dir:
        Folder where models are looked for and downloaded to.
    offline:
        Never download.
    json:
        Print the result as one JSON object.
    """
    import torch

    from stapes.export.onnx import find
    from stapes.export.quantize import QuantizeSettings
    from stapes.export.quantize import quantize as run
    from stapes.export.target import check_target

    if output_dir is None:
        raise UsageError(f"say where to write the folder: stapes quantize {model} --scheme {scheme} -o FOLDER")
    if limit < 1:
        raise UsageError(f"--limit is {limit}: give 1 or more")
    if sensitive < 0:
        raise UsageError(f"--sensitive is {sensitive}: give a share of the size, such as 0.1")
    if threads is not None:
        if threads < 1:
            raise UsageError(f"--threads is {threads}: give 1 or more")
        torch.set_num_threads(threads)
    check_target(output_dir, given if (given := Path(model).expanduser()).exists() else None)  # before fetching it
    terminal = Terminal()
    with terminal.progress("bytes", "looking for the model …") as progress:
        name, location = find(model, model_dir, progress, offline=offline)
    check_target(output_dir, location.path)
    settings = QuantizeSettings(
        scheme=scheme,
        manifest=manifest,
        limit=limit,
        calibration=calibrate,
        sensitive=sensitive,
        max_wer_change=max_wer_change,
        full_range=full_range,
    )
    report = run(name, location, output_dir, settings, terminal.note)
    terminal.out(to_json(report.as_json()) + "\n" if json else _in_words(report))
    return 0


def _in_words(report: QuantizeReport) -> str:
    ratio = report.bytes / report.source_bytes
    lines = [
        f"{report.folder}: {report.model} in {report.scheme}, {report.bytes / 1e6:.1f} MB, {ratio:.2f} × fp32's",
        f"  kept in {_KEPT.get(report.scheme, 'fp32')}: {', '.join(report.kept) or 'no layer'}",
    ]
    lines += [f"  {error:.3f} {name}" for name, error in list(report.errors.items())[:5]]
    if report.before is not None and report.after is not None:
        lines.append(
            f"  WER {report.before.wer:.2f} → {report.after.wer:.2f} % ({report.after.words} words); "
            f"{report.after.speed / report.before.speed:.2f} × as fast, one recording at a time"
        )
    return "".join(f"{line}\n" for line in lines)
