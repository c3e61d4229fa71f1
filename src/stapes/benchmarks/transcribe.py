"""Transcription by length of the recording, device, precision and batch size, beside other systems."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch

import stapes
from stapes.benchmarks.audio import Recording
from stapes.benchmarks.other_peers import OTHER_PEERS
from stapes.benchmarks.random_weights import load_random, without_judgement
from stapes.benchmarks.records import Weights
from stapes.benchmarks.rounds import Case, Contender
from stapes.checkpoints import catalog
from stapes.checkpoints.onnx_folder import is_onnx, read_onnx_folder
from stapes.checkpoints.sizes import published_config
from stapes.devices.backend import Device, choose_dtype, resolve
from stapes.errors import ModelError, StapesError, UsageError
from stapes.evaluation.normalizers import choose, normalize
from stapes.evaluation.peers import Peer, PeerSettings, open_peer
from stapes.evaluation.results import ModelFacts
from stapes.evaluation.scoring import word_errors
from stapes.evaluation.systems import Stapes, open_system
from stapes.models.whisper import Whisper
from stapes.options import Precision, TranscribeOptions

PEERS = {
    "faster-whisper": "faster-whisper",
    "transformers": "transformers",
    "whisper.cpp": "pywhispercpp",
    "openai-whisper": "openai-whisper",
}
"""Systems that can be measured beside us, and the package each comes in."""

_WARM_UP_SECONDS = 300.0

_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_COMPUTE_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}


@dataclass(frozen=True, kw_only=True)
class TranscribeBench:
    """What to measure. The matrix is every combination of the four lists.

    ``peers``: NAME or NAME?OPTION=VALUE; the option ``model`` is for those that cannot open ours. ``random_tokens``:
    random weights of the size of ``model``, every window made to write so many tokens; None: the real ones.
    """

    model: str
    recordings: list[Recording]
    warm_up: Recording
    """Heard before recordings that are too long to be heard twice."""
    devices: tuple[str, ...] = ("auto",)
    precisions: tuple[Precision, ...] = ("auto",)
    batch_sizes: tuple[int, ...] = (8,)
    peers: tuple[str, ...] = ()
    options: TranscribeOptions
    threads: int | None = None
    random_tokens: int | None = None
    model_dir: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.random_tokens is not None and self.peers:
            raise UsageError("--random-weights and --peer: only our own network can be made without weights; drop one")
        for spec in self.peers:
            _parse(spec)

    def weights(self) -> Weights:
        """Whose weights run. Raises UsageError, ModelError where they are not here."""
        return describe_weights(self.model, self.random_tokens, self.model_dir, offline=self.offline)

    def cases(self) -> Iterator[Case]:
        """The rows. Models stay loaded from one length to the next."""
        for device, precision, batch in product(self.devices, self.precisions, self.batch_sizes):
            where = resolve(device)
            shown = self._shown(precision, where)
            with ExitStack() as loaded:
                systems = _Loading(self, device, precision, shown, batch, loaded)
                for recording in self.recordings:
                    yield Case(
                        {
                            "audio_seconds": recording.seconds,
                            "device": where.backend,
                            "device_name": where.name,
                            "precision": shown,
                            "batch_size": batch,
                            "threads": self.threads or torch.get_num_threads(),
                        },
                        lambda recording=recording, systems=systems: systems.contenders(recording),
                    )

    def _shown(self, precision: Precision, where: Device) -> str:
        """The number format that a precision means for this model on a device."""
        found = None if self.random_tokens is not None else catalog.find(self.model, self.model_dir)
        if found is not None and is_onnx(found.path):
            folder = read_onnx_folder(found.path)
            return folder.scheme or _PRECISIONS[getattr(torch, folder.dtype)]
        dtype = choose_dtype(precision, where)  # refuses what the device cannot do
        return precision if precision in ("fp8", "int8", "int4") else _PRECISIONS[dtype]


def describe_weights(
    model: str, random_tokens: int | None, model_dir: str | None = None, *, offline: bool = False
) -> Weights:
    """Whose weights run, downloaded if need be. random_tokens: as for `TranscribeBench`.

    Raises UsageError for a size that is not known, ModelError where the weights are not here and cannot be had.
    """
    if random_tokens is not None:
        with torch.device("meta"):
            network = Whisper(published_config(model))
        parameters = sum(parameter.numel() for parameter in network.parameters())
        return Weights(name=model, kind="random", parameters=parameters, tokens=random_tokens)
    if catalog.find(model, model_dir) is None:
        catalog.pull(model, model_dir, offline=offline)
    location = catalog.find(model, model_dir)
    if location is None:
        raise ModelError(f"{model} is not on this machine: `stapes models pull {model}`")
    return Weights(name=model, kind="real", sha256=_sha256(location))


class _Loading:
    """The systems of one device, precision and batch size: loaded at the first case, let go of after the last."""

    def __init__(
        self, bench: TranscribeBench, device: str, precision: Precision, shown: str, batch: int, stack: ExitStack
    ) -> None:
        self._bench, self._device, self._stack = bench, device, stack
        self._precision: Precision = precision
        self._shown = shown
        self._options = replace(bench.options, batch_size=batch)
        self._systems: list[tuple[Peer, str]] = []

    def contenders(self, recording: Recording) -> list[Contender]:
        if not self._systems:
            for open_one in (self._ours, *(lambda spec=spec: self._peer(spec) for spec in self._bench.peers)):
                system, options = open_one()
                self._stack.callback(system.close)
                self._systems.append((system, options))
        # On what is measured, so that every shape has been seen; on something shorter where that would take too long.
        warm_up = recording if recording.seconds <= _WARM_UP_SECONDS else self._bench.warm_up
        for system, _ in self._systems:
            _transcribe(system, warm_up.path, self._options.language)
        return [self._contender(system, options, recording) for system, options in self._systems]

    def _ours(self) -> tuple[Peer, str]:
        bench = self._bench
        if bench.random_tokens is None:
            ours = open_system(
                bench.model,
                self._options,
                device=self._device,
                precision=self._precision,
                threads=bench.threads,
                model_dir=bench.model_dir,
                offline=bench.offline,
            )
            return ours, ""
        assert self._options.batch_size is not None
        recognizer = load_random(
            bench.model,
            tokens=bench.random_tokens,
            device=self._device,
            precision=self._precision,
            threads=bench.threads,
            batch_size=self._options.batch_size,
        )
        facts = ModelFacts(name=bench.model, precision=self._shown, device=recognizer.device.name)
        return Stapes(recognizer, without_judgement(self._options), facts), ""

    def _peer(self, spec: str) -> tuple[Peer, str]:
        """The peer on the same model, device, number format, batch size and threads, unless its options say else."""
        system, extra = _parse(spec)
        shown = "&".join(f"{key}={value}" for key, value in sorted(extra.items()))
        bench = self._bench
        model = extra.pop("model", bench.model)
        precision = self._shown.partition("-")[0]
        if system == "faster-whisper":
            extra = {"compute_type": _COMPUTE_TYPES.get(precision, "default"), **extra}
        elif system != "whisper.cpp":  # has one format only
            extra = {"dtype": precision if precision in _PRECISIONS.values() else "fp32", **extra}
        if system in OTHER_PEERS:
            known, opener = OTHER_PEERS[system]
            if unknown := sorted(set(extra) - known):
                raise UsageError(f"{system} has no option {unknown[0]!r}: it has {', '.join(sorted(known))}")
            device = "cuda" if self._device in ("rocm", "hip") else self._device
            settings = PeerSettings(
                model=model,
                extra=extra,
                options=self._options,
                device=device,
                threads=bench.threads,
                model_dir=bench.model_dir,
                offline=bench.offline,
            )
            return opener(settings), shown
        query = "&".join(f"{key}={value}" for key, value in extra.items())
        peer = open_peer(
            f"{system}:{model}?{query}",
            options=self._options,
            device=self._device,
            threads=bench.threads,
            model_dir=bench.model_dir,
            offline=bench.offline,
        )
        return peer, shown

    def _contender(self, system: Peer, options: str, recording: Recording) -> Contender:
        language = self._options.language
        is_random = self._bench.random_tokens is not None

        def judge(text: str) -> Mapping[str, float | None]:
            return {
                "words": float(len(text.split())),
                "wer": None if is_random else _wer(recording.text, text, language),
                **getattr(system, "work", {}),
            }

        return Contender(
            system=system.system,
            version=_version(system.system),
            options=options,
            precision=system.facts.precision,
            run=lambda: _transcribe(system, recording.path, language),
            judge=judge,
            gpu=system.gpu,
        )


def _transcribe(system: Peer, path: Path, language: str | None) -> str:
    ((_, text),) = system.transcribe_many([str(path)], language)
    if isinstance(text, StapesError):
        raise text
    return text


def _wer(spoken: str, written: str, language: str | None) -> float | None:
    """Whether a fast system also wrote what was said; None where the extra that counts errors is not installed."""
    try:
        name = choose("auto", language)
        reference = normalize(spoken, name)
        errors = word_errors(reference, normalize(written, name))
    except UsageError:
        return None
    words = len(reference.split())
    return (errors.substitutions + errors.deletions + errors.insertions) / words if words else None


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    name, _, query = spec.partition("?")
    if name not in PEERS:
        raise UsageError(
            f"--peer {spec}: there is no such peer: say {', '.join(PEERS)}, each with ?OPTION=VALUE if wanted"
        )
    return name, dict(parse_qsl(query, keep_blank_values=True))


def _version(system: str) -> str | None:
    if system == "stapes":
        return stapes.__version__
    try:
        return version(PEERS[system])
    except (PackageNotFoundError, KeyError):
        return None


def _sha256(location: catalog.Location) -> str | None:
    """Of the file of weights, or of all of them in the order of their names."""
    path = location.path
    files: Iterable[Path] = location.parts or (
        [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".bin", ".pt"))
    )
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if list(files) else None


def as_json(corpus_name: str, sha256: str, language: str | None) -> dict[str, Any]:
    """What was heard, as results hold it."""
    return {"corpus": corpus_name, "sha256": sha256, "language": language}
