# pyright: basic
"""Windows for a student: labelled utterances one after another up to 29 s, in several random orders, at three speeds.

join.py OUT_FOLDER COPIES SEED LABELLED.jsonl.gz …: WAV files and OUT_FOLDER/joined.jsonl.gz, labels with their times.
The audio is that of the manifests; only its order, its neighbours and its speed (0.9, 1, 1.1) are new.
"""

import gzip
import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr

RATE, LONGEST = 16_000, 29.0


def heard(cut):
    source = cut["recording"]["sources"][0]["source"]
    first = round(cut["start"] * RATE)
    pcm, rate = soundfile.read(source, start=first, frames=round(cut["duration"] * RATE), dtype="float32")
    assert rate == RATE, source
    return pcm


def write(job):
    path, cuts, speed, gaps = job
    parts, said, at = [], [], 0.0
    for cut, gap in zip(cuts, gaps, strict=False):
        pcm = heard(cut)
        for one in cut["supervisions"]:
            start, end = at + one["start"] / speed, at + (one["start"] + one["duration"]) / speed
            said.append((start, end, one["text"], one.get("language")))
        parts += [pcm, np.zeros(round(gap * speed * RATE), np.float32)]
        at += len(pcm) / RATE / speed + gap
    pcm = np.concatenate(parts)
    if speed != 1.0:  # fewer samples are the same sound, faster
        pcm = soxr.resample(pcm, RATE * speed, RATE, quality="MQ")
    soundfile.write(path, pcm, RATE, subtype="PCM_16")
    seconds, name = len(pcm) / RATE, path.stem
    supervisions = []
    for number, (start, end, text, language) in enumerate(said):
        start, end = min(start, seconds), min(end, seconds)
        one = {
            "id": f"{name}-{number}",
            "recording_id": name,
            "start": round(start, 3),
            "duration": round(end - start, 3),
            "channel": 0,
            "text": text,
            "language": language,
        }
        supervisions.append(one)
    recording = {
        "id": name,
        "sources": [{"type": "file", "channels": [0], "source": str(path)}],
        "sampling_rate": RATE,
        "num_samples": len(pcm),
        "duration": seconds,
        "channel_ids": [0],
    }
    return json.dumps(
        {
            "id": name,
            "start": 0.0,
            "duration": seconds,
            "channel": 0,
            "supervisions": supervisions,
            "recording": recording,
            "type": "MonoCut",
        },
        ensure_ascii=False,
    )


def main():
    folder, copies, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    chance, groups, jobs = random.Random(seed), [], []
    for path in sys.argv[4:]:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            groups.append([json.loads(line) for line in lines])
    everything = [cut for group in groups for cut in group if cut["duration"] < LONGEST / 1.0]
    for copy in range(copies):
        chance.shuffle(everything)
        row, gaps, length = [], [], 0.0
        speed = chance.choice((0.9, 1.0, 1.0, 1.1))
        most = chance.choice((6.0, 14.0, LONGEST, LONGEST))  # short windows too
        for cut in [*everything, None]:
            if row and (cut is None or length + cut["duration"] / speed > most):
                jobs.append((folder / "audio" / f"w{copy}-{len(jobs):05d}.wav", row, speed, gaps))
                row, gaps, length = [], [], 0.0
                speed = chance.choice((0.9, 1.0, 1.0, 1.1))
                most = chance.choice((6.0, 14.0, LONGEST, LONGEST))
            if cut is not None and cut["duration"] / speed <= LONGEST:
                gap = chance.uniform(0.1, 0.5)
                row.append(cut)
                gaps.append(gap)
                length += cut["duration"] / speed + gap
    with ProcessPoolExecutor(int(__import__("os").environ.get("JOBS", "8"))) as pool:
        lines = list(pool.map(write, jobs, chunksize=16))
    with gzip.open(folder / "joined.jsonl.gz", "wt", encoding="utf-8", compresslevel=1) as out:
        out.writelines(line + "\n" for line in lines)
    print(f"{len(lines)} windows of {len(everything)} utterances")


if __name__ == "__main__":
    main()
