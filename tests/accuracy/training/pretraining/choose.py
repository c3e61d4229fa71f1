# ruff: noqa: E501
# pyright: basic
"""The lowest character error rate on dev that each run kept (its model is the one with the lowest word error rate)."""

import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
best = {}
for path in sorted(folder.glob("*/metrics.jsonl")):
    rows = [json.loads(line) for line in path.open() if line.strip()]
    dev = [r for r in rows if r["kind"] == "dev"]
    if not dev:
        continue
    result = [r for r in rows if r["kind"] == "result"]
    kept = result[-1] if result else min(dev, key=lambda r: r["wer"])
    last = dev[-1]
    seconds = result[-1]["seconds"] if result else 0
    part = path.parent.name.partition("-")[0]
    if len(sys.argv) < 3:
        print(
            f"{path.parent.name}: {last['step']} steps, {seconds:.0f} s; dev of the model kept: CER {100 * kept['cer']:.2f} %, WER {100 * kept['wer']:.2f} %; lowest CER {100 * min(r['cer'] for r in dev):.2f} %"
        )
    if part not in best or kept["cer"] < best[part][0]:
        best[part] = (kept["cer"], path.parent.name)
if len(sys.argv) > 2:
    print(best[sys.argv[2]][1])
