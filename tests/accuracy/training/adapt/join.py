# pyright: basic
"""Windows for a student, up to 29 s: utterances, or pieces of them, one after another in random orders.

join.py OUT_FOLDER WHOLE PIECES SEED MANIFEST.jsonl.gz …: WAV files and OUT_FOLDER/joined.jsonl.gz, for the teacher to
write down. WHOLE copies are of whole utterances, with the texts that are known. PIECES copies are of utterances cut
where it is quiet, 0.8 to 3 s each, with pieces of other sentences of the speaker around: words in orders that
nobody could know by heart; what is said there, the teacher has to say. Speed, loudness and, where NOISES and RIRS are
patterns of noises and room responses, noise and rooms are drawn for each window here and not in each epoch:
reading is then all that training has to do.
"""

import glob
import gzip
import json
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr

RATE, LONGEST = 16_000, 29.0


def matching(patterns):
    return sorted(path for each in patterns.split() for path in glob.glob(each))  # noqa: PTH207


NOISES, RIRS = matching(os.environ.get("NOISES", "")), matching(os.environ.get("RIRS", ""))


def heard(cut):
    source = cut["recording"]["sources"][0]["source"]
    first = round(cut["start"] * RATE)
    pcm, rate = soundfile.read(source, start=first, frames=round(cut["duration"] * RATE), dtype="float32")
    assert rate == RATE, source
    return pcm


def pieces(cut, chance):
    """Where it is cut: (start, end) in samples, at the quietest 20 ms within 0.3 s of a random place."""
    pcm = heard(cut)
    frames = np.square(pcm[: len(pcm) // 320 * 320].reshape(-1, 320)).mean(1)
    loud = np.convolve(frames, np.ones(3) / 3, "same")
    places = [0]
    while len(pcm) - places[-1] > 3.3 * RATE:
        middle = (places[-1] + round(chance.uniform(0.8, 3.0) * RATE)) // 320
        first = max(middle - 15, places[-1] // 320 + 25)
        near = loud[first : middle + 15]
        if not len(near):
            break
        places.append((first + int(near.argmin())) * 320 + 160)
    return [*zip(places, [*places[1:], len(pcm)], strict=True)]


def cut_up(job):
    cut, seed = job
    return [(cut, first, last) for first, last in pieces(cut, random.Random(seed))]


def sounding(pcm, chance):
    """The window in a room, with noise, at another loudness: at times."""
    from stapes.data.augment import add_noise, add_room

    if RIRS and chance.random() < 0.2:
        response, rate = soundfile.read(chance.choice(RIRS), dtype="float32", always_2d=True)
        pcm = add_room(pcm, soxr.resample(response[:, 0], rate, RATE) if rate != RATE else response[:, 0])
    if NOISES and chance.random() < 0.3:
        noise, rate = soundfile.read(chance.choice(NOISES), dtype="float32", always_2d=True)
        noise = soxr.resample(noise[:, 0], rate, RATE) if rate != RATE else noise[:, 0]
        first = chance.randrange(max(1, len(noise) // 2))
        pcm = add_noise(pcm, np.resize(noise[first:], len(pcm)), chance.uniform(8.0, 25.0))
    pcm = pcm * np.float32(10 ** (chance.uniform(-12.0, 4.0) / 20))
    peak = float(np.abs(pcm).max(initial=0.0))
    return pcm / peak if peak > 1.0 else pcm


def write(job):
    path, row, speed, seed, is_known = job
    chance, parts, edge = random.Random(seed), [], np.linspace(0, 1, 80, dtype=np.float32)
    for cut, first, last in row:
        pcm = heard(cut)[first:last].copy()
        pcm[:80] *= edge[: len(pcm)]
        pcm[-80:] *= edge[::-1][-len(pcm) :]
        gap = chance.uniform(0.1, 0.5) if is_known else chance.uniform(0.0, 0.15)
        parts += [pcm, np.zeros(round(gap * speed * RATE), np.float32)]
    pcm = np.concatenate(parts)
    if speed != 1.0:  # fewer samples are the same sound, faster
        pcm = soxr.resample(pcm, RATE * speed, RATE, quality="MQ")
    pcm = sounding(pcm, chance)[: 30 * RATE]
    soundfile.write(path, pcm, RATE, subtype="PCM_16")
    texts = [one["text"] for cut, _, _ in row for one in cut["supervisions"]] if is_known else []
    name, seconds = path.stem, len(pcm) / RATE
    said = {
        "id": name,
        "recording_id": name,
        "start": 0.0,
        "duration": seconds,
        "channel": 0,
        "text": " ".join(texts),
        "language": "en",
    }
    recording = {
        "id": name,
        "sources": [{"type": "file", "channels": [0], "source": str(path)}],
        "sampling_rate": RATE,
        "num_samples": len(pcm),
        "duration": seconds,
        "channel_ids": [0],
    }
    whole = {"id": name, "start": 0.0, "duration": seconds, "channel": 0, "type": "MonoCut"}
    return json.dumps({**whole, "supervisions": [said], "recording": recording}, ensure_ascii=False)


def by_speaker(parts, chance):
    """Runs of up to six pieces of one speaker, in random order."""
    speakers, runs = {}, []
    for part in parts:
        speakers.setdefault(part[0]["supervisions"][0].get("speaker"), []).append(part)
    for own in speakers.values():
        chance.shuffle(own)
        runs += [own[i : i + 6] for i in range(0, len(own), 6)]
    chance.shuffle(runs)
    return [part for run in runs for part in run]


def main():
    folder, whole, cut_copies, seed = Path(sys.argv[1]).resolve(), *map(int, sys.argv[2:5])
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    chance, everything, jobs = random.Random(seed), [], []
    for path in sys.argv[5:]:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            everything += [json.loads(line) for line in lines]
    everything = [cut for cut in everything if cut["duration"] < LONGEST]
    with ProcessPoolExecutor(int(os.environ.get("JOBS") or os.cpu_count() or 1)) as pool:
        for copy in range(whole + cut_copies):
            is_known = copy < whole
            if is_known:
                parts = [(cut, 0, round(cut["duration"] * RATE)) for cut in everything]
                chance.shuffle(parts)
            else:
                asked = [(cut, f"{seed} {copy} {number}") for number, cut in enumerate(everything)]
                parts = by_speaker([part for found in pool.map(cut_up, asked, chunksize=32) for part in found], chance)
            row, length = [], 0.0
            speed = chance.choice((0.9, 1.0, 1.0, 1.1))
            most = chance.choice((6.0, 14.0, LONGEST, LONGEST))  # short windows too
            for part in [*parts, None]:
                seconds = 0.0 if part is None else (part[2] - part[1]) / RATE / speed + (0.5 if is_known else 0.15)
                if row and (part is None or length + seconds > most):
                    name = f"{folder.name}-{copy}-{len(jobs):05d}"
                    jobs.append((folder / "audio" / f"{name}.wav", row, speed, f"{seed} {name}", is_known))
                    row, length = [], 0.0
                    speed = chance.choice((0.9, 1.0, 1.0, 1.1))
                    most = chance.choice((6.0, 14.0, LONGEST, LONGEST))
                if part is not None:
                    row.append(part)
                    length += seconds
        lines = list(pool.map(write, jobs, chunksize=16))
    with gzip.open(folder / "joined.part", "wt", encoding="utf-8", compresslevel=1) as out:
        out.writelines(line + "\n" for line in lines)
    (folder / "joined.part").replace(folder / "joined.jsonl.gz")
    hours = sum(json.loads(line)["duration"] for line in lines) / 3600
    print(f"{len(lines)} windows, {hours:.2f} h, of {len(everything)} utterances")


if __name__ == "__main__":
    main()
