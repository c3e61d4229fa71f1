"""A recording and what is said in it: when each word is said, by a CTC model, in memory that no length makes grow."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from stapes.audio.decode import SAMPLE_RATE, AudioSource, open_audio
from stapes.decoding.ctc_align import Alignment, align, align_words
from stapes.decoding.ctc_align_stream import StreamAligner, check_frames
from stapes.decoding.spelling import WILDCARD, SpeltText, spell
from stapes.errors import AudioError, UsageError
from stapes.inference.ctc_model import CTCModel
from stapes.inference.ctc_windows import Emissions
from stapes.inference.ingest import name_of
from stapes.progress import Progress
from stapes.text.tokenizers import language_label
from stapes.transcript import Segment, Transcript, Word

Text = str | Path
"""What is said in a recording, or the file (UTF-8) that holds it."""

_GROUP = 64
"""Recordings that are read before the short ones among them are computed."""
_BATCH_SECONDS = 480
"""Sound that is computed at once, padding included."""
_READERS = 4

DOUBTFUL_PROBABILITY = 0.05
"""Of a label, as the geometric mean over a text's labels: below it the text is probably not what is said. With a
recogniser of two words, the texts of 16 recordings had 0.96 to 1, other texts of the same words a median of 0.03; with
one of ten words, 0.38 to 1 and at most 0.0001 on 24."""

_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])")


class _Text(NamedTuple):
    """A text in segments, and as the model spells it."""

    segments: list[str]
    spelt: SpeltText


class _Short(NamedTuple):
    """A recording of one window, as it was read, and its text."""

    source: AudioSource
    text: _Text
    pcm: np.ndarray
    warnings: list[str]
    damaged: bool


class Aligner:
    """Aligns recordings with their texts by one model.

    open_ends: recordings may hold other speech before and after their text. batch: windows of a long recording that are
    computed together; where it is more than one, short recordings are too. settings: those of `open_audio`.
    Raises UsageError: the model does not know the language, or several channels are to be heard.
    """

    def __init__(
        self,
        model: CTCModel,
        progress: Progress,
        *,
        language: str | None = None,
        open_ends: bool = False,
        batch: int = 1,
        channels: str = "mix",
        **settings: Any,
    ) -> None:
        if channels == "separate":
            raise UsageError("--channels separate: a text belongs to one channel; say mix or its number")
        self._model, self._progress = model, progress
        self._adapter = language if model.languages else None
        self._tokenizer = model.tokenizer_for(self._adapter)
        self._language = self._adapter or language_label(language) or self._tokenizer.language
        self._open_ends, self._batch, self._settings = open_ends, batch, {"channels": channels, **settings}

    def align(self, source: AudioSource, text: Text) -> Transcript:
        """The words of the text with their times; segments are its lines, or the sentences of its only line.

        Raises AudioError: the recording cannot be read, or breaks off; UsageError: the text cannot be read, has no
        words, or does not fit into the recording.
        """
        began = time.perf_counter()
        what = self._spell(text)
        emissions = Emissions(self._model, source, batch=self._batch, language=self._adapter, **self._settings)
        self._progress.add_total(emissions.duration)
        aligner: StreamAligner | None = None
        done = 0.0
        with self._on_device():
            for _, log_probs in emissions:
                if aligner is None:
                    size, frames = log_probs.shape[1], emissions.frames
                    aligner = StreamAligner(what.spelt.ids, self._tokenizer.blank_id, size, frames=frames)
                aligner.feed(log_probs)
                done += len(log_probs) * emissions.frame_seconds
                self._progress.advance(len(log_probs) * emissions.frame_seconds)
            alignment = Alignment([], 0.0) if aligner is None else aligner.finish()
        self._progress.advance(max(0.0, emissions.duration - done))
        if aligner is None:
            check_frames(what.spelt.ids, 0)
        transcript = self._transcript(source, what, alignment, emissions.duration)
        transcript.warnings += emissions.warnings
        transcript.damaged = emissions.damaged
        transcript.timings = {"total": time.perf_counter() - began}
        return transcript

    def align_many(self, pairs: Iterable[tuple[AudioSource, Text]]) -> Iterator[Transcript]:
        """`align` for many recordings, in order: one that fails has its ``error``."""
        pairs = iter(pairs)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="stapes-align") as readers:
            while group := list(islice(pairs, _GROUP if self._batch > 1 else 1)):
                short: dict[int, _Short] = {}
                done: dict[int, Transcript] = {}
                for number, found in enumerate(readers.map(self._read, *zip(*group, strict=True))):
                    if isinstance(found, _Short):
                        short[number] = found
                    elif found is not None:
                        done[number] = found
                done |= zip(short, self._align_short(list(short.values())), strict=True)
                for number, (source, text) in enumerate(group):
                    yield done[number] if number in done else self._tried(source, text)

    def _tried(self, source: AudioSource, text: Text) -> Transcript:
        try:
            return self.align(source, text)
        except (AudioError, UsageError) as error:
            return Transcript(path=name_of(source), error=str(error))

    def _spell(self, text: Text) -> _Text:
        if isinstance(text, Path):
            try:
                text = text.read_text(encoding="utf-8-sig")
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or "it is no UTF-8"
                raise UsageError(f"{text}: the text cannot be read ({reason}); give a text file") from None
        segments = segment_texts(text)
        spelt = spell("\n".join(segments), self._tokenizer, open_ends=self._open_ends)
        if not spelt.words:
            raise UsageError("the text has no words: give what is said in the recording")
        return _Text(segments, spelt)

    # Short recordings together.

    def _read(self, source: AudioSource, text: Text) -> _Short | Transcript | None:
        """A short recording, or why there is none; None for what `align` does better."""
        comes_once = hasattr(source, "read") or (isinstance(source, str) and source == "-")
        if self._batch == 1 or comes_once:
            return None
        try:
            what = self._spell(text)
            with open_audio(source, **self._settings) as stream:
                chunks: list[np.ndarray] = []
                for chunk in stream:
                    chunks.append(chunk[0])
                    if sum(map(len, chunks)) > self._model.window:
                        return None
            pcm = np.concatenate([np.zeros(0, np.float32), *chunks])
            check_frames(what.spelt.ids, self._model.frame_count(len(pcm)))
        except (AudioError, UsageError) as error:
            return Transcript(path=name_of(source), error=str(error))
        self._progress.add_total(len(pcm) / SAMPLE_RATE)
        return _Short(source, what, pcm, list(stream.warnings), stream.damaged)

    def _align_short(self, recordings: Sequence[_Short]) -> list[Transcript]:
        """Recordings of one window each, in batches of similar lengths."""
        out = [Transcript()] * len(recordings)
        order = sorted(range(len(recordings)), key=lambda i: -len(recordings[i].pcm))
        while order:
            count = max(1, _BATCH_SECONDS * SAMPLE_RATE // max(1, len(recordings[order[0]].pcm)))
            rows, order = order[:count], order[count:]
            some = [recordings[i] for i in rows]
            for row, recording, alignment in zip(rows, some, self._align_batch(some), strict=True):
                duration = len(recording.pcm) / SAMPLE_RATE
                transcript = self._transcript(recording.source, recording.text, alignment, duration)
                transcript.warnings += recording.warnings
                transcript.damaged = recording.damaged
                out[row] = transcript
                self._progress.advance(duration)
        return out

    @torch.no_grad()
    def _align_batch(self, recordings: Sequence[_Short]) -> list[Alignment]:
        model, device = self._model, self._model.device
        waveform = pad_sequence([torch.from_numpy(recording.pcm) for recording in recordings], batch_first=True)
        lengths = torch.tensor([len(recording.pcm) for recording in recordings])
        with self._on_device():
            with model.lock:
                model.set_language(self._adapter)
                logits, _ = model(waveform.to(device), lengths)
            frames = [model.frame_count(len(recording.pcm)) for recording in recordings]
            ids = [recording.text.spelt.ids for recording in recordings]
            return align(logits.float().log_softmax(dim=-1), frames, ids, self._tokenizer.blank_id)

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels start on the thread's current GPU."""
        device = self._model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _transcript(self, source: AudioSource, what: _Text, alignment: Alignment, duration: float) -> Transcript:
        words = align_words(alignment, what.spelt, self._model.hop / SAMPLE_RATE)
        segments = list(_segments(what.segments, words, what.spelt))
        return Transcript(
            text="".join(segment.text for segment in segments).strip(),
            language=self._language,
            duration=duration,
            segments=segments,
            path=name_of(source),
            warnings=_doubts(alignment),
        )


def _doubts(alignment: Alignment) -> list[str]:
    """What to say of a text for which the sound hardly speaks."""
    logs = [math.log(max(token.probability, 1e-10)) for token in alignment.tokens if token.id != WILDCARD]
    if not logs or (mean := math.exp(sum(logs) / len(logs))) >= DOUBTFUL_PROBABILITY:
        return []
    return [
        f"the text may not be what is said: the model gives its letters a mean probability of {mean:.1g}, so the times "
        "mean little; check that text, recording and model belong together"
    ]


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
