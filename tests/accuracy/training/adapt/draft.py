# ruff: noqa: PTH123
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
"""Batch 1: teacher alone, teacher with draft, student alone, by turns over the same recordings, on one device.

draft.py TEACHER STUDENT MANIFEST COUNT ROUNDS OUT.json
Texts and tokens of teacher and teacher with draft are compared one by one; latencies are of whole calls (samples in
memory → text), default options without VAD's search. The first pass warms up and is not counted.
"""

import gzip
import json
import os
import statistics
import sys
import time

import numpy as np
import soundfile

import stapes
from stapes.devices.machine import facts

teacher, student, manifest, count, rounds, out = sys.argv[1:]
device = os.environ.get("DEVICE", "auto")
with gzip.open(manifest, "rt") as lines:
    cuts = [json.loads(line) for line in lines][: int(count)]
sounds = [soundfile.read(cut["recording"]["sources"][0]["source"], dtype="float32")[0] for cut in cuts]
# Long windows too: neighbours joined up to 28 s, where more tokens are written at once.
longer, row = [], np.zeros(0, np.float32)
for pcm in sounds:
    if row.size and row.size + pcm.size > 28 * 16_000:
        longer.append(row)
        row = np.zeros(0, np.float32)
    row = np.concatenate([row, pcm])
longer.append(row)
sets = {"utterances": sounds, "windows": longer}
tokens = int(os.environ.get("DRAFT_TOKENS", "5"))
opened = {
    "teacher": stapes.load(teacher, device=device, batch_size=1),
    "draft": stapes.load(teacher, device=device, batch_size=1, draft=student, draft_tokens=tokens),
    "student": stapes.load(student, device=device, batch_size=1),
}
report = {
    "teacher": teacher,
    "student": student,
    "draft_tokens": tokens,
    "manifest": manifest,
    "machine": facts(),
    "sets": {},
}
for name, recordings in sets.items():
    times = {each: [] for each in opened}
    said, accepted = {each: [] for each in opened}, None
    for number in range(int(rounds) + 1):
        for each, recognizer in opened.items():
            took, texts, drafted = [], [], [0, 0]
            for pcm in recordings:
                begun = time.perf_counter()
                heard = recognizer.transcribe(pcm, language="en", vad=False, sample_rate=16_000)
                took.append(time.perf_counter() - begun)
                drafted = [drafted[0] + heard.drafted, drafted[1] + heard.agreed]
                texts.append([(segment.text, list(segment.tokens)) for segment in heard.segments])
            if number:
                times[each].append(took)
                said[each].append(texts)
                if each == "draft":
                    accepted = drafted[1] / drafted[0] if drafted[0] else None
            print(time.strftime("%H:%M:%S"), name, number, each, f"{sum(took):.2f} s", flush=True)
    differ = sum(
        a != b
        for one, other in zip(said["teacher"], said["draft"], strict=False)
        for a, b in zip(one, other, strict=False)
    )
    written = sum(len(ids) for texts in said["teacher"][0] for _, ids in texts)
    median = {each: [statistics.median(took) for took in rows] for each, rows in times.items()}
    total = {each: [sum(took) for took in rows] for each, rows in times.items()}
    figures = {
        "recordings": len(recordings),
        "seconds_of_sound": sum(map(len, recordings)) / 16_000,
        "tokens": written,
        "differing_texts": differ,
        "compared_texts": len(recordings) * int(rounds),
        "median_seconds": {each: statistics.median(rows) for each, rows in median.items()},
        "total_seconds": total,
        "times_as_fast_with_draft": [a / b for a, b in zip(total["teacher"], total["draft"], strict=False)],
        "times_as_fast_student": [a / b for a, b in zip(total["teacher"], total["student"], strict=False)],
    }
    figures["accepted"] = accepted
    report["sets"][name] = figures
    print(name, json.dumps(figures), flush=True)
for recognizer in opened.values():
    recognizer.close()

# Many at once, default batch: what the fewer layers are worth where the GPU is full.
many = {name: stapes.load(path, device=device) for name, path in (("teacher", teacher), ("student", student))}
times = {name: [] for name in many}
for number in range(int(rounds) + 1):
    for name, recognizer in many.items():
        begun = time.perf_counter()
        rows = [heard for _ in range(4 if device == "auto" else 1) for heard in sounds]
        assert sum(1 for _ in recognizer.transcribe_many(rows, sample_rate=16_000, language="en", vad=False)) == len(
            rows
        )
        if number:
            times[name].append(time.perf_counter() - begun)
        print(time.strftime("%H:%M:%S"), "batches", number, name, f"{time.perf_counter() - begun:.2f} s", flush=True)
report["batches"] = {
    "recordings": len(rows),
    "total_seconds": times,
    "times_as_fast_student": [a / b for a, b in zip(times["teacher"], times["student"], strict=False)],
}
print(json.dumps(report["batches"]))
with open(out, "w") as file:
    json.dump(report, file, indent=1)
