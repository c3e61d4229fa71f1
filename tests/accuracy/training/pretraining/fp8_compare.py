# pyright: basic
"""Losses and speeds of fp8 beside bf16. Speed: the median over the lines after the first 60 steps."""

import json
import pathlib
import statistics
import sys

folder, runs = pathlib.Path(sys.argv[1]), {}
for path in folder.glob("*/metrics.jsonl"):
    rows = [json.loads(line) for line in path.open() if line.strip()]
    if any(r["kind"] == "train" for r in rows):
        runs[path.parent.name] = [r for r in rows if r["kind"] == "train"]
out = {}
for name, rows in sorted(runs.items()):
    late = [r["audio_seconds_per_second"] for r in rows if r["step"] > 60] or [
        r["audio_seconds_per_second"] for r in rows[-2:]
    ]
    out[name] = {
        "steps": rows[-1]["step"],
        "audio_s_per_s": statistics.median(late),
        "lowest": min(late),
        "highest": max(late),
        "first_loss": rows[0]["contrastive_loss"],
        "last_loss": rows[-1]["contrastive_loss"],
        "mfu": rows[-1].get("mfu"),
    }
for fp8 in [n for n in runs if n.startswith("fp8")]:
    for other in [n for n in runs if n.startswith("bf16")]:
        ours, theirs = ({r["step"]: r for r in runs[n]} for n in (fp8, other))
        both = sorted(ours.keys() & theirs.keys())
        for key in ("loss", "contrastive_loss"):
            apart = [abs(ours[s][key] - theirs[s][key]) / theirs[s][key] for s in both]
            out[f"{fp8} / {other}, {key}"] = {
                "largest": max(apart),
                "mean": statistics.mean(apart),
                "last": apart[-1],
                "means_apart": abs(
                    statistics.mean(ours[s][key] for s in both) / statistics.mean(theirs[s][key] for s in both) - 1
                ),
            }
        out[f"{fp8} / {other}, speed"] = out[fp8]["audio_s_per_s"] / out[other]["audio_s_per_s"]
pathlib.Path(sys.argv[2]).write_text(json.dumps(out, indent=1) + "\n")
print(json.dumps(out, indent=1))
