"""Profilers that come with the vendors' tools: AMD's ``rocprofv3`` and NVIDIA's ``nsys``, around a command of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from stapes.errors import UsageError

Tool = Literal["rocprofv3", "nsys"]

_WHENCE = {
    "rocprofv3": "it comes with ROCm 6.2 and newer (package rocprofiler-sdk); add its bin folder to PATH",
    "nsys": "it is NVIDIA Nsight Systems (package nsight-systems-cli); add its bin folder to PATH",
}


def command_line(tool: Tool, words: Sequence[str], output: Path, python: str = sys.executable) -> list[str]:
    """The whole command line that profiles ``stapes WORDS…`` into files named after ``output``."""
    ours = [python, "-m", "stapes", *words]
    stem = output.with_suffix("")
    if tool == "rocprofv3":
        # Traces of kernels, copies and the HIP runtime, their sums, and a timeline for ui.perfetto.dev.
        flags = ["--kernel-trace", "--memory-copy-trace", "--hip-runtime-trace", "--stats"]
        where = ["--output-directory", str(stem.parent), "--output-file", stem.name]
        return [tool, *flags, "--output-format", "csv", "pftrace", *where, "--", *ours]
    where = ["--output", str(stem), "--force-overwrite", "true"]
    flags = ["--trace", "cuda,nvtx,osrt,cublas,cudnn", "--cuda-memory-usage", "true", "--stats", "true"]
    return [tool, "profile", *flags, *where, *ours]


def run_tool(
    tool: Tool,
    words: Sequence[str],
    output: Path,
    find: Callable[[str], str | None] = shutil.which,
    run: Callable[[list[str]], int] = subprocess.call,
) -> int:
    """Run the tool to its end and return its exit code, which is that of the command. Raises UsageError if missing."""
    if find(tool) is None:
        raise UsageError(f"--tool {tool}: it is not installed here: {_WHENCE[tool]}; or leave --tool out")
    output.parent.mkdir(parents=True, exist_ok=True)
    code = run(command_line(tool, words, output))
    return code if code >= 0 else 128 - code  # ended by a signal, as a shell counts it
