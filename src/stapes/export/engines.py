"""``stapes export --to migraphx`` and ``--to tensorrt``: graphs compiled beforehand by the vendor's own tool.

Tools are called as a user would call them. Where one is not installed, its exact commands are written into a script
beside the graphs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onnx import ModelProto

from stapes.errors import ModelError
from stapes.export.weights import read_graphs

Target = Literal["migraphx", "tensorrt"]

TOOLS: Mapping[Target, str] = {"migraphx": "migraphx-driver", "tensorrt": "trtexec"}
SUFFIXES: Mapping[Target, str] = {"migraphx": ".mxr", "tensorrt": ".engine"}
_PACKAGES: Mapping[Target, str] = {
    "migraphx": "AMD's package migraphx (ROCm)",
    "tensorrt": "NVIDIA's package tensorrt (it brings trtexec)",
}
_SECONDS = 3600

SIZES: Mapping[str, int] = {
    "windows": 8,
    "candidates": 1,
    "tokens": 8,
    "picked": 2,
    "cached": 448,
    "batch": 4,
    "samples": 30 * 16_000,
    "frames": 30 * 100,
}
"""What the axes that may change are compiled for."""

_LEAST: Mapping[str, int] = {"samples": 16_000, "frames": 100}
"""Of axes that may not be 1: a second."""


@dataclass(frozen=True)
class EngineResult:
    """A graph that was compiled, or why it was not. ``milliseconds``: of one run, where the tool tells."""

    graph: str
    command: str
    engine: str | None = None
    failure: str | None = None
    milliseconds: float | None = None


def input_shapes(model: ModelProto, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of each input with ``sizes`` for the axes that have a name. Raises ModelError for one that has none."""
    out = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        unknown = [dim.dim_param for dim in dims if dim.dim_param and dim.dim_param not in sizes]
        if unknown:
            raise ModelError(f"the graph has an axis {unknown[0]!r} that no size is known for: export the model again")
        out[value.name] = tuple(sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims)
    return out


def migraphx_command(
    graph: Path, shapes: Mapping[str, Sequence[int]], *, half: bool, architecture: str | None = None
) -> list[str]:
    """Compile a graph for an AMD GPU: the one that is here, or one of ``architecture`` (MIGraphX 2.16 and later)."""
    command = [TOOLS["migraphx"], "compile", str(graph), "--onnx", "--gpu"]
    command += ["--gpu-arch", architecture] if architecture else []
    command += ["--fp16"] if half else []
    for name, shape in shapes.items():
        command += ["--input-dim", f"@{name}", *map(str, shape)]
    return [*command, "--binary", "-o", str(graph.with_suffix(SUFFIXES["migraphx"]))]


def tensorrt_command(
    graph: Path, least: Mapping[str, Sequence[int]], best: Mapping[str, Sequence[int]], *, half: bool
) -> list[str]:
    """Compile a graph for the NVIDIA GPU that is here, for shapes from ``least`` to ``best``; best for the latter."""

    def listed(shapes: Mapping[str, Sequence[int]]) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())

    command = [TOOLS["tensorrt"], f"--onnx={graph}", f"--saveEngine={graph.with_suffix(SUFFIXES['tensorrt'])}"]
    command += ["--fp16"] if half else []
    if dict(least) != dict(best):
        command += [f"--minShapes={listed(least)}", f"--optShapes={listed(best)}", f"--maxShapes={listed(best)}"]
    return command


def commands(
    folder: Path,
    graphs: Mapping[str, str],
    target: Target,
    *,
    half: bool,
    architecture: str | None = None,
    sizes: Mapping[str, int] = SIZES,
) -> dict[str, list[str]]:
    """The command that compiles each graph of an exported model."""
    out = {}
    for name, model in read_graphs(folder, graphs).items():
        path, shapes = folder / graphs[name], input_shapes(model, sizes)
        if target == "migraphx":
            out[name] = migraphx_command(path, shapes, half=half, architecture=architecture)
        else:
            least = input_shapes(model, dict.fromkeys(sizes, 1) | {"picked": sizes["picked"], **_LEAST})
            out[name] = tensorrt_command(path, least, shapes, half=half)
    return out


def read_migraphx(output: str, code: int) -> tuple[str | None, float | None]:
    """Why ``migraphx-driver`` failed, None where it did not; milliseconds of a run, which ``perf`` tells."""
    time = re.search(r"Total time: ([\d.]+)\s*ms", output)
    if code == 0:
        return None, float(time[1]) if time else None
    said = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in said if re.search(r"error|what\(\)|unknown operator|unsupported|terminate", line, re.I)]
    return (told or said or [f"it ended with code {code} and said nothing"])[-1][:300], None


def read_trtexec(output: str, code: int) -> tuple[str | None, float | None]:
    """Why ``trtexec`` failed, None where it did not; milliseconds of a run on the GPU."""
    passed = "&&&& PASSED" in output
    time = re.search(r"GPU Compute Time: .*?mean = ([\d.]+) ms", output)
    if passed and code == 0:
        return None, float(time[1]) if time else None
    errors = [line.partition("[E]")[2].strip() for line in output.splitlines() if "[E]" in line]
    said = [line.strip() for line in output.splitlines() if line.strip()]
    return (errors[:1] or said[-1:] or [f"it ended with code {code} and said nothing"])[0][:300], None


def written(target: Target, made: Mapping[str, object]) -> list[str]:
    """The files that `build_engines` writes, where all goes well."""
    return [f"build-{target}.sh", *(f"{graph}{SUFFIXES[target]}" for graph in made)]


def write_script(folder: Path, target: Target, made: Mapping[str, Sequence[str]]) -> Path:
    """The commands as a script, to be run where the tool is."""
    script = folder / f"build-{target}.sh"
    lines = ["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"']
    for command in made.values():
        words = [word.replace(f"{folder}/", "") for word in command]  # beside the script, wherever it is copied to
        lines.append(shlex.join(words))
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script.chmod(0o755)
    return script


def build_engines(
    folder: Path, target: Target, made: Mapping[str, Sequence[str]], note: Callable[[str], None] = lambda _: None
) -> tuple[list[EngineResult], str | None]:
    """Run the commands. Returns what came of each, and what is missing where the tool is not installed."""
    tool, script = TOOLS[target], write_script(folder, target, made)
    if shutil.which(tool) is None:
        missing = f"{tool} is not installed ({_PACKAGES[target]}): run {script} where it is"
        return [EngineResult(graph, shlex.join(command), failure=missing) for graph, command in made.items()], missing
    read = read_migraphx if target == "migraphx" else read_trtexec
    results = []
    for graph, command in made.items():
        note(f"{tool} compiles {graph}")
        engine = folder / f"{graph}{SUFFIXES[target]}"
        try:
            done = subprocess.run(list(command), capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
            failure, time = read(done.stdout + done.stderr, done.returncode)
        except (OSError, subprocess.TimeoutExpired) as error:
            failure, time = f"{tool} could not be run to its end ({error})", None
        if failure is None and not engine.is_file():
            failure = f"{tool} said that all is well, but wrote no {engine.name}"
        name = None if failure else engine.name
        results.append(EngineResult(graph, shlex.join(command), name, failure, time))
    return results, None
