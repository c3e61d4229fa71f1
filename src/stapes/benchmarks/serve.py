"""The server under load: requests of several clients, or at random times; dynamic batching beside fixed batches.

Loads, each a case; figures are of the round, times in seconds:

- ``closed``: so many ``clients``, each of which sends its next recording when its last was answered. What the server
  can do.
- ``open``: requests come at random times, ``rate`` a second (Poisson), whatever became of those before. What users
  feel: ``latency_p50``, ``_p95``, ``_p99`` from the moment when a request was due.
- ``beside``: recordings of a few seconds one after the other, alone (``alone_p50``, ``_p95``) and while a long one is
  on its way (``latency_…``); ``p95_ratio`` is between the two.

``requests_per_second`` and ``sound_per_second`` (seconds of sound) count what was answered; ``goodput``, requests a
second that were answered within the target. ``refused`` are 429 and 503, ``lost`` those that got no answer, ``failed``
all other statuses; ``other_texts``: answers whose text is not that of the first answer for the same recording.

Batching: ``dynamic`` is the server's own; ``fixed:8`` begins eight requests when none is at work, and the next eight
when all of them have ended; ``single`` is ``fixed:1``. All run in turn on one engine, which is told between rounds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import stapes
from stapes.benchmarks.audio import find_clips
from stapes.benchmarks.random_weights import without_judgement
from stapes.benchmarks.records import Weights
from stapes.benchmarks.rounds import Case, Contender
from stapes.benchmarks.run import Run
from stapes.benchmarks.serve_clients import (
    Answer,
    Recording,
    Server,
    as_figures,
    as_form,
    beside,
    closed_loop,
    open_loop,
    poisson_arrivals,
    quantile,
)
from stapes.benchmarks.serve_process import ServerProcess
from stapes.benchmarks.stream_clients import Clip, recording_of
from stapes.benchmarks.transcribe import as_json, describe_weights
from stapes.devices.backend import Device, choose_dtype, resolve
from stapes.errors import UsageError
from stapes.evaluation.peers import samples
from stapes.options import Precision, TranscribeOptions

_LONGEST = 29.0
"""Seconds of the longest recording that is sent: one window."""

_MOST_CLIPS = 256
_PAUSES = (0.05, 0.5)
"""Seconds before each short recording beside a long one."""

_TOKENS_PER_WORD = 1.35
"""What Whisper's tokenizer makes of LibriSpeech's test texts, written as sentences."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What to measure. ``random``: ``model`` is a published size. ``url``: a server that is there, in place of ours."""

    model: str
    random: bool = False
    url: str | None = None
    key: str | None = None
    device: str = "auto"
    precision: Precision = "auto"
    batching: tuple[str, ...] = ("dynamic",)
    clients: tuple[int, ...] = (16,)
    rates: tuple[str, ...] = ()
    """Requests a second, or a share of what the last closed loop reached: 50%."""
    requests: int = 200
    target: float = 2.0
    beside: int = 0
    """Recordings of ``clip_seconds`` beside one of ``long_seconds``; 0: not measured."""
    clip_seconds: float = 3.0
    long_seconds: float = 600.0
    max_batch: int | None = None
    max_wait_ms: float = 50.0
    decoders: int = 2
    corpus: str | None = None
    data: Path | None = None
    language: str | None = "en"
    threads: int | None = None
    model_dir: str | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if self.url is not None and self.batching != ("dynamic",):
            raise UsageError("--batching is for a server that is begun here: leave it out beside --url")
        for mode in self.batching:
            size_of(mode)
        if not (self.clients or self.rates or self.beside):
            raise UsageError("there is nothing to measure: give --clients, --rates or --beside")
        if any(rate.endswith("%") for rate in self.rates) and not self.clients:
            raise UsageError("--rates: a share is of what --clients reach; give those too, or requests a second")
        for rate in self.rates:
            rate_of(rate, 1.0)
        for name, low, high in (("requests", 1, 1_000_000), ("beside", 0, 100_000), ("decoders", 1, 256)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"--{name} is {getattr(self, name)}: give {low} to {high}")
        if self.clients and not 1 <= min(self.clients) <= max(self.clients) <= 10_000:
            raise UsageError("--clients: give numbers from 1 to 10000, separated by commas")
        if self.max_batch is not None and self.max_batch < self.largest_batch:
            raise UsageError(f"--max-batch is {self.max_batch}, fewer than a batch of {self.largest_batch}: give more")

    @property
    def largest_batch(self) -> int:
        """Of the fixed ones; 0 where there are none."""
        return max(size_of(mode) or 0 for mode in self.batching)


def size_of(batching: str) -> int | None:
    """The size of fixed batches that a mode means, None for dynamic batching. Raises UsageError."""
    if batching == "dynamic":
        return None
    size = "1" if batching == "single" else batching.removeprefix("fixed:")
    if not size.isdecimal() or not 1 <= int(size) <= 1024:
        raise UsageError(f"--batching has {batching!r}: say dynamic, fixed:8 (or another size) or single")
    return int(size)


def rate_of(text: str, reached: float) -> float:
    """Requests a second of "2.5", or of a share of ``reached``: "80%". Raises UsageError."""
    try:
        rate = float(text.removesuffix("%")) * (reached / 100 if text.endswith("%") else 1.0)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise UsageError(f"--rates has {text!r}: give requests a second, or a share such as 80%")
    return rate


class ServeBench:
    """Measures the cases of its settings."""

    def __init__(self, settings: ServeSettings, log: Callable[[str], None] = lambda line: None) -> None:
        self.settings = settings
        self._log = log
        self._corpus = find_clips(settings.corpus, settings.data)
        rows = [row for row in self._corpus.rows[:_MOST_CLIPS] if row.start == 0.0 and row.end is None]
        self._clips = [Clip(samples(row.audio), row.text) for row in rows if (row.duration or 0.0) <= _LONGEST]
        if not self._clips:
            raise UsageError(f"{self._corpus.name} has no recording of up to {_LONGEST:g} s: name another --corpus")
        self._fields = _fields(settings)
        self._device: Device | None = None if settings.url else resolve(settings.device)
        self._server: Server | None = None
        self._facts: dict[str, Any] = {}
        self._reached = 0.0  # requests a second, by the last closed loop
        self._texts: dict[str, str | None] = {}

    def run(self, rounds: int, command: list[str], *, quick: bool = False) -> Run:
        """All of it, as a run to be written down."""
        settings = self.settings
        if settings.url:
            weights = Weights(name=self._served(Server(settings.url, settings.key)), kind="real")
        else:
            weights = describe_weights(settings.model, 1 if settings.random else None, settings.model_dir, offline=True)
            weights.tokens = None  # as many as the corpus has
        audio = as_json(self._corpus.name, self._corpus.sha256(), settings.language)
        return Run(
            "serve",
            self._cases(),
            rounds=rounds,
            weights=weights,
            audio=audio,
            command=command,
            quick=quick,
            log=self._log,
        )

    def _cases(self) -> Iterator[Case]:
        settings = self.settings
        with ExitStack() as stack:
            self._open(stack)
            for clients in settings.clients:
                yield self._closed(clients)
            for rate in settings.rates:
                yield self._at_rate(rate_of(rate, self._reached))
            if settings.beside:
                yield self._beside()

    def _open(self, stack: ExitStack) -> None:
        settings = self.settings
        if settings.url:
            self._server = Server(settings.url, settings.key)
            self._facts = {"device": "unknown", "device_name": "of the server", "precision": "unknown"}
            return
        assert self._device is not None
        largest, on_cpu = settings.largest_batch, self._device.backend == "cpu"
        max_batch = settings.max_batch or (max(largest, 0 if on_cpu else 16) if largest else None)
        process = ServerProcess(settings, max_batch, self._lengths() if settings.random else None, self._log)
        self._server = stack.enter_context(process)
        slots = self._switch("dynamic")["slots"]
        dtype = str(choose_dtype(settings.precision, self._device)).removeprefix("torch.")
        self._facts = {
            "device": self._device.backend,
            "device_name": self._device.name,
            "precision": dtype if settings.precision in ("auto", "fp32", "fp16", "bf16") else settings.precision,
            "slots": slots,
            "threads": settings.threads or process.threads,
        }

    def _lengths(self) -> list[tuple[float, int]]:
        """Seconds and tokens of the corpus."""
        return [
            (len(clip.pcm) / 16_000, max(1, round(_TOKENS_PER_WORD * len(clip.text.split())))) for clip in self._clips
        ]

    def _served(self, server: Server) -> str:
        """The first model of a server that is there. Raises UsageError where nobody answers."""
        try:
            status, body = asyncio.run(server.ask("GET", "/v1/models"))
        except (OSError, EOFError) as error:
            raise UsageError(f"--url {self.settings.url}: nobody answers ({error}): is the server there?") from None
        if status == 401:
            raise UsageError(f"--url {self.settings.url} wants a key: put it into the variable STAPES_API_KEY")
        with suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(body)["data"][0]["id"])
        return "unknown"

    def _switch(self, batching: str) -> dict[str, Any]:
        """Let the engine batch in some way from now on."""
        if self.settings.url:
            return {}
        assert self._server is not None
        wanted = json.dumps({"size": size_of(batching)}).encode()
        status, body = asyncio.run(self._server.ask("POST", "/bench/batching", wanted))
        if status != 200:
            raise UsageError(f"the server did not take --batching {batching}: {body.decode(errors='replace')[:200]}")
        return json.loads(body)

    def _requests(self, count: int) -> list[Recording]:
        """Recordings in an order that is always the same: all of them, again and again, each time shuffled."""
        rng = np.random.default_rng(self.settings.seed)
        order: list[int] = []
        while len(order) < count:
            order += rng.permutation(len(self._clips)).tolist()
        forms: dict[int, Recording] = {}
        for index in order[:count]:
            if index not in forms:
                forms[index] = as_form(f"clip {index}", self._clips[index].pcm, self._fields)
        return [forms[index] for index in order[:count]]

    # The loads.

    def _closed(self, clients: int) -> Case:
        requests = self._requests(self.settings.requests)
        server = self._server
        assert server is not None

        def play(some: Sequence[Recording] = requests) -> list[Answer]:
            return asyncio.run(closed_loop(server, some, clients))

        def noted(figures: dict[str, Any], batching: str) -> None:
            if batching == "dynamic":
                self._reached = figures["requests_per_second"]

        def warm_up(batching: str) -> None:
            at_once = min(clients, size_of(batching) or clients)
            play(requests[: max(8, 2 * at_once)])

        return self._case({"load": "closed", "clients": clients}, requests, play, warm_up, noted)

    def _at_rate(self, rate: float) -> Case:
        requests = self._requests(self.settings.requests)
        arrivals = poisson_arrivals(len(requests), rate, self.settings.seed)
        server = self._server
        assert server is not None

        def play() -> list[Answer]:
            return asyncio.run(open_loop(server, requests, arrivals))

        def warm_up(batching: str) -> None:
            asyncio.run(closed_loop(server, requests[:8], 4))

        return self._case({"load": "open", "rate": round(rate, 3)}, requests, play, warm_up)

    def _case(
        self,
        facts: dict[str, Any],
        requests: Sequence[Recording],
        play: Callable[[], list[Answer]],
        warm_up: Callable[[str], None],
        noted: Callable[[dict[str, Any], str], None] = lambda figures, batching: None,
    ) -> Case:
        facts |= {"requests": len(requests), "sound_seconds": round(sum(each.seconds for each in requests), 1)}

        def contender(batching: str) -> Contender:
            def judge(answers: list[Answer]) -> Mapping[str, float | None]:
                figures = as_figures(answers, self.settings.target) | self._compare(answers)
                noted(figures, batching)
                return figures

            return self._contender(batching, play, judge)

        def opened() -> list[Contender]:
            for batching in self.settings.batching:
                self._switch(batching)
                warm_up(batching)
            return [contender(batching) for batching in self.settings.batching]

        return Case(facts | {"target": self.settings.target} | self._facts, opened)

    def _beside(self) -> Case:
        settings, server = self.settings, self._server
        assert server is not None
        near = sorted(self._clips, key=lambda clip: abs(len(clip.pcm) / 16_000 - settings.clip_seconds))[:8]
        forms = [as_form(f"short clip {number}", clip.pcm, self._fields) for number, clip in enumerate(near)]
        clips = [forms[number % len(forms)] for number in range(settings.beside)]
        long = as_form("long", recording_of(self._clips, 0, settings.long_seconds)[0], self._fields)
        pauses = np.random.default_rng(settings.seed).uniform(*_PAUSES, size=len(clips)).tolist()

        def play() -> tuple[list[Answer], list[Answer], list[Answer]]:
            return asyncio.run(beside(server, clips, long, pauses))

        def judge(answers: tuple[list[Answer], list[Answer], list[Answer]]) -> Mapping[str, float | None]:
            alone, together, whole = answers
            figures = as_figures(together, settings.target) | self._compare([*alone, *together])
            before = as_figures(alone, settings.target)
            figures |= {f"alone_p{share}": before[f"latency_p{share}"] for share in (50, 95, 99)}
            figures["p95_ratio"] = None
            if before["latency_p95"] and figures["latency_p95"]:
                figures["p95_ratio"] = figures["latency_p95"] / before["latency_p95"]
            figures["long_answered"] = float(sum(answer.status == 200 for answer in whole))
            figures["long_p50"] = quantile([answer.latency for answer in whole if answer.status == 200], 0.5)
            return figures

        def opened() -> list[Contender]:
            self._switch("dynamic")
            asyncio.run(closed_loop(server, clips[:4], 1))
            return [self._contender("dynamic", play, judge)]

        facts = {
            "load": "beside",
            "requests": len(clips),
            "clip_seconds": settings.clip_seconds,
            "long_seconds": round(long.seconds, 1),
        }
        return Case(facts | {"target": settings.target} | self._facts, opened)

    def _contender(self, batching: str, play: Callable[[], Any], judge: Callable[[Any], Any]) -> Contender:
        is_ours = self._device is not None
        return Contender(
            system="stapes" if is_ours else "server",
            version=stapes.__version__ if is_ours else None,
            options=batching if is_ours else "",
            precision=self._facts["precision"],
            prepare=lambda: void(self._switch(batching)),
            run=play,
            judge=judge,
            gpu=self._device.torch.index if self._device is not None and self._device.backend != "cpu" else None,
        )

    def _compare(self, answers: Sequence[Answer]) -> dict[str, float | None]:
        """How many texts are not what the same recording had at first."""
        good = [answer for answer in answers if answer.status == 200]
        return {
            "other_texts": float(
                sum(self._texts.setdefault(answer.recording.name, answer.text) != answer.text for answer in good)
            )
        }


def void(result: Any) -> None:
    """Nothing of it is wanted."""


def _fields(settings: ServeSettings) -> dict[str, str]:
    fields = {"language": settings.language} if settings.language else {}
    if not settings.random:
        return fields
    usual, wanted = TranscribeOptions(), without_judgement(TranscribeOptions())
    changed = {name: getattr(wanted, name) for name in TranscribeOptions.__dataclass_fields__}
    changed = {name: value for name, value in changed.items() if value != getattr(usual, name)}
    return fields | {name: "none" if value is None else str(value) for name, value in changed.items()}
