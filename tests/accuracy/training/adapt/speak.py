# pyright: basic, reportMissingImports=false
"""Texts read aloud by speech synthesisers: many more texts for a student than there are recordings of.

speak.py TEXTS.txt OUT_FOLDER [COUNT] — a sentence a line; 16-kHz WAV and OUT_FOLDER/spoken.jsonl. VOICES says which
voices and how often: "heart:3 slt:1 rms:1 awb:1 kal16:1". heart is Python's package hibari-tts (with onnxruntime), the
others are programs of Debian's package flite (flite_cmu_us_slt …, searched in FLITE_BIN, else on the PATH). Voice and
pace of a sentence depend on SEED and its number alone; what is there already is not spoken again.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr

RATE, LONGEST = 16_000, 28.0
VOICES = [each.split(":") for each in os.environ.get("VOICES", "heart:3 slt:1 rms:1 awb:1 kal16:1").split()]
SEED = os.environ.get("SEED", "0")
neural = {}


def program(voice):
    name = f"flite_cmu_us_{voice}"
    return shutil.which(name, path=os.environ.get("FLITE_BIN") or None)


def spoken(voice, text, pace, path, seed):
    if voice != "heart":
        # The list of arguments: a text is never read as a command or an option.
        options = ["--setf", f"duration_stretch={1 / pace:.3f}", "-o", str(path)]
        subprocess.run([str(program(voice)), *options, "-t", text], check=True, timeout=60, stdout=subprocess.DEVNULL)
        pcm, rate = soundfile.read(path, dtype="float32")
    else:
        if "heart" not in neural:
            from hibari import Hibari

            neural["heart"] = Hibari()
        voice = neural["heart"]
        pcm, rate = np.asarray(voice(text, speed=pace, seed=seed), np.float32), 24_000
    if rate != RATE:
        pcm = soxr.resample(pcm, rate, RATE, quality="HQ")
    return pcm


def speak(job):
    number, text, folder = job
    chance = random.Random(f"{SEED} {number}")
    voice = chance.choices([name for name, _ in VOICES], [float(weight) for _, weight in VOICES])[0]
    pace, level = chance.uniform(0.8, 1.2), chance.uniform(0.1, 0.9)
    path = folder / f"{number % 256:02x}" / f"{voice}-{number:05d}.wav"
    try:
        if not path.exists():
            whole = path.with_suffix(".part.wav")
            pcm = spoken(voice, text, pace, whole, number)
            peak = float(np.abs(pcm).max(initial=0.0))
            if peak < 1e-3:
                return f"{number}: silence"
            soundfile.write(whole, pcm * np.float32(level / peak), RATE, subtype="PCM_16")
            whole.replace(path)
        seconds = soundfile.info(path).duration
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return f"{number}: {error}"
    if not 1.0 <= seconds <= LONGEST:
        return f"{number}: {seconds:.1f} s"
    return {"audio": str(path), "text": text, "duration": seconds, "speaker": voice, "lang": "en", "split": "train"}


def main():
    texts, folder = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    lines = [line.strip() for line in texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    numbers = list(range(len(lines)))
    random.Random(SEED).shuffle(numbers)
    numbers = numbers[: int(sys.argv[3])] if len(sys.argv) > 3 else numbers
    missing = [voice for voice, _ in VOICES if voice != "heart" and program(voice) is None]
    if missing:
        sys.exit(f"no program for {', '.join(missing)}: install flite, or set FLITE_BIN or VOICES")
    for each in range(256):
        (folder / "audio" / f"{each:02x}").mkdir(parents=True, exist_ok=True)
    jobs = [(number, lines[number], folder / "audio") for number in numbers]
    with ProcessPoolExecutor(int(os.environ.get("JOBS") or os.cpu_count() or 1)) as pool:
        found = list(pool.map(speak, jobs, chunksize=16))
    rows = [row for row in found if isinstance(row, dict)]
    left = [row for row in found if isinstance(row, str)]
    (folder / "spoken.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    hours = sum(row["duration"] for row in rows) / 3600
    print(f"{len(rows)} sentences, {hours:.2f} h, {len(left)} left out {left[:5]}")
    sys.exit(0 if rows and len(left) < 0.1 * len(found) else 1)


if __name__ == "__main__":
    main()
