# ruff: noqa: E501
# pyright: basic
"""Trains and evaluates every objective and the small CTC model, several at a time on one GPU.

    python3 drive.py all        everything (about 9 minutes on an H200 with 16 cores); the same command goes on
    PROBE_SECONDS=100 python3 drive.py probe    all first trainings side by side: their steps a second, nothing kept
    python3 drive.py summary    the table so far

Trainings have a fixed number of steps (BASE_STEPS and so on). With PROBE_SECONDS those that would miss the time limit at
the pace that they have then, or waste it, start again with the number that fits. (ONLY=names: some; SEEDS, BASE_SLOTS:
fewer at once; MAX_SECONDS of everything, BASE_SECONDS and so on of each.)
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

E = os.environ.get
D = Path(E("D", "/tmp/d"))
NOISE = E("NOISE", "/tmp/data/noise-rir")
WORK = Path(E("WORK", "/tmp/stapes/train"))
OUT = Path(E("OUT_DIR", "/tmp/out/train"))
PYTHON = E("PYTHON", "python3")
MAX_SECONDS = float(E("MAX_SECONDS", "560"))  # of everything, evaluation included
BASE_SECONDS = float(E("BASE_SECONDS", "165"))  # of a training on the base encoder
TINY_SECONDS = float(E("TINY_SECONDS", "225"))
SCRATCH_SECONDS = float(E("SCRATCH_SECONDS", "370"))
START_SECONDS = float(E("START_SECONDS", "30"))  # imports, reading, dev evaluations, the last checkpoint
PROBE_SECONDS = float(E("PROBE_SECONDS", "1e9"))  # pace is known after 100 s at the earliest, when kernels are found
BASE_SLOTS = int(E("BASE_SLOTS", "5"))
EVALUATIONS = int(E("EVALUATIONS", "3"))  # at once, while trainings run; twice as many after
SEEDS = int(E("SEEDS", "3"))
GUESS = {
    "base": int(E("BASE_STEPS", "2400")),
    "scratch": int(E("SCRATCH_STEPS", "2400")),
    "tiny": int(E("TINY_STEPS", "2750")),
}
SECONDS = {"base": BASE_SECONDS, "scratch": SCRATCH_SECONDS, "tiny": TINY_SECONDS}
MULTIPLE = {"base": 50, "scratch": 100, "tiny": 50}
BASE, TINY = E("BASE", "base"), E("TINY", "tiny.en")
EXTRA = shlex.split(E("EXTRA", ""))  # for dry runs
EVALUATE = shlex.split(E("EVALUATE", "--device cuda --no-vad --batch-size 64"))
ONLY = E("ONLY", "")  # names of trainings, separated by commas

COMMON = [
    "run.epochs=none",
    "run.tensorboard=false",
    "run.sample_texts=2",
    "checkpoint.keep=1",
    "checkpoint.keep_best=1",
    "data.buckets=32",
    "data.vocabulary=char",
]
FINE = [
    "data.batch_seconds=160",
    "data.workers=1",
    "optimizer.peak_lr=6e-4",
    "optimizer.lr_scales.encoder=0.2",
    "optimizer.warmup_steps=150",
    "optimizer.ema=0.99",
    "masks.time_masks=2",
]
DECODER = ["model.decoder_layers=3", "model.decoder_dropout=0.2"]
SCRATCH = ["data.batch_seconds=200", "optimizer.peak_lr=8e-4", "optimizer.warmup_steps=500", "optimizer.ema=0.99"]
AUGMENT = [
    f"augment.noises=['{NOISE}/sc_*.flac','{NOISE}/sb_noise*.flac']",
    f"augment.rooms=['{NOISE}/sb_rir*.flac','{NOISE}/lh_*.flac']",
    "augment.noise_probability=0.3",
    "augment.room_probability=0.2",
    "data.workers=2",
]
PLAIN = [
    "augment.speeds=[1.0]",
    "augment.gain_probability=0",
    "masks.time_masks=0",
    "masks.frequency_masks=0",
    "data.workers=1",
]
HYBRID = ["objective.ctc_weight=0.5"]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')} +{time.monotonic() - BEGUN:5.0f}s] {text}", flush=True)


BEGUN = time.monotonic()


@dataclass
class Job:
    name: str
    kind: str
    recipe: str
    sets: list[str]
    process: subprocess.Popen | None = None
    since: float = 0.0
    tried: int = 0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = WORK / "logs" / f"{self.name}.log"

    @property
    def folder(self) -> Path:
        return WORK / "runs" / self.name

    @property
    def done(self) -> bool:
        return (self.folder / "model" / "training.json").exists()

    def command(self, steps: int) -> list[str]:
        times = 3 if self.recipe == "attention" else 5  # it writes token by token: its evaluations take longest
        sets = [
            *COMMON,
            f"run.steps={steps}",
            f"run.evaluate_every={max(1, -(-steps // times))}",
            f"run.max_minutes={(SECONDS[self.kind] + 20) / 60:.2f}",
            *self.sets,
            *EXTRA,
        ]
        words = ["train", self.recipe]
        for corpus in ("ls", "so"):
            words += ["--train", str(D / corpus / "train.jsonl.gz"), "--dev", str(D / corpus / "dev.jsonl.gz")]
        words += ["-o", str(self.folder)]
        for each in sets:
            words += ["--set", each]
        return [PYTHON, "-m", "stapes", *words, "--resume"]

    def start(self, steps: int) -> None:
        self.tried += 1
        command = self.command(steps)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "command.txt").write_text(shlex.join(["stapes", *command[3:-1]]) + "\n")
        say(f"start {self.name}: {steps} steps")
        self.process = subprocess.Popen(
            command, stdout=self.log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
        )
        self.since = time.monotonic()

    def end(self) -> None:
        """At once, with its readers of audio (its own process group)."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def lines(self, kind: str) -> list[dict]:
        found = []
        try:
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                if (value := json.loads(line)).get("kind") == kind:
                    found.append(value)
        except (OSError, ValueError):
            pass
        return found

    def pace(self) -> float | None:
        """Steps a second, of the last lines of its log."""
        lines = self.lines("train")[-8:]
        if len(lines) < 3:
            return None
        return (lines[-1]["step"] - lines[0]["step"]) / max(1e-6, lines[-1]["time"] - lines[0]["time"])


def jobs() -> list[Job]:
    out = [
        Job("scratch-ctc", "scratch", "ctc", [*SCRATCH, *AUGMENT, "seed=0"]),
        Job("scratch-ctc-plain", "scratch", "ctc", [*SCRATCH, *PLAIN, "seed=0"]),
        Job("scratch-hybrid", "scratch", "hybrid", [*SCRATCH, *AUGMENT, *DECODER, *HYBRID, "seed=0"]),
        Job("scratch-attention", "scratch", "attention", [*SCRATCH, *AUGMENT, *DECODER, "seed=0"]),
        Job("tiny-ctc", "tiny", "whisper_ctc", [*FINE, f"model.init={TINY}", "seed=0"]),
    ]
    makes = {"ctc": [], "hybrid": [*DECODER, *HYBRID], "attention": DECODER}
    # All three, then second seeds: what is cut off by the time limit is a third seed.
    for seed in range(SEEDS):
        for kind in ("hybrid", "ctc", "attention"):
            out.append(
                Job(f"base-{kind}-{seed}", "base", kind, [*FINE, f"model.init={BASE}", *makes[kind], f"seed={seed}"])
            )
    wanted = [name for name in ONLY.split(",") if name]
    return [job for job in out if not wanted or job.name in wanted]


class Steps:
    """How many steps each kind makes; kept, so that going on makes as many."""

    def __init__(self) -> None:
        self.file = WORK / "steps.json"
        self.known: dict[str, int] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def of(self, kind: str) -> int:
        return self.known.get(kind, GUESS[kind])

    def fix(self, kind: str, steps: int) -> None:
        self.known[kind] = steps
        self.file.write_text(json.dumps(self.known))


def fitting(group: list[Job], kind: str) -> int | None:
    """Steps that fit into the kind's time at the pace of the slowest."""
    paces = {job.name: job.pace() for job in group}
    say(
        f"pace of {kind}: " + ", ".join(f"{name} {pace:.2f}/s" if pace else f"{name} ?" for name, pace in paces.items())
    )
    known = [pace for pace in paces.values() if pace]
    if not known:
        return None
    steps = min(known) * (SECONDS[kind] - START_SECONDS)
    return max(MULTIPLE[kind], int(steps / MULTIPLE[kind]) * MULTIPLE[kind])


def adapt(running: list[Job], steps: Steps, *, keep: bool) -> None:
    for kind in ("base", "scratch", "tiny"):
        group = [job for job in running if job.kind == kind]
        if not group or kind in steps.known:
            continue
        fits = fitting(group, kind)
        guess = steps.of(kind)
        if fits is None or (keep and 0.8 * guess <= fits <= 1.5 * guess):
            say(f"{kind}: {guess} steps stay (fit: {fits})")
            steps.fix(kind, guess)
            continue
        say(f"{kind}: {fits} steps in place of {guess}: start again")
        steps.fix(kind, fits)
        if keep:
            for job in group:
                job.end()
                shutil.rmtree(job.folder, ignore_errors=True)
                job.tried = 0
                job.start(fits)


def bring_home(job: Job) -> None:
    to = OUT / "runs" / job.name
    to.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "command.txt", "model/training.json"):
        if (job.folder / name).exists():
            shutil.copy(job.folder / name, to / Path(name).name)
    if job.kind == "tiny" and (job.folder / "model").exists():
        shutil.copytree(job.folder / "model", OUT / "tiny-ctc-model", dirs_exist_ok=True)


def evaluations(job: Job) -> list[tuple[str, list[str]]]:
    out = []
    for corpus in ("ls", "so"):
        # Under a name that tells, which results take over; its audio is named by absolute paths.
        manifest = WORK / "manifests" / f"{'librispeech' if corpus == 'ls' else 'speechocean762'}-test.jsonl.gz"
        manifest.parent.mkdir(exist_ok=True)
        if not manifest.exists():
            manifest.write_bytes((D / corpus / "test.jsonl.gz").read_bytes())
        folder = WORK / "results" / corpus / job.name
        if not (folder / "result.json").exists():
            words = ["evaluate", str(job.folder / "model"), str(manifest), "-o", str(folder), *EVALUATE]
            out.append((f"{corpus}/{job.name}", [PYTHON, "-m", "stapes", *words]))
    return out


def everything() -> None:
    steps, waiting, running = Steps(), list(jobs()), []
    to_judge: list[tuple[str, list[str]]] = []
    judging: list[tuple[str, subprocess.Popen, float]] = []
    for job in list(waiting):
        if job.done:
            waiting.remove(job)
            to_judge += evaluations(job)
    adapted = False
    first = time.monotonic()
    while waiting or running or to_judge or judging:
        now = time.monotonic()
        elapsed = now - BEGUN
        for job in list(running):
            code = job.process.poll()
            if code is None and now - job.since > SECONDS[job.kind] + 75:
                say(f"{job.name}: ended by force")
                job.end()
                code = -9
            if code is not None:
                running.remove(job)
                last = job.lines("dev")[-1:] or [{}]
                say(
                    f"{job.name}: exit {code}, {now - job.since:.0f} s, step {last[0].get('step')}, dev WER {last[0].get('wer')}, CER {last[0].get('cer')}"
                )
                job.process = None
                bring_home(job)
                if job.done:
                    to_judge += evaluations(job)
                elif job.tried < 2 and elapsed < MAX_SECONDS / 2:
                    waiting.insert(0, job)
                else:
                    say(f"{job.name}: GIVEN UP, see {job.log}: " + job.log.read_text(errors="replace")[-600:])
        for job in list(waiting):
            late = elapsed + SECONDS[job.kind] > MAX_SECONDS - 45
            if late:
                say(f"{job.name}: left out, {MAX_SECONDS - elapsed:.0f} s are left")
                waiting.remove(job)
            elif job.kind != "base" or sum(each.kind == "base" for each in running) < BASE_SLOTS:
                waiting.remove(job)
                running.append(job)
                job.start(steps.of(job.kind))
        if not adapted and now - first > PROBE_SECONDS:
            adapted = True
            adapt(running, steps, keep=True)
        for each in list(judging):
            name, process, since = each
            if process.poll() is not None or now - since > 240:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                judging.remove(each)
                result = WORK / "results" / name / "result.json"
                wer = json.loads(result.read_text())["wer"]["value"] if result.exists() else None
                say(f"judged {name}: exit {process.returncode}, {now - since:.0f} s, WER {wer}")
                if result.exists():
                    (OUT / "results").mkdir(parents=True, exist_ok=True)
                    with tarfile.open(OUT / "results" / f"{name.replace('/', '-')}.tar.gz", "w:gz") as tar:
                        tar.add(result.parent, arcname=name)
        while to_judge and len(judging) < (EVALUATIONS if running else 3 * EVALUATIONS):
            name, command = to_judge.pop(0)
            (WORK / "results" / name).parent.mkdir(parents=True, exist_ok=True)
            log = (WORK / "logs" / f"evaluate-{name.replace('/', '-')}.log").open("ab")
            judging.append((name, subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True), now))
        if elapsed > MAX_SECONDS + 90:
            say("time is over: the same command goes on")
            for job in running:
                job.end()
            for _, process, _ in judging:
                os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.5)
    summary()
    say("DONE train all")


def probe() -> None:
    running = list(jobs())
    chosen, base = [], 0
    for job in running:
        base += job.kind == "base"
        if job.kind != "base" or base <= BASE_SLOTS:
            job.name = f"probe-{job.name}"
            job.__post_init__()
            shutil.rmtree(job.folder, ignore_errors=True)
            chosen.append(job)
            job.start(GUESS[job.kind])
    time.sleep(PROBE_SECONDS)
    for kind in ("base", "scratch", "tiny"):
        group = [job for job in chosen if job.kind == kind]
        if group:
            say(f"{kind}: {fitting(group, kind)} steps fit into {SECONDS[kind]:.0f} s (guess {GUESS[kind]})")
    for job in chosen:
        code = job.process.poll()
        last = job.lines("train")[-1:] or [{}]
        say(
            f"{job.name}: running {code is None}; "
            + ", ".join(
                f"{key} {last[0].get(key)}"
                for key in (
                    "step",
                    "loss",
                    "audio_seconds_per_second",
                    "padding_share",
                    "gpu_memory_peak_bytes",
                    "gpu_utilisation",
                )
            )
        )
        if code is not None:
            say(job.log.read_text(errors="replace")[-800:])
        job.end()
        shutil.rmtree(job.folder, ignore_errors=True)
    say("DONE train probe")


def summary() -> None:
    rows = []
    for job in jobs():
        if not job.done:
            continue
        cost = json.loads((job.folder / "model" / "training.json").read_text())
        row = [
            job.name,
            f"{cost['steps']} steps",
            f"{60 * cost['hours']:.1f} min",
            f"{cost['audio_seconds_per_second']:.0f} audio s/s",
            f"{cost.get('peak_memory_bytes', 0) / 1e9:.1f} GB",
        ]
        for corpus in ("ls", "so"):
            file = WORK / "results" / corpus / job.name / "result.json"
            if file.exists():
                found = json.loads(file.read_text())
                row.append(f"{corpus} WER {100 * found['wer']['value']:.2f} CER {100 * found['cer']['value']:.2f}")
        best = min((line["wer"] for line in job.lines("dev")), default=None)
        rows.append(" | ".join([*row, f"dev WER {best}"]))
    text = "\n".join(rows)
    print(text, flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "summary.txt").write_text(text + "\n")


if __name__ == "__main__":
    for place in (WORK / "logs", WORK / "runs", WORK / "results", OUT):
        place.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    {"all": everything, "probe": probe, "summary": summary}[sys.argv[1] if len(sys.argv) > 1 else "all"]()
