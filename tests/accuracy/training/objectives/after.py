# ruff: noqa: E501, SIM115
# pyright: basic
"""Joins clips with known boundaries, and says what after.sh found."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from statistics import mean, median

import numpy as np
import soundfile

RATE = 16_000
GAP = 0.3
LONG_SECONDS = 300.0


def wer(folder: Path) -> float:
    return json.loads((folder / "result.json").read_text())["wer"]["value"]


def best(out: str, *weights: str) -> None:
    print(min(weights, key=lambda weight: wer(Path(out) / f"dev-lm-{weight}")))


def clips(manifest: Path, limit: int) -> list[tuple[str, str, str]]:
    found = []
    for line in gzip.open(manifest, "rt"):
        cut = json.loads(line)
        source = cut["recording"]["sources"][0]["source"]
        path = source if Path(source).is_absolute() else str(manifest.parent / source)
        found.append((cut["supervisions"][0].get("speaker", ""), path, cut["supervisions"][0]["text"]))
    return found[:limit] if limit else found


def trimmed(samples: np.ndarray) -> np.ndarray:
    """Without silence at the ends: 10-ms frames more than 35 dB below the loudest; 20 ms are left on either side."""
    hop = RATE // 100
    frames = samples[: len(samples) // hop * hop].reshape(-1, hop)
    level = 10 * np.log10(np.mean(frames**2, axis=1) + 1e-12)
    loud = np.flatnonzero(level > level.max() - 35)
    return samples[max(0, loud[0] - 2) * hop : (loud[-1] + 3) * hop]


def join(manifest: str, out: str, limit: str) -> None:
    """long-N.wav: clips of a speaker one after another, as they are, about five minutes each. trimmed-N.wav: without
    their silence, a gap of 0.3 s between. plain-N.wav: the same recordings as long. Each with its lines and times."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[list[tuple[str, str]]] = []
    seconds, speaker = 0.0, None
    for who, path, text in clips(Path(manifest), int(limit)):
        length = soundfile.info(path).duration
        if who != speaker or seconds > LONG_SECONDS:
            groups.append([])
            seconds, speaker = 0.0, who
        groups[-1].append((path, text))
        seconds += length
    rows = []
    for number, group in enumerate(groups):
        for kind in ("plain", "trimmed"):
            parts, times, at = [], [], 0
            for path, _ in group:
                samples, rate = soundfile.read(path, dtype="float32")
                assert rate == RATE
                if kind == "trimmed":
                    samples = trimmed(samples)
                times.append((at / RATE, (at + len(samples)) / RATE))
                parts.append(samples)
                at += len(samples)
                if kind == "trimmed":
                    parts.append(np.zeros(round(GAP * RATE), np.float32))
                    at += len(parts[-1])
            wav = folder / f"{kind}-{number}.wav"
            soundfile.write(wav, np.concatenate(parts), RATE, subtype="PCM_16")
            wav.with_suffix(".txt").write_text("\n".join(text for _, text in group) + "\n")
            wav.with_suffix(".times.json").write_text(json.dumps(times))
        whole = folder / f"plain-{number}.wav"
        rows.append(
            {
                "audio": whole.name,
                "text": " ".join(text for _, text in group),
                "duration": soundfile.info(str(whole)).duration,
            }
        )
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(groups)} recordings of {sum(row['duration'] for row in rows) / len(rows):.0f} s on average")


def segments(path: Path) -> list[tuple[float, float]]:
    value = json.loads(path.read_text())
    transcripts = value.get("transcripts", [value])
    found = []
    for each in transcripts[0]["segments"]:
        words = [word for word in each.get("words") or [] if word.get("start") is not None]
        found.append((words[0]["start"], words[-1]["end"]) if words else (each["start"], each["end"]))
    return found


def report(out: str, weight: str) -> None:
    folder = Path(out)
    greedy, lm, long = wer(folder / "greedy"), wer(folder / "lm"), wer(folder / "long")
    other = json.loads((folder / "compare-lm.json").read_text())["sets"][0]["systems"]
    against = next(each["against_baseline"] for each in other if each["against_baseline"])
    print(
        f"1 greedy {100 * greedy:.2f} %, 4-gram (beam search, weight {weight}) {100 * lm:.2f} %, p {against['p']:.2g} "
        f"over {against['utterances']} utterances: {'met' if lm < greedy and against['p'] < 0.05 else 'NOT MET'}"
    )
    print(f"  speechocean762 test, greedy: {100 * wer(folder / 'so-greedy'):.2f} %")
    print(
        f"2 long recordings {100 * long:.2f} %, whole utterances {100 * greedy:.2f} %, difference {100 * (long - greedy):+.2f}: "
        f"{'met' if abs(long - greedy) <= 0.002 else 'NOT MET'}"
    )
    for kind in ("trimmed", "plain"):
        starts, ends, middles = [], [], []
        for file in sorted((folder / "joined").glob(f"{kind}-*.aligned.json")):
            times = json.loads(Path(str(file).replace(".aligned.json", ".times.json")).read_text())
            said = segments(file)
            if len(said) != len(times):
                print(f"  {file.name}: {len(said)} segments for {len(times)} clips")
                continue
            starts += [a[0] - b[0] for a, b in zip(said, times, strict=True)]
            ends += [a[1] - b[1] for a, b in zip(said, times, strict=True)]
            middles += [
                (said[i][1] + said[i + 1][0]) / 2 - (times[i][1] + times[i + 1][0]) / 2 for i in range(len(said) - 1)
            ]
        for name, errors in (
            ("starts", starts),
            ("ends", ends),
            ("starts and ends", starts + ends),
            ("middle of the pause", middles),
        ):
            if errors:
                size = [abs(each) for each in errors]
                print(
                    f"3 {kind}, {name}: median error {1000 * median(size):.0f} ms, mean {1000 * mean(size):.0f} ms, "
                    f"bias {1000 * median(errors):+.0f} ms, {len(errors)} boundaries, {100 * mean(each < 0.1 for each in size):.0f} % within 100 ms"
                )


if __name__ == "__main__":
    {"best": best, "join": join, "report": report}[sys.argv[1]](*sys.argv[2:])
