"""Which cross-attention heads of the published models follow the speech: what word times are read from.

openai/whisper publishes them by name (``_ALIGNMENT_HEADS`` in ``whisper/__init__.py``). A ``.pt`` file does not say its
name, so they are found by the network's sizes, which tell all but large-v1 and large-v2 apart; these two by the
SHA-256 that their download addresses carry. A fine-tuned model keeps the heads of the one it came from.
"""

from __future__ import annotations

from pathlib import Path

from stapes.checkpoints.files import sha256
from stapes.models.whisper import WhisperConfig

Heads = tuple[tuple[int, int], ...]
_ByLayer = dict[int, tuple[int, ...]]

# Vocabulary, width, encoder layers, decoder layers → decoder layer → heads.
_BY_SIZE: dict[tuple[int, int, int, int], _ByLayer] = {
    (51864, 384, 4, 4): {1: (0,), 2: (0, 5), 3: (0, 1, 2, 3, 4)},  # tiny.en
    (51865, 384, 4, 4): {2: (2,), 3: (0, 2, 3, 4, 5)},  # tiny
    (51864, 512, 6, 6): {3: (3,), 4: (7,), 5: (1, 5, 7)},  # base.en
    (51865, 512, 6, 6): {3: (1,), 4: (2, 3, 7), 5: (1, 2, 4, 6)},  # base
    (51864, 768, 12, 12): {
        6: (6,),
        7: (0, 3, 8),
        8: (2, 5, 7),
        9: (0, 4, 8, 10),
        10: (0, 1, 2, 3, 6, 11),
        11: (2, 4),
    },  # small.en
    (51865, 768, 12, 12): {5: (3, 9), 8: (0, 4, 7, 8), 9: (0, 7, 9), 10: (5,)},  # small
    (51864, 1024, 24, 24): {
        11: (4,),
        14: (1, 12, 14),
        15: (4,),
        16: (0, 4, 9),
        17: (12, 14),
        18: (7, 10, 15),
        20: (0, 3, 9, 14),
        21: (12,),
    },  # medium.en
    (51865, 1024, 24, 24): {13: (15,), 15: (4, 15), 16: (1,), 20: (0,), 23: (4,)},  # medium
    (51866, 1280, 32, 32): {
        7: (0,),
        10: (17,),
        12: (18,),
        13: (12,),
        16: (1,),
        17: (14,),
        19: (11,),
        21: (4,),
        24: (1,),
        25: (6,),
    },  # large-v3
    (51866, 1280, 32, 4): {2: (4, 11), 3: (3, 6, 11, 14)},  # turbo
}
_LARGE = (51865, 1280, 32, 32)
_BY_SHA256: dict[str, _ByLayer] = {
    # large-v1
    "e4b87e7e0bf463eb8e6956e646f1e277e901512310def2c24bf0e11bd3c28e9a": {
        9: (19,),
        11: (2, 4, 17),
        22: (7, 11, 17),
        23: (2, 15),
    },
    # large-v2
    "81f7c96c852ee8fc832187b0132e569d6c3065a3252ed18e56effd0b6a73e524": {
        10: (12,),
        13: (17,),
        16: (11, 12, 13),
        17: (15, 16),
        18: (4, 11, 19),
        19: (11,),
        21: (2, 3),
        22: (3, 9, 12),
        23: (5, 7, 13),
        25: (5,),
        26: (1, 12),
        27: (15,),
    },
}


def published_heads(config: WhisperConfig, file: Path) -> Heads | None:
    """The (decoder layer, head) pairs published for a network of these sizes, read from ``file``; None: not known."""
    sizes = (config.vocab_size, config.width, config.encoder_layers, config.decoder_layers)
    layers = _BY_SIZE.get(sizes)
    if sizes == _LARGE and file.is_file():
        layers = _BY_SHA256.get(sha256(file))
    return tuple((layer, head) for layer, heads in layers.items() for head in heads) if layers else None
