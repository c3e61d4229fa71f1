# ruff: noqa: E501
# pyright: basic
"""Hybrid against the better of CTC and attention, and augmented against plain, over all seeds: matched pairs.

An utterance's errors are summed over the seeds, so that a pair is an utterance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stapes.evaluation.scoring import matched_pairs


def errors(folders: list[Path], kinds: tuple[str, ...]) -> tuple[dict[str, int], int]:
    found: dict[str, int] = {}
    spoken = 0
    for folder in folders:
        for line in (folder / "utterances.jsonl").read_text().splitlines():
            value = json.loads(line)
            found[value["id"]] = found.get(value["id"], 0) + sum(value[kind] for kind in kinds)
            spoken += sum(value[kind.replace("insertions", "hits")] for kind in kinds)  # hits in place of insertions
    return found, spoken


def main(root: Path) -> None:
    words = ("substitutions", "deletions", "insertions")
    characters = tuple(f"char_{kind}" for kind in words)
    for corpus in ("ls", "so"):
        for start in ("base", "scratch"):
            sets = {}
            for objective in ("ctc", "attention", "hybrid"):
                folders = sorted(root.glob(f"{corpus}/{start}-{objective}-[0-9]")) or [
                    each for each in root.glob(f"{corpus}/{start}-{objective}") if each.exists()
                ]
                if folders:
                    sets[objective] = (*errors(folders, words), len(folders))
            if len(sets) < 3:
                continue
            rates = {name: sum(found.values()) / spoken for name, (found, spoken, _) in sets.items()}
            better = min(("ctc", "attention"), key=rates.__getitem__)
            ids = sorted(sets["hybrid"][0])
            n = sets["hybrid"][2] / sets[better][2]
            found = matched_pairs(
                [sets["hybrid"][0][each] for each in ids], [round(sets[better][0][each] * n) for each in ids]
            )
            print(
                f"{corpus} {start}: "
                + ", ".join(f"{name} {100 * rate:.2f} % ({sets[name][2]} seeds)" for name, rate in rates.items())
                + f"; hybrid against {better}: {100 * (rates['hybrid'] - rates[better]):+.2f} points, p {found.p:.2g}"
            )
        plain, augmented = root / corpus / "scratch-ctc-plain", root / corpus / "scratch-ctc"
        if plain.exists() and augmented.exists():
            a, b = errors([augmented], characters), errors([plain], characters)
            rate_a, rate_b = sum(a[0].values()) / a[1], sum(b[0].values()) / b[1]
            ids = sorted(a[0])
            p = matched_pairs([a[0][each] for each in ids], [b[0][each] for each in ids]).p
            print(
                f"{corpus} augmented CER {100 * rate_a:.2f} %, plain {100 * rate_b:.2f} %: {100 * (1 - rate_a / rate_b):+.1f} % relative lower, p {p:.2g}"
            )


main(Path(sys.argv[1]))
