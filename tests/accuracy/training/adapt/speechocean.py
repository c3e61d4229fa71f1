# ruff: noqa: PTH123
# pyright: basic, reportArgumentType=false
"""Line 1's lessons, and the choice among what they made.

speechocean.py lessons FOLDER LS_TRAIN LS_DEV SO_TRAIN SO_DEV    FOLDER has {ls,so,extra}.jsonl.gz of `stapes label`
speechocean.py judge RUN SHARE…        a training's weights, so far on the way from base, on both dev sets
speechocean.py choose RUN…             the lowest WER on speechocean762 among those that keep LibriSpeech

Lessons: rehearsal is what base itself writes, with its case, points and times, where the known text agrees. The new
texts get a capital and a point, for base writes so and need not learn another style, and the times at which base heard
someone begin and end. Two of LibriSpeech's ten training speakers are heard by dev alone: a choice by two speakers is
hardly one.
"""

import gzip
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

W = Path(os.environ.get("W", "/tmp/stapes/adapt"))
OUT = Path(os.environ.get("OUT_DIR", "/tmp/out/adapt"))
MODEL = os.environ.get("MODEL", "base")
TOLERANCE = float(os.environ.get("TOLERANCE", "0.5"))  # absolute, in per cent; 1.0 is what test may be worse
SHARES = [float(each) for each in os.environ.get("SHARES", "0.4 0.55 0.7 0.85 1.0").split()]
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
    if (folder / "extra.jsonl.gz").exists():
        rehearsal += read(folder / "extra.jsonl.gz")
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


def between(run, share, folder):
    """A training's weights, so far on the way from base; what it took beside them."""
    if folder.exists():
        return
    words = ["models", "merge", MODEL, run / "model", folder]
    words += ["--share", share] if share < 1 else []
    if command(*words):
        raise SystemExit(f"{run.name} {share} cannot be merged")
    cost = json.loads((run / "model" / "training.json").read_text())
    cost["command"] = [*cost.get("command", []), "&&", "stapes", *map(str, words)]
    (folder / "training.json").write_text(json.dumps(cost))


def is_adapter(run):
    return (run / "model" / "adapter_config.json").exists()


def judge(run, *shares):
    run, lessons = Path(run), W / "so-own"
    for share in map(float, shares or SHARES):
        name = f"{run.name}-{share:g}" if run.name != MODEL else MODEL
        result = W / "so-dev" / name
        if (result / "result.json").exists():
            continue
        begun, whole = time.monotonic(), share == 1 and not is_adapter(run)
        if run.name == MODEL:
            model = MODEL
        elif whole:
            model = run / "model"
        else:
            model = W / "so-candidates" / name
            between(run, share, model)
        rc = command("evaluate", model, lessons / "dev.jsonl.gz", "-o", result, *MORE)
        if run.name != MODEL and not whole:
            shutil.rmtree(model, ignore_errors=True)  # the chosen one is made again
        say(name, "rc", rc, f"after {time.monotonic() - begun:.1f} s")


def choose(*runs):
    new = set(json.loads((W / "so-own" / "dev.ids.json").read_text()))
    table, found = [], {"full": [], "lora": []}

    def row(name):
        sums = rates(W / "so-dev" / name, new)
        wer = {corpus: 100 * sum(each[:3]) / max(1, each[3]) for corpus, each in sums.items()}
        kinds = " ".join("/".join(map(str, each[:3])) for each in sums.values())
        table.append(f"{name:24s} speechocean762 {wer['so']:6.2f} %  LibriSpeech {wer['ls']:6.2f} %  S/D/I {kinds}")
        return wer

    before = row(MODEL)
    for run in map(Path, runs):
        for share in SHARES:
            name = f"{run.name}-{share:g}"
            if (W / "so-dev" / name / "result.json").exists():
                wer = row(name)
                kind = "lora" if is_adapter(run) else "full"
                found[kind].append({"name": name, "run": str(run), "share": share, **wer})
    print("\n".join(table), flush=True)
    chosen = {"model": MODEL, "before": before, "tolerance": TOLERANCE, "candidates": found}
    for kind, candidates in found.items():
        kept = [each for each in candidates if each["ls"] <= before["ls"] + TOLERANCE]
        if not kept and candidates:
            say(f"{kind}: nothing keeps LibriSpeech within {TOLERANCE}: the nearest is taken")
            kept = [min(candidates, key=lambda each: each["ls"])]
        if not kept:
            continue
        best = chosen[kind] = min(kept, key=lambda each: each["so"])
        target = W / "so-chosen" / kind
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        run = Path(best["run"])
        if best["share"] == 1 and kind == "full":
            (target / "model").symlink_to(run / "model")
        else:
            between(run, best["share"], target / "model")
        say("chosen", kind, json.dumps(best))
    (W / "so-chosen").mkdir(parents=True, exist_ok=True)
    (W / "so-chosen" / "chosen.json").write_text(json.dumps(chosen, indent=1))
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.copy(W / "so-chosen" / "chosen.json", OUT / "so-chosen.json")
    (OUT / "so-dev.txt").write_text("\n".join(table) + "\n")
    if "lora" in chosen:  # a few MB
        shutil.copytree(Path(chosen["lora"]["run"]) / "model", OUT / "models" / "so-lora", dirs_exist_ok=True)


if __name__ == "__main__":
    {"lessons": lessons, "judge": judge, "choose": choose}[sys.argv[1]](*sys.argv[2:])
