"""Pseudo-labels: training data out of a job, of what can be believed, and a report of what cannot and why.

The filters are those of large unlabelled corpora (Granary, arXiv 2505.13404; NeMo's speech-data-processor): a language
that two passes agree on, no loops, no phrases that models write over silence, a believable speed, confidence.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from stapes.bulk.inputs import URL
from stapes.bulk.options import LabelOptions
from stapes.bulk.phrases import PHRASES, expected_scripts
from stapes.bulk.plan import Plan
from stapes.bulk.store import Store, read
from stapes.data.checks import AudioFacts
from stapes.data.corpora import Row
from stapes.data.prepare import cut
from stapes.errors import UsageError
from stapes.evaluation.results import write_json
from stapes.evaluation.scoring import repeated_ngrams
from stapes.text.files import whole_file
from stapes.text.tokenizers import language_label

FORMAT = "stapes-pseudo-labels-1"
_RATE = 16_000
_PAD = 0.1
"""Seconds of sound kept before and after an utterance, where nothing else is said in them."""

_PHRASE_SHARE = 0.5


@dataclass(slots=True)
class _Tally:
    utterances: int = 0
    seconds: float = 0.0
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, seconds: float, example: dict[str, str] | None = None) -> None:
        self.utterances += 1
        self.seconds += seconds
        if example is not None and len(self.examples) < 5:
            self.examples.append(example)

    def to_dict(self) -> dict[str, Any]:
        return {
            "utterances": self.utterances,
            "hours": round(self.seconds / 3600, 4),
            **({"examples": self.examples} if self.examples else {}),
        }


@dataclass(frozen=True, slots=True)
class Utterance:
    """Segments of one recording that are learnt from together. Seconds in the recording."""

    start: float
    end: float
    segments: Sequence[dict[str, Any]]

    @property
    def text(self) -> str:
        """What is said."""
        return " ".join("".join(segment["text"] for segment in self.segments).split())

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


def make_labels(out: str | Path, manifest: str | Path, options: LabelOptions | None = None) -> dict[str, Any]:
    """Write the cuts, ``MANIFEST.report.json`` and ``MANIFEST.rejected.jsonl``; the report. One shard is in memory.

    Raises UsageError where there is no job, or the second pass is of other inputs; OutputError.
    """
    options, target = options or LabelOptions(), Path(manifest)
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise UsageError(f"{target} is no name for a manifest: let it end in .jsonl or .jsonl.gz")
    filters = Filters(options)
    kept, rejected = _Tally(), {}
    recordings = failed = 0
    base = target.name.removesuffix(".gz").removesuffix(".jsonl")
    with ExitStack() as stack:
        cuts = _writer(stack, target)
        left_out = _writer(stack, target.with_name(f"{base}.rejected.jsonl"))
        for row, second in _rows(out, options.second_pass):
            recordings += 1
            if row["status"] != "ok":
                failed += 1
                continue
            for utterance, reason in filters.judge(row, second):
                if reason is None:
                    kept.add(utterance.seconds)
                    _write(cuts, to_cut(row, utterance, target.parent))
                else:
                    example = {"id": row["id"], "text": utterance.text[:200]}
                    rejected.setdefault(reason, _Tally()).add(utterance.seconds, example)
                    _write(left_out, {**example, "start": utterance.start, "end": utterance.end, "reason": reason})
    report = {
        "format": FORMAT,
        "recordings": recordings,
        "failed": failed,
        "kept": kept.to_dict(),
        "rejected": {reason: tally.to_dict() for reason, tally in sorted(rejected.items())},
        "options": {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        "second_pass": None if options.second_pass is None else str(options.second_pass),
        "job": Store(out).run()["configuration"],
    }
    write_json(target.with_name(f"{base}.report.json"), report)
    return report


def _writer(stack: ExitStack, path: Path) -> Any:
    file: BinaryIO = stack.enter_context(whole_file(path))
    if path.suffix != ".gz":
        return file
    # No date and no name inside: the same job gives the same bytes.
    return stack.enter_context(gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0))


def _write(file: Any, value: dict[str, Any]) -> None:
    file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n")


def _rows(out: str | Path, second: Path | None) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    if second is None:
        yield from ((row, None) for row in read(out))
        return
    first_store, second_store = Store(out), Store(second)
    first_plan, second_plan = Plan(first_store.folder), Plan(second_store.folder)
    other = f"{second} is a job over other inputs, or in other shards, than {out}: run it with the same ones"
    if first_plan.files.tolist() != second_plan.files.tolist():
        raise UsageError(other)
    there = set(second_store.finished())
    for shard in first_store.finished():
        if shard not in there:
            raise UsageError(f"{second} has not finished shard {shard}: run the same command as before, it goes on")
        for row, again in zip_longest(first_store.read_rows(shard), second_store.read_rows(shard)):
            if row["id"] != again["id"]:
                raise UsageError(other)
            yield row, again


class Filters:
    """Decides what is believed."""

    def __init__(self, options: LabelOptions) -> None:
        self.options = options
        self._language = language_label(options.language)
        self._phrases = {_plain(phrase) for phrase in PHRASES}
        if options.phrases is not None:
            try:
                lines = options.phrases.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"{options.phrases} cannot be read ({error}): give a file with a phrase a line"
                ) from None
            self._phrases |= {plain for line in lines if (plain := _plain(line))}

    def judge(
        self, row: dict[str, Any], second: dict[str, Any] | None = None
    ) -> Iterator[tuple[Utterance, str | None]]:
        """The utterances of a row, each with the reason not to believe it, or None."""
        of_all = self._language_reason(row, second)
        for utterance in join_segments(row, self.options):
            yield utterance, of_all or self._reason(row, utterance)

    def _language_reason(self, row: dict[str, Any], second: dict[str, Any] | None) -> str | None:
        expected = self._language or language_label(row.get("expected_language"))
        found = language_label(row["language"])
        if expected is not None and found is not None and found != expected:
            return "other language"
        probability = row["language_probability"]
        if probability is not None and probability < self.options.min_language_probability:
            return "language unsure"
        if second is not None:
            if second["status"] != "ok":
                return "second pass failed"
            again = language_label(second["language"])
            if again is not None and again != (expected or found):
                return "passes disagree on the language"
        return None

    def _reason(self, row: dict[str, Any], utterance: Utterance) -> str | None:
        options, text = self.options, utterance.text
        plain = _plain(text)
        if not plain:
            return "no words"
        if not options.min_seconds <= utterance.seconds <= options.max_seconds:
            return "too short" if utterance.seconds < options.min_seconds else "too long"
        if row["damaged"]:
            return "damaged recording"
        scripts = expected_scripts(self._language or row.get("expected_language") or row["language"])
        if scripts is not None and not _is_in(text, scripts):
            return "other script"
        if self._is_phrase(plain):
            return "known phrase"
        repeated = repeated_ngrams("", plain) > options.max_repeated
        if repeated or any(each["compression_ratio"] > options.max_compression_ratio for each in utterance.segments):
            return "repeats itself"
        speed = sum(character.isalnum() for character in text) / utterance.seconds
        if not options.min_characters_per_second <= speed <= options.max_characters_per_second:
            return "too slow" if speed < options.min_characters_per_second else "too fast"
        return self._doubt(utterance)

    def _doubt(self, utterance: Utterance) -> str | None:
        options = self.options
        if any(each["avg_logprob"] < options.min_logprob for each in utterance.segments):
            return "unsure"
        if any(each["no_speech_prob"] > options.max_no_speech for each in utterance.segments):
            return "perhaps no speech"
        words = [word["probability"] for each in utterance.segments for word in each.get("words") or ()]
        if words and sum(words) / len(words) < options.min_word_probability:
            return "unsure words"
        return None

    def _is_phrase(self, plain: str) -> bool:
        """Whether most of a text is a phrase that models write where nothing is said."""
        return any(phrase in plain and len(phrase) >= _PHRASE_SHARE * len(plain) for phrase in self._phrases)


def join_segments(row: dict[str, Any], options: LabelOptions) -> Iterator[Utterance]:
    """The segments of a row as utterances: those of one speaker, as many as fit without a long pause."""
    segments = [segment for segment in row["segments"] if segment["text"].strip()]
    if segments and row["duration"] <= options.max_seconds and len({each.get("speaker") for each in segments}) == 1:
        yield Utterance(0.0, row["duration"], segments)
        return
    groups: list[list[dict[str, Any]]] = []
    for segment in segments:
        last = groups[-1][-1] if groups else None
        if (
            last is None
            or segment.get("speaker") != last.get("speaker")
            or segment["start"] - last["end"] > options.max_pause
            or segment["end"] - groups[-1][0]["start"] > options.max_seconds - 2 * _PAD
        ):
            groups.append([])
        groups[-1].append(segment)
    edges = [0.0, *((a[-1]["end"] + b[0]["start"]) / 2 for a, b in pairwise(groups)), math.inf]
    for group, low, high in zip(groups, edges, edges[1:], strict=False):
        # Half of a pause at most; and where segments overlap, each as it is.
        start = min(max(group[0]["start"] - _PAD, low), group[0]["start"])
        end = max(min(group[-1]["end"] + _PAD, high, row["duration"]), group[-1]["end"])
        yield Utterance(round(start, 3), round(end, 3), group)


def to_cut(row: dict[str, Any], utterance: Utterance, folder: Path) -> dict[str, Any]:
    """An utterance as lhotse's MonoCut, as `stapes prepare` writes them."""
    rate, channels, seconds = row["recording"] or (_RATE, 1, None)
    offset = row.get("start", 0.0)
    whole = seconds if seconds is not None and "end" in row else offset + row["duration"]
    speaker = utterance.segments[0].get("speaker")
    channel = row.get("channel")
    if speaker is not None and channel is None:  # one speaker a channel
        channel = int(speaker.rpartition(" ")[2]) - 1
    start = round(offset + utterance.start, 3)
    facts = AudioFacts(
        samples=round(utterance.seconds * _RATE),
        rate=rate,
        channels=channels,
        recording_seconds=max(whole, start + utterance.seconds),
    )
    is_url = URL.match(row["audio"]) is not None
    made = cut(
        Row(
            id=row["id"] if utterance.seconds == row["duration"] else f"{row['id']}@{utterance.start:.2f}",
            audio="/" if is_url else row["audio"],
            text=utterance.text,
            speaker=row.get("speaker") or speaker,
            language=row["language"],
            start=start,
            channel=channel if channels > 1 else None,
        ),
        utterance.text,
        facts,
        folder,
    )
    if is_url:
        made["recording"]["sources"][0] |= {"type": "url", "source": row["audio"]}
    return made


def _plain(text: str) -> str:
    """Words in lower case without punctuation; characters of scripts without spaces stand as they are."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", unicodedata.normalize("NFKC", text).casefold()).split())


def _is_in(text: str, scripts: frozenset[str]) -> bool:
    """Whether most letters are of these scripts, by the first word of their Unicode names."""
    letters = [unicodedata.name(character, "").partition(" ")[0] for character in text if character.isalpha()]
    return not letters or sum(name in scripts for name in letters) >= 0.5 * len(letters)
