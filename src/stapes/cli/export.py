"""``stapes export MODEL --to onnx``: a model for other runtimes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, to_json
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.checkpoints.onnx_folder import OnnxFolder
    from stapes.export.onnx import ExportReport

Target = Literal["onnx", "migraphx", "tensorrt", "huggingface"]


def export(
    model: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    to: Target = "onnx",
    output_dir: Annotated[Path | None, Parameter(alias="-o")] = None,
    precision: Literal["auto", "fp32", "fp16"] = "auto",
    language: str | None = None,
    architecture: str | None = None,
    windows: int = 8,
    model_dir: str | None = None,
    offline: bool = False,
    json: bool = False,
) -> int:
    """Write a model as a folder for another runtime, which `transcribe --model FOLDER` opens.

    Whisper and wav2vec 2.0 CTC models. Every graph is run by ONNX Runtime and compared with PyTorch: one that differs
    is refused, and nothing is written.

    For example:

        stapes export base --to onnx -o base-onnx
        stapes transcribe talk.mp3 --model ./base-onnx
        stapes export turbo --to migraphx --architecture gfx942 -o turbo-mi300

    Exit code: 0 done, 2 wrong usage, 3 no such model, the numbers differ, or the vendor's tool is missing or failed.

    Parameters
    ----------
    model:
        Name, folder, Hugging Face id or .pt file.
    to:
        onnx: graphs for ONNX Runtime. migraphx, tensorrt: these, and each compiled by migraphx-driver or trtexec;
        where the tool is not installed, a script with its commands. huggingface: weights as `transformers` opens them.
    output_dir:
        The folder to write: a new or empty one, or an earlier export, which is replaced at the end.
    precision:
        Of the weights. auto: fp32, and fp16 for migraphx and tensorrt.
    language:
        Which of its languages a model is exported in that has adapters for several.
    architecture:
        With --to migraphx, compile for this GPU (such as gfx942) instead of the one that is here.
    windows:
        With --to migraphx or tensorrt, windows computed together.
    model_dir:
        Folder where models are looked for and downloaded to.
    offline:
        Never download.
    json:
        Print the result as one JSON object.
    """
    from stapes.checkpoints.onnx_folder import read_onnx_folder
    from stapes.export import onnx
    from stapes.export.target import check_target, record

    if output_dir is None:
        raise UsageError(f"say where to write the folder: stapes export {model} --to {to} -o FOLDER")
    if architecture is not None and to != "migraphx":
        raise UsageError("--architecture goes with --to migraphx; TensorRT compiles for the GPU that is here")
    if windows < 1:
        raise UsageError(f"--windows is {windows}: give 1 or more")
    check_target(output_dir, given if (given := Path(model).expanduser()).exists() else None)  # before fetching it
    terminal = Terminal()
    with terminal.progress("bytes", "looking for the model …") as progress:
        name, location = onnx.find(model, model_dir, progress, offline=offline)
    check_target(output_dir, location.path)
    if to == "huggingface":
        if precision != "auto":
            raise UsageError("--to huggingface writes the weights as they are: leave --precision out")
        report = onnx.export_huggingface(name, location, output_dir, language=language)
        return _tell(terminal, report, json)
    chosen = precision if precision != "auto" else "fp32" if to == "onnx" else "fp16"

    def made(folder: Path, exported: OnnxFolder) -> dict[str, list[str]]:
        """The commands of the vendor's tool."""
        if to == "onnx":
            return {}
        from stapes.export import engines

        graphs = {name: file for name, file in exported.graphs.items() if "@" not in name}
        sizes = {**engines.SIZES, "windows": windows, "batch": windows}
        return engines.commands(folder, graphs, to, half=chosen == "fp16", architecture=architecture, sizes=sizes)

    report = onnx.export_onnx(
        name, location, output_dir, precision=chosen, language=language, note=terminal.note, inspect=made
    )
    if to == "onnx":
        return _tell(terminal, report, json)
    from stapes.export import engines

    commands = made(output_dir, read_onnx_folder(output_dir))
    try:
        results, missing = engines.build_engines(output_dir, to, commands, terminal.note)
    finally:
        record(output_dir, engines.written(to, commands))
    _tell(terminal, report, json, engines=[asdict(result) for result in results])
    if missing:
        terminal.failure(missing)
    for result in results if not missing else []:
        if result.failure:
            terminal.failure(result.failure, result.graph)
    return 3 if missing or any(result.failure for result in results) else 0


def _tell(terminal: Terminal, report: ExportReport, json: bool, **more: Any) -> int:
    if json:
        terminal.out(to_json({**report.as_json(), **more}) + "\n")
        return 0
    lines = [f"{report.folder}: {report.model} in {report.precision}, {report.bytes / 1e6:.1f} MB"]
    for graph, check in (report.checked or {}).items():
        lines.append(f"  {graph:8} {check['error']:.1e} from PyTorch (at most {check['tolerance']:g})")
    for engine in more.get("engines", ()):
        time = f", {engine['milliseconds']:.1f} ms" if engine["milliseconds"] is not None else ""
        lines.append(f"  {engine['graph']:8} {engine['engine'] or engine['command']}{time}")
    terminal.out("".join(f"{line}\n" for line in lines))
    return 0
