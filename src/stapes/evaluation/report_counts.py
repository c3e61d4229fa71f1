"""The numbers of one evaluation's utterances, read as a stream and kept as arrays."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import numpy as np

from stapes.errors import UsageError
from stapes.evaluation.report_words import WordErrors
from stapes.evaluation.results import UTTERANCES, Result, Utterance, build, read_utterances

UNKNOWN = -1
"""In arrays of codes: not known."""


class ResultCounts:
    """One result's utterances as arrays ``(utterances,)``, in the order of its file; about 100 bytes each with the ids.

    Attributes:
        rows: id → place in the arrays.
        text: a hash of each normalised reference: the same words have the same one.
        numbers: ``words``, ``s``, ``d``, ``i`` (substituted, deleted, inserted words), ``characters``, ``c``
            (character errors), ``failed``, and ``language`` and ``speaker`` as codes into the lists of their names.
        duration, snr: seconds, and decibels (NaN where unknown).

    Raises:
        UsageError: a line is damaged, an id comes twice, or the counts are not those of ``result.json``.
    """

    def __init__(self, folder: Path, result: Result) -> None:
        self.folder = folder
        self.result = result
        self.rows: dict[str, int] = {}
        text, duration, snr = array("q"), array("d"), array("d")
        names = ("words", "s", "d", "i", "characters", "c", "failed", "language", "speaker")
        columns = [array("q") for _ in names]
        languages: dict[str | None, int] = {None: UNKNOWN}
        speakers: dict[str | None, int] = {None: UNKNOWN}
        for row, spoken in enumerate(read_utterances(folder)):
            if self.rows.setdefault(spoken.id, row) != row:
                raise UsageError(
                    f"{folder / UTTERANCES}: the id {spoken.id!r} comes twice; run `stapes evaluate` again"
                )
            text.append(hash(spoken.normalized_reference))
            duration.append(spoken.duration)
            snr.append(np.nan if spoken.snr_db is None else spoken.snr_db)
            values = (
                spoken.words,
                spoken.substitutions,
                spoken.deletions,
                spoken.insertions,
                spoken.characters,
                spoken.char_errors,
                spoken.error is not None,
                languages.setdefault(spoken.language, len(languages) - 1),
                speakers.setdefault(spoken.speaker, len(speakers) - 1),
            )
            try:
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
            except OverflowError:
                raise UsageError(
                    f"{folder / UTTERANCES}, line {row + 1}: a count is impossibly large: the file is damaged; run "
                    "`stapes evaluate` again"
                ) from None
        self.text, self.duration, self.snr = np.array(text), np.array(duration), np.array(snr)
        self.numbers = {name: np.array(column, np.int64) for name, column in zip(names, columns, strict=True)}
        self.languages = [name for name in languages if name is not None]
        self.speakers = [name for name in speakers if name is not None]
        self._check()

    @property
    def errors(self) -> np.ndarray:
        """Word errors of each utterance."""
        return self.numbers["s"] + self.numbers["d"] + self.numbers["i"]

    def names(self, rows: np.ndarray) -> list[str | None]:
        """The speakers of these rows."""
        return [None if code == UNKNOWN else self.speakers[code] for code in self.numbers["speaker"][rows]]

    def read_words(self, rows: np.ndarray, errors: WordErrors, wanted: set[int]) -> dict[int, Utterance]:
        """Read the file again: count in ``errors`` which words were confused in ``rows``, and return some utterances.

        ``wanted`` and the keys that come back are places in ``rows``.
        """
        place_of = np.full(len(self.rows), UNKNOWN)
        place_of[rows] = np.arange(len(rows))
        wrong = self.errors > 0
        file = self.folder / UTTERANCES
        found = {}
        with file.open(encoding="utf-8") as lines:
            for row, line in enumerate(lines):
                place = int(place_of[row])
                if place == UNKNOWN or not (wrong[row] or place in wanted):
                    continue
                value = json.loads(line)
                if value.get("error") is None:  # what a failure lost are not words confused
                    errors.add(value["normalized_reference"], value["normalized_hypothesis"])
                if place in wanted:
                    found[place] = build(Utterance, value, f"{file}, line {row + 1}")
        return found

    def _check(self) -> None:
        counts = self.result.counts
        said = (counts.words, counts.substitutions, counts.deletions, counts.insertions)
        if said != (found := tuple(int(self.numbers[name].sum()) for name in ("words", "s", "d", "i"))):
            what = "words, substitutions, deletions and insertions"
            raise UsageError(
                f"{self.folder}: result.json counts {said} {what}, {UTTERANCES} {found}: the two are not of one "
                "evaluation, or one is damaged; run `stapes evaluate` again"
            )
