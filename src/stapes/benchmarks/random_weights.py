"""Networks of published sizes that know nothing: what a model takes in time and memory, without its weights.

Speed does not depend on what the weights are, only on how many tokens they make the decoder write; so that number is
fixed. Everything else is the real thing: the same engine, batches, windows and speech detection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import torch
from torch import Tensor

from stapes.checkpoints.alignment import published_heads
from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint
from stapes.checkpoints.sizes import published_config
from stapes.devices.backend import choose_dtype, resolve
from stapes.errors import UsageError
from stapes.loading import assemble
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids
from stapes.options import Precision, TranscribeOptions
from stapes.recognizer import Recognizer
from stapes.text.tokenizers import LANGUAGES, WhisperTokenizer

_SCALE = 0.02
"""Standard deviation of the matrices: small enough that no activation overflows in half precision."""


def without_judgement(options: TranscribeOptions) -> TranscribeOptions:
    """The options with nothing that looks at the text: noise would be tried again at every temperature."""
    return replace(
        options,
        without_timestamps=True,
        temperature_increment_on_fallback=None,
        logprob_threshold=None,
        no_speech_threshold=None,
        compression_ratio_threshold=None,
    )


def load_random(
    name: str,
    *,
    tokens: int,
    device: str = "auto",
    precision: Precision = "auto",
    threads: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> Recognizer:
    """A recogniser of the published size ``name`` with random weights; every window becomes ``tokens`` tokens.

    That holds for the default ``suppress_tokens`` and for options ``without_judgement``.
    Raises UsageError for a name whose size is not known, and for more tokens than a window can have.
    """
    config = published_config(name)
    if not 1 <= tokens <= config.text_context - 8:
        raise UsageError(f"--tokens is {tokens}: a window holds 1 to {config.text_context - 8}")
    if threads is not None:
        torch.set_num_threads(threads)
    where = resolve(device)
    dtype = choose_dtype(precision, where)
    tokenizer = random_tokenizer(config)
    checkpoint = WhisperCheckpoint(
        name=name,
        path=Path(f"random-{name}"),
        config=config,
        read=lambda: random_weights(config, seed, dtype, where.torch),
        tokenizer=None,
        alignment_heads=published_heads(config, Path(f"random-{name}")),
        # Text only: the end would cut a window short, and a time would make the rest of it be heard again.
        suppress_tokens=text_only(tokenizer, config.vocab_size),
    )
    int8_cache = precision in ("fp8", "int8", "int4")
    recognizer = assemble(name, checkpoint, tokenizer, where, dtype, batch_size, precision, int8_cache)
    recognizer.engine.exact_tokens = tokens
    return recognizer


def text_only(tokenizer: WhisperTokenizer, vocab_size: int) -> tuple[int, ...]:
    """What to suppress so that a window never ends by itself: all that is no text, and what text never needs."""
    return tuple(sorted({*tokenizer.non_speech_tokens(), *range(tokenizer.eot, vocab_size)}))


def random_weights(
    config: WhisperConfig, seed: int, dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights by our names, the embedding first: normal matrices, norms that change nothing. Made on the device."""
    device = device or torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Whisper(config).named_parameters()}
    for name in sorted(shapes, key=lambda each: each != EMBEDDING):  # the embedding first, then as they stand
        if name == "encoder.positions":
            yield name, sinusoids(config.audio_context, config.width)
        elif "norm" in name:
            yield name, torch.full(shapes[name], float(name.endswith("weight")), dtype=dtype, device=device)
        else:
            yield name, torch.empty(shapes[name], dtype=dtype, device=device).normal_(0.0, _SCALE, generator=generator)


def random_tokenizer(config: WhisperConfig) -> WhisperTokenizer:
    """A tokenizer of the right size and markers; its text tokens are all bytes, then made-up words."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    end = 50257 if config.is_multilingual else 50256
    words = ("Ġ" + "".join(each) for each in product(ascii_lowercase, repeat=4))
    vocabulary = {token: id for id, token in enumerate([*letters, *islice(words, end - len(letters))])}
    # English-only models have the markers of the languages too.
    languages = list(LANGUAGES)[: max(99, config.languages)]
    markers = ["endoftext", "startoftranscript", *languages, "translate", "transcribe", "startoflm", "startofprev"]
    markers += ["nospeech", "notimestamps"]
    return WhisperTokenizer(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "added_tokens": [{"id": end + n, "content": f"<|{marker}|>"} for n, marker in enumerate(markers)],
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "vocab": vocabulary,
                "merges": [],
            },
        },
        vocab_size=config.vocab_size,
    )
