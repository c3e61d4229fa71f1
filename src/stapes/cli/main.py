"""The ``stapes`` command: parses, calls, and turns errors into one sentence and an exit code.

Exit codes: 0 all done, 1 some inputs failed, 2 wrong usage, 3 no usable device or model, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError

import stapes
from stapes.cli import bench, bulk, kernels, lm, models, serve
from stapes.cli.align import align
from stapes.cli.arguments import normalise
from stapes.cli.compare import compare
from stapes.cli.doctor import doctor
from stapes.cli.evaluate import evaluate
from stapes.cli.export import export
from stapes.cli.interrupts import interruptible
from stapes.cli.label import label
from stapes.cli.live import live
from stapes.cli.monitor import monitor
from stapes.cli.prepare import prepare
from stapes.cli.profile import profile_command
from stapes.cli.quantize import quantize
from stapes.cli.terminal import display, prepare_streams, to_json
from stapes.cli.train import train
from stapes.cli.transcribe import transcribe
from stapes.cli.tune import tune
from stapes.errors import StapesError

app = App(
    name="stapes",
    help="Speech recognition: from recordings to text and subtitles.\n\nExample: stapes transcribe talk.mp3",
    version=stapes.__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,
    # As in openai/whisper, the last mention of an option counts.
    default_parameter=Parameter(allow_repeating=True, negative_iterable=()),
)
app.command(transcribe, sort_key=1, usage="Usage: stapes transcribe [OPTIONS] INPUT…")
app.command(live, usage="Usage: stapes live [OPTIONS] [-]")
app.command(align, usage="Usage: stapes align [OPTIONS] AUDIO [TEXT]")
app.command(models.app)
app.command(evaluate, usage="Usage: stapes evaluate [OPTIONS] MODEL MANIFEST")
app.command(bulk.app)
app.command(prepare, usage="Usage: stapes prepare [OPTIONS] CORPUS SOURCE OUT")
app.command(label, usage="Usage: stapes label [OPTIONS] MANIFEST OUT")
app.command(train, usage="Usage: stapes train [OPTIONS] RECIPE")
app.command(export, usage="Usage: stapes export [OPTIONS] MODEL")
app.command(quantize, usage="Usage: stapes quantize [OPTIONS] MODEL")
app.command(compare, usage="Usage: stapes compare [OPTIONS] RESULT…")
app.command(serve.app)
app.command(bench.app)
app.command(kernels.app)
app.command(lm.app)
app.command(monitor)
app.command(
    profile_command(lambda words: _run(list(words))), name="profile", usage="Usage: stapes profile [OPTIONS] COMMAND…"
)
app.command(doctor)
app.command(tune, usage="Usage: stapes tune [OPTIONS] MODEL")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. As the process's own entry point (no ``argv``) it exits itself."""
    prepare_streams()
    with interruptible():
        code = _run(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        _leave(code)
    return code


def _run(tokens: list[str]) -> int:
    try:
        tokens = normalise(app, tokens)
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownCommandError as error:
        name = tokens[0] if tokens else ""
        if os.path.exists(name):  # noqa: PTH110
            return _fail(f"{name!r} is no command: for its words, say `stapes transcribe {name}`", 2, tokens)
        return _fail(f"{error} See `stapes --help`.", 2, tokens)
    except CycloptsError as error:
        return _fail(f"{error} See `{_command(tokens)} --help`.", 2, tokens)
    except StapesError as error:
        return _fail(str(error), error.exit_code, tokens)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, [])  # stdout may hold a result already
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int, tokens: Sequence[str]) -> int:
    """Say what ended the command; with --json on stdout too."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(f"stapes: {display(message)}", file=sys.stderr, flush=True)
        if "--json" in tokens and sys.stdout is not None:
            print(to_json({"error": message, "exit_code": code}), flush=True)
    return code


def _command(tokens: Sequence[str]) -> str:
    command, _, _ = app.parse_commands(tokens)
    return " ".join(["stapes", *command])


def _leave(code: int) -> NoReturn:
    """End the process; without waiting for threads where work was cancelled in the middle of a step.

    Nor where it is one of several: after FSDP2 PyTorch's caches keep the threads of gloo alive, and one of them that
    lets go of a tensor while the interpreter is being taken down aborts the process, as if its work had failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    if threading.active_count() > 1 or "WORLD_SIZE" in os.environ:
        os._exit(code)
    sys.exit(code)
