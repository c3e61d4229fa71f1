"""The public object: a loaded model that transcribes, aligns and listens."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from stapes.audio.decode import AudioSource
from stapes.audio.vad import VoiceActivityDetector
from stapes.devices.backend import Device
from stapes.errors import AudioError, UsageError
from stapes.inference.ctc_alignment import Aligner
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.family import Family
from stapes.inference.following import Follower, SegmentListener
from stapes.inference.ingest import Ingest
from stapes.inference.pool import PoolEngine
from stapes.inference.requests import Priority
from stapes.inference.results import make_transcript
from stapes.inference.scheduler import Scheduler
from stapes.inference.streaming import Event, Live, Session, TurnOptions
from stapes.inference.torch_ctc import TorchCTCEngine
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.options import TranscribeOptions
from stapes.progress import Cancellation, Progress, Silent
from stapes.text.tokenizers import language_label
from stapes.transcript import Transcript


class Recognizer:
    """A loaded model. Any number of threads may call it at the same time: their windows share the device."""

    def __init__(self, family: Family, device: Device, on_close: Callable[[], None] = lambda: None) -> None:
        self.family, self.device = family, device
        self._on_close = on_close
        self.name, self.config = family.name, family.config
        self.tokenizer, self.engine = family.tokenizer, family.engine
        self._detector: VoiceActivityDetector | None = None
        self._live: Live | None = None
        self._slots = self.engine.slots
        self._lock = threading.Lock()
        self._scheduler = Scheduler(self.engine, slots=self._slots, resize=partial(_resize, self.engine))

    def transcribe(
        self,
        audio: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Progress | None = None,
        priority: Priority = "interactive",
        on_segments: SegmentListener | None = None,
        cancellation: Cancellation | None = None,
        **changes: Any,
    ) -> Transcript:
        """Transcribe one recording.

        audio: a path, ``"-"`` for standard input, bytes, a file object, or samples with ``sample_rate``. Options come
        as one object or by name (``word_timestamps=True``). priority: beside other calls, "interactive" goes first and
        "bulk" takes what is left. on_segments: gets the transcript's segments, each once and in order, as soon as they
        are settled; it is called in a thread that others wait for and must return at once. cancellation: to give the
        call up from another thread. Raises AudioError when the recording cannot be read, CancelledError; damaged ones
        give what could be read, with ``warnings``.
        """
        checked = _options(options, changes)
        with closing(
            self._run([(audio, sample_rate)], checked, progress, priority, 1, on_segments, cancellation)
        ) as results:
            (transcript,) = results
        if transcript.error is not None:
            raise AudioError(transcript.error)
        return transcript

    def check_language(self, language: str) -> None:
        """Raise UsageError where the model cannot listen for this language but would only write its name down.

        Calls that name a language take it: beside recordings of a corpus it says how their texts are written.
        """
        family = self.family
        if not isinstance(family, CTCFamily) or family.model.languages:
            return
        trained = family.tokenizer.language
        if trained is None or language_label(language) != language_label(trained):
            hint = "it knows the one it was trained for" if trained is None else f"it knows {trained}"
            raise UsageError(
                f"--language {language} cannot be chosen with {self.name}, a model of one language ({hint}): leave "
                "--language out, or take a model of that language"
            )

    def transcribe_many(
        self,
        audio: Iterable[AudioSource],
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Progress | None = None,
        priority: Priority = "bulk",
        cancellation: Cancellation | None = None,
        **changes: Any,
    ) -> Iterator[Transcript]:
        """Transcribe recordings together; yield each as it is done, in any order.

        ``path`` tells which it is. A recording that fails is yielded with ``error`` set and stops no other. The work
        goes on between one result and the next, a few recordings ahead of the caller; closing the iterator cancels what
        is left. priority, cancellation: as in ``transcribe``. ``batch_size`` beside other calls: at most so many
        windows of this one are decoded together.
        """
        inputs = ((source, sample_rate) for source in audio)
        checked = _options(options, changes)
        yield from self._run(inputs, checked, progress, priority, _workers(), cancellation=cancellation)

    def align(
        self,
        audio: AudioSource,
        text: str | Path,
        *,
        language: str | None = None,
        open_ends: bool = False,
        channels: str = "mix",
        sample_rate: int | None = None,
        progress: Progress | None = None,
    ) -> Transcript:
        """Find when each word of a known text is said, with a CTC model; however long the recording is.

        text: what is said, or the `Path` of a file (UTF-8) that holds it. Its lines become segments, its sentences
        where it has one line; a word's probability is 0 where the model cannot write it and only its neighbours tell
        its time. open_ends: the recording may hold other speech before and after the text. Raises AudioError;
        UsageError where the model is no CTC model, or the text does not fit into the recording. One that fits but is
        probably not what is said has its warning in ``warnings``.
        """
        settings = {"language": language, "open_ends": open_ends, "channels": channels, "sample_rate": sample_rate}
        return replace(self._aligner(progress, settings).align(audio, text), model=self.name)

    def align_many(
        self,
        pairs: Iterable[tuple[AudioSource, str | Path]],
        *,
        language: str | None = None,
        open_ends: bool = False,
        channels: str = "mix",
        progress: Progress | None = None,
    ) -> Iterator[Transcript]:
        """`align` for many recordings, in order: one that fails is yielded with ``error`` set."""
        settings = {"language": language, "open_ends": open_ends, "channels": channels}
        for transcript in self._aligner(progress, settings).align_many(pairs):
            yield replace(transcript, model=self.name)

    def _aligner(self, progress: Progress | None, settings: dict[str, Any]) -> Aligner:
        if not isinstance(self.family, CTCFamily):
            raise UsageError(
                f"{self.name} is no CTC model and cannot align a text that is given: use one such as wav2vec 2.0, or "
                "`transcribe` with word timestamps"
            )
        if isinstance(self.engine, PoolEngine):
            raise UsageError(f"aligning a text runs on one device, and {self.name} is on {self.device.name}: name one")
        batch = 1 if self.device.backend == "cpu" else 8
        return Aligner(self.family.model, progress or Silent(), batch=batch, **settings)

    def stream(
        self,
        options: TranscribeOptions | None = None,
        *,
        turns: TurnOptions | None = None,
        sample_rate: int = 16_000,
        on_event: Callable[[Event], None] | None = None,
        **changes: Any,
    ) -> Session:
        """Begin to listen to live sound: ``feed`` the session samples, and ``finish`` it.

        Words come as `Partial`, which may still change, and `Committed`, which never do; `Final` has all words of a
        turn, or of a part of a long one, with their times in the session. Any number of sessions share each batch.
        turns: when a turn begins and ends. sample_rate: of what is fed. on_event: called with each event at once, and
        must not take long; otherwise they are returned by ``feed`` and ``finish``. Options come as in ``transcribe``.
        """
        checked = self.family.check(_options(options, changes))
        return self.live.open(checked, turns or TurnOptions(), on_event, sample_rate=sample_rate)

    @property
    def live(self) -> Live:
        """All live sessions."""
        detector = self._speech_detector()
        with self._lock:
            if self._live is None:
                self._live = Live(self.family, self._scheduler, detector, self._prepare())
            return self._live

    def warm_up(self) -> None:
        """Do now what would take long at first, so that no call has to wait for it; only before the first call.

        It takes seconds on a GPU; elsewhere there is nothing to do.
        """
        if getattr(self.engine, "finds_words_apart", False):
            self._scheduler.do(self.engine.warm_up, self._prepare())

    def close(self) -> None:
        """Let go of the model and its memory. Calls that are not over fail with UsageError."""
        if self._live is not None:
            self._live.close()
        if not self._scheduler.close():
            return  # in the middle of a long operation, which needs that memory
        self.engine.clear()
        self._on_close()
        if self.device.backend != "cpu":
            torch.cuda.empty_cache()

    def __enter__(self) -> Recognizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        inputs: Iterable[tuple[AudioSource, int | None]],
        options: TranscribeOptions,
        progress: Progress | None,
        priority: Priority,
        workers: int,
        on_segments: SegmentListener | None = None,
        cancellation: Cancellation | None = None,
    ) -> Generator[Transcript, None, None]:
        if priority not in get_args(Priority):
            raise UsageError(f"priority is {priority!r}: say {' or '.join(get_args(Priority))}")
        options = self.family.check(options)
        progress = progress or Silent()
        make, follower = self.family.feeds(options), None
        if on_segments is not None:
            follower = Follower(on_segments, make, progress, options.clips()[0][0])
        ingest = Ingest(
            inputs,
            follower.make if follower else make,
            options,
            self._speech_detector() if options.vad else None,
            follower or progress,
            workers=workers,
            ahead=2 * (options.batch_size or self._slots) + workers,
            replays=self.family.replays,
        )
        with closing(self._scheduler.run(ingest, priority, options.batch_size, self._prepare(), cancellation)) as jobs:
            for job in jobs:
                progress.advance(job.duration - job.reported)
                progress.add_total(job.duration - job.estimate)
                transcript = make_transcript(job, self.name)
                if follower is not None:
                    follower.finish(transcript.segments)
                yield transcript

    def _prepare(self) -> Callable[[], None]:
        """What the thread that drives the engine does first: it is to work as this one would."""
        stream = getattr(self.engine, "stream", None)
        return partial(_settle_thread, self.device.torch, torch.get_num_threads(), stream)

    def _speech_detector(self) -> VoiceActivityDetector:
        with self._lock:
            if self._detector is None:
                self._detector = VoiceActivityDetector(threads=_workers())
            return self._detector


def _resize(engine: TorchWhisperEngine | TorchCTCEngine, slots: int) -> None:
    """Make an engine decode that many windows together. Only while it holds none: it drops all slots."""
    engine.clear()
    engine.slots = slots


def _settle_thread(device: torch.device, threads: int, stream: torch.cuda.Stream | None) -> None:
    """Give a new thread what belongs to a thread: PyTorch's number of threads, the GPU that is meant, its stream."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if stream is not None:
        torch.cuda.synchronize(device)  # weights were loaded on another
        torch.cuda.set_stream(stream)


def _options(options: TranscribeOptions | None, changes: dict[str, Any]) -> TranscribeOptions:
    try:
        return replace(options or TranscribeOptions(), **changes)
    except TypeError as error:
        found = re.search(r"'(\w+)'", str(error))
        raise UsageError(f"There is no option {found[1] if found else error}") from None


def _workers() -> int:
    return max(1, min(4, os.cpu_count() or 1))
