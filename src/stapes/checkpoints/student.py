"""A Whisper with fewer decoder layers, cut from a larger one: where distillation starts from.

Source: distil-whisper (Gandhi, von Platen, Rush 2023, https://arxiv.org/abs/2311.00430), ``create_student_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.errors import UsageError

_LAYERS = "decoder.layers."


def spread_layers(layers: int, kept: int) -> tuple[int, ...]:
    """Which of so many layers to keep: the last, the first, and those spread evenly between them."""
    steps = max(1, kept - 1)
    return (*((layers - 1) * i // steps for i in range(kept - 1)), layers - 1)


def with_decoder_layers(checkpoint: WhisperCheckpoint, kept: int, which: Sequence[int] = ()) -> WhisperCheckpoint:
    """The same model with only so many of its decoder layers: ``which``, or else those of `spread_layers`.

    Raises UsageError where it has not as many, or not these.
    """
    layers = checkpoint.config.decoder_layers
    if checkpoint.scheme is not None:
        raise UsageError(f"{checkpoint.name} is quantised: make the student of the model that it was made of")
    if not 1 <= kept <= layers:
        raise UsageError(f"{checkpoint.name} has {layers} decoder layers: a student of it can have 1 to {layers}")
    chosen = tuple(which) or spread_layers(layers, kept)
    if len(chosen) != kept or sorted({*chosen} & {*range(layers)}) != list(chosen):
        raise UsageError(
            f"layers {', '.join(map(str, chosen))} cannot be those of a student with {kept} decoder layers: name as "
            f"many of {checkpoint.name}'s, 0 to {layers - 1}, in their order"
        )
    places = {old: new for new, old in enumerate(chosen)}

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in checkpoint.read():
            if not name.startswith(_LAYERS):
                yield name, tensor
                continue
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            if int(number) in places:
                yield f"{_LAYERS}{places[int(number)]}.{rest}", tensor

    heads = tuple((places[layer], head) for layer, head in checkpoint.alignment_heads or () if layer in places)
    config = replace(checkpoint.config, decoder_layers=kept)
    return replace(checkpoint, config=config, read=read, alignment_heads=heads or None)
