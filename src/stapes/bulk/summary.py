"""A job as `stapes compare` reads it: error rates where the manifest had texts, speed and failures in any case."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stapes
from stapes.bulk.state import look
from stapes.bulk.store import Store, read
from stapes.devices import machine
from stapes.errors import UsageError
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.results import (
    UTTERANCES,
    CorpusFacts,
    Memory,
    ModelFacts,
    Result,
    Speed,
    Utterance,
    read_utterances,
    write_result,
)
from stapes.evaluation.scoring import Errors, character_errors, repeated_ngrams, word_errors
from stapes.evaluation.summary import summarize
from stapes.text.files import whole_file


def summarize_job(out: str | Path, folder: str | Path, *, normalizer: str = "auto") -> Result:
    """Write ``result.json`` and ``utterances.jsonl`` of what is finished into a folder.

    A recording without a text has no words: it counts in hours and failures alone. Raises UsageError, OutputError.
    """
    store, target = Store(out), Path(folder)
    found, run = look(out), store.run()
    choose(normalizer, None)
    digest, languages, references, speakers = hashlib.sha256(), set(), 0, set()
    with whole_file(target / UTTERANCES) as file:
        for row in read(out):
            utterance = _utterance(row, normalizer)
            languages.add(utterance.language)
            speakers.add(utterance.speaker)
            references += "reference" in row
            known = [row["id"], row.get("reference"), utterance.speaker, row.get("start"), row.get("end")]
            digest.update(json.dumps(known).encode() + b"\n")
            line = json.dumps(asdict(utterance), ensure_ascii=False).encode("utf-8", "backslashreplace")
            file.write(line + b"\n")
    if not found["files_done"]:
        raise UsageError(f"{out} has no finished shards yet: look with `stapes bulk status {out}`")
    summary = summarize(read_utterances(target))
    if not references:  # nobody has said what was said, so nothing is known of silence
        summary.hallucination.silence_insertions_per_minute, summary.hallucination.silence_minutes = None, 0.0
    configuration = run["configuration"]
    wall, heard = _speed(found)
    result = Result(
        command=run["command"],
        stapes=stapes.__version__,
        commit=machine.commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine.facts(),
        system="stapes bulk",
        model=ModelFacts(name=configuration["model"], precision=configuration["precision"], device=_device(store)),
        options={**configuration["options"], "model": configuration["model"], "revision": configuration["revision"]},
        corpus=CorpusFacts(
            name=store.folder.resolve().name,
            manifest=str(store.folder),
            sha256=digest.hexdigest(),
            utterances=summary.utterances,
            hours=summary.audio_seconds / 3600,
            speakers=len(speakers - {None}),
        ),
        normalizer=normalizer,
        normalizer_by_language={each or "unknown": choose(normalizer, each) for each in sorted(languages, key=str)},
        wer=summary.wer,
        cer=summary.cer,
        counts=summary.counts,
        failed=summary.failed,
        hallucination=summary.hallucination,
        breakdown=summary.breakdown,
        speed=Speed(
            audio_seconds=summary.audio_seconds,
            wall_seconds=wall,
            real_time_factor=wall / heard if heard and wall else None,
            throughput=heard / wall if heard and wall else None,
        ),
        memory=Memory(),
    )
    write_result(target, result)
    return result


def _utterance(row: dict[str, Any], normalizer: str) -> Utterance:
    language = row.get("expected_language") or row.get("language")
    name = choose(normalizer, language)
    reference, hypothesis = row.get("reference"), row.get("text", "")
    plain, written = normalize(reference or "", name), normalize(hypothesis, name)
    nothing = Errors(0, 0, 0, 0)
    words = nothing if reference is None else word_errors(plain, written)
    characters = nothing if reference is None else character_errors(plain, written)
    return Utterance(
        id=row["id"],
        audio=row["audio"],
        duration=row["duration"],
        speaker=row.get("speaker"),
        language=language,
        reference=reference or "",
        hypothesis=hypothesis,
        normalized_reference=plain,
        normalized_hypothesis=written,
        **words._asdict(),
        **{f"char_{kind}": count for kind, count in characters._asdict().items()},
        repeated_ngrams=repeated_ngrams(plain, written),
        error=row.get("error"),
    )


def _speed(found: dict[str, Any]) -> tuple[float, float]:
    """(Wall seconds, audio seconds) of the runs that did it all in one go; zeros where it was done in several."""
    drivers = found["drivers"]
    if not drivers or any(driver["working_seconds"] is None for driver in drivers):
        return 0.0, 0.0
    heard = sum(driver["audio_seconds_now"] for driver in drivers)
    if abs(heard - found["audio_seconds"]) > 1.0 + 1e-3 * heard:
        return 0.0, 0.0
    began = min(driver["updated"] - driver["working_seconds"] for driver in drivers)
    return max(driver["updated"] for driver in drivers) - began, heard


def _device(store: Store) -> str | None:
    workers: Iterator[dict[str, Any]] = (store.read_done(shard).get("worker", {}) for shard in store.finished()[:1])
    return next(workers, {}).get("device")
