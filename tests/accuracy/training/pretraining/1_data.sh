#!/usr/bin/env bash
# The rest of the audio for pre-training, beside /tmp/d/ls and /tmp/d/so (prepare.sh), and the hour to fine-tune on.
# About 15-25 s on 16 cores (about 4,000 short recordings). Makes D/pt/train.jsonl.gz and W/hour.jsonl.gz.
. "$(dirname "$0")/common.sh"
say data
$PY - "$DATA" "$D" "$W" <<'P'
import gzip, json, pathlib, sys
data, d, w = map(pathlib.Path, sys.argv[1:])
# Speakers of LibriSpeech's and speechocean762's dev and test; fsdd is left out, for its six speakers are its test's too.
out = {"422", "84", "2086", "1993", "2412", "2902"}
rows = []
for corpus in ("commonvoice", "asterisk", "ljspeech", "misc-en", "pocketsphinx", "yesno", "noise-rir"):
    file = data / corpus / "manifest.jsonl"
    if not file.exists():
        print(f"{corpus}: not here"); continue
    there = missing = 0
    for line in file.open():
        row = json.loads(line)
        path = data / corpus / row["audio"]
        if row.get("speaker") in out:
            continue
        if not path.exists():
            missing += 1; continue
        there += 1
        rows.append({"audio": str(path), "text": "", "duration": row["duration"], "split": "train",
                     "speaker": f'{corpus}-{row.get("speaker")}', "lang": row.get("lang") or "en"})
    print(f"{corpus}: {there} recordings, {missing} not here")
d.mkdir(parents=True, exist_ok=True)
(d / "pt.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
# One hour of LibriSpeech's train: an equal share of each of its ten speakers, in the manifest's order. Nothing random.
by = {}
for line in gzip.open(d / "ls/train.jsonl.gz", "rt"):
    cut = json.loads(line)
    by.setdefault(cut["supervisions"][0]["speaker"], []).append((cut["duration"], line))
share, kept, total = 3600 / len(by), [], 0.0
for speaker, lines in sorted(by.items()):
    left = share
    for duration, line in lines:
        if duration <= left:
            kept.append(line); left -= duration; total += duration
# What speakers with less than their share leave over goes to the next lines of the others.
chosen = set(kept)
for lines in by.values():
    for duration, line in lines:
        if line not in chosen and total + duration <= 3600:
            kept.append(line); chosen.add(line); total += duration
gzip.open(w / "hour.jsonl.gz", "wt").writelines(kept)
print(f"hour.jsonl.gz: {len(kept)} utterances, {total:.1f} s, {len(by)} speakers")
P
if [ -n "${TINY:-}" ]; then head -40 "$D/pt.jsonl" > "$D/pt40.jsonl"; mv "$D/pt40.jsonl" "$D/pt.jsonl"; fi
stapes prepare jsonl "$D/pt.jsonl" "$D/pt" --untranscribed --convert wav ${TINY:+--jobs 1} > "$W/prepare.log" 2>&1 || say "prepare: exit code $?"
tail -n 3 "$W/prepare.log"; df -h /dev/shm | tail -n 1
cp "$D/pt/report.md" "$OUT/pt_report.md" 2>/dev/null
say "DONE pretrain data"
