# ruff: noqa: PTH123, SIM115
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
"""Line 2: three languages, LoRA on at most 32 clips each, tested on clips of speakers that were not in training.

There are only 28 to 38 clips a language, so each clip is tested once, by an adapter that heard neither it nor its
speaker (cross-validation by speaker; FOLDS adapters a language and seed). Settings are chosen on other languages
(`tune`), never on these: by the mean over them of what is left of base's CER.
Everything through the command line's own functions, in one process a language, which saves the imports.

2-languages.py prepare DATA/commonvoice/manifest.jsonl LANG…      manifests of the folds
2-languages.py tune NAME LANG…                                     settings, or base, tried on the first fold of each
2-languages.py settle LANG…                                        the best → W/languages/settings.json
2-languages.py run LANG [SEED…]                                    base, then each fold: train, evaluate
2-languages.py summary LANG…                                       the figures → W/languages/summary.json
"""

import gzip
import json
import os
import random
import shlex
import sys
import time
from collections import defaultdict
from pathlib import Path

W = Path(os.environ.get("W", "/tmp/stapes/adapt")) / "languages"
OUT = Path(os.environ.get("OUT_DIR", "/tmp/out/adapt")) / "languages"
MODEL = os.environ.get("MODEL", "base")
FOLDS = int(os.environ.get("FOLDS", "5"))
MOST = 32  # clips in training
STEPS = os.environ.get("STEPS")  # for dry runs
MORE = shlex.split(os.environ.get("TRAIN_MORE", ""))
EVALUATE_MORE = shlex.split(os.environ.get("EVALUATE_MORE", ""))
DEADLINE = time.monotonic() + float(os.environ.get("MAX_SECONDS", "400"))
ALL = '["query","key","value","out","up","down"]'
SETTINGS = {
    **{f"qv-1e-3-{steps}": ["optimizer.peak_lr=1e-3", f"run.steps={steps}"] for steps in (60, 100)},
    **{
        f"all-{rate}-{steps}": [
            f"optimizer.peak_lr={rate}",
            f"run.steps={steps}",
            f"lora.targets={ALL}",
            "lora.dropout=0.1",
        ]
        for rate in ("2e-4", "3e-4", "5e-4")
        for steps in (60, 120, 200)
    },
}
OTHERWISE = SETTINGS["all-3e-4-120"]  # where there was no time to tune
# A language without a token of its own takes over that of one like it.
TOKENS = {
    "hsb": "cs",
    "rm-sursilv": "it",
    "rm-vallader": "it",
    "ga-IE": "cy",
    "kab": "fr",
    "cnh": "tl",
    "rw": "sw",
    "lg": "sw",
}


def say(*words):
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def command(*words):
    from stapes.cli.main import main

    say("stapes", shlex.join(map(str, words)))
    begun, kept = time.monotonic(), sys.argv
    sys.argv = ["stapes", *map(str, words)]  # what a result says that it was made by
    try:
        code = main([str(word) for word in words])
    finally:
        sys.argv = kept
    say(f"rc {code} after {time.monotonic() - begun:.1f} s")
    return code


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path, cuts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(cut, ensure_ascii=False) + "\n" for cut in cuts)


def folds(cuts):
    """Clips by fold: all of a speaker's in one; the speaker with most clips first, into the fold with fewest."""
    groups = defaultdict(list)
    for cut in cuts:
        said = cut["supervisions"][0]
        groups[said.get("speaker") or cut["id"]].append(cut)
    out = [[] for _ in range(FOLDS)]
    for _, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        min(out, key=len).extend(group)
    return out


def prepare(manifest, *languages):
    rows = [json.loads(line) for line in open(manifest, encoding="utf-8")]
    for language in languages:
        folder = W / language
        if (folder / "all.jsonl.gz").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        mine = [
            row | {"audio": str(Path(manifest).parent / row["audio"]), "split": "train"}
            for row in rows
            if row["lang"] == language
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in mine))
        command("prepare", "jsonl", folder / "rows.jsonl", folder / "data", "--convert", "wav", "--normalize", "none")
        cuts = read(folder / "data" / "train.jsonl.gz")
        report = {"clips": len(mine), "prepared": len(cuts), "folds": []}
        for number, test in enumerate(folds(cuts)):
            names = {cut["id"] for cut in test}
            train = [cut for cut in cuts if cut["id"] not in names]
            random.Random(number).shuffle(train)
            train = train[:MOST]
            assert not {speaker(cut) for cut in train} & {speaker(cut) for cut in test}
            write(folder / f"train-{number}.jsonl.gz", train)
            write(folder / f"test-{number}.jsonl.gz", test)
            seconds = sum(cut["duration"] for cut in train)
            report["folds"].append(
                {
                    "train": len(train),
                    "test": len(test),
                    "train_minutes": round(seconds / 60, 2),
                    "train_speakers": len({speaker(cut) for cut in train}),
                    "test_speakers": len({speaker(cut) for cut in test}),
                }
            )
        write(folder / "all.jsonl.gz", cuts)
        (folder / "folds.json").write_text(json.dumps(report, indent=1))
        say(language, json.dumps(report))


def speaker(cut):
    return cut["supervisions"][0].get("speaker") or cut["id"]


def evaluate(model, manifest, name):
    if Path(model).parent.name and not Path(model).exists():
        say(f"{model} is not there")
    elif not (W / "results" / name / "result.json").exists():
        command("evaluate", model, manifest, "-o", W / "results" / name, *EVALUATE_MORE)


def train(language, fold, settings, run, seed=0):
    if (run / "ended").exists():
        return
    words = ["train", "whisper_lora", "--train", W / language / f"train-{fold}.jsonl.gz", "-o", run]
    sets = [
        f"model.init={MODEL}",
        f"seed={seed}",
        "data.batch_seconds=240",
        "augment.speeds=[0.9,1.0,1.1]",
        "optimizer.warmup_steps=10",
        "run.epochs=none",
        "run.evaluate_every=1000",
        "data.workers=1",
        "run.tensorboard=false",
        *settings,
    ]
    if language in TOKENS:
        sets.append(f"model.language_tokens.{language}={TOKENS[language]}")
    if STEPS:
        sets.append(f"run.steps={STEPS}")
    for each in sets:
        words += ["--set", each]
    words += MORE
    if (run / "checkpoints").exists():
        words.append("--resume")
    if command(*words) == 0:
        (run / "ended").write_text(shlex.join(map(str, words)))


def errors(*names):
    """Errors and characters of these results together."""
    rows = []
    for name in names:
        path = W / "results" / name / "utterances.jsonl"
        rows += [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []
    wrong = sum(row["char_substitutions"] + row["char_deletions"] + row["char_insertions"] for row in rows)
    return wrong, sum(row["char_hits"] + row["char_substitutions"] + row["char_deletions"] for row in rows), rows


def tune(name, *languages):
    for language in languages:
        if time.monotonic() > DEADLINE:
            say("no time left to tune")
            return
        model = MODEL
        if name != "base":
            run = W / language / "tune" / name
            train(language, 0, SETTINGS[name], run)
            model = run / "model"
        evaluate(model, W / language / "test-0.jsonl.gz", f"tune-{language}-{name}")


def settle(*languages):
    found = {}
    for name in ("base", *SETTINGS):
        if all((W / "results" / f"tune-{language}-{name}" / "result.json").exists() for language in languages):
            counted = {language: errors(f"tune-{language}-{name}") for language in languages}
            found[name] = {language: wrong / characters for language, (wrong, characters, _) in counted.items()}
            say(name, *(f"{language} {100 * cer:.1f} %" for language, cer in found[name].items()))
    base = found.pop("base", dict.fromkeys(languages, 1.0))
    left = {name: sum(cer[each] / base[each] for each in languages) / len(languages) for name, cer in found.items()}
    if left:
        best = min(left, key=left.get)
        settled = {"base": base, "cer": found, "left_of_base": left, "chosen": best, "settings": SETTINGS[best]}
        (W / "settings.json").write_text(json.dumps(settled, indent=1))


def chosen():
    path = W / "settings.json"
    return json.loads(path.read_text())["settings"] if path.exists() else OTHERWISE


def run(language, *seeds):
    beside = os.environ.get("BESIDE") == "1"  # another process sees to what is the same for all seeds
    if not beside:
        evaluate(MODEL, W / language / "all.jsonl.gz", f"base-{language}")
    for seed in seeds or ("0",):
        for fold in range(FOLDS):
            if time.monotonic() > DEADLINE:
                say(f"no time left: {language} seed {seed} fold {fold} is not run")
                return
            folder = W / language / f"seed-{seed}" / f"fold-{fold}"
            train(language, fold, chosen(), folder, seed)
            evaluate(folder / "model", W / language / f"test-{fold}.jsonl.gz", f"lora-{language}-{seed}-{fold}")
    # What a language of two minutes cost English: one of its adapters on LibriSpeech, told that it is English.
    english = Path(os.environ.get("D", "/tmp/d")) / "ls" / "test.jsonl.gz"
    first = W / language / f"seed-{(seeds or ('0',))[0]}" / "fold-0" / "model"
    if not beside and time.monotonic() < DEADLINE and english.exists():
        evaluate(first, english, f"kept-{language}")


def by_speaker(before, after, draws=1000):
    """95 % of the relative fall of the CER when speakers are drawn with repetition."""
    people = defaultdict(lambda: [0, 0])
    for index, rows in enumerate((before, after)):
        for row in rows:
            people[row["speaker"] or row["id"]][index] += (
                row["char_substitutions"] + row["char_deletions"] + row["char_insertions"]
            )
    chance, names, falls = random.Random(0), list(people), []
    for _ in range(draws):
        drawn = [people[chance.choice(names)] for _ in names]
        a, b = sum(x for x, _ in drawn), sum(x for _, x in drawn)
        falls.append(1 - b / a if a else 0.0)
    falls.sort()
    return [falls[int(0.025 * draws)], falls[int(0.975 * draws) - 1]]


def summary(*languages):
    report = {"model": MODEL, "settings": chosen(), "languages": {}}
    for language in languages:
        wrong, characters, before = errors(f"base-{language}")
        found = {"folds": json.loads((W / language / "folds.json").read_text()), "seeds": {}}
        if characters:
            found["base_cer"] = wrong / characters
        seeds = sorted({path.parent.parent.name for path in (W / language).glob("seed-*/fold-*/model")})
        for seed in seeds:
            names = [f"lora-{language}-{seed[5:]}-{fold}" for fold in range(FOLDS)]
            w, c, after = errors(*names)
            heard = {row["id"] for row in after}
            same = [row for row in before if row["id"] in heard]
            a = sum(row["char_substitutions"] + row["char_deletions"] + row["char_insertions"] for row in same)
            if not c or not a:
                continue
            found["seeds"][seed] = {
                "clips": len(after),
                "of": len(before),
                "base_cer": a / c,
                "lora_cer": w / c,
                "relative": 1 - w / a,
                "interval": by_speaker(same, after),
            }
        report["languages"][language] = found
    falls = [each["relative"] for found in report["languages"].values() for each in found["seeds"].values()]
    report["mean_relative"] = sum(falls) / len(falls) if falls else None
    (W / "summary.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))
    say(json.dumps(report, ensure_ascii=False))


def home():
    import shutil

    for pattern in (
        "*.json",
        "*/folds.json",
        "results/*/*.json*",
        "*/seed-*/fold-*/metrics.jsonl",
        "*/seed-*/fold-*/model/*.json",
        "*/tune/*/metrics.jsonl",
    ):
        for path in W.glob(pattern):
            if path.name in ("tokenizer.json", "vocab.json"):
                continue
            target = OUT / path.relative_to(W)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


if __name__ == "__main__":
    W.mkdir(parents=True, exist_ok=True)
    {"prepare": prepare, "tune": tune, "settle": settle, "run": run, "summary": summary}[sys.argv[1]](*sys.argv[2:])
    home()
    say("DONE adapt 2-languages", *sys.argv[1:])
