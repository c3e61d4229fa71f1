# ruff: noqa: PTH123
# pyright: basic, reportArgumentType=false
"""Line 1's lessons, and the choice among what they made.

speechocean.py some MANIFEST OUT COUNT    so many utterances of a manifest, of all its voices
speechocean.py lessons FOLDER LS_TRAIN LS_DEV SO_TRAIN SO_DEV
    FOLDER has {ls,so,extra,spoken}.jsonl.gz of `stapes label`
speechocean.py choose RUN…    the lowest WER on speechocean762 among those that keep LibriSpeech, on both dev sets:
    of each training's weights, part of the way from base, and of averages of trainings of one kind (greedy soups,
    Wortsman et al. 2022), which for LoRA are adapters again

Lessons: rehearsal is what base itself writes, with its case, points and times, where the known text agrees. The new
texts get a capital and a point, for base writes so and need not learn another style, and the times at which base heard
someone begin and end. Two of LibriSpeech's ten training speakers are heard by dev alone: a choice by two speakers is
hardly one.
"""

import gzip
import itertools
import json
import multiprocessing
import os
import random
import shlex
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

W = Path(os.environ.get("W", "/tmp/stapes/adapt"))
OUT = Path(os.environ.get("OUT_DIR", "/tmp/out/adapt"))
MODEL = os.environ.get("MODEL", "base")
TOLERANCE = float(os.environ.get("TOLERANCE", "0.8"))  # absolute, in per cent; 1.0 is what test may be worse
SHARES = [float(each) for each in os.environ.get("SHARES", "0.6 0.8 1.0").split()]
SOUP_SHARES = [float(each) for each in os.environ.get("SOUP_SHARES", "0.7 0.85 1.0").split()]
SECONDS = float(os.environ.get("CHOOSE_SECONDS", "90"))  # then nothing new is tried
MORE = shlex.split(os.environ.get("EVALUATE_MORE", "--batch-size 16"))  # beside others: little memory


def say(*words):
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path, cuts):
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(cut, ensure_ascii=False) + "\n" for cut in cuts)
    say(path.name, len(cuts), "utterances,", round(sum(cut["duration"] for cut in cuts) / 60, 1), "minutes")


def some(manifest, out, count):
    cuts = read(manifest)
    random.Random(0).shuffle(cuts)
    write(Path(out), cuts[: int(count)])


def speaker(cut):
    return cut["supervisions"][0].get("speaker")


def styled(text):
    words = ["I" + word[1:] if word == "i" or word.startswith("i'") else word for word in text.split()]
    text = " ".join(words)
    return f"{text[:1].upper()}{text[1:]}."


def lessons(folder, ls_train, ls_dev, so_train, so_dev):
    folder = Path(folder)
    known = read(ls_train)
    kept_for_dev = set(sorted({speaker(cut) for cut in known})[::5])
    rehearsal = [cut for cut in read(folder / "ls.jsonl.gz") if speaker(cut) not in kept_for_dev]
    for more in ("extra", "spoken"):
        if (folder / f"{more}.jsonl.gz").exists():
            rehearsal += read(folder / f"{more}.jsonl.gz")
    write(folder / "rehearsal.jsonl.gz", rehearsal)
    new = [cut for cut in known if speaker(cut) in kept_for_dev]
    write(folder / "dev.jsonl.gz", [*read(so_dev), *read(ls_dev), *new])
    (folder / "dev.ids.json").write_text(json.dumps([cut["id"] for cut in read(so_dev)]))
    heard = {}
    with open(folder / "so.labels.jsonl", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row.get("segments"):
                heard[row["id"]] = row["segments"][0][0], row["segments"][-1][1]
    cuts, timed = read(so_train), 0
    for cut in cuts:
        said = cut["supervisions"][0]
        said["text"] = styled(said["text"])
        start, end = heard.get(cut["id"], (0.0, 0.0))
        end = min(end, cut["duration"])
        if end - start >= 0.5:  # else the whole is left open
            said["start"], said["duration"] = round(start, 2), round(end - start, 2)
            timed += 1
    write(folder / "train.jsonl.gz", cuts)
    say(timed, "of them with times; speakers", sorted(kept_for_dev), "are dev's")


def command(*words):
    from stapes.cli.main import main

    kept, sys.argv = sys.argv, ["stapes", *map(str, words)]  # what a result says that it was made by
    try:
        return main([str(word) for word in words])
    finally:
        sys.argv = kept


def rates(result, new):
    """Errors of each kind and words: speechocean762's, LibriSpeech's."""
    found = {"so": [0, 0, 0, 0], "ls": [0, 0, 0, 0]}
    with open(result / "utterances.jsonl", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            sums = found["so" if row["id"] in new else "ls"]
            for place, kind in enumerate(("substitutions", "deletions", "insertions")):
                sums[place] += row[kind]
            sums[3] += row["hits"] + row["substitutions"] + row["deletions"]
    return found


def name_of(runs, share):
    return "+".join(run.name.removeprefix("so-") for run in runs) + f"-{share:g}"


def is_adapter(run):
    return (run / "model" / "adapter_config.json").exists()


def made(runs, share, folder):
    """Trainings' weights, averaged, so far on the way from base; what they took beside them. The model's folder."""
    if len(runs) == 1 and share == 1:
        return runs[0] / "model"
    if folder.exists():
        return folder
    words = ["models", "merge", MODEL, *(run / "model" for run in runs), folder, "--share", share]
    words += ["--adapter"] if is_adapter(runs[0]) else []
    if command(*words):
        raise RuntimeError(f"{name_of(runs, share)} cannot be merged")
    costs = [json.loads((run / "model" / "training.json").read_text()) for run in runs]
    cost = costs[0] | {name: sum(each[name] for each in costs) for name in ("steps", "hours")}
    cost["peak_memory_bytes"] = max(each.get("peak_memory_bytes") or 0 for each in costs)
    every = [word for each in costs for word in [*each.get("command", []), "&&"]]
    cost["command"] = [*every, "stapes", *map(str, words)]
    (folder / "training.json").write_text(json.dumps(cost))
    return folder


def judge(runs, share):
    """Write down what dev says to an average; no runs: to base. In a process of several."""
    name = name_of(runs, share) if runs else MODEL
    result = W / "so-dev" / Path(name).name
    if (result / "result.json").exists():
        return
    begun, folder = time.monotonic(), W / "so-candidates" / name
    model = made(runs, share, folder) if runs else MODEL
    rc = command("evaluate", model, W / "so-own" / "dev.jsonl.gz", "-o", result, *MORE)
    if runs:
        shutil.rmtree(folder, ignore_errors=True)  # the chosen one is made again
    say(name, "rc", rc, f"after {time.monotonic() - begun:.1f} s")


class Dev:
    """What dev said, and processes that ask it: each reads the programs once."""

    def __init__(self, pool):
        self.pool, self.rows, self.base = pool, {}, None
        self.new = set(json.loads((W / "so-own" / "dev.ids.json").read_text()))

    def ask(self, *asked):
        """(runs, share) …, all at once; what fails has no figures."""
        running = [self.pool.submit(judge, runs, share) for runs, share in asked]
        for (runs, share), each in zip(asked, running, strict=True):
            try:
                each.result()
            except Exception as error:
                say(name_of(runs, share), repr(error)[:200])
            self.read(runs, share)

    def read(self, runs, share):
        name = name_of(runs, share) if runs else MODEL
        folder = W / "so-dev" / Path(name).name
        if not (folder / "result.json").exists():
            return
        sums = rates(folder, self.new)
        wer = {corpus: 100 * sum(each[:3]) / max(1, each[3]) for corpus, each in sums.items()}
        row = {"name": name, "runs": [str(run) for run in runs], "share": share, **wer}
        kinds = " ".join("/".join(map(str, each[:3])) for each in sums.values())
        row["line"] = f"{name:32s} speechocean762 {wer['so']:6.2f} %  LibriSpeech {wer['ls']:6.2f} %  S/D/I {kinds}"
        self.rows[name] = row
        if not runs:
            self.base = row

    def of(self, runs):
        return sorted(
            (row for row in self.rows.values() if row["runs"] == [str(run) for run in runs]),
            key=lambda row: row["share"],
        )

    @property
    def limit(self):
        if self.base is None:
            raise SystemExit("base was not judged, and nothing can be chosen: the same command tries it again")
        return self.base["ls"] + TOLERANCE

    def best(self, runs):
        """The share with the lowest WER on speechocean762 that keeps LibriSpeech; else the one that keeps most."""
        kept = [row for row in self.of(runs) if row["ls"] <= self.limit]
        if kept:
            return True, min(kept, key=lambda row: row["so"])
        return False, min(self.of(runs), key=lambda row: row["ls"], default=None)

    def reach(self, runs):
        """(WER on speechocean762, share): the lowest that keeps LibriSpeech, shares between those asked too.

        Straight lines from base's rates on: shares in steps would favour whoever happens to pass one of them.
        """
        assert self.base is not None
        limit, asked = self.limit, self.of(runs)
        points = [(0.0, self.base["ls"], self.base["so"]), *((row["share"], row["ls"], row["so"]) for row in asked)]
        found = [(so, share) for share, ls, so in points if ls <= limit]
        for before, after in itertools.pairwise(points):
            if before[1] <= limit < after[1]:
                part = (limit - before[1]) / (after[1] - before[1])
                found.append((before[2] + part * (after[2] - before[2]), before[0] + part * (after[0] - before[0])))
        return min(found)


def choose(*runs):
    runs = [run for run in map(Path, runs) if (run / "model" / "training.json").exists()]
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(int(os.environ.get("JOBS", "7")), mp_context=context) as pool:
        dev = Dev(pool)
        dev.ask(([], 1.0), *(([run], share) for share in SHARES for run in runs))
        kinds = {
            kind: sorted((run for run in runs if is_adapter(run) == (kind == "lora")), key=lambda run: dev.reach([run]))
            for kind in ("full", "lora")
        }
        # Greedy soups, of both kinds at once: the best training, then each other one that makes dev better.
        soups, left = {kind: own[:1] for kind, own in kinds.items()}, {kind: own[1:] for kind, own in kinds.items()}
        while any(left.values()) and time.monotonic() - began < SECONDS:
            tried = {kind: [*soups[kind], own.pop(0)] for kind, own in left.items() if own}
            dev.ask(*((soup, share) for soup in tried.values() for share in SOUP_SHARES))
            for kind, soup in tried.items():
                if dev.reach(soup) < dev.reach(soups[kind]):
                    soups[kind] = soup
        finer = []  # where the limit is reached, and a little before
        for soup in filter(None, soups.values()):
            shares = {round(dev.reach(soup)[1] - step, 2) for step in (0.0, 0.04, 0.08)}
            finer += [
                (soup, share) for share in sorted(shares) if share > 0 and time.monotonic() - began < SECONDS + 10
            ]
        dev.ask(*finer)
    table = [row["line"] for row in dev.rows.values()]
    print("\n".join(table), flush=True)
    candidates = [{name: value for name, value in row.items() if name != "line"} for row in dev.rows.values()]
    chosen = {"model": MODEL, "tolerance": TOLERANCE, "candidates": candidates}
    for kind, soup in soups.items():
        kept, best = dev.best(soup) if soup else (False, None)
        if best is None:
            continue
        if not kept:
            say(f"{kind}: nothing keeps LibriSpeech within {TOLERANCE}: the nearest is taken")
        chosen[kind] = {name: value for name, value in best.items() if name != "line"}
        target = W / "so-chosen" / kind
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        model = made(soup, best["share"], target / "model")
        if model != target / "model":
            (target / "model").symlink_to(model)
        say("chosen", kind, best["line"])
    (W / "so-chosen" / "chosen.json").write_text(json.dumps(chosen, indent=1))
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.copy(W / "so-chosen" / "chosen.json", OUT / "so-chosen.json")
    (OUT / "so-dev.txt").write_text("\n".join(table) + "\n")
    if "lora" in chosen:  # some MB for each adapter that is in it
        shutil.copytree(W / "so-chosen" / "lora" / "model", OUT / "models" / "so-lora", dirs_exist_ok=True)
    say("chosen after", round(time.monotonic() - began), "s")


if __name__ == "__main__":
    {"some": some, "lessons": lessons, "choose": choose}[sys.argv[1]](*sys.argv[2:])
