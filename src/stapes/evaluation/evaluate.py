"""Measure one system on one corpus, into a folder that a broken-off run goes on from.

The work is split in two so that a command line stays in charge: ``outputs`` runs the system, in another thread if need
be; ``take`` scores one output and appends it to ``utterances.jsonl``; ``finish`` adds everything up.
"""

from __future__ import annotations

import json
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import stapes
from stapes.audio.decode import SAMPLE_RATE, open_audio
from stapes.devices import machine
from stapes.errors import OutputError, StapesError, UsageError
from stapes.evaluation.corpora import Corpus, Row
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.peers import Peer, samples
from stapes.evaluation.results import (
    UTTERANCES,
    CorpusFacts,
    Memory,
    ModelFacts,
    Result,
    Speed,
    Utterance,
    build,
    read_utterances,
    write_json,
    write_result,
)
from stapes.evaluation.scoring import character_errors, repeated_ngrams, word_errors
from stapes.evaluation.snr import estimate_snr
from stapes.evaluation.summary import summarize
from stapes.options import TranscribeOptions
from stapes.progress import Progress, Silent
from stapes.text.tokenizers import language_code, language_label

RUN = "run.json"
"""What the folder was begun with, and the time each session took."""


@dataclass(slots=True)
class Output:
    """What a system wrote for the row of this index; ``at``: when, on the clock of ``time.perf_counter``."""

    row: int
    text: str
    error: str | None
    latency: float
    duration: float
    at: float


@dataclass(slots=True, kw_only=True)
class _Session:
    """One run of the command."""

    wall_seconds: float = 0.0
    audio_seconds: float = 0.0
    peak_rss_bytes: int | None = None
    peak_device_bytes: int | None = None
    energy_joules: float | None = None
    fingerprint: str | None = None


@dataclass(slots=True, kw_only=True)
class _Run:
    """``run.json``."""

    identity: dict[str, Any]
    system: str | None = None
    model: ModelFacts | None = None
    sessions: list[Any] = field(default_factory=list)


class Evaluation:
    """One evaluation in one folder.

    folder: made where missing; one that holds a part of this same evaluation goes on from there. model: what was asked
    for, as JSON: a folder begun with another model, corpus, options or normaliser is refused. Raises UsageError,
    OutputError.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        model: dict[str, Any],
        options: TranscribeOptions,
        *,
        normalizer: str = "auto",
        measure_snr: bool = False,
        command: list[str] | None = None,
    ) -> None:
        self.folder, self.corpus, self.options = folder, corpus, options
        self.normalizer, self.measure_snr, self.command = normalizer, measure_snr, command or []
        self.failures: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.given = language_label(options.language)
        choose(normalizer, None)
        normalize("", choose(normalizer, "en"))  # now, not after an hour of work
        word_errors("a", "b")
        self._run = self._begin(model)
        self._peer: Peer | None = None
        self._session = _Session()
        self._meter: machine.EnergyMeter | None = None
        self._started = 0.0
        done = self._recover()
        self.waiting = [i for i, row in enumerate(corpus.rows) if row.id not in done]
        self.snr = {i: snr for i in self.waiting if (snr := corpus.rows[i].snr_db) is not None}
        self._file = self._open_utterances()

    def _begin(self, model: dict[str, Any]) -> _Run:
        identity = {
            "stapes": stapes.__version__,
            "model": model,
            "corpus": self.corpus.sha256(),
            "options": asdict(self.options),
            "normalizer": self.normalizer,
            "snr": self.measure_snr,
        }
        file = self.folder / RUN
        utterances = self.folder / UTTERANCES
        begun = utterances.exists() and utterances.stat().st_size > 0
        if begun and not file.exists():
            raise UsageError(f"{self.folder} holds {UTTERANCES} without its {RUN}: choose another folder with -o")
        if not begun:  # whatever was tried here before came to nothing
            run = _Run(identity=identity)
            write_json(file, asdict(run))
            return run
        try:
            run = build(_Run, json.loads(file.read_text(encoding="utf-8")), str(file))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{file} is damaged ({error}): choose another folder with -o, or delete this one"
            ) from None
        if different := _differences(run.identity, json.loads(json.dumps(identity))):
            raise UsageError(
                f"{self.folder} holds another evaluation: {'; '.join(different)}. "
                "Choose another folder with -o, or delete it"
            )
        return run

    def _recover(self) -> set[str]:
        """Ids of what is there already. A last line that was cut off when the process was killed is taken away."""
        file = self.folder / UTTERANCES
        if not file.exists():
            return set()
        with file.open("rb+") as content:
            end = content.seek(0, 2)
            tail = min(end, 1 << 20)
            content.seek(end - tail)
            whole = content.read(tail).rfind(b"\n") + 1
            if whole != tail:
                content.truncate(end - tail + whole)
        done: set[str] = set()
        for each in read_utterances(self.folder):
            done.add(each.id)
            if each.error is not None:
                self.failures.append((each.audio, each.error))
        return done

    def _open_utterances(self) -> Any:
        try:
            return (self.folder / UTTERANCES).open("ab", buffering=0)
        except OSError as error:
            raise OutputError(f"{self.folder / UTTERANCES} cannot be written ({error.strerror})") from error

    def outputs(self, load: Callable[[], Peer], progress: Progress | None = None) -> Generator[Output, None, None]:
        """Load the system and transcribe what is waiting, one call of it for each language."""
        progress = progress or Silent()
        if not self.waiting:
            return
        if self.measure_snr:
            self._measure_snr(progress)
        self._peer = load()
        self._check_model(self._peer)
        progress.add_total(sum(self.corpus.rows[i].duration or 0.0 for i in self.waiting))
        by_language: dict[str | None, list[int]] = {}
        for i in self.waiting:
            by_language.setdefault(self._spoken(self.corpus.rows[i].language), []).append(i)
        machine.reset_peak_memory(self._peer.gpu)
        self._meter = machine.EnergyMeter(self._peer.gpu)
        self._started = time.perf_counter()
        for language, rows in by_language.items():
            for output in self._transcribe(self._peer, rows, language):
                progress.advance(output.duration)
                yield output

    def _spoken(self, language: str | None) -> str | None:
        """The language that systems are told: the one given, else the row's, None where Whisper knows neither."""
        if self.given is not None or language is None:
            return self.given
        try:
            return language_code(language)
        except UsageError:
            note = f"{language} is no language of Whisper: detected instead"
            if note not in self.notes:
                self.notes.append(note)
            return None

    def _measure_snr(self, progress: Progress) -> None:
        progress.note("estimating signal-to-noise ratios")
        for i in self.waiting:
            row = self.corpus.rows[i]
            if i not in self.snr:
                try:
                    heard = samples(row.audio) if row.end is None else _part(row)
                except StapesError:  # transcribing it will say so
                    continue
                if (found := estimate_snr(heard)) is not None:
                    self.snr[i] = round(found, 2)

    def _transcribe(self, peer: Peer, rows: list[int], language: str | None) -> Iterator[Output]:
        submitted: defaultdict[str, deque[tuple[int, float, float]]] = defaultdict(deque)
        unreadable: dict[str, str] = {}

        def paths() -> Iterator[str]:  # systems draw from it in threads of their own, one at a time
            for i in rows:
                row = self.corpus.rows[i]
                path, duration = row.audio, row.duration
                try:
                    if row.end is not None:
                        path = self._cut(i)
                    elif duration is None:
                        with open_audio(path) as stream:
                            duration = stream.duration
                except StapesError as error:
                    unreadable[path] = str(error)
                submitted[path].append((i, time.perf_counter(), duration or 0.0))
                yield path

        for path, text in peer.transcribe_many(paths(), language):
            i, since, duration = submitted[path].popleft()
            if not submitted[path]:
                del submitted[path]
            now = time.perf_counter()
            error = unreadable.get(path) or (str(text) if isinstance(text, StapesError) else None)
            yield Output(i, "" if error else str(text), error, now - since, duration, now)
            if self.corpus.rows[i].end is not None:
                Path(path).unlink(missing_ok=True)
        for path, left in submitted.items():
            for i, _, duration in left:
                error = f"{path}: {peer.system} gave no result for it"
                yield Output(i, "", error, 0.0, duration, time.perf_counter())

    def _cut(self, i: int) -> str:
        """The part of a recording that row ``i`` is, as a file of its own."""
        path = self.folder / ".parts" / f"{i}.wav"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_float_wav(_part(self.corpus.rows[i])))
        return str(path)

    def take(self, output: Output) -> Utterance:
        """Score one output and write it down. Raises OutputError."""
        row = self.corpus.rows[output.row]
        language = self.given or row.language
        name = self._normalizer(language)
        reference, hypothesis = normalize(row.text, name), normalize(output.text, name)
        words, characters = word_errors(reference, hypothesis), character_errors(reference, hypothesis)
        utterance = Utterance(
            id=row.id,
            audio=row.audio,
            duration=round(output.duration, 3),
            speaker=row.speaker,
            language=language,
            split=row.split,
            snr_db=self.snr.get(output.row),
            reference=row.text,
            hypothesis=output.text,
            normalized_reference=reference,
            normalized_hypothesis=hypothesis,
            **words._asdict(),
            **{f"char_{kind}": count for kind, count in characters._asdict().items()},
            repeated_ngrams=repeated_ngrams(reference, hypothesis),
            latency=None if output.error else round(output.latency, 4),
            error=output.error,
        )
        line = json.dumps(asdict(utterance), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise OutputError(f"{self.folder / UTTERANCES} cannot be written ({error.strerror})") from error
        if output.error is not None:
            self.failures.append((row.audio, output.error))
        self._session.wall_seconds = output.at - self._started
        self._session.audio_seconds += output.duration
        return utterance

    def _normalizer(self, language: str | None) -> str:
        return choose(self.normalizer, "en" if self.options.task == "translate" else language)

    def pause(self) -> None:
        """Write down what this session took, so that another can go on. Called once, however the session ended."""
        self._file.close()
        if self._peer is not None and self._started:
            session, gpu = self._session, self._peer.gpu
            session.peak_rss_bytes = machine.peak_rss_bytes()
            session.peak_device_bytes = machine.peak_device_bytes(gpu)
            session.energy_joules = self._meter.joules() if self._meter else None
            session.fingerprint = machine.facts()["fingerprint"]
            self._run.sessions.append(asdict(session))
            write_json(self.folder / RUN, asdict(self._run))

    def finish(self) -> Result:
        """Add up everything in the folder and write ``result.json``. Call it when nothing is waiting any more."""
        parts = self.folder / ".parts"
        if parts.is_dir() and not any(parts.iterdir()):
            parts.rmdir()
        found = summarize(read_utterances(self.folder), seed=self.options.seed)
        sessions = [build(_Session, session, str(self.folder / RUN)) for session in self._run.sessions]
        if self._run.model is None or self._run.system is None:
            raise UsageError(f"{self.folder / RUN} does not say which model ran: delete the folder and evaluate again")
        wall = sum(session.wall_seconds for session in sessions)
        heard = sum(session.audio_seconds for session in sessions)
        facts = machine.facts()
        if any(session.fingerprint != facts["fingerprint"] for session in sessions):
            wall = heard = 0.0
            self.notes.append("parts of this evaluation ran on different machines: it has no speed")
        rows = self.corpus.rows
        languages = sorted({self.given or row.language for row in rows}, key=str)
        result = Result(
            command=self.command,
            stapes=stapes.__version__,
            commit=machine.commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=facts,
            system=self._run.system,
            model=self._run.model,
            options={**asdict(self.options), "model": self._run.identity["model"]},
            corpus=CorpusFacts(
                name=self.corpus.name,
                manifest=self.corpus.manifest,
                sha256=self._run.identity["corpus"],
                utterances=found.utterances,
                hours=found.audio_seconds / 3600,
                speakers=len({row.speaker for row in rows if row.speaker is not None}),
            ),
            normalizer=self.normalizer,
            normalizer_by_language={each or "unknown": self._normalizer(each) for each in languages},
            wer=found.wer,
            cer=found.cer,
            counts=found.counts,
            failed=found.failed,
            hallucination=found.hallucination,
            breakdown=found.breakdown,
            speed=Speed(
                audio_seconds=found.audio_seconds,
                wall_seconds=wall,
                real_time_factor=wall / heard if heard and wall else None,
                throughput=heard / wall if heard and wall else None,
                latency_p50=found.latency_p50,
                latency_p95=found.latency_p95,
            ),
            memory=Memory(
                peak_rss_bytes=_most(session.peak_rss_bytes for session in sessions),
                peak_device_bytes=_most(session.peak_device_bytes for session in sessions),
            ),
            energy_joules=_total(session.energy_joules for session in sessions),
        )
        write_result(self.folder, result)
        return result

    def _check_model(self, peer: Peer) -> None:
        """Refuse to go on with a model that turned out to be another one than the folder was begun with."""
        before, now = self._run.model, peer.facts
        if before is not None and (different := _differences(asdict(before), asdict(now))):
            raise UsageError(
                f"{self.folder} was begun with another model: {'; '.join(different)}. Choose another folder with -o"
            )
        self._run.system, self._run.model = peer.system, now
        write_json(self.folder / RUN, asdict(self._run))


def evaluate(evaluation: Evaluation, load: Callable[[], Peer], progress: Progress | None = None) -> Result:
    """Run an evaluation from where it stands to its end, in this thread."""
    try:
        for output in evaluation.outputs(load, progress):
            evaluation.take(output)
    finally:
        evaluation.pause()
    return evaluation.finish()


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    out: list[str] = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key} was {str(a)[:60]}, now {str(b)[:60]}")
    return out


def _part(row: Row) -> np.ndarray:
    with open_audio(row.audio, start=row.start, end=row.end) as stream:
        chunks = [chunk[0] for chunk in stream]
    return np.concatenate(chunks) if chunks else np.zeros(0, np.float32)


def _float_wav(audio: np.ndarray) -> bytes:
    data = audio.astype("<f4").tobytes()
    layout = struct.pack("<HHIIHH", 3, 1, SAMPLE_RATE, 4 * SAMPLE_RATE, 4, 32)  # 3: IEEE float
    size = struct.pack("<I", 4 + 8 + len(layout) + 8 + len(data))
    header = b"RIFF" + size + b"WAVEfmt " + struct.pack("<I", len(layout)) + layout
    return header + b"data" + struct.pack("<I", len(data)) + data


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None
