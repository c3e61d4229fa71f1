"""Any system by its name: our recogniser, or a peer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

import stapes
from stapes.checkpoints import catalog
from stapes.errors import ModelError, StapesError, UsageError
from stapes.evaluation.peers import Peer, is_peer, open_peer
from stapes.evaluation.results import ModelFacts
from stapes.evaluation.training_cost import read_cost
from stapes.options import Backend, Precision, TranscribeOptions
from stapes.progress import Progress
from stapes.recognizer import Recognizer

_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def precision_of(recognizer: Recognizer, asked: Precision) -> str:
    """The number format that a recogniser runs in, which was loaded with ``--precision`` so."""
    folder = getattr(getattr(recognizer.engine, "model", None), "folder", None)
    if folder is not None and folder.scheme is not None:  # an exported model says itself what it is
        return folder.scheme
    return asked if asked in ("fp8", "int8", "int4") else _PRECISIONS[recognizer.engine.dtype]


class Stapes:
    """Our recogniser as one of the systems: the same engine, options and batches as ``stapes transcribe``."""

    system = "stapes"

    def __init__(self, recognizer: Recognizer, options: TranscribeOptions, facts: ModelFacts) -> None:
        self._recognizer, self._options, self.facts = recognizer, options, facts
        self.work: dict[str, float] = {}
        device = recognizer.device.torch
        self.gpu: int | None = device.index if device.type == "cuda" else None

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """As ``Recognizer.transcribe_many``. A language that this multilingual model does not know is not told."""
        if language is not None and not self._recognizer.family.can_be_told(language):
            language = None
        for transcript in self._recognizer.transcribe_many(paths, replace(self._options, language=language)):
            assert transcript.path is not None
            error = transcript.error
            self.work = {
                "windows": len({segment.seek for segment in transcript.segments}),
                "tokens": sum(len(segment.tokens) for segment in transcript.segments),
            }
            yield transcript.path, transcript.text.strip() if error is None else ModelError(error)

    def close(self) -> None:
        """Let go of the model."""
        self._recognizer.close()


def open_system(
    name: str,
    options: TranscribeOptions | None = None,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    backend: Backend = "auto",
    max_vram: str | None = None,
    threads: int | None = None,
    model_dir: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    adapter: str | None = None,
    draft: str | None = None,
    draft_tokens: int = 5,
) -> Peer:
    """Load our model of this name, folder, id or file (as ``stapes.load``), or the peer that it names.

    Raises what ``stapes.load`` and ``open_peer`` raise.
    """
    options = options or TranscribeOptions()
    if is_peer(name):
        if adapter is not None:
            raise UsageError(f"--adapter is for our own models, and {name} is a peer: leave it out")
        if draft is not None:
            raise UsageError(f"--draft is for our own models, and {name} is a peer: leave it out")
        return open_peer(name, options=options, device=device, threads=threads, model_dir=model_dir, offline=offline)
    recognizer = stapes.load(
        name,
        device=device,
        precision=precision,
        backend=backend,
        max_vram=max_vram,
        threads=threads,
        model_dir=model_dir,
        offline=offline,
        language=options.language,
        progress=progress,
        adapter=adapter,
        draft=draft,
        draft_tokens=draft_tokens,
    )
    location = catalog.find(name, model_dir)
    facts = ModelFacts(
        name=recognizer.name,
        path=str(location.path) if location else None,
        precision=precision_of(recognizer, precision),
        device=recognizer.device.name,
        parameters=recognizer.family.parameters,
        training_cost=read_cost(location.path) if location else None,
    )
    return Stapes(recognizer, options, facts)


def weights_size(name: str, model_dir: str | None = None) -> int | None:
    """Bytes of our model on this machine; None for a peer and for one that is not here."""
    location = None if is_peer(name) else catalog.find(name, model_dir)
    return location.size if location else None
