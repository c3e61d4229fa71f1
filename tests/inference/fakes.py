"""A model that needs no weights: a tokenizer of numbers, and an engine that writes what a script says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from stapes.devices.backend import resolve
from stapes.inference.engine import Alignment, DecodeRequest, DecodeResult
from stapes.inference.ingest import Ingest, Job
from stapes.inference.longform import open_recording
from stapes.inference.mixer import Mixer
from stapes.inference.recording import Model
from stapes.inference.requests import Priority, Request
from stapes.inference.whisper_family import WhisperFamily
from stapes.options import TranscribeOptions
from stapes.progress import Progress, Silent
from stapes.recognizer import Recognizer
from stapes.text.tokenizers import language_code

EOT, BEGIN = 1000, 1100
SOT, SOT_PREV, TRANSCRIBE, NO_TIMESTAMPS = 1001, 1002, 1003, 1099
POISON = 666
"""A word that the tokenizer cannot stand."""
LANGUAGES = {"en": 1010, "de": 1011, "fr": 1012}


def at(seconds: float) -> int:
    """The timestamp token of a time."""
    return BEGIN + round(seconds / 0.02)


class FakeTokenizer:
    """Token n below 1000 is the word " n"; a text of numbers is its tokens."""

    eot, sot, sot_prev, timestamp_begin = EOT, SOT, SOT_PREV, BEGIN
    transcribe, translate, sot_lm, no_speech = TRANSCRIBE, 1004, 1005, 1006
    is_multilingual = True

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        if POISON in ids:
            raise ValueError("poison")
        return "".join(f" {id}" for id in ids if id < EOT)

    def start_sequence(self, language: str | None, task: str, *, without_timestamps: bool) -> list[int]:
        assert language is not None, "decoded before its language was known"
        return [SOT, LANGUAGES[language], TRANSCRIBE, *([NO_TIMESTAMPS] if without_timestamps else [])]

    def known_code(self, code: str) -> str:
        return language_code(code)

    def language_id(self, code: str) -> int:
        return LANGUAGES[code]

    def non_speech_tokens(self) -> list[int]:
        return []

    def split_to_words(self, ids: Sequence[int], language: str | None = None) -> tuple[list[str], list[list[int]]]:
        return [f" {id}" for id in ids], [[id] for id in ids]


MODEL = Model(FakeTokenizer(), 448, ())  # type: ignore[arg-type]

Script = Callable[[np.ndarray, DecodeRequest], DecodeResult]


def result(tokens: Sequence[int], **changes: Any) -> DecodeResult:
    """A result that every threshold likes."""
    values = {"avg_logprob": -0.3, "no_speech_prob": 0.01, "temperature": 0.0, "looped": False} | changes
    return DecodeResult(tokens=list(tokens), **values)


def whole(pcm: np.ndarray, request: DecodeRequest) -> DecodeResult:
    """One segment through all of the window, whose word tells what was heard."""
    seconds = len(pcm) / 16000
    return result([at(0), 1 + int(abs(float(pcm[len(pcm) // 2])) * 900), at(seconds)], temperature=request.temperature)


@dataclass(eq=False)
class FakeSlot:
    pcm: np.ndarray
    request: DecodeRequest
    left: int
    told: bool = False


@dataclass
class FakeEngine:
    """``rows`` slots of each kind; a window takes ``steps(pcm, request)`` steps. Records what was done."""

    script: Script = whole
    rows: int = 4
    encoder_batch: int = 1
    steps: Callable[[np.ndarray, DecodeRequest], int] = lambda pcm, request: 3
    languages: Callable[[np.ndarray], dict[str, float]] = lambda pcm: {"en": 0.9, "de": 0.1, "fr": 0.0}
    words: Callable[[Sequence[int]], list[float]] | None = None
    probability: float = 0.9
    log: list[tuple[Any, ...]] = field(default_factory=list)
    active: list[FakeSlot] = field(default_factory=list)
    lanes: dict[Any, Any] = field(default_factory=dict)
    steps_per_look: ClassVar[int] = 1
    enqueues: ClassVar[bool] = False
    fail_in: dict[str, int] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)

    @property
    def slots(self) -> int:
        return self.rows

    @slots.setter
    def slots(self, rows: int) -> None:
        assert not self.active, "resized while windows are in slots"
        self.rows = rows

    def _called(self, name: str) -> None:
        self.threads.add(threading.get_ident())
        if name in self.fail_in:
            self.fail_in[name] -= 1
            if self.fail_in[name] <= 0:
                raise RuntimeError(f"{name} broke")

    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False) -> list[np.ndarray]:
        self._called("encode")
        assert 1 <= len(windows) <= self.encoder_batch
        assert all(0 < len(window) <= 480_000 for window in windows)
        self.log.append(("encode again" if again else "encode", len(windows)))
        return list(windows)

    def detect_language(self, encoded: Sequence[np.ndarray]) -> list[dict[str, float]]:
        self._called("detect_language")
        return [self.languages(pcm) for pcm in encoded]

    def free_slots(self, request: DecodeRequest) -> int:
        kind = (request.candidates, request.is_beam)
        return self.rows - sum((s.request.candidates, s.request.is_beam) == kind for s in self.active)

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[np.ndarray]) -> list[FakeSlot]:
        self._called("admit")
        assert len({(r.candidates, r.is_beam) for r in requests}) == 1
        assert len(requests) <= self.free_slots(requests[0])
        new = [FakeSlot(pcm, r, self.steps(pcm, r)) for pcm, r in zip(encoded, requests, strict=True)]
        self.active += new
        for slot in new:
            self.log.append(("admit", slot.request.temperature, round(float(slot.pcm[0]), 3)))
        return new

    def step(self, count: int) -> None:
        self._called("step")
        self.log.append(("step", len(self.active)))
        for slot in self.active:
            slot.left -= count

    def harvest(self) -> list[tuple[FakeSlot, DecodeResult]]:
        self._called("harvest")
        ended = [slot for slot in self.active if slot.left <= 0 and not slot.told]
        for slot in ended:
            slot.told = True
        return [(slot, self.script(slot.pcm, slot.request)) for slot in ended]

    def align(
        self, slots: Sequence[FakeSlot], prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[Alignment]:
        """Token i of a text is heard from ``words(text)[i]`` seconds on; by default they come every half second."""
        out = []
        for slot, prompt, text in zip(slots, prompts, texts, strict=True):
            starts = self.words(text) if self.words else [0.5 * i for i in range(len(text))]
            frames = max(1, len(slot.pcm) // 320)
            scores = torch.full((1, len(prompt) + len(text) + 1, 1500), -10.0)
            edges = [min(frames - 1, round(start / 0.02)) for start in starts] + [frames]
            for i, (start, end) in enumerate(pairwise(edges)):
                scores[0, len(prompt) - 1 + i, start : max(end, start + 1)] = 10.0
            out.append(Alignment(scores, np.full(len(text), self.probability)))
        return out

    def release(self, slot: FakeSlot) -> None:
        self.active.remove(slot)

    def clear(self) -> None:
        assert not self.active, "cleared while windows are in slots"


def tone(seconds: float, level: float = 0.5) -> np.ndarray:
    """Constant samples: what is heard says where it is from."""
    return np.full(round(seconds * 16000), level, np.float32)


class FakeDetector:
    """Speech wherever the first sample of a frame is not zero."""

    def state(self) -> list[np.ndarray]:
        return [np.zeros(0, np.float32)]

    def probabilities(
        self, states: Sequence[list[np.ndarray]], pcm: Sequence[np.ndarray], *, final: bool = False
    ) -> list[np.ndarray]:
        out = []
        for state, samples in zip(states, pcm, strict=True):
            held = np.concatenate([state[0], samples])
            count = -(-len(held) // 512) if final else len(held) // 512
            out.append((held[: count * 512 : 512] != 0).astype(np.float32) * 0.98 + 0.01)
            state[0] = held[count * 512 :]
        return out


def living_workers() -> list[threading.Thread]:
    """Ingest's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("ingest-")]


def endless(seconds: float, level: float = 0.5) -> Iterator[np.ndarray]:
    """A stream of ten-second chunks that is never whole in memory."""
    for _ in range(round(seconds / 10)):
        yield tone(10, level)


def fake_recognizer(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> Recognizer:
    """The public object around a fake engine; speech is wherever there is sound."""
    config = SimpleNamespace(text_context=448, vocab_size=3000, decoder_layers=2, encoder_layers=2)
    checkpoint: Any = SimpleNamespace(config=config, suppress_tokens=None)
    monkeypatch.setattr("stapes.recognizer.VoiceActivityDetector", lambda **_: FakeDetector())
    family = WhisperFamily("fake", checkpoint, FakeTokenizer(), engine)  # type: ignore[arg-type]
    return Recognizer(family, resolve("cpu"))


def read_now(inputs: Sequence[Any], *, progress: Progress | None = None, **options: Any) -> Ingest:
    """An ingest that has read all inputs already, in this thread."""
    chosen = TranscribeOptions(**({"language": "en"} | options))
    pairs: Iterable[Any] = [(source, 16000 if isinstance(source, np.ndarray) else None) for source in inputs]
    detector: Any = FakeDetector() if chosen.vad else None
    make = partial(open_recording, MODEL, chosen)
    ingest = Ingest(pairs, make, chosen, detector, progress or Silent(), workers=0, ahead=len(inputs) + 1)
    ingest._work()
    return ingest


@dataclass
class TimedEngine(FakeEngine):
    """Keeps a clock of its own: seconds that a GPU would take. Whoever else acts, acts by this clock."""

    steps_per_look = 4
    now: float = 0.0
    encode_seconds: tuple[float, float] = (0.001, 0.004)  # a batch, and each window of it
    step_seconds: tuple[float, float] = (0.002, 0.00001)  # a step, and each slot in it

    def encode(self, windows: Sequence[np.ndarray], *, again: bool = False) -> list[np.ndarray]:
        encoded = super().encode(windows, again=again)
        self.now += self.encode_seconds[0] + self.encode_seconds[1] * len(windows)
        return encoded

    def step(self, count: int) -> None:
        super().step(count)
        self.now += count * (self.step_seconds[0] + self.step_seconds[1] * len(self.active))


class LaggingEngine(FakeEngine):
    """Looks at the step call before the last, as an engine does that never waits for its GPU."""

    steps_per_look = 4
    enqueues = True

    def harvest(self) -> list[tuple[FakeSlot, DecodeResult]]:
        self._called("harvest")
        ended = [slot for slot in self.active if slot.left <= -self.steps_per_look and not slot.told]
        for slot in ended:
            slot.told = True
        return [(slot, self.script(slot.pcm, slot.request)) for slot in ended]


class PoolEngine(TimedEngine):
    """Slots of all kinds share one memory, and those of many candidates are fewer."""

    def free_slots(self, request: DecodeRequest) -> int:
        kind = (request.candidates, request.is_beam)
        used = sum((slot.request.candidates, slot.request.is_beam) == kind for slot in self.active)
        return min(max(1, self.rows // request.candidates) - used, self.rows - len(self.active))


class Nobody:
    """Drives nothing: the test itself calls the mixer."""

    is_current_thread = True

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer

    def ring(self, *, urgent: bool) -> None:
        self.mixer.urgent |= urgent


class Answer:
    """A request of a test and what came of it. ``ends`` counts how often it was told that it is over."""

    def __init__(self, mixer: Mixer, ingest: Ingest, priority: Priority, batch_size: int | None = None) -> None:
        self.request = Request(Nobody(mixer), ingest, priority, batch_size)
        self.ends = 0
        self.jobs: list[Job] = []
        self.error: BaseException | None = None
        deliver, end = self.request.deliver, self.request.end

        def counted_deliver(jobs: Sequence[Job]) -> None:
            self.jobs += jobs
            deliver(jobs)

        def counted_end(error: BaseException | None = None) -> None:
            self.ends += 1
            self.error = error
            end(error)

        self.request.deliver, self.request.end = counted_deliver, counted_end  # type: ignore[method-assign]


class Clockwork:
    """A mixer without threads: what happens when is decided by the engine's clock and by nothing else."""

    def __init__(self, engine: TimedEngine, steps: int = 4) -> None:
        self.engine = engine
        self.mixer = Mixer(engine, steps, engine.rows, None)  # type: ignore[arg-type]
        self.events: list[tuple[float, Callable[[], None]]] = []
        self.finished: dict[Answer, float] = {}
        self.answers: list[Answer] = []

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something at a time of the engine's clock."""
        self.events.append((seconds, act))
        self.events.sort(key=lambda event: event[0])

    def submit(
        self, inputs: Sequence[Any], priority: Priority, batch_size: int | None = None, **options: Any
    ) -> Answer:
        """A request that comes now."""
        answer = Answer(self.mixer, read_now(inputs, **options), priority, batch_size)
        self.answers.append(answer)
        self.mixer.add(answer.request)
        return answer

    def run(self, until: Callable[[], bool] = lambda: False, check: Callable[[], None] = lambda: None) -> None:
        """Go on until all is done."""
        while (self.events or self.mixer.requests) and not until():
            while self.events and self.events[0][0] <= self.engine.now:
                self.events.pop(0)[1]()
            worked = self.mixer.point()
            for answer in self.answers:
                if answer.request.ended:
                    self.finished.setdefault(answer, self.engine.now)
            check()
            if not worked:
                assert not self.mixer.requests, "requests wait although the engine could work"
                if self.events:
                    self.engine.now = max(self.engine.now, self.events[0][0])
