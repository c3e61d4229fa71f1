"""LoRA adapters of Whisper in peft's layout: ``adapter_config.json`` and ``adapter_model.safetensors``, a few MB.

An adapter is read beside any copy of its base, in whatever format that is, and merged into each matrix as it passes by:
everything behind the loader sees a Whisper like any other. peft's layout is Hugging Face's (huggingface/peft,
``LoraConfig``), with the names of ``transformers`` before ``base_model.model.``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stapes.checkpoints.catalog import ALIASES, KNOWN, repository_of
from stapes.checkpoints.files import ADAPTER_SETTINGS as SETTINGS
from stapes.checkpoints.folders import written_whole
from stapes.checkpoints.formats import WhisperCheckpoint, whisper_names
from stapes.checkpoints.huggingface import reused_languages
from stapes.checkpoints.save import write_generation
from stapes.errors import ModelError
from stapes.models.low_rank import DOWN, UP, merge
from stapes.models.whisper import WhisperConfig
from stapes.text.files import read_json

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {"lora_A.weight": DOWN, "lora_B.weight": UP}


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk."""

    path: Path
    base: str | None
    """What it was trained on, as its settings say it: a name, a Hugging Face id, a path."""
    scale: float
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    """Our name of a weight → the thin matrix that is applied first, and the one after it."""
    language_tokens: Mapping[str, str]
    """Languages that took over another one's token."""


def base_of(folder: Path) -> str:
    """The model that an adapter belongs to: its name in the catalogue, or what the settings say.

    Raises ModelError where they do not.
    """
    base = read_json(folder / SETTINGS).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{folder / SETTINGS} does not say which model it adapts: name it, --model BASE --adapter {folder}"
        )
    return next((name for name, known in KNOWN.items() if known.repository == base), base)


def base_to_say(model: str) -> str:
    """How an adapter's settings call the model it belongs to: by its Hugging Face id, or by its path."""
    if model in KNOWN or model in ALIASES:
        return repository_of(model) or model
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def read_adapter(folder: Path, config: WhisperConfig) -> Adapter:
    """Read an adapter for a Whisper of these sizes.

    Raises ModelError for one that is missing or damaged, belongs to another network, or is of a kind that cannot be
    merged (DoRA, adapted convolutions or embeddings, trained biases).
    """
    settings = read_json(folder / SETTINGS)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if settings.get("peft_type") != "LORA" or type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(
            f"{folder / SETTINGS} is no LoRA adapter of one rank: give one that `stapes train` or peft wrote"
        )
    odd = [name for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if settings.get(name)]
    if odd or settings.get("bias", "none") != "none" or settings.get("fan_in_fan_out"):
        raise ModelError(f"{folder / SETTINGS} has {', '.join(odd) or 'bias'}, which is not read: merge it with peft")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / WEIGHTS} cannot be read ({error}): copy the adapter again") from None
    names = {huggingface: ours for ours, huggingface, _ in whisper_names(config)}
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        path, part = next(
            ((key.removesuffix(f".{end}"), our) for end, our in _PARTS.items() if key.endswith(end)), ("", "")
        )
        ours = names.get(f"{path.removeprefix(_PREFIX)}.weight")
        if ours is None or tensor.ndim != 2:
            raise ModelError(f"{folder / WEIGHTS} has {key}, which is no adapter of this model: give it its own base")
        found.setdefault(ours, {})[part] = tensor
    broken = [name for name, parts in found.items() if parts.keys() != {DOWN, UP}]
    if broken or not found:
        raise ModelError(
            f"{folder / WEIGHTS} lacks half of {', '.join(broken[:3]) or 'everything'}: copy the adapter again"
        )
    scale = alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank
    return Adapter(
        folder,
        settings.get("base_model_name_or_path"),
        scale,
        {name: (parts[DOWN], parts[UP]) for name, parts in found.items()},
        reused_languages(folder),
    )


def with_adapter(checkpoint: WhisperCheckpoint, folder: Path, share: float = 1.0) -> WhisperCheckpoint:
    """A model with an adapter, or so much of it, merged into it while it is read. Raises ModelError."""
    adapter = read_adapter(folder, checkpoint.config)
    if checkpoint.stored is not None:
        raise ModelError(f"{checkpoint.path} is quantised: merge {folder} into the model before, then quantise that")

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in checkpoint.read():
            if name in adapter.matrices:
                down, up = adapter.matrices[name]
                if (up.shape[0], down.shape[1]) != tensor.shape or up.shape[1] != down.shape[0]:
                    raise ModelError(
                        f"{folder} is of a model of another size than {checkpoint.path}: give its own base"
                    )
                tensor = merge(tensor, down, up, share * adapter.scale)
            yield name, tensor

    languages = {**checkpoint.language_tokens, **adapter.language_tokens}
    return replace(checkpoint, read=read, language_tokens=languages)


def add_adapters(
    folder: Path, checkpoint: WhisperCheckpoint, learnt: Sequence[tuple[Path, float]], *, base: str
) -> None:
    """Write one adapter that does what the adapters of ``learnt`` do together, each to its share.

    B₁A₁ s₁ + B₂A₂ s₂ is [s₁B₁ s₂B₂] [A₁; A₂]: its rank is the sum of theirs. Raises ModelError, OutputError.
    """
    adapters = [(read_adapter(path, checkpoint.config), share) for path, share in learnt]
    ranks = [max(len(down) for down, _ in each.matrices.values()) for each, _ in adapters]
    weights: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for each, _ in adapters for name in each.matrices):
        known = next(each.matrices[name] for each, _ in adapters if name in each.matrices)
        inputs, outputs = known[0].shape[1], known[1].shape[0]
        downs, ups = [], []
        for (each, share), rank in zip(adapters, ranks, strict=True):
            # peft knows one rank: an adapter that leaves a matrix as it is has zeros there.
            down, up = each.matrices.get(name, (torch.zeros(rank, inputs), torch.zeros(outputs, rank)))
            if down.shape != (rank, inputs) or up.shape != (outputs, rank):
                raise ModelError(f"{each.path} is of a model of another size than {learnt[0][0]}: give adapters of one")
            downs.append(down.float())
            ups.append(share * each.scale * up.float())
        path = name.removesuffix(".weight")
        weights[f"{path}.{DOWN}"] = torch.cat(downs).to(known[0].dtype)
        weights[f"{path}.{UP}"] = torch.cat(ups, dim=1).to(known[1].dtype)
    languages = {code: token for each, _ in reversed(adapters) for code, token in each.language_tokens.items()}
    settled = replace(checkpoint, language_tokens={**checkpoint.language_tokens, **languages})
    save_adapter(folder, settled, weights, base=base, alpha=float(sum(ranks)), dropout=0.0)


def save_adapter(
    folder: Path,
    checkpoint: WhisperCheckpoint,
    weights: Mapping[str, Tensor],
    *,
    base: str,
    alpha: float,
    dropout: float,
) -> None:
    """Write an adapter, whole or not at all. Raises OutputError.

    weights: by our names, such as ``encoder.layers.0.attention.query.lora_a``; others than adapters' are left out.
    base: what it was trained on. checkpoint: the same, for what generation needs to know.
    """
    names = {ours: huggingface for ours, huggingface, _ in whisper_names(checkpoint.config)}
    tensors, rank, adapted = {}, 0, []
    for name, tensor in weights.items():
        path, _, part = name.rpartition(".")
        end = next((end for end, our in _PARTS.items() if our == part), None)
        if end is None:
            continue
        theirs = names[f"{path}.weight"].removesuffix(".weight")
        tensors[f"{_PREFIX}{theirs}.{end}"] = tensor.contiguous()
        if part == DOWN:
            rank = len(tensor)
            adapted.append(theirs)
    with written_whole(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        settings = _settings(base, rank, alpha, dropout, _target_modules(names, adapted))
        (temporary / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        write_generation(checkpoint, temporary)


def _target_modules(names: Mapping[str, str], adapted: list[str]) -> list[str]:
    """What peft is told to adapt: the ends of names where all that end so are adapted, else every name."""
    ends = sorted({path.rpartition(".")[2] for path in adapted})
    matching = [theirs.removesuffix(".weight") for theirs in names.values() if theirs.endswith(".weight")]
    everywhere = [path for path in matching if path.rpartition(".")[2] in ends]
    return ends if len(everywhere) == len(adapted) else adapted


def _settings(base: str, rank: int, alpha: float, dropout: float, modules: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
    }
