"""From the command line's INPUT arguments to recordings, and from recordings to the names of their outputs."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stapes.audio.sources import MEDIA_EXTENSIONS
from stapes.errors import UsageError

STDIN = "-"


class Failure(NamedTuple):
    """An input that gave no result, and the reason in one sentence."""

    path: str
    reason: str


def expand(arguments: Iterable[str]) -> tuple[list[str], list[Failure]]:
    """Recordings in the order given, each once, and the arguments in which none were found.

    A folder stands for the audio and video files in it and below (by extension, sorted, hidden ones left out); a
    pattern with ``*``, ``?`` or ``[…]`` for the files it matches (``**`` for any depth); ``@FILE`` for the lines of
    a list; ``-`` for stdin.

    Raises:
        UsageError: a list cannot be read.
    """
    recordings: dict[str, str] = {}  # absolute path -> the name as given
    failures: list[Failure] = []
    for argument in _with_lists(arguments):
        found, failed = _expand_one(argument)
        failures.extend(failed)
        for name in found:
            recordings.setdefault(name if name == STDIN else os.path.abspath(name), name)  # noqa: PTH100 (keeps links)
    return list(recordings.values()), failures


def _with_lists(arguments: Iterable[str]) -> Iterator[str]:
    for argument in arguments:
        if not argument.startswith("@"):
            yield argument
            continue
        try:
            # Names are bytes on this system: whatever is no UTF-8 passes through.
            text = Path(argument[1:]).read_text(encoding="utf-8-sig", errors="surrogateescape")
        except OSError as error:
            raise UsageError(
                f"{argument}: the list cannot be read ({error.strerror}); "
                f"for a recording of that name, write ./{argument}"
            ) from error
        for line in text.split("\n"):
            line = line.removesuffix("\r")
            if line.strip() and not line.lstrip().startswith("#"):
                yield line


def _expand_one(argument: str) -> tuple[list[str], list[Failure]]:
    # Existing names first: "song [live].mp3" is a file, not a pattern.
    if argument == STDIN or (os.path.lexists(argument) and not os.path.isdir(argument)):  # noqa: PTH112 (Path('') is a folder)
        return [argument], []
    if os.path.isdir(argument):  # noqa: PTH112
        return _folder(argument)
    if glob.has_magic(argument):
        # What the shell would do with an unquoted pattern: every match is a named file.
        found: list[str] = []
        failures: list[Failure] = []
        for match in sorted(glob.glob(argument, recursive=True)):  # noqa: PTH207 (keeps names as given)
            if not Path(match).is_dir():
                found.append(match)
            elif "**" not in argument:  # ** lists the files below by itself
                inside, failed = _folder(match)
                found += inside
                failures += failed
        if not found and not failures:
            failures.append(Failure(argument, "no file matches this pattern; check the folder and the spelling"))
        return found, failures
    return [argument], []  # not there: the recogniser says so, as of any file that cannot be opened


def _folder(folder: str) -> tuple[list[str], list[Failure]]:
    failures: list[Failure] = []

    def unreadable(error: OSError) -> None:
        failures.append(Failure(str(error.filename), f"the folder cannot be read ({error.strerror})"))

    found: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [os.path.join(parent, name) for name in sorted(files) if not name.startswith(".")]  # noqa: PTH118
        # A pipe or a socket with a promising name would be waited for without end.
        found += [p for p in paths if Path(p).suffix[1:].lower() in MEDIA_EXTENSIONS and Path(p).is_file()]
    if not found and not failures:
        failures.append(Failure(folder, "the folder has no audio or video files; name the files to try them anyway"))
    return found, failures


def plan_outputs(recordings: Sequence[str], folder: Path, formats: Sequence[str]) -> dict[str, dict[str, Path]]:
    """For each recording, its output path for each format.

    The name is the recording's without its extension. Where two would collide they keep their folders, from the
    deepest one that all recordings share; in one folder, their full names (``a.mp3.srt``). An output never takes
    the place of a recording.
    """
    sources = {name: Path(folder, "stdin") if name == STDIN else Path(os.path.abspath(name)) for name in recordings}  # noqa: PTH100
    files = [source for name, source in sources.items() if name != STDIN]
    shared = Path(os.path.commonpath([source.parent for source in files])) if files else folder
    keep_folder: set[str] = set()
    keep_extension: set[str] = set()

    def output(name: str, format: str) -> Path:
        source = sources[name]
        parent = source.parent.relative_to(shared) if name in keep_folder and name != STDIN else Path()
        stem = source.name if name in keep_extension else source.stem
        return Path(folder, parent, f"{stem}.{format}")

    # Each round makes the names that still collide longer; with folder and extension a name is the recording's own.
    while True:
        plan = {name: {format: output(name, format) for format in formats} for name in recordings}
        owners: defaultdict[str, list[str]] = defaultdict(list)
        for name, source in sources.items():
            owners[str(source)].append(name)
        for name, paths in plan.items():
            for path in paths.values():
                owners[os.path.abspath(path)].append(name)  # noqa: PTH100
        progress = False
        for names in owners.values():
            if len(names) < 2:
                continue
            several_folders = len({sources[name].parent for name in names}) > 1
            kept = keep_folder if several_folders and not keep_folder.issuperset(names) else keep_extension
            progress = progress or not kept.issuperset(names)
            kept.update(names)
        if not progress:
            break
    clash = next((names for names in owners.values() if len(names) > 1), None)
    if clash:
        raise UsageError(f"{clash[0]} and {clash[-1]} would be written to the same file: choose another folder with -o")
    return plan
