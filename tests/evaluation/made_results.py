"""Evaluations that never happened: folders as ``stapes evaluate`` writes them, errors drawn by length and noise."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stapes.evaluation import results
from stapes.evaluation.scoring import Tally, character_errors, word_errors

_TEXT = {
    "en": "the of and to in that was his he it with is for as had you not be her on at by which have or from this",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden",
    "es": "de la que el en los del se las por un para con no una su al lo como más pero sus le ya o este sí",
    "ja": "日 本 語 音 声 認 識 評 価 結 果 比 較 時 間 話 者 雑 環 境 単 誤 率",
}
WORDS = {language: text.split() for language, text in _TEXT.items()}


def utterances(count: int = 200, seed: int = 0, speakers: int = 25, texts: dict[int, str] | None = None) -> list[dict]:
    """What was said: the same for all systems."""
    draw = random.Random(seed)
    spoken = []
    for number in range(count):
        language = draw.choices(list(WORDS), [5, 2, 2, 1])[0]
        duration = round(min(38.0, draw.lognormvariate(1.8, 0.7)), 2)
        words = draw.choices(WORDS[language], k=max(1, int(duration * 2.3)))
        spoken.append(
            {
                "id": f"utt-{number:06d}",
                "audio": f"audio/{number}.wav",
                "duration": duration,
                "speaker": f"speaker {draw.randrange(speakers)}",
                "language": language,
                "split": "test",
                "snr_db": None if number % 10 == 0 else round(draw.uniform(-5, 35), 1),
                "reference": (texts or {}).get(number, " ".join(words)),
            }
        )
    return spoken


def transcribe(spoken: dict[str, Any], quality: float, draw: random.Random) -> str:
    """Words misheard: more of them with noise and in very short recordings."""
    snr = 40.0 if spoken["snr_db"] is None else spoken["snr_db"]
    chance = quality * (1 + 3 / (1 + 2 ** (snr / 5)) + (1.0 if spoken["duration"] < 2 else 0.0))
    written = []
    for word in spoken["reference"].split():
        kind = draw.random()
        if kind < 0.6 * chance:
            written.append(draw.choice(WORDS[spoken["language"]]))
        elif kind < 0.85 * chance:
            continue
        else:
            written.append(word)
            if kind < chance:
                written.append(draw.choice(WORDS[spoken["language"]]))
    return " ".join(written)


def write(
    folder: Path,
    spoken: list[dict[str, Any]],
    *,
    quality: float = 0.05,
    seed: int = 1,
    fast: bool = False,
    hypotheses: dict[int, str] | None = None,
    failures: dict[int, str] | None = None,
    **changes: Any,
) -> Path:
    """One evaluation in ``folder``. ``changes`` replace fields of ``result.json``, ``model`` and ``corpus`` in part.

    ``fast`` counts errors without aligning, for very large sets whose numbers need not be exact.
    """
    names = ("hits", "substitutions", "deletions", "insertions")
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    word, character = Tally(), Tally()
    sums = [0, 0, 0, 0]
    order = list(enumerate(spoken))
    draw.shuffle(order)  # as they finish
    with (folder / results.UTTERANCES).open("w", encoding="utf-8") as file:
        for number, each in order:
            error = (failures or {}).get(number)
            text = "" if error else (hypotheses or {}).get(number, transcribe(each, quality, draw))
            if fast:
                at = len(each["reference"].split())
                wrong = sum(a != b for a, b in zip(each["reference"].split(), text.split(), strict=False))
                words = (at - wrong, wrong, 0, 0)
                characters = (len(each["reference"]) - wrong, wrong, 0, 0)
            else:
                words = word_errors(each["reference"], text)
                characters = character_errors(each["reference"], text)
            sums = [a + b for a, b in zip(sums, words, strict=True)]
            word.add(sum(words[1:]), sum(words[:3]), each["speaker"])
            character.add(sum(characters[1:]), sum(characters[:3]), each["speaker"])
            line = {
                **each, "hypothesis": text, "normalized_reference": each["reference"], "normalized_hypothesis": text,
                "repeated_ngrams": 0, "latency": round(0.1 + each["duration"] / 20, 3), "error": error,
            }  # fmt: skip
            line |= dict(zip(names, words, strict=True))
            line |= dict(zip((f"char_{name}" for name in names), characters, strict=True))
            file.write(json.dumps(line, ensure_ascii=True) + "\n")
    seconds = sum(each["duration"] for each in spoken)
    throughput = changes.pop("throughput", 20.0)
    model = {"name": "base", "precision": "fp32", "device": "cpu", "parameters": 74_000_000, **changes.pop("model", {})}
    corpus = {
        "name": "made-up", "manifest": str(folder.parent / "manifest.jsonl"), "sha256": "0" * 64,
        "utterances": len(spoken), "hours": seconds / 3600, "speakers": 25, **changes.pop("corpus", {}),
    }  # fmt: skip
    result = results.Result(
        command=["stapes", "evaluate", model["name"], corpus["manifest"]], stapes="0.3.0", commit="abc1234",
        date="2026-03-01T12:00:00+00:00",
        machine={"fingerprint": "f00d", "cpu": "Some CPU", "cores": 8, "memory_bytes": 32_000_000_000, "gpus": []},
        system="stapes", model=results.ModelFacts(**model), options={"language": None, "beam_size": 5, "batch_size": 8},
        corpus=results.CorpusFacts(**corpus), normalizer="basic",
        wer=word.interval(resamples=100), cer=character.interval(resamples=100),
        counts=results.Counts(**dict(zip(("words", "hits", *names[1:]), (sum(sums[:3]), *sums), strict=True))),
        failed=len(failures or {}), hallucination=results.Hallucination(
            silence_insertions_per_minute=2.5, silence_minutes=3.0, repeated_ngram_utterances=1, repeated_ngrams=7),
        breakdown={},
        speed=results.Speed(audio_seconds=seconds, wall_seconds=seconds / throughput, real_time_factor=1 / throughput,
                            throughput=throughput, latency_p50=0.4, latency_p95=1.3),
        memory=results.Memory(peak_rss_bytes=900_000_000),
    )  # fmt: skip
    value = asdict(result)
    for name, change in changes.items():
        value[name] = {**value[name], **change} if isinstance(change, dict) and name != "machine" else change
    (folder / results.RESULT).write_text(json.dumps(value), encoding="utf-8")
    return folder


def three_systems(root: Path, count: int = 200, **kept: Any) -> list[Path]:
    """What a first comparison looks like: two precisions of a model and a smaller one by another program."""
    spoken = utterances(count)
    device = {"peak_device_bytes": None}
    return [
        write(root / "base", spoken, quality=0.04, seed=1, throughput=18.0, **kept),
        write(root / "base-int8", spoken, quality=0.043, seed=2, throughput=41.0, model={"precision": "int8"},
              memory={"peak_rss_bytes": 520_000_000, **device}, **kept),
        write(root / "tiny", spoken, quality=0.075, seed=3, throughput=77.0, system="faster-whisper",
              model={"name": "tiny", "parameters": 39_000_000, "precision": "int8"},
              memory={"peak_rss_bytes": 410_000_000, **device}, **kept),
    ]  # fmt: skip
