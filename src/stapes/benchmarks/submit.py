"""Pack results so that somebody can send them to us: the figures, the machine, the versions, the log, and no names."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

from stapes.benchmarks.anonymous import anonymous, anonymous_text, personal_names
from stapes.benchmarks.records import read_bench
from stapes.devices import machine
from stapes.errors import OutputError, UsageError

# Hardware and software, which ``devices.machine`` promises to hold no names: a host called after its GPU must not
# take the GPU's name away.
_KEEP = frozenset({"machine"})


def find_results(sources: Sequence[str | Path]) -> list[Path]:
    """The result files that ``sources`` name: files, and folders with files in them. Raises UsageError."""
    found: list[Path] = []
    for source in map(Path, sources):
        found += sorted(source.glob("*.json")) if source.is_dir() else [source]
    if not found:
        raise UsageError(
            f"there are no results in {', '.join(map(str, sources)) or 'nothing'}: run `stapes bench transcribe` first"
        )
    return found


def pack(sources: Sequence[str | Path], output: Path) -> list[str]:
    """Write a zip of the results of this machine. Returns the names of what is in it.

    Results of another machine are refused: whoever measured there submits them. Raises UsageError, OutputError.
    """
    facts = machine.facts()
    results = [(path, read_bench(path)) for path in find_results(sources)]
    strangers = [path.name for path, result in results if result.fingerprint != facts["fingerprint"]]
    if strangers:
        raise UsageError(
            f"{strangers[0]} was measured on another machine: submit it from there, or name the files of this one"
        )
    names = personal_names()
    files = {
        "machine.json": json.dumps(facts, indent=1) + "\n",
        "versions.txt": "".join(f"{line}\n" for line in _installed()),
    }
    for number, (path, result) in enumerate(results):
        name = anonymous_text(path.name, names)
        if f"results/{name}" in files:  # of another folder
            name = f"{number}-{name}"
        clean = anonymous(asdict(result), names, keep=_KEEP)
        files[f"results/{name}"] = json.dumps(clean, indent=1, ensure_ascii=False) + "\n"
        log = path.with_suffix(".log")
        if log.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
            files[f"logs/{Path(name).stem}.log"] = anonymous_text(text, names)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                # A fixed time: the archive's own dates would tell the time zone.
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    except OSError as error:
        raise OutputError(f"{output}: cannot be written ({error.strerror}); choose another place with -o") from error
    return list(files)


def _installed() -> list[str]:
    """``name==version`` of every package; where each came from is left out, for it may be a folder."""
    found = {f"{each.metadata['Name']}=={each.version}" for each in distributions() if each.metadata["Name"]}
    return sorted(found, key=str.lower)
