"""Corpora that lhotse knows how to read, by the name of its recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stapes.data.corpora import BadRow, Row
from stapes.errors import UsageError

_PREFIX = "prepare_"


def recipe_names() -> list[str]:
    """What lhotse's recipes are called: ``aishell``, ``ami``, ``fleurs`` …"""
    return sorted(name.removeprefix(_PREFIX) for name in dir(_recipes()) if name.startswith(_PREFIX))


def read_recipe(name: str, source: Path) -> Iterator[Row | BadRow]:
    """The supervisions of a corpus, as lhotse's recipe finds them. The recipe runs to its end first.

    Raises UsageError with what the recipe said where it fails.
    """
    try:
        found = getattr(_recipes(), _PREFIX + name)(source)
    except Exception as error:  # recipes raise whatever they meet
        raise UsageError(
            f"lhotse's recipe {name} could not read {source} ({type(error).__name__}: {error}): name the folder that "
            "it describes, or give a jsonl"
        ) from error
    return _rows(found, ())


def _rows(found: Any, names: tuple[str, ...]) -> Iterator[Row | BadRow]:
    if not isinstance(found, dict):
        raise UsageError(f"lhotse's recipe gave {type(found).__name__}, not manifests: prepare the corpus as a jsonl")
    if "recordings" not in found:
        for name, part in found.items():
            if isinstance(part, dict):
                yield from _rows(part, (*names, str(name)))
        return
    recordings = {recording.id: recording for recording in found["recordings"]}
    split = "-".join(names) or None
    for said in found.get("supervisions") or ():
        recording = recordings.get(said.recording_id)
        where = f"lhotse's {said.id}"
        if recording is None:
            yield BadRow(where, "missing", f"there is no recording {said.recording_id}")
            continue
        channel = said.channel[0] if isinstance(said.channel, list) else said.channel
        source = next((each for each in recording.sources if channel in each.channels), None)
        if source is None or source.type != "file":
            yield BadRow(where, "missing", f"channel {channel} of {recording.id} is in no plain file")
            continue
        whole = said.start == 0 and said.duration >= recording.duration - 0.02
        yield Row(
            id=said.id,
            audio=str(source.source),
            text=said.text or "",
            split=split,
            speaker=said.speaker,
            language=said.language,
            gender=said.gender,
            duration=said.duration,
            start=said.start,
            end=None if whole else said.start + said.duration,
            channel=source.channels.index(channel) if len(source.channels) > 1 else None,
        )


def _recipes() -> Any:
    try:
        import lhotse.recipes
    except ImportError as error:
        raise UsageError(f"lhotse's recipes cannot be used ({error}): pip install 'stapes[train]'") from error
    return lhotse.recipes
