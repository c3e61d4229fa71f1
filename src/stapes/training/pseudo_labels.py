"""What a teacher writes for a manifest, as a manifest to train a student on (distil-whisper, arXiv 2311.00430).

Labels are kept where they agree with the text that is known: a word error rate above the threshold means that the
teacher has misheard, or that the text is not what is said. Everything that the teacher wrote is kept beside the result,
so that an interruption costs nothing, and another threshold no second listening.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stapes.data.manifest import Utterance, open_text, read_cuts
from stapes.data.options import PseudoLabelOptions
from stapes.data.reading import read_promised
from stapes.data.text_rules import normalize_text
from stapes.errors import AudioError, OutputError, UsageError
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.scoring import repeated_ngrams, word_errors
from stapes.progress import Progress, Silent
from stapes.text.files import whole_file
from stapes.text.tokenizers import language_label

Segments = Sequence[tuple[float, float, str]]
"""Start, end (seconds) and text, one after another."""

Listener = Callable[[np.ndarray, str | None], Segments]
"""Samples (16 kHz) and the language where it is known → what the teacher writes. Raises StapesError."""

_MOST_NAMED = 1000
"""Utterances that the report names."""


def pseudo_label(
    manifest: Path,
    out: Path,
    listen: Listener,
    options: PseudoLabelOptions | None = None,
    *,
    identity: Mapping[str, Any] | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write ``out`` (.jsonl or .jsonl.gz, lhotse's cuts) and its report beside it; return the report.

    identity: what the labels depend on, such as the teacher's name: the labels of another one are not gone on from.
    jobs: utterances that are listened to at the same time. Raises UsageError for a manifest that cannot be read,
    OutputError; what is wrong with an utterance is in the report.
    """
    options, progress = options or PseudoLabelOptions(), progress or Silent()
    if out.resolve() == manifest.resolve():
        raise UsageError(f"{out} is the manifest itself: give the labelled one another name")
    utterances = list(read_cuts(manifest))
    if not utterances:
        raise UsageError(f"{manifest}: no utterances; prepare the corpus again")
    progress.add_total(sum(each.duration for each in utterances))
    with _Journal(_beside(out, "labels.jsonl"), dict(identity or {})) as journal:
        _listen_to_all(utterances, listen, journal, jobs, progress)
        return _write(manifest, out, utterances, journal.written, options, dict(identity or {}))


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(f"{out.name.removesuffix('.gz').removesuffix('.jsonl')}.{suffix}")


def _listen_to_all(
    utterances: Sequence[Utterance], listen: Listener, journal: _Journal, jobs: int, progress: Progress
) -> None:
    def hear(utterance: Utterance) -> dict[str, Any]:
        try:
            pcm = read_promised(utterance.audio, utterance.start, utterance.duration, utterance.channel)
            return {"segments": [list(each) for each in listen(pcm, utterance.language)]}
        except AudioError as error:
            return {"error": str(error)}

    running: deque[tuple[Utterance, Future[dict[str, Any]]]] = deque()
    with ThreadPoolExecutor(jobs, thread_name_prefix="stapes-label") as pool:
        try:
            for utterance in utterances:
                if utterance.id in journal.written:
                    progress.advance(utterance.duration)
                    continue
                running.append((utterance, pool.submit(hear, utterance)))
                if len(running) >= 2 * jobs:
                    _take(*running.popleft(), journal, progress)
            while running:
                _take(*running.popleft(), journal, progress)
        finally:
            pool.shutdown(cancel_futures=True)


def _take(utterance: Utterance, future: Future[dict[str, Any]], journal: _Journal, progress: Progress) -> None:
    journal.add(utterance.id, future.result())
    progress.advance(utterance.duration)


class _Journal:
    """What the teacher wrote, by the utterance's id, kept as it comes."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.written: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> _Journal:
        whole = self._read()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("r+b" if whole else "wb")
            if whole:  # a last line that was cut off when the process was killed is taken away
                self._file.truncate(whole)
                self._file.seek(whole)
            else:
                self._line({"identity": self.identity})
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); choose another folder") from error
        return self

    def _read(self) -> int:
        """Take up what is there; the bytes of it that are whole lines."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        whole = data.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in data[:whole].splitlines()]
            found = lines[0]["identity"] if lines else self.identity
            self.written = {line.pop("id"): line for line in lines[1:]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self.path} is damaged: delete it, and all is listened to again") from None
        if found != self.identity:
            raise UsageError(
                f"{self.path} holds what another teacher wrote ({found}): delete it, or give another output"
            )
        return whole

    def add(self, id: str, result: dict[str, Any]) -> None:
        self.written[id] = result
        self._line({"id": id, **result})

    def _line(self, value: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); free space and go on") from error

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _write(
    manifest: Path,
    out: Path,
    utterances: Sequence[Utterance],
    written: Mapping[str, dict[str, Any]],
    options: PseudoLabelOptions,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    kept_seconds = errors = words = compared = kept = 0.0
    dropped: list[dict[str, Any]] = []
    with whole_file(out) as raw:
        file = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) if out.suffix == ".gz" else raw
        for utterance, cut in zip(utterances, _raw_cuts(manifest), strict=True):
            found = _decide(utterance, written[utterance.id], options)
            if found.words:
                compared, errors, words = compared + 1, errors + found.errors, words + found.words
            if found.reason is not None:
                dropped.append({"id": utterance.id, "code": found.code, "reason": found.reason, "wer": found.wer})
                continue
            kept, kept_seconds = kept + 1, kept_seconds + utterance.duration
            line = json.dumps(_labelled(cut, utterance, found), ensure_ascii=False)
            file.write(line.encode("utf-8", "surrogateescape") + b"\n")
        if file is not raw:
            file.close()
    if not kept:
        out.unlink(missing_ok=True)
    report = {
        "manifest": str(manifest),
        "identity": dict(identity),
        "max_wer": options.max_wer,
        "utterances": len(utterances),
        "kept": int(kept),
        "kept_hours": kept_seconds / 3600,
        "compared": int(compared),
        "wer": errors / words if words else None,
        "dropped": dict(Counter(each["code"] for each in dropped).most_common()),
        "dropped_utterances": dropped[:_MOST_NAMED],
    }
    with whole_file(_beside(out, "report.json")) as file:
        file.write(json.dumps(report, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"))
    return report


def _raw_cuts(manifest: Path) -> Iterator[dict[str, Any]]:
    with open_text(manifest) as file:
        yield from (json.loads(line) for line in file if line.strip())


@dataclass(frozen=True, slots=True)
class _Label:
    segments: Segments
    errors: int = 0
    words: int = 0
    """Of the known text, normalised; 0 where there is none."""
    code: str = ""
    reason: str | None = None
    """Why it is left out."""

    @property
    def wer(self) -> float | None:
        return round(self.errors / self.words, 4) if self.words else None


def _decide(utterance: Utterance, written: Mapping[str, Any], options: PseudoLabelOptions) -> _Label:
    """Whether a label is kept."""
    if "error" in written:
        return _Label((), code="unreadable", reason=written["error"])
    segments = [
        (float(start), float(end), text)
        for start, end, said in written["segments"]
        if (text := normalize_text(said, options.normalize, utterance.language, options.case).strip())
    ]
    rule = choose("auto", language_label(utterance.language))
    label = normalize(" ".join(text for _, _, text in segments), rule)
    known = normalize(utterance.text, rule)
    hits, substituted, deleted, inserted = word_errors(known, label)
    words = hits + substituted + deleted if known else 0
    errors = substituted + deleted + inserted if known else 0
    if not label:
        return _Label((), errors, words, "empty", "the teacher heard no words")
    if repeated_ngrams(known, label):
        return _Label((), errors, words, "repeats", "the teacher repeats itself")
    if known and errors > options.max_wer * words:
        return _Label((), errors, words, "disagrees", f"its word error rate is {100 * errors / max(1, words):.0f} %")
    return _Label(segments, errors, words)


def _labelled(cut: dict[str, Any], utterance: Utterance, label: _Label) -> dict[str, Any]:
    """The cut with what the teacher wrote, a supervision for each segment; the text that was known beside it."""
    cut["recording"]["sources"][0]["source"] = str(Path(utterance.audio).absolute())
    last = 0.0
    said = []
    for number, (start, end, text) in enumerate(label.segments):
        start = min(max(last, start), utterance.duration)
        last = min(max(start, end), utterance.duration)
        one = {
            "id": utterance.id if len(label.segments) == 1 else f"{utterance.id}-{number}",
            "recording_id": cut["recording"].get("id", utterance.id),
            "start": round(start, 3),
            "duration": round(last - start, 3),
            "channel": cut.get("channel", 0),
            "text": text,
            "language": utterance.language,
            "speaker": utterance.speaker,
        }
        said.append({key: value for key, value in one.items() if value is not None})
    cut["supervisions"] = said
    cut["custom"] = {**(cut.get("custom") or {}), "known_text": utterance.text, "wer": label.wer}
    return cut
