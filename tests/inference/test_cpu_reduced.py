"""Whisper on CPUs with bf16 units: packed keys and values, attention without a maximum, a vocabulary in 8 bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.audio.features import SAMPLE_RATE
from stapes.benchmarks.random_weights import load_random
from stapes.devices import backend
from stapes.devices.backend import choose_dtype, computes_in_bf16, resolve
from stapes.errors import UsageError
from stapes.inference.cpu import _is_harmless, attend
from stapes.inference.cpu_decoder import CpuTextDecoder
from stapes.inference.packed import Int8Vocabulary, can_pack, pack
from stapes.inference.packed_memory import PackedCrossAttention, PackedRows
from stapes.models.whisper import CrossAttention, Whisper, WhisperConfig
from stapes.options import Precision, TranscribeOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))
from small_whisper import random_weights

CONFIG = WhisperConfig(80, 51865, 64, 1, 4, 2, 4, audio_context=40, text_context=24)
needs_bf16 = pytest.mark.skipif(not computes_in_bf16(), reason="this CPU has no units for bf16")
pytestmark = pytest.mark.skipif(not can_pack(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("queries", [1, 3, 200])
@torch.inference_mode()
def test_packed_keys_and_values_attend_as_others_do(queries: int) -> None:
    torch.manual_seed(0)
    cross = CrossAttention(64, 4)
    packed = PackedCrossAttention(cross)
    states, x = torch.randn(3, 40, 64), torch.randn(3, queries, 64)
    wanted, scores = cross(x, *cross.keys_values(states), [1, 3])
    keys, values = packed.keys_values(states)
    found, ours = packed(x, keys, values, [1, 3])
    assert torch.allclose(found, wanted, atol=1e-5)
    assert ours is not None
    assert scores is not None
    assert torch.allclose(ours, scores, atol=1e-5)
    # Windows move: rows in another order, and some of them.
    kept = keys.room(5), values.room(5)
    for place, (room, rows) in enumerate(zip(kept, (keys, values), strict=True)):
        assert room.shape == (5,)
        for target, source in ((0, 2), (1, 0)):
            kept[place][target] = rows[source]
    moved, _ = packed(x[[2, 0]], kept[0][:2], kept[1][:2])
    assert torch.allclose(moved, wanted[[2, 0]], atol=1e-5)
    assert isinstance(keys[1:], PackedRows)


def network() -> Whisper:
    model = Whisper(CONFIG)
    weights = {name: 0.2 * value if value.ndim > 1 else value for name, value in random_weights(config=CONFIG).items()}
    model.load_state_dict(weights)
    return model.requires_grad_(False).eval()


@torch.inference_mode()
def test_the_decoder_for_cpus_reads_as_the_plain_one() -> None:
    plain, model = network(), pack(network())
    ours = CpuTextDecoder(model.decoder)
    torch.manual_seed(1)
    states = torch.randn(2, 40, 64)
    tokens = torch.randint(0, 50_000, (4, 6))  # two candidates for each window
    found = []
    for decoder in (plain.decoder, ours):
        memory = decoder.memory(states)
        cache = [(torch.zeros(4, 4, 24, 16), torch.zeros(4, 4, 24, 16)) for _ in range(2)]
        logits = []
        for first, last in ((0, 3), (3, 4), (4, 6)):
            positions = torch.arange(first, last).expand(4, -1)
            mask = (torch.arange(last) <= torch.arange(first, last)[:, None])[None, None].expand(4, -1, -1, -1)
            read, scores = decoder(tokens[:, first:last], positions, cache, memory, mask, {1: [0, 2]})
            logits.append(decoder.logits(read))
            assert scores is not None
        found.append((torch.cat(logits, dim=1), scores))
    for wanted, got in zip(*found, strict=True):
        assert torch.allclose(got, wanted, atol=2e-4)


@needs_bf16
@pytest.mark.parametrize("size", [1.0, 30.0])
@torch.inference_mode()
def test_attention_is_right_with_and_without_a_maximum(size: float) -> None:
    torch.manual_seed(2)
    query, key, value = (size * torch.randn(2, 3, 50, 16) for _ in range(3))
    assert _is_harmless(query, key) == (size == 1.0)
    wanted = (query @ key.transpose(-1, -2)).softmax(dim=-1) @ value
    ours = attend(query.bfloat16(), key.bfloat16(), value.transpose(-1, -2).bfloat16())
    if size == 1.0:
        assert float((ours - wanted).norm() / wanted.norm()) < 0.02
    assert bool(ours.isfinite().all())
    exact = attend(query, key, value.transpose(-1, -2).contiguous())
    assert torch.allclose(exact, wanted, atol=1e-3 * size)


@needs_bf16  # only such CPUs run it; products of bytes saturate on AVX2
@torch.inference_mode()
def test_a_vocabulary_in_8_bits_is_near_and_rows_are_their_own() -> None:
    torch.manual_seed(3)
    embedding, states = torch.randn(20_000, 64), torch.randn(2, 3, 64)
    states[1, 0] *= 1000
    vocabulary = Int8Vocabulary(embedding.half())
    wanted, found = states @ embedding.T, vocabulary(states)
    assert found.shape == wanted.shape
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0 < float(errors.max()) < 0.02
    assert torch.equal(vocabulary(states[1, 1]), found[1, 1])


@needs_bf16
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_windows_come_and_go_and_words_have_times(precision: Precision) -> None:
    with load_random("tiny", tokens=12, device="cpu", precision=precision, threads=1, batch_size=2) as recognizer:
        assert recognizer.engine.dtype == torch.bfloat16
        rng = np.random.default_rng(0)
        clips = [(0.1 * rng.standard_normal(SAMPLE_RATE)).astype(np.float32) for _ in range(3)]
        options = TranscribeOptions(
            vad=False, language="en", word_timestamps=True, temperature_increment_on_fallback=None
        )
        found = list(recognizer.transcribe_many(clips, options, sample_rate=SAMPLE_RATE))
        assert len(found) == 3
        assert all(each.segments[0].words for each in found)


def test_a_cpu_without_bf16_units_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "computes_in_bf16", lambda: False)
    with pytest.raises(UsageError, match=r"bf16 units.*stapes quantize"):
        choose_dtype("int8", resolve("cpu"))
    monkeypatch.setattr(backend, "computes_in_bf16", lambda: True)
    assert choose_dtype("int8", resolve("cpu")) == torch.bfloat16
    assert choose_dtype("auto", resolve("cpu")) == torch.float32
    with pytest.raises(UsageError, match="needs a GPU"):
        choose_dtype("int4", resolve("cpu"))
