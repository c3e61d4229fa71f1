"""Live sessions side by side: how long words take to come, and how many streams a device holds.

Figures of a round, in seconds where not said otherwise, each as median (``_p50``) and 95th percentile (``_p95``):

- ``first_words``: from the beginning of the first word of a turn to the first words shown, provisional or not.
- ``words``: from a word's end to its commit.
- ``final_after_speech``: from the end of a turn's last word to its final text; the silence that ends a turn is in it.
- ``final_after_stop``: from the moment when that silence had lasted long enough to the final text.
- ``committed_changed``: committed words that a final text does not have (0 by contract); ``revised_per_word``:
  provisional words that were taken back, for each word of the final texts; ``partial_interval``; ``wer`` of the
  sessions and ``file_wer`` of the same recordings as files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stapes
from stapes.audio.features import SAMPLE_RATE
from stapes.benchmarks.audio import find_clips
from stapes.benchmarks.random_weights import load_random, without_judgement
from stapes.benchmarks.records import Weights
from stapes.benchmarks.rounds import Case, Contender
from stapes.benchmarks.run import Run
from stapes.benchmarks.scripted import SaidWord, ScriptedVoice, say, with_script
from stapes.benchmarks.stream_clients import Client, Clip, Played, as_figures, play, recording_of
from stapes.benchmarks.transcribe import as_json, describe_weights
from stapes.errors import UsageError
from stapes.evaluation.corpora import Corpus
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.peers import samples
from stapes.evaluation.scoring import word_errors
from stapes.inference.live_session import MakeVoice, Session
from stapes.inference.recording import Model
from stapes.loading import load
from stapes.options import Precision, TranscribeOptions, TurnOptions
from stapes.recognizer import Recognizer
from stapes.serving.settings import SWITCH_SECONDS

_WARM_UP_SECONDS = 6.0
_MOST_CLIPS = 256
_FIRST_SPEECH = 0.3
"""Where speech begins and ends in a clip of a script, seconds from its edges."""

_FINEST = 1.1
"""The search for the most streams ends where the next step would be less than this factor."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """What to measure. ``random``: ``model`` is a published size, and clients say what a script says."""

    model: str
    random: bool = False
    device: str = "auto"
    precision: Precision = "auto"
    streams: tuple[int, ...] = (1, 4)
    seconds: float = 60.0
    """Speech of each client, at least."""
    target: float = 0.5
    """Seconds that 95 % of final texts are to come in after the stop."""
    search: bool = False
    """Go on from the last number of streams to the most that keep to the target."""
    turns: TurnOptions = TurnOptions()  # noqa: RUF009 - frozen
    slots: int | None = None
    corpus: str | None = None
    data: Path | None = None
    language: str | None = "en"
    threads: int | None = None
    model_dir: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1 or max(self.streams) > 10_000:
            raise UsageError("--streams: give numbers from 1 to 10000, separated by commas")
        if not 2 <= self.seconds <= 36_000:
            raise UsageError(f"--seconds is {self.seconds:g}: give 2 to 36000")
        if not 0.01 <= self.target <= 60:
            raise UsageError(f"--target is {self.target:g}: give seconds, 0.01 to 60")


class StreamBench:
    """Measures the cases of its settings."""

    def __init__(self, settings: StreamSettings, log: Callable[[str], None] = lambda line: None) -> None:
        self.settings = settings
        self._log = log
        self._corpus = find_clips(settings.corpus, settings.data)
        self._clips = [
            Clip(samples(row.audio), row.text)
            for row in self._corpus.rows[:_MOST_CLIPS]
            if row.start == 0.0 and row.end is None
        ]
        if not self._clips:
            raise UsageError(f"{self._corpus.name} has no whole recordings to speak: name another --corpus")
        self._recognizer: Recognizer | None = None
        self._options = TranscribeOptions(language=settings.language)
        if settings.random:
            self._options = without_judgement(self._options)
        self._last: Mapping[str, float | None] = {}
        self._file_wer: dict[int, float | None] = {}

    def run(self, rounds: int, command: list[str], *, quick: bool = False) -> Run:
        """All of it, as a run to be written down."""
        settings = self.settings
        weights: Weights = describe_weights(
            settings.model, 1 if settings.random else None, settings.model_dir, offline=settings.offline
        )
        if settings.random:
            weights.tokens = None  # as many as the script has
        audio = as_json(self._corpus.name, _sha256(self._corpus), settings.language)
        return Run(
            "stream",
            self._cases(),
            rounds=rounds,
            weights=weights,
            audio=audio,
            command=command,
            quick=quick,
            log=self._log,
        )

    def _cases(self) -> Iterator[Case]:
        recognizer = self._open()
        with closing(recognizer):
            count = 0
            for count in self.settings.streams:
                yield self._case(recognizer, count)
            if self.settings.search:
                yield from self._search(recognizer, count)

    def _search(self, recognizer: Recognizer, count: int) -> Iterator[Case]:
        """Double while the target is kept, then halve the distance to the last that was not."""
        kept, broken = (count, None) if self._is_kept() else (0, count)
        while broken is None or (broken > kept + 1 and broken > kept * _FINEST):
            count = 2 * kept if broken is None else (kept + broken) // 2
            yield self._case(recognizer, count)
            if self._is_kept():
                kept = count
            else:
                broken = count

    def _is_kept(self) -> bool:
        found = self._last.get("final_after_stop_p95")
        return found is not None and found <= self.settings.target

    def _open(self) -> Recognizer:
        """As in the server's process: warm, and Python's threads in quick turns."""
        sys.setswitchinterval(SWITCH_SECONDS)
        recognizer = self._load()
        recognizer.warm_up()
        return recognizer

    def _load(self) -> Recognizer:
        settings = self.settings
        if not settings.random:
            return load(
                settings.model,
                settings.device,
                settings.precision,
                threads=settings.threads,
                model_dir=settings.model_dir,
                offline=settings.offline,
                batch_size=settings.slots,
            )
        recognizer = load_random(
            settings.model,
            tokens=1,
            device=settings.device,
            precision=settings.precision,
            threads=settings.threads,
            batch_size=settings.slots or (128 if torch.cuda.is_available() else 3),
        )
        return with_script(recognizer)

    def _case(self, recognizer: Recognizer, count: int) -> Case:
        settings = self.settings
        facts = {
            "streams": count,
            "seconds": settings.seconds,
            "target": settings.target,
            "silence_ms": settings.turns.silence_duration_ms,
            "device": recognizer.device.backend,
            "device_name": recognizer.device.name,
            "precision": str(recognizer.engine.dtype).removeprefix("torch."),
            "slots": recognizer.engine.slots,
            "threads": settings.threads or torch.get_num_threads(),
        }

        def judge(played: Played) -> Mapping[str, float | None]:
            found = as_figures(played)
            found["within_target"] = None
            if found["final_after_stop_p95"] is not None:
                found["within_target"] = float(found["final_after_stop_p95"] <= settings.target)
            if not settings.random:
                found["wer"] = self._wer(played.texts, count)
                found["file_wer"] = self._wer_of_files(recognizer, count)
            self._last = found
            return found

        def contenders() -> list[Contender]:
            self._play(recognizer, count, _WARM_UP_SECONDS)
            ours = Contender(
                system="stapes",
                version=stapes.__version__,
                precision=facts["precision"],
                run=lambda: self._play(recognizer, count, settings.seconds),
                judge=judge,
                gpu=recognizer.device.torch.index if recognizer.device.backend != "cpu" else None,
            )
            return [ours]

        return Case(facts, contenders)

    def _play(self, recognizer: Recognizer, count: int, seconds: float) -> Played:
        clients = []
        voices: dict[Client, MakeVoice | None] = {}
        for number in range(count):
            pcm, placed = self._recording(number, count, seconds)
            words = self._script(recognizer, placed) if self.settings.random else []
            client = Client(pcm, [word.end for word in words] or None)
            voices[client] = self._voice(recognizer, words) if self.settings.random else None
            clients.append(client)
        options = recognizer.family.check(self._options)

        def listen(client: Client) -> Session:
            return recognizer.live.open(options, self.settings.turns, client.take, make_voice=voices[client])

        return play(clients, listen, lambda: recognizer.live.interval)

    def _recording(self, number: int, count: int, seconds: float) -> tuple[np.ndarray, list[tuple[Clip, float]]]:
        """What one of so many clients says: each begins where another part of the corpus does."""
        return recording_of(self._clips, number * len(self._clips) // count, seconds)

    def _script(self, recognizer: Recognizer, placed: list[tuple[Clip, float]]) -> list[SaidWord]:
        words: list[SaidWord] = []
        for clip, start in placed:
            end = start + len(clip.pcm) / SAMPLE_RATE - _FIRST_SPEECH
            words += say(clip.text, start + _FIRST_SPEECH, end, recognizer.tokenizer.eot)
        return words

    def _voice(self, recognizer: Recognizer, words: list[SaidWord]) -> MakeVoice:
        family: Any = recognizer.family
        model = Model(family.tokenizer, family.config.text_context, family.suppressed(self._options))
        options = replace(recognizer.family.check(self._options), vad=False)
        return lambda returned: ScriptedVoice(model, options, returned, words)

    def _said(self, count: int) -> list[str]:
        placed = [self._recording(number, count, self.settings.seconds)[1] for number in range(count)]
        return [" ".join(clip.text for clip, _ in of_one) for of_one in placed]

    def _wer(self, texts: list[str], count: int) -> float | None:
        return _wer(self._said(count), texts, self.settings.language)

    def _wer_of_files(self, recognizer: Recognizer, count: int) -> float | None:
        """The same recordings as files: each client's, in one piece."""
        if count not in self._file_wer:
            recordings = [self._recording(number, count, self.settings.seconds)[0] for number in range(count)]
            texts = [recognizer.transcribe(pcm, self._options, sample_rate=SAMPLE_RATE).text for pcm in recordings]
            self._file_wer[count] = _wer(self._said(count), texts, self.settings.language)
        return self._file_wer[count]


def _wer(said: list[str], written: list[str], language: str | None) -> float | None:
    """Over all texts together; None where the extra that counts errors is not installed."""
    try:
        name = choose("auto", language)
        wrong = words = 0
        for reference, hypothesis in zip(said, written, strict=True):
            reference = normalize(reference, name)
            errors = word_errors(reference, normalize(hypothesis, name))
            wrong += errors.substitutions + errors.deletions + errors.insertions
            words += len(reference.split())
    except UsageError:
        return None
    return wrong / words if words else None


def _sha256(corpus: Corpus) -> str:
    return corpus.sha256()
