"""A recording and what is said in it: when each word is said, by a CTC model, in memory that no length makes grow."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from stapes.audio.decode import AudioSource
from stapes.decoding.ctc_align import align_words
from stapes.decoding.ctc_align_stream import StreamAligner
from stapes.decoding.spelling import SpeltText, spell
from stapes.errors import AudioError, UsageError
from stapes.inference.ctc_model import CTCModel
from stapes.inference.ctc_windows import Emissions
from stapes.inference.ingest import name_of
from stapes.progress import Progress
from stapes.transcript import Segment, Transcript, Word

Text = str | Path
"""What is said in a recording, or the file (UTF-8) that holds it."""

_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])")


def align_pairs(
    model: CTCModel,
    pairs: Iterable[tuple[AudioSource, Text]],
    progress: Progress,
    *,
    errors: Literal["keep", "raise"] = "keep",
    **settings: Any,
) -> Iterator[Transcript]:
    """Align recordings one after another, as `align_recording` does; one that fails has its ``error``, or raises it."""
    if model.languages:
        model.tokenizer_for(settings.get("language"))  # an unknown language is no fault of the recordings
    for source, text in pairs:
        try:
            written = _read(text) if isinstance(text, Path) else text
            yield align_recording(model, source, written, progress, **settings)
        except (AudioError, UsageError) as error:
            if errors == "raise":
                raise
            yield Transcript(path=name_of(source), error=str(error))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8"
        raise UsageError(f"{path}: the text cannot be read ({reason}); give a text file") from None


def align_recording(
    model: CTCModel,
    source: AudioSource,
    text: str,
    progress: Progress,
    *,
    language: str | None = None,
    open_ends: bool = False,
    batch: int = 1,
    **settings: Any,
) -> Transcript:
    """The words of the text with their times, in segments: the text's lines, or its sentences where it has one line.

    open_ends: the recording may hold other speech before and after the text. batch: windows computed together.
    settings: those of `open_audio`. Raises AudioError: the recording cannot be read, or breaks off; UsageError: the
    text has no words, does not fit into the recording, or the model does not know the language.
    """
    began = time.perf_counter()
    adapter = language if model.languages else None
    tokenizer = model.tokenizer_for(adapter)
    lines = segment_texts(text)
    spelt = spell("\n".join(lines), tokenizer, open_ends=open_ends)
    if not spelt.words:
        raise UsageError("the text has no words: give what is said in the recording")
    emissions = Emissions(model, source, batch=batch, language=adapter, **settings)
    progress.add_total(emissions.duration)
    aligner: StreamAligner | None = None
    done = 0
    for _, log_probs in emissions:
        if aligner is None:
            aligner = StreamAligner(spelt.ids, tokenizer.blank_id, log_probs.shape[1], frames=emissions.frames)
        aligner.feed(log_probs)
        done += len(log_probs)
        progress.advance(len(log_probs) * emissions.frame_seconds)
    progress.advance(max(0.0, emissions.duration - done * emissions.frame_seconds))
    if aligner is None:
        raise UsageError(f"{emissions.name} is too short for any word: give the recording of the text")
    alignment = aligner.finish()
    words = align_words(alignment, spelt, emissions.frame_seconds)
    segments = list(_segments(lines, words, spelt))
    return Transcript(
        text="".join(segment.text for segment in segments).strip(),
        language=language or tokenizer.language,
        duration=emissions.duration,
        segments=segments,
        path=name_of(source),
        warnings=list(emissions.warnings),
        damaged=emissions.damaged,
        timings={"total": time.perf_counter() - began},
    )


def segment_texts(text: str) -> list[str]:
    """The lines of a text that have something in them, or the sentences of its only one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1:
        lines = [part.strip() for part in _SENTENCE_END.split(lines[0]) if part.strip()]
    return lines


def _segments(lines: Sequence[str], words: Sequence[Word], spelt: SpeltText) -> Iterator[Segment]:
    """Words by the line in which each begins; a line of nothing that is said is written with the word before it."""
    ends, total = [], 0
    for line in lines:
        total += len("".join(line.split()))
        ends.append(total)
    groups: list[list[int]] = [[] for _ in lines]
    line, place = 0, 0
    for number, word in enumerate(words):
        letters = "".join(word.word.split())
        first = next((at for at, letter in enumerate(letters) if letter.isalnum()), 0)  # a dash may stand before it
        while place + first >= ends[line]:
            line += 1
        groups[line].append(number)
        place += len(letters)
    for number, group in enumerate(filter(None, groups)):
        said = [words[i] for i in group]
        known = [word.probability for i, word in zip(group, said, strict=True) if not spelt.words[i].is_wildcard]
        yield Segment(
            id=number,
            seek=round(100 * said[0].start),
            start=said[0].start,
            end=said[-1].end,
            text="".join(word.word for word in said),
            tokens=spelt.ids[spelt.words[group[0]].start : spelt.words[group[-1]].end],
            avg_logprob=sum(math.log(max(each, 1e-10)) for each in known) / len(known) if known else 0.0,
            words=said,
        )
