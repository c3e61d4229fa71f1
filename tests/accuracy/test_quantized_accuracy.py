"""What 8 and 4 bits cost in words: Whisper base on LibriSpeech, in the CPU's fp32 on the weights that they stand for.

The kernels compute on those very weights, up to rounding (tests/kernels, tests/inference/test_quantized.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from corpora import DATA
from scoring import word_errors
from torch import Tensor, nn

from stapes.checkpoints import catalog
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.devices.backend import resolve
from stapes.inference.quantized import bits_of
from stapes.kernels.quantization import dequantize, quantize_int4, quantize_int8
from stapes.loading import assemble
from stapes.models.whisper import Whisper

FOLDER = DATA / "librispeech"


@cache
def word_error_rate(precision: str) -> float:
    """Percent, on every third clip of the test split."""
    rows = [json.loads(line) for line in (FOLDER / "manifest.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "test"][::3]
    found = catalog.find("base", None)
    assert found is not None
    checkpoint = open_checkpoint(found.path, "base", found.parts)
    with torch.device("meta"):
        modules = dict(Whisper(checkpoint.config).named_modules())

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, weight in checkpoint.read():
            path, _, leaf = name.rpartition(".")
            module = modules[path]
            if precision != "fp32" and leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding):
                wanted = 4 if precision == "int4" and isinstance(module, nn.Linear) else 8
                bits = bits_of(path, checkpoint.config.width, weight.shape[1], wanted)
                yield name, dequantize(quantize_int4(weight) if bits == 4 else quantize_int8(weight))
            else:
                yield name, weight

    tokenizer = open_tokenizer(checkpoint, None)
    recognizer = assemble("base", replace(checkpoint, read=read), tokenizer, resolve("cpu"), torch.float32, 3)
    texts = [recognizer.transcribe(FOLDER / row["audio"], language="en").text for row in rows]
    recognizer.close()
    return word_errors([row["text"] for row in rows], texts, "en").rate


@pytest.mark.data
@pytest.mark.accuracy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("precision", "most"), [("int8", 0.2), ("int4", 0.5)])
def test_quantised_weights_cost_few_words(precision: str, most: float) -> None:
    assert word_error_rate(precision) <= word_error_rate("fp32") + most
