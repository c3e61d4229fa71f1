"""Reads recordings ahead of the model: decodes them and finds their speech in worker threads.

Only so much is read ahead, however many recordings there are and however long each is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stapes.audio.decode import AudioSource, AudioStream, open_audio
from stapes.audio.features import SAMPLE_RATE
from stapes.audio.replay import Replay
from stapes.audio.vad import VoiceActivityDetector
from stapes.errors import AudioError, StapesError
from stapes.inference.feed import AudioFeed, FeedMaker, FeedWindow
from stapes.options import TranscribeOptions
from stapes.progress import Progress

_BACKLOG = 120 * SAMPLE_RATE
"""Samples of one recording that may wait for the model."""

_CHUNK = 20 * SAMPLE_RATE
"""Samples that are handed on at once."""

_STOP_SECONDS = 1.0
"""How long threads are waited for when they are stopped."""


@dataclass(eq=False)
class Job:
    """One input on its way: a recording for each channel that is transcribed by itself."""

    source: AudioSource
    sample_rate: int | None
    name: str
    channels: list[AudioFeed] = field(default_factory=list)
    offset: float = 0.0
    read: bool = False
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    damaged: bool = False
    estimate: float = 0.0
    reported: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def done(self) -> bool:
        """Whether everything of it is transcribed, or it has failed."""
        return self.read and all(recording.done for recording in self.channels)

    @property
    def duration(self) -> float:
        """Seconds read so far."""
        return max((recording.length for recording in self.channels), default=0) / SAMPLE_RATE


def name_of(source: AudioSource) -> str:
    """What messages call an input."""
    if isinstance(source, np.ndarray):
        return "<array>"
    if isinstance(source, bytes | bytearray | memoryview):
        return "<bytes>"
    if isinstance(source, str | Path) or hasattr(source, "__fspath__"):
        return str(source)
    return str(getattr(source, "name", "<stream>"))


class Ingest:
    """Worker threads that read jobs in order and hand their windows to one scheduling thread.

    make: makes the state machine of a channel. ahead: jobs that are read and not collected by the caller yet, at most.
    replays: the machines may want a recording twice; what comes only once is then copied to a temporary file.
    """

    rank = 0
    """Within its class of priority, those with a lower one go first: ends of live turns are -1, what is still being
    said is 1, all else is 0."""

    def __init__(
        self,
        inputs: Iterable[tuple[AudioSource, int | None]],
        make: FeedMaker,
        options: TranscribeOptions,
        detector: VoiceActivityDetector | None,
        progress: Progress,
        *,
        workers: int,
        ahead: int,
        max_seconds: float | None = None,
        replays: bool = False,
    ) -> None:
        self.make, self.options, self.detector, self.progress = make, options, detector, progress
        self.max_seconds, self.replays = max_seconds, replays
        self.ahead = ahead
        self.changed = threading.Condition()
        self.jobs: list[Job] = []
        self._uncollected = 0
        self._listener: Callable[[], None] = _nobody
        self._input_lock = threading.Lock()
        self._inputs: Iterator[tuple[AudioSource, int | None]] = iter(inputs)
        self._exhausted = False
        self._stopped = False
        self._failure: BaseException | None = None
        self.threads = [threading.Thread(target=self._work, daemon=True, name=f"ingest-{i}") for i in range(workers)]
        for thread in self.threads:
            thread.start()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this, from any thread, whenever there may be a new window or a job that is done."""
        with self.changed:
            self._listener = listener

    # The scheduling thread.

    def take(self) -> FeedWindow | None:
        """The next window that is ready, of the earliest job that has one."""
        with self.changed:
            jobs = list(self.jobs)
        for job in jobs:
            for recording in job.channels:
                try:
                    window = recording.take()
                except Exception as error:  # one recording must never stop the others
                    recording.fail(error)
                    self._notify()
                    continue
                if window is not None:
                    self._wake_workers()
                    return window
        return None

    def finished(self) -> list[Job]:
        """Jobs that are done; each is returned once. When there are none, raises what ended the inputs, if anything."""
        with self.changed:
            done = [job for job in self.jobs if job.done]
            if done:
                self.jobs = [job for job in self.jobs if job not in done]
                self._uncollected += len(done)
                self._wake_workers()
            elif self._failure is not None:
                raise self._failure
        for job in done:
            error = next((recording.error for recording in job.channels if recording.error is not None), None)
            if error is not None and job.error is None:
                job.error = f"{job.name}: transcribing failed unexpectedly ({type(error).__name__}: {error})"
        return done

    def completed(self) -> None:
        """Windows have been completed: report the progress, and let workers that wait for it go on."""
        with self.changed:
            for job in self.jobs:
                seconds = min((recording.settled for recording in job.channels), default=0) / SAMPLE_RATE
                if seconds > job.reported:
                    self.progress.advance(seconds - job.reported)
                    job.reported = seconds
            self._wake_workers()

    @property
    def over(self) -> bool:
        """Whether no job is left or will come."""
        with self.changed:
            return self._exhausted and not self.jobs

    def collected(self) -> None:
        """The caller has taken a job: another one may be read."""
        with self.changed:
            self._uncollected -= 1
            self._wake_workers()

    def abandon(self) -> None:
        """Give up: threads end at their next chunk."""
        with self.changed:
            self._stopped = True
            self._wake_workers()

    def stop(self) -> None:
        """Give up, and wait for the threads. One that waits for its input is left behind."""
        self.abandon()
        patience = time.monotonic() + _STOP_SECONDS
        for thread in self.threads:
            if thread is not threading.current_thread():  # the garbage collector may have closed us there
                thread.join(max(0.0, patience - time.monotonic()))

    def _wake_workers(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()
            self._listener()

    # The worker threads.

    def _work(self) -> None:
        while True:
            try:
                job = self._next_job()
            except BaseException as error:  # the caller's iterator failed: the scheduling thread must hear of it
                with self.changed:
                    self._failure, self._exhausted = error, True
                    self._notify()
                return
            if job is None:
                return
            try:
                self._read(job)
            except StapesError as error:
                job.error = str(error)
            except Exception as error:  # one bad input must never stop the others
                job.error = f"{job.name}: reading failed unexpectedly ({type(error).__name__}: {error})"
                for recording in job.channels:
                    if not recording.ended:
                        recording.fail(error)
                        recording.finish(None)
            with self.changed:
                job.read = True
                self._notify()

    def _next_job(self) -> Job | None:
        # The inputs may be slow to come; only the workers wait for them, not the scheduling thread.
        with self._input_lock:
            with self.changed:
                while len(self.jobs) + self._uncollected >= self.ahead and not self._stopped:
                    self.changed.wait()
                if self._stopped or self._exhausted:
                    return None
            found = next(self._inputs, None)
            with self.changed:
                if found is None:
                    self._exhausted = True
                    self._notify()
                    return None
                job = Job(*found, name_of(found[0]))
                self.jobs.append(job)
                return job

    def _read(self, job: Job) -> None:
        clips = self.options.clips()
        job.offset = clips[0][0]
        settings: dict[str, Any] = {
            "sample_rate": job.sample_rate,
            "start": clips[0][0],
            "end": clips[-1][1],
            "channels": self.options.channels,
            "max_seconds": self.max_seconds,
        }
        if not self.replays:
            self._read_once(job, open_audio(job.source, **settings))
            return
        with Replay(job.source, **settings) as replay:
            try:
                self._read_once(job, replay.open())
            except StapesError:
                self._read_again(job, replay)  # as far as it was read
                raise
            if not self._read_again(job, replay):
                raise AudioError(f"{job.name} has become shorter while it was read: transcribe it again")

    def _read_once(self, job: Job, stream: AudioStream) -> None:
        clips, start = self.options.clips(), job.offset
        job.name = stream.name
        with stream:
            job.estimate = stream.duration or 0.0
            self.progress.add_total(job.estimate)
            samples = [
                (round((a - start) * SAMPLE_RATE), None if b is None else round((b - start) * SAMPLE_RATE))
                for a, b in clips
            ]
            recordings = [self.make(samples) for _ in range(stream.channels)]
            detector = self.detector and (stream.speech or self.detector)
            states: list[Any] = [detector.state() for _ in recordings] if detector else []
            with self.changed:
                job.channels = recordings
            try:
                for chunk in _regroup(stream):
                    if not self._hand_over(job, chunk, detector, states, final=False):
                        return
            finally:
                job.warnings, job.damaged = stream.warnings, stream.damaged
                # What was read before a failure is transcribed all the same.
                nothing = np.zeros((len(recordings), 0), dtype=np.float32)
                self._hand_over(job, nothing, detector, states, final=True)

    def _read_again(self, job: Job, replay: Replay) -> bool:
        """Read a recording a second time, for the channels that want it. False: they lack something."""
        channels = [(number, recording) for number, recording in enumerate(job.channels) if recording.again]
        if not channels or self._stopped:
            return True
        with suppress(StapesError), replay.open() as stream:  # what breaks it off now has done so before
            for chunk in _regroup(stream):
                for number, recording in channels:
                    recording.feed_again(chunk[number])
                if not self._notify_and_wait(job):
                    return True
        lacking = [recording for _, recording in channels if not recording.finish_again()]
        return not lacking

    def _hand_over(
        self, job: Job, chunk: np.ndarray, detector: VoiceActivityDetector | None, states: list[Any], final: bool
    ) -> bool:
        """Find speech in the next samples and hand both to the recordings. False: stopped."""
        probabilities: list[np.ndarray | None] = [None] * len(job.channels)
        if detector is not None:
            probabilities = list(detector.probabilities(states, list(chunk), final=final))
        for recording, samples, probability in zip(job.channels, chunk, probabilities, strict=True):
            if final:
                recording.finish(probability)
            else:
                recording.feed(samples, probability)
        return self._notify_and_wait(job, wait=not final)

    def _notify_and_wait(self, job: Job, *, wait: bool = True) -> bool:
        """There may be windows: let them be taken, before more is read. False: stopped."""
        with self.changed:
            self._notify()
            # The fullest counts: of two speakers one may be silent throughout.
            while wait and not self._stopped and max(r.backlog for r in job.channels) > _BACKLOG:
                self.changed.wait()
            return not self._stopped


def _nobody() -> None:
    """Listens to what nobody listens to."""


def _regroup(stream: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Chunks (channels, samples) of any size as chunks of a good size."""
    held: list[np.ndarray] = []
    size = 0
    for chunk in stream:
        held.append(chunk)
        size += chunk.shape[1]
        if size >= _CHUNK:
            yield np.concatenate(held, axis=1)
            held, size = [], 0
    if held:
        yield np.concatenate(held, axis=1)
