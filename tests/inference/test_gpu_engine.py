"""The engine for GPUs against the plain one, both on the CPU: there it runs without its kernels and graphs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stapes.decoding.rules import Vocabulary
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.gpu_decoder import GpuDecoder
from stapes.inference.gpu_encoder import GpuEncoder
from stapes.inference.gpu_lane import GpuLane
from stapes.inference.gpu_whisper import Encoding, GpuWhisperEngine
from stapes.inference.quantized import QuantizedLinear, quantize
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.kernels.quantization import dequantize
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids
from stapes.options import Precision

CONFIG = WhisperConfig(
    mel_bins=80, vocab_size=120, width=64, encoder_layers=2, encoder_heads=2, decoder_layers=2, decoder_heads=2
)
TEXT = 90
VOCABULARY = Vocabulary(end=TEXT, no_speech=94, no_timestamps=95, timestamp_begin=96, size=120)
SOT, MARKERS = 91, (91, 92, 93, 94, 95)


def make_model(seed: int = 0) -> Whisper:
    generator = torch.Generator().manual_seed(seed)
    model = Whisper(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.25 if parameter.dim() > 1 else 0.1
            parameter.copy_(float("norm.weight" in name) + spread * torch.randn(parameter.shape, generator=generator))
        model.encoder.positions.copy_(sinusoids(1500, CONFIG.width))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def make_engine(kind: type[TorchWhisperEngine], model: Whisper, slots: int = 3, **options: Any) -> TorchWhisperEngine:
    languages = {"xx": 92, "yy": 93}
    return kind(model, VOCABULARY, languages, SOT, [5, TEXT], [(1, 0)], slots, 2, **options)


def noise(count: int, seed: int = 1) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [(0.1 * generator.standard_normal(size)).astype(np.float32) for size in (480_000, 32_000, 160_000)[:count]]


def write(engine: TorchWhisperEngine, windows: list[np.ndarray], **options: Any) -> list[DecodeResult]:
    request = DecodeRequest(prompt=(SOT, 92), sot_index=0, timestamps=True, suppressed=MARKERS, key=(1,), **options)
    slots = engine.admit([request] * len(windows), engine.encode(windows))
    results: dict[Any, DecodeResult] = {}
    for _ in range(500):
        engine.step(2)
        for slot, result in engine.harvest():
            results[slot] = result
            engine.release(slot)
        if len(results) == len(slots):
            return [results[slot] for slot in slots]
    raise AssertionError("some windows never ended")


def test_encoder_computes_what_the_plain_one_does() -> None:
    model = make_model()
    mel = torch.randn(2, 80, 3000, generator=torch.Generator().manual_seed(2))
    truth = model.encoder(mel)
    found = GpuEncoder(copy.deepcopy(model.encoder))(mel)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_a_short_prompt_is_read_as_the_plain_decoder_reads_it() -> None:
    model = make_model()
    mel = torch.randn(2, 80, 3000, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([[91, 92, 7, 8], [91, 93, 9, 10]])
    truth = model(mel, tokens)
    decoder = GpuDecoder(copy.deepcopy(model.decoder), CONFIG)
    memory, rows = decoder.new_memory(3, quantized=False), torch.tensor([2, 0], dtype=torch.int32)
    decoder.remember(model.encoder(mel), memory, rows)
    states, scores = decoder.read(tokens, memory, rows, heads={1: [0]})
    logits = decoder.logits(states.flatten(0, 1)).view(2, 4, -1)
    torch.testing.assert_close(logits, truth, rtol=1e-3, atol=1e-3)
    assert scores is not None
    assert scores.shape == (2, 1, 4, 1500)


def test_the_same_texts_as_the_plain_engine() -> None:
    for options in ({}, {"temperature": 0.7, "best_of": 2}, {"beam_size": 2}):
        plain = write(make_engine(TorchWhisperEngine, make_model(), 6), noise(2), **options)
        ours = write(make_engine(GpuWhisperEngine, make_model(), 6), noise(2), **options)
        assert [each.tokens for each in ours] == [each.tokens for each in plain]
        assert [each.avg_logprob for each in ours] == pytest.approx([each.avg_logprob for each in plain], abs=1e-3)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_write_what_their_widened_form_writes(precision: Precision) -> None:
    quantised = quantize(make_model(), precision)
    widened = make_model()
    for path, module in quantised.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = dequantize(module.quantized)
            if path.endswith("projection"):
                widened.decoder.embedding.weight.copy_(weight)
            else:
                target = widened.get_submodule(path)
                assert isinstance(target, nn.Linear)
                target.weight.copy_(weight)
    assert any(isinstance(module, QuantizedLinear) for module in quantised.modules())
    plain = write(make_engine(TorchWhisperEngine, widened), noise(2))
    ours = write(make_engine(GpuWhisperEngine, quantised), noise(2))
    assert [each.tokens for each in ours] == [each.tokens for each in plain]


def test_memory_in_8_bits_is_nearly_as_good() -> None:
    plain = write(make_engine(GpuWhisperEngine, make_model()), noise(3))
    ours = write(make_engine(GpuWhisperEngine, make_model(), quantize_memory=True), noise(3))
    likelihoods = [(a.avg_logprob, b.avg_logprob) for a, b in zip(plain, ours, strict=True) if a.tokens == b.tokens]
    assert len(likelihoods) >= 2
    assert all(abs(a - b) < 0.01 for a, b in likelihoods)
    assert any(a != b for a, b in likelihoods)


@pytest.mark.parametrize("slots", [1, 3])
def test_language_is_detected_while_all_slots_are_taken(slots: int) -> None:
    plain, ours = (make_engine(kind, make_model(), slots) for kind in (TorchWhisperEngine, GpuWhisperEngine))
    request = DecodeRequest(prompt=(SOT, 92), sot_index=0, timestamps=True, suppressed=MARKERS)
    truth = plain.detect_language(plain.encode(noise(3)))
    encoded = ours.encode(noise(3))
    free = ours.detect_language(encoded)
    slots_taken = ours.admit([request] * slots, encoded[:slots])
    assert ours.free_slots(request) == 0
    taken = ours.detect_language(encoded)
    for found in (free, taken):
        for one, other in zip(found, truth, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    for slot in slots_taken:
        ours.release(slot)
    assert ours.free_slots(request) == slots


def test_fewer_slots_where_the_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(GpuWhisperEngine, make_model(), slots=8)
    make = GpuDecoder.new_memory

    def small_card(decoder: GpuDecoder, rows: int, quantized: bool) -> Any:
        if rows > 4:
            raise torch.OutOfMemoryError
        return make(decoder, rows, quantized)

    monkeypatch.setattr(GpuDecoder, "new_memory", small_card)
    request = DecodeRequest(prompt=(SOT, 92), sot_index=0, timestamps=True, suppressed=MARKERS)
    assert engine.free_slots(request) == 2
    assert len(write(engine, noise(2))) == 2


def test_only_so_many_tokens_where_they_are_counted() -> None:
    engine = make_engine(GpuWhisperEngine, make_model())
    engine.exact_tokens = 5
    text_only = tuple(range(TEXT, 120))
    request = DecodeRequest(prompt=(SOT, 95), sot_index=0, timestamps=False, suppressed=text_only, stop_loops=False)
    slots = engine.admit([request, replace(request, exact_tokens=9)], engine.encode(noise(2)))
    ended = {}
    for _ in range(4):
        engine.step(4)
        ended |= dict(engine.harvest())
    assert [len(ended[slot].tokens) for slot in slots] == [5, 9]


def test_encodings_are_of_their_own_window() -> None:
    engine = make_engine(GpuWhisperEngine, make_model())
    together = engine.encode(noise(3))
    for window, found in zip(noise(3), together, strict=True):
        (alone,) = engine.encode([window])
        assert isinstance(found, Encoding)
        _close(alone.states, found.states)


def _close(found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_warming_up_visits_all_buckets_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: set[tuple[int, int, bool]] = set()
    batches: list[int] = []
    plain = GpuLane._advance

    def noted(lane: GpuLane, rows: int, blank: Tensor) -> None:
        visited.add((lane.group, rows // lane.group, lane._draws()))
        plain(lane, rows, blank)

    monkeypatch.setattr(GpuLane, "_advance", noted)
    cold, warm = (make_engine(GpuWhisperEngine, make_model(), 6) for _ in range(2))
    assert isinstance(warm, GpuWhisperEngine)
    encode = warm._encode

    def encoded(pcm: Tensor, lengths: list[int] | None) -> Tensor:
        batches.append(len(pcm))
        return encode(pcm, lengths)

    monkeypatch.setattr(warm, "_encode", encoded)
    warm.warm_up()
    assert {(1, 1, False), (1, 4, False), (1, 6, False), (5, 1, True)} <= visited
    assert set(batches) == {1, 2}
    assert sorted(warm.free_rows) == list(range(6))
    for count, options in ((2, {}), (1, {"temperature": 0.7, "best_of": 5})):
        found = [write(each, noise(count), exact_tokens=12, **options) for each in (warm, cold)]
        ours, theirs = ([(each.tokens, round(each.avg_logprob, 4)) for each in results] for results in found)
        assert ours == theirs


def test_alignments_ahead_are_those_of_now_though_their_slots_are_free() -> None:
    engine = make_engine(GpuWhisperEngine, make_model())
    assert isinstance(engine, GpuWhisperEngine)
    request = DecodeRequest(prompt=(SOT, 92), sot_index=0, timestamps=False, suppressed=MARKERS, exact_tokens=3)
    slots = engine.admit([request] * 2, engine.encode(noise(2)))
    texts = [[7, 8, 9], [10, 11]]
    now = engine.align(slots, [(SOT, 92)] * 2, texts)
    ahead = engine.align_ahead(slots, [(SOT, 92)] * 2, texts)
    for slot in slots:
        engine.release(slot)
    engine.admit([request], engine.encode(noise(3)[2:]))
    for one, each in zip(now, ahead, strict=True):
        with engine.aligned(each) as other:
            torch.testing.assert_close(one.scores, other.scores, rtol=0, atol=0)
            assert one.probabilities.tolist() == other.probabilities.tolist()
