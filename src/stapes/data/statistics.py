"""What a prepared corpus holds: hours, speakers, lengths, vocabulary, what was rejected and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stapes.data.checks import REASONS, UNREADABLE

_MAX_EXAMPLES = 20  # of each reason, in the readable report
_BAR = 40  # characters


@dataclass(frozen=True, slots=True)
class Rejected:
    """An utterance that is not in the manifest."""

    id: str
    audio: str
    split: str | None
    code: str
    reason: str


@dataclass(slots=True)
class SplitStatistics:
    """Running counts of one split; memory grows with its vocabulary and speakers alone."""

    seconds: float = 0.0
    utterances: int = 0
    words: int = 0
    speakers: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    distinct_words: set[int] = field(default_factory=set)
    """Hashes of them."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Utterances by whole seconds."""
    shortest: float = float("inf")
    longest: float = 0.0

    def add(self, seconds: float, text: str, speaker: str | None, language: str | None) -> None:
        """Count an utterance."""
        self.seconds += seconds
        self.utterances += 1
        words = text.split()
        self.words += len(words)
        self.distinct_words.update(map(hash, words))
        if speaker is not None:
            self.speakers[speaker] += 1
        if language is not None:
            self.languages[language] += 1
        self.characters.update(text)
        self.lengths[int(seconds)] += 1
        self.shortest, self.longest = min(self.shortest, seconds), max(self.longest, seconds)

    def as_json(self) -> dict[str, Any]:
        """Numbers, and counts by length and character."""
        return {
            "utterances": self.utterances,
            "hours": round(self.seconds / 3600, 4),
            "speakers": len(self.speakers),
            "languages": dict(self.languages.most_common()),
            "words": self.words,
            "distinct_words": len(self.distinct_words),
            "seconds": {
                "shortest": round(self.shortest, 3) if self.utterances else None,
                "mean": round(self.seconds / self.utterances, 3) if self.utterances else None,
                "longest": round(self.longest, 3) if self.utterances else None,
            },
            "lengths": {str(seconds): self.lengths[seconds] for seconds in sorted(self.lengths)},
            "characters": dict(self.characters.most_common()),
        }


def report_json(
    settings: Mapping[str, Any],
    splits: Mapping[str, SplitStatistics],
    rejected: Iterable[Rejected],
    notes: Iterable[str],
) -> dict[str, Any]:
    """``report.json``: every rejected utterance is in it."""
    rejected = list(rejected)
    counts = Counter(each.code for each in rejected)
    return {
        **settings,
        "splits": {name: splits[name].as_json() for name in sorted(splits)},
        "rejected": {
            "count": len(rejected),
            "unreadable": sum(counts[code] for code in UNREADABLE),
            "by_reason": dict(counts.most_common()),
            "utterances": [
                {"id": each.id, "audio": each.audio, "split": each.split, "code": each.code, "reason": each.reason}
                for each in rejected
            ],
        },
        "notes": list(notes),
    }


def report_markdown(report: Mapping[str, Any]) -> str:
    """``report.md``: the same to read, with some examples of each reason."""
    lines = [f"# {report['corpus']} from `{report['source']}`", "", f"`{report['command']}`", ""]
    lines += ["| split | utterances | hours | speakers | words | different words | shortest, mean, longest (s) |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, split in report["splits"].items():
        seconds = ", ".join(str(split["seconds"][name]) for name in ("shortest", "mean", "longest"))
        lines.append(
            f"| {name} | {split['utterances']:,} | {split['hours']:.2f} | {split['speakers'] or '–'} "
            f"| {split['words']:,} | {split['distinct_words']:,} | {seconds} |"
        )
    lines += ["", *(f"- {note}" for note in report["notes"]), ""]
    lines += ["## Lengths", ""]
    for name, split in report["splits"].items():
        lines += [f"{name}:", "", "```", *_histogram({int(key): n for key, n in split["lengths"].items()}), "```", ""]
    lines += ["## Characters", ""]
    for name, split in report["splits"].items():
        shown = " ".join(
            f"{'␣' if character == ' ' else character} {n}" for character, n in split["characters"].items()
        )
        lines += [f"{name}, {len(split['characters'])} different: {_code(shown)}", ""]
    rejected = report["rejected"]
    lines += [f"## Rejected: {rejected['count']:,}", ""]
    for code, count in rejected["by_reason"].items():
        lines += [f"### {code}: {count:,} ({REASONS[code]})", ""]
        examples = [each for each in rejected["utterances"] if each["code"] == code]
        lines += [f"- {_code(each['id'])}: {_plain(each['reason'])}" for each in examples[:_MAX_EXAMPLES]]
        if count > _MAX_EXAMPLES:
            lines.append(f"- … and {count - _MAX_EXAMPLES:,} more in report.json")
        lines.append("")
    return "\n".join(lines)


def _histogram(lengths: Mapping[int, int]) -> list[str]:
    """Rows of at least a second, some twenty at most."""
    if not lengths:
        return ["nothing"]
    step = max(1, -(-(max(lengths) + 1) // 20))
    counts = np.zeros(max(lengths) // step + 1, np.int64)
    for seconds, count in lengths.items():
        counts[seconds // step] += count
    first = int(np.flatnonzero(counts)[0])
    scale = _BAR / counts.max()
    return [
        f"{row * step:>4}–{(row + 1) * step:<4} s {count:>8,} {'█' * round(count * scale)}"
        for row, count in enumerate(counts)
        if row >= first
    ]


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
