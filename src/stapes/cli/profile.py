"""``stapes profile COMMAND…``: where the time and the memory of a command go, as one HTML page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, to_json
from stapes.errors import UsageError

if TYPE_CHECKING:
    from stapes.diagnostics.profile import Profile


def profile_command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """The command, given what runs a command line in this process and returns its exit code."""

    def profile(
        *command: Annotated[
            str, Parameter(name="COMMAND", allow_leading_hyphen=True, help="A command of stapes with its options.")
        ],
        output: Annotated[Path | None, Parameter(alias="-o")] = None,
        seconds: float = 30.0,
        after: float = 0.0,
        trace: Path | None = None,
        tool: Literal["rocprofv3", "nsys"] | None = None,
        json: bool = False,
    ) -> int:
        """Run a command of stapes and show where its time and memory go; the exit code is the command's.

        Operators and GPU kernels by time, what fraction of the chip's peak they reach, memory and calls of the
        allocator over time. Options of profile stand before the command, all that follows is the command's.

        For example:

            stapes profile transcribe talk.mp3 --model base
            stapes profile -o base.html --trace base.json bench transcribe --quick
            stapes profile --tool rocprofv3 transcribe talk.mp3

        Parameters
        ----------
        output:
            The HTML file to write. Default: profile.html, and none with --json. For --tool the name of its files.
        seconds:
            How much is recorded in all, in windows of at most a second. Memory is watched to the end.
        after:
            Seconds of the command that pass before recording begins.
        trace:
            Write the first window as a Chrome trace too (JSON; open it in ui.perfetto.dev).
        tool:
            Run the command under a vendor's profiler instead, where it is installed.
        json:
            Print the figures as one JSON object; the command's own output goes to stderr.
        """
        from stapes.diagnostics import external_profilers

        if not 0.1 <= seconds <= 3600:
            raise UsageError(f"--seconds is {seconds:g}: give 0.1 to 3600")
        if not 0 <= after <= 24 * 3600:
            raise UsageError(f"--after is {after:g}: give 0 or more seconds")
        if tool is not None:
            _check(command)
            if json or trace is not None:
                raise UsageError(f"--tool {tool} writes files of its own: leave --json and --trace out")
            return external_profilers.run_tool(tool, command, output or Path("profile"))
        # Before PyTorch is imported: its profiler writes of every window to stderr otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        _check(command)
        page = output or (None if json else Path("profile.html"))
        write_html = None if page is None else _page_writer()  # before the work, which may be long
        from stapes.diagnostics.profile import profile as record

        terminal = Terminal()
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            found = record(lambda: run(command), command, seconds=seconds, after=after, trace=trace)
        if page is not None and write_html is not None:
            with shielded():
                write_html(found, page)
        if json:
            terminal.out(to_json({**found.summary(), "html": str(page) if page else None}) + "\n")
        else:
            terminal.note(_in_short(found))
        for path in filter(None, (page, found.trace)):
            terminal.note(f"wrote {path}")
        return found.exit_code

    return profile


def _page_writer() -> Callable[[Profile, Path], None]:
    try:
        from stapes.diagnostics.profile_page import write_html
    except ImportError as error:
        raise UsageError(
            f"the page of a profile needs {error.name}: pip install 'stapes[evaluate]', or take --json alone"
        ) from error
    return write_html


def _check(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("nothing to profile: say a command of stapes, as in `stapes profile transcribe talk.mp3`")
    if command[0].startswith("-"):
        raise UsageError(
            f"{command[0]} is no option of profile: `stapes profile --help`; options of the command follow its name"
        )
    if command[0] in ("profile", "monitor", "serve"):
        raise UsageError(f"`stapes {command[0]}` cannot be profiled: name a command that works and then ends")


def _in_short(found: Profile) -> str:
    most = [each.operator.name for each in found.operators(3)]
    figures = found.summary()
    busy = figures["device_busy_fraction"]
    parts = [f"{found.wall_seconds:.1f} s, {found.activity.recorded_seconds:.1f} s recorded"]
    if busy is not None:
        parts.append(f"GPU busy {100 * busy:.0f} %")
    parts += [
        f"{dtype} at {100 * each.fraction:.1f} % of peak"
        for dtype, each in found.overall().items()
        if each.fraction is not None
    ]
    if most:
        parts.append(f"most time in {', '.join(most)}")
    return "; ".join(parts)
