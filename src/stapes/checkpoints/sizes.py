"""The networks of the published models, by name, for those who need a network and not its weights."""

from __future__ import annotations

from stapes.checkpoints.catalog import ALIASES, KNOWN
from stapes.errors import UsageError
from stapes.models.whisper import WhisperConfig

# Width, encoder layers, decoder layers; a head is 64 wide. Source: the config.json of each on the Hugging Face Hub.
_SIZES = {
    "tiny": (384, 4, 4),
    "base": (512, 6, 6),
    "small": (768, 12, 12),
    "medium": (1024, 24, 24),
    "large": (1280, 32, 32),
    "turbo": (1280, 32, 4),
    "distil-small": (768, 12, 4),
    "distil-medium": (1024, 24, 2),
    "distil-large": (1280, 32, 2),
}
_HEAD = 64


def published_config(name: str) -> WhisperConfig:
    """The sizes of the published model called ``name`` (``stapes models`` lists them). Raises UsageError."""
    name = ALIASES.get(name, name)
    known = KNOWN.get(name)
    if known is None:
        raise UsageError(f"{name!r} is no published model whose size is known: say one of {', '.join(KNOWN)}")
    kind = name.removesuffix(".en").partition("-v")[0]
    width, encoder_layers, decoder_layers = _SIZES[kind]
    heads = width // _HEAD
    return WhisperConfig(
        # large-v3 and what came from it hear finer and know Cantonese.
        mel_bins=128 if known.languages == 100 else 80,
        vocab_size=51766 + known.languages if known.languages > 1 else 51864,
        width=width,
        encoder_layers=encoder_layers,
        encoder_heads=heads,
        decoder_layers=decoder_layers,
        decoder_heads=heads,
    )
