#!/usr/bin/env bash
# Manifests of LibriSpeech and speechocean762 as WAV. DATA: where the recordings are; OUT: where manifests go.
set -euo pipefail
DATA=${DATA:-../shared/data}; D=${D:-/tmp/d}; STAPES=${STAPES:-"python3 -m stapes"}
mkdir -p "$D"
$STAPES prepare jsonl "$DATA/librispeech/manifest.jsonl" "$D/ls" --convert wav || test $? = 1
python3 - "$DATA" "$D" <<'P'
import json, sys, pathlib
data, d = map(pathlib.Path, sys.argv[1:])
rows = [json.loads(l) for l in (data / "speechocean762/manifest.jsonl").open()]
speakers = sorted({r["speaker"] for r in rows if r["split"] == "train"})
dev = set(speakers[::10])
for r in rows:
    r["audio"] = str(data / "speechocean762" / r["audio"])
    if r["split"] == "train" and r["speaker"] in dev:
        r["split"] = "dev"
(d / "so.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
P
$STAPES prepare jsonl "$D/so.jsonl" "$D/so" --convert wav || test $? = 1
ls -la "$D"/*
