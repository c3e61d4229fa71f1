# ruff: noqa: E501
# pyright: basic
"""Dev figures of pre-training runs, and with --best the name of the one with the lowest strict loss on dev."""

import json
import pathlib
import sys

best = "--best" in sys.argv
found = []
for place in sys.argv[1:]:
    if place == "--best":
        continue
    path = pathlib.Path(place)
    rows = [json.loads(line) for line in path.open() if line.strip()]
    dev = [r for r in rows if r["kind"] == "dev"]
    train = [r for r in rows if r["kind"] == "train" and "audio_seconds_per_second" in r]
    name = path.parent.name
    if not dev:
        if not best:
            print(f"{name}: no evaluation yet, {train[-1]['step'] if train else 0} steps")
        continue
    low = min(dev, key=lambda r: r["strict_loss"])
    found.append((low["strict_loss"], name))
    if best:
        continue
    late = train[len(train) // 2 :]
    rate = sorted(r["audio_seconds_per_second"] for r in late)[len(late) // 2] if late else 0
    print(f"{name}: {train[-1]['step'] if train else '-'} steps, {rate:.0f} audio s/s (median of the later half)")
    for r in [*dev[:: max(1, len(dev) // 6)], low]:
        print(
            f"   step {r['step']:6d}: dev strict loss {r['strict_loss']:.4f}, loss {r['loss']:.4f}, accuracy {100 * r['accuracy']:.2f} %, codes {r['code_perplexity']:.1f}"
        )
    if train:
        r = train[-1]
        print(
            f"   train, last line: loss {r.get('contrastive_loss', 0):.4f}, accuracy {100 * r.get('contrastive_accuracy', 0):.2f} %, codes {r.get('code_perplexity', 0):.1f}, gradient {r.get('gradient_norm', 0):.3f}"
        )
if best:
    print(min(found)[1] if found else "none")
