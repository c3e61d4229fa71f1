"""From a corpus on disk to manifests: every utterance checked, on all cores, able to go on after an interruption.

What is measured of each piece of audio is kept in ``measured.sqlite`` in the output folder, by a fingerprint of the
file's content. A rerun measures only what is new; everything that is quick (texts, limits, splits, duplicates) is
decided anew, so that other options take effect. Manifests and reports appear when all is done, each whole.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from stapes.audio.decode import SAMPLE_RATE
from stapes.data import checks, pool
from stapes.data.checks import AudioFacts, Limits
from stapes.data.corpora import CORPORA, BadRow, ReadOptions, Row, read_corpus
from stapes.data.options import PrepareOptions
from stapes.data.pool import Died, ordered_map
from stapes.data.seeds import key_of
from stapes.data.splits import DEFAULT_SPLIT, split_rule
from stapes.data.statistics import Rejected, SplitStatistics, report_json, report_markdown
from stapes.data.text_rules import normalize_text
from stapes.errors import OutputError, StapesError, UsageError
from stapes.progress import Progress, Silent
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.text.files import whole_file

_COMMIT_SECONDS = 2.0  # measurements that an interruption may cost
_GUESSED_SECONDS = 5.0  # of an utterance, for the progress, where the corpus does not say


@dataclass(slots=True)
class _Run:
    """What is known so far."""

    splits: dict[str, SplitStatistics] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    seen_audio: dict[bytes, str] = field(default_factory=dict)
    said: Counter[int] = field(default_factory=Counter)
    ids: set[int] = field(default_factory=set)
    speaker_splits: dict[str, set[str]] = field(default_factory=dict)
    measured: int = 0


def prepare(
    corpus: str,
    source: str | Path,
    out: str | Path,
    options: PrepareOptions | None = None,
    *,
    progress: Progress | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Write ``SPLIT.jsonl.gz`` (lhotse CutSets), ``report.json`` and ``report.md`` to ``out``; return the report.

    corpus: ``librispeech``, ``commonvoice``, ``tedlium``, ``folder``, ``jsonl``, ``csv``, or a recipe of lhotse.

    Raises UsageError for a corpus that is not there or options that make no sense, OutputError where ``out`` cannot be
    written. What is wrong with an utterance is in the report.
    """
    options, progress, source, out = options or PrepareOptions(), progress or Silent(), Path(source), Path(out)
    rule = split_rule(options.split)
    normalize_text("", options.normalize, None, options.case)
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs is {options.jobs}: give a number of processes from 1")
    tokenizer = None if options.vocabulary is None else CTCTokenizer.from_folder(options.vocabulary)
    limits = Limits(**{name: getattr(options, name) for name in Limits.__slots__})
    read = ReadOptions(text_field=options.text_field, language=options.language, untranscribed=options.untranscribed)

    rows: Callable[[], Iterable[Row | BadRow]] = partial(read_corpus, corpus, source, read)
    if corpus not in CORPORA:  # a recipe of lhotse has read everything before it gives the first row
        found = list(rows())
        rows = partial(iter, found)
    for row in rows():
        if isinstance(row, Row):
            progress.add_total(_expected(row))
    run = _Run()
    jobs = options.jobs or len(os.sched_getaffinity(0))
    with _alone(out):
        with _Journal(out / "measured.sqlite") as journal, _Manifests(out) as manifests:
            work = partial(_measure, journal=journal.path, convert=options.convert, out=out)
            with closing(ordered_map(work, _wanted(rows, rule, run), jobs)) as results:
                for row, result in results:
                    facts = _facts(row, result, journal, run)
                    _decide(row, facts, options, limits, tokenizer, run, manifests)
                    progress.add_total((facts.seconds or _expected(row)) - _expected(row))
                    progress.advance(facts.seconds or _expected(row))
            if not run.splits and not run.rejected:
                raise UsageError(f"{source} has no utterances: name the folder or file that the corpus is in")
        settings = {
            "corpus": corpus,
            "source": str(source),
            "command": command,
            "options": {name: _plain(value) for name, value in asdict(options).items()},
            "measured": run.measured,
        }
        report = report_json(settings, run.splits, run.rejected, _notes(run))
        _remove_stale(out, report)
        _write(out / "report.json", json.dumps(report, ensure_ascii=False, indent=1))
        _write(out / "report.md", report_markdown(report))
    return report


def _write(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # names of files may hold bytes that are no UTF-8


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep others from writing to ``out`` until the block ends, and take away what one left that was killed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"{out} cannot be written ({error.strerror}): choose another folder") from error
    try:
        _lock(folder, out)
        for left in out.glob(".stapes-*.part"):
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, out: Path) -> None:
    deadline = time.monotonic() + 3 * pool.ALIVE_SECONDS  # processes of a run that was killed hold on a little longer
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Another `stapes prepare` is writing to {out}: wait for it, or name another folder"
                ) from None
            time.sleep(0.1)
        except OSError:
            return None  # some network file systems know no locks


def _remove_stale(out: Path, report: Mapping[str, Any]) -> None:
    """Manifests of an earlier run with other splits would look like a part of this one."""
    try:
        before = json.loads((out / "report.json").read_text(encoding="utf-8"))["splits"]
        for split in set(before) - set(report["splits"]):
            (out / f"{split}.jsonl.gz").unlink(missing_ok=True)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _expected(row: Row) -> float:
    if row.duration is not None:
        return row.duration
    return row.end - row.start if row.end is not None else _GUESSED_SECONDS


def _wanted(rows: Callable[[], Iterable[Row | BadRow]], rule: Callable[[Row], str | None], run: _Run) -> Iterator[Row]:
    """The rows that are to be measured, each with its split and an id of its own.

    Those for training come last, so that of audio that is there twice, the copy to test with is kept.
    """
    for training in (False, True):
        for row in rows():
            if isinstance(row, BadRow):
                if not training:
                    run.rejected.append(Rejected(row.where, row.where, None, row.code, row.reason))
                continue
            split = rule(row)
            if (split is not None and split.startswith(DEFAULT_SPLIT)) == training:
                yield from _numbered(row, split, run)


def _numbered(row: Row, split: str | None, run: _Run) -> Iterator[Row]:
    """The row with a split and an id that no other has; nothing for one without a split."""
    id, count = row.id, 1
    while (key := key_of(id)) in run.ids:
        count += 1
        id = f"{row.id}#{count}"
    run.ids.add(key)
    if split is None:
        run.rejected.append(Rejected(id, row.audio, row.split, "split", "no part of --split fits it"))
    else:
        yield replace(row, id=id, split=re.sub(r"[^\w.-]+", "_", split))


# -- measuring, in processes of its own


@dataclass(frozen=True, slots=True)
class _Measured:
    key: str
    facts: AudioFacts
    new: bool


def _measure(row: Row, *, journal: Path, convert: str | None, out: Path) -> _Measured | StapesError:
    """What the journal knows of a row's audio, or else a measurement of it."""
    try:
        key = checks.fingerprint(row, convert)
    except OSError as error:
        code = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
        return _Measured("", AudioFacts(code=code, error=f"{row.audio}: {error.strerror or error}"), False)
    known = _look_up(journal, key)
    if known is not None and _is_there(out, known):
        return _Measured(key, known, False)
    try:
        return _Measured(key, checks.measure(row, convert, out), True)
    except StapesError as error:
        return error
    except Exception as error:  # a bug in a decoder's wrapper must not end the others' work
        facts = AudioFacts(code="unreadable", error=f"{row.audio} could not be measured ({error!r})")
        return _Measured(key, facts, False)


def _look_up(journal: Path, key: str) -> AudioFacts | None:
    global _connection
    if _connection is None:
        _connection = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=60)
    found = _connection.execute("SELECT facts FROM measured WHERE key = ?", (key,)).fetchone()
    return None if found is None else AudioFacts(**json.loads(found[0]))


_connection: sqlite3.Connection | None = None  # of a measuring process


def _is_there(out: Path, facts: AudioFacts) -> bool:
    if not facts.converted:
        return True
    try:
        return (out / facts.converted).stat().st_size == facts.converted_bytes
    except OSError:
        return False


class _Journal:
    """Measurements by fingerprint, kept as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except (OSError, sqlite3.OperationalError) as error:
            raise OutputError(f"{path} cannot be written ({error}): choose another folder") from error
        except sqlite3.DatabaseError:  # damaged: measuring again costs time, no more
            path.unlink()
            self._open()
        self._committed = time.monotonic()

    def _open(self) -> None:
        self._connection = sqlite3.connect(self.path, timeout=60)
        # What is not committed yet stays in memory. Written early, as SQLite does when it is much, it locks out those
        # who look up, and they are whom the next commit waits for.
        self._connection.execute("PRAGMA cache_spill = OFF")
        self._connection.execute("CREATE TABLE IF NOT EXISTS measured (key TEXT PRIMARY KEY, facts TEXT) WITHOUT ROWID")
        self._connection.commit()

    def add(self, measured: _Measured) -> None:
        try:
            row = (measured.key, measured.facts.to_json())
            self._connection.execute("INSERT OR REPLACE INTO measured VALUES (?, ?)", row)
            if time.monotonic() - self._committed > _COMMIT_SECONDS:
                self._commit()
        except sqlite3.OperationalError as error:
            raise OutputError(f"{self.path} cannot be written ({error}): free the space and go on") from error

    def _commit(self) -> None:
        self._connection.commit()
        self._committed = time.monotonic()

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._commit()
        self._connection.close()


def _facts(row: Row, result: _Measured | StapesError | Died, journal: _Journal, run: _Run) -> AudioFacts:
    if isinstance(result, StapesError):
        raise result
    if isinstance(result, Died):
        return AudioFacts(code="unreadable", error=f"{row.audio} ended the decoder's process (exit code {result.code})")
    if result.new:
        run.measured += 1
        journal.add(result)
    return result.facts


# -- deciding and writing


def _decide(
    row: Row,
    facts: AudioFacts,
    options: PrepareOptions,
    limits: Limits,
    tokenizer: CTCTokenizer | None,
    run: _Run,
    manifests: _Manifests,
) -> None:
    """Write an utterance to its manifest, or note why not."""
    assert row.split is not None
    spoken = "" if options.untranscribed else row.text
    text = normalize_text(spoken, options.normalize, row.language, options.case)
    unknown, tokens = "", text
    if tokenizer is not None:
        unknown = "".join(dict.fromkeys(character for character in text if not tokenizer.can_spell(character)))
        tokens = text if unknown else tokenizer.encode(text)
    reason = checks.rejected(row, text, facts, limits, tokens, unknown)
    digest = bytes.fromhex(facts.digest)
    if reason is None and not options.keep_duplicates and digest in run.seen_audio:
        reason = ("duplicate", f"the same audio as {run.seen_audio[digest]}")
    if reason is not None:
        run.rejected.append(Rejected(row.id, row.audio, row.split, *reason))
        return
    run.seen_audio.setdefault(digest, row.id)
    if row.speaker is not None:
        if text:
            run.said[hash((row.speaker, text))] += 1
        run.speaker_splits.setdefault(row.speaker, set()).add(row.split)
    run.splits.setdefault(row.split, SplitStatistics()).add(facts.seconds, text, row.speaker, row.language)
    manifests.write(row.split, cut(row, text, facts, manifests.out))


def cut(row: Row, text: str, facts: AudioFacts, out: Path) -> dict[str, Any]:
    """An utterance as lhotse's MonoCut. The path of its audio is absolute."""
    if facts.converted:
        audio, rate, channel, start = out / facts.converted, SAMPLE_RATE, 0, 0.0
        samples = facts.samples
    else:
        audio, rate, channel, start = Path(row.audio), facts.rate, row.channel or 0, row.start
        samples = round(facts.recording_seconds * rate)
    mixed = not facts.converted and row.channel is None and facts.channels > 1
    channels = [0] if facts.converted else list(range(facts.channels))
    said = {
        "id": row.id,
        "recording_id": row.id,
        "start": 0.0,
        "duration": facts.seconds,
        "channel": channel,
        "text": text,
        "language": row.language,
        "speaker": row.speaker,
        "gender": row.gender,
    }
    recording = {
        "id": row.id,
        "sources": [{"type": "file", "channels": channels, "source": str(audio.resolve())}],
        "sampling_rate": rate,
        "num_samples": samples,
        "duration": samples / rate,
        "channel_ids": channels,
    }
    return {
        "id": row.id,
        "start": start,
        "duration": min(facts.seconds, samples / rate - start),
        "channel": channel,
        # lhotse's MonoCut has one channel; ``Manifest`` reads the mean of all where this stands here.
        **({"custom": {"channels": "mix"}} if mixed else {}),
        "supervisions": [{key: value for key, value in said.items() if value is not None}],
        "recording": recording,
        "type": "MonoCut",
    }


class _Manifests:
    """The manifests being written, a file a split; they take their names where the block ends well."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._stack = ExitStack()
        self._files: dict[str, gzip.GzipFile] = {}

    def write(self, split: str, value: Mapping[str, Any]) -> None:
        if split not in self._files:
            raw: BinaryIO = self._stack.enter_context(whole_file(self.out / f"{split}.jsonl.gz"))
            # No date and no name inside: the same corpus gives the same bytes.
            zipped = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
            self._files[split] = self._stack.enter_context(zipped)
        line = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
        self._files[split].write(line + b"\n")

    def __enter__(self) -> _Manifests:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)


def _notes(run: _Run) -> list[str]:
    notes = []
    repeated = sum(count - 1 for count in run.said.values() if count > 1)
    if repeated:
        notes.append(f"{repeated:,} utterances repeat what the same speaker said in another (kept)")
    shared = [speaker for speaker, splits in run.speaker_splits.items() if len(splits) > 1]
    if shared:
        notes.append(f"{len(shared):,} speakers are in more than one split, such as {shared[0]!r}")
    digits = sum(n for s in run.splits.values() for character, n in s.characters.items() if character.isdigit())
    if digits:
        notes.append(f"{digits:,} digits are in the texts: a model of letters learns words from sound, not numerals")
    return notes
