"""The engine on a GPU itself: kernels, captured steps, neighbours. Skipped where PyTorch sees none."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_engine import MARKERS, SOT, make_engine, make_model, noise

from stapes.devices.backend import fp8_dtype, resolve
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.quantized import Fp8Linear, take_fp8
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.kernels.fp8_weights import quantize_fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(dtype: torch.dtype = torch.float16, slots: int = 16, **options: Any) -> Any:
    return make_engine(GpuWhisperEngine, make_model().to("cuda", dtype), slots, **options)


def request(number: int, **options: Any) -> DecodeRequest:
    return DecodeRequest(
        prompt=(SOT, 92), sot_index=0, timestamps=True, suppressed=MARKERS, key=(number,), stop_loops=False, **options
    )


def many(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [(0.1 * generator.standard_normal(240_000)).astype(np.float32) for _ in range(count)]


def write(engine: Any, numbers: list[int], encoded: list[Any], chance: random.Random) -> dict[int, DecodeResult]:
    """Windows join in random groups and leave as they end."""
    waiting, active, results = list(numbers), {}, {}
    for _ in range(3000):
        room = engine.free_slots(request(0))
        group = waiting[: min(room, chance.randint(1, 3))] if chance.random() < 0.4 else []
        if group:
            slots = engine.admit([request(n) for n in group], [encoded[n] for n in group])
            active.update(zip(slots, group, strict=True))
            waiting = waiting[len(group) :]
        engine.step(chance.randint(1, 4))
        for slot, result in engine.harvest():
            results[active.pop(slot)] = result
            engine.release(slot)
        if not waiting and not active:
            return results
    raise AssertionError("some windows never ended")


def test_fp32_writes_what_the_plain_engine_writes_on_the_cpu() -> None:
    encoded = (engine := on_gpu(torch.float32)).encode(noise(3))
    plain = make_engine(TorchWhisperEngine, make_model(), 3)
    slots = plain.admit([request(n) for n in range(3)], plain.encode(noise(3)))
    truth: dict[Any, DecodeResult] = {}
    while len(truth) < 3:
        plain.step(1)
        for slot, result in plain.harvest():
            truth[slot] = result
            plain.release(slot)
    found = write(engine, [0, 1, 2], encoded, random.Random(0))
    for number, slot in enumerate(slots):
        assert found[number].tokens == truth[slot].tokens
        assert found[number].avg_logprob == pytest.approx(truth[slot].avg_logprob, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"quantize_memory": True}])
def test_neighbours_and_arrivals_change_no_bit(options: dict[str, Any]) -> None:
    """At one size of captured steps; of sixteen slots all run at that of sixteen or fewer, so one size is forced."""
    engine = on_gpu(**options)
    encoded = [engine.encode([window])[0] for window in many(24)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("stapes.inference.gpu_lane._BUCKETS", (16,))
        first = write(engine, list(range(24)), encoded, random.Random(1))
        for seed in range(2, 6):
            numbers = random.Random(seed).sample(range(24), 24)
            again = write(engine, numbers, encoded, random.Random(seed))
            for number in range(24):
                assert again[number].tokens == first[number].tokens
                assert again[number].avg_logprob == first[number].avg_logprob


def test_captured_steps_are_what_eager_ones_are() -> None:
    captured, eager = on_gpu(), on_gpu()
    assert captured._graph_pool is not None
    eager._graph_pool = None
    results = []
    for engine in (captured, eager):
        encoded = [engine.encode([window])[0] for window in many(8)]
        results.append(write(engine, list(range(8)), encoded, random.Random(3)))
    for number in range(8):
        assert results[0][number].tokens == results[1][number].tokens
        assert results[0][number].avg_logprob == results[1][number].avg_logprob


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_recorded_encoder_is_what_the_eager_one_is(dtype: torch.dtype) -> None:
    recorded, eager = on_gpu(dtype), on_gpu(dtype)
    eager._graph_pool = None
    recorded.warm_up()
    assert len(recorded._encoder_graphs) == 2
    sound = many(recorded.encoder_batch)
    for count, urgent in [*((count, False) for count in range(1, len(sound) + 1)), (1, True), (3, True)]:
        for _ in range(2):  # a replay leaves nothing behind
            pairs = zip(recorded.encode(sound[:count], urgent=urgent), eager.encode(sound[:count]), strict=True)
            torch.cuda.synchronize()
            assert all(torch.equal(one.states, other.states) for one, other in pairs)


def test_caches_are_given_back() -> None:
    engine = on_gpu()
    write(engine, list(range(8)), [engine.encode([window])[0] for window in many(8)], random.Random(4))
    held = torch.cuda.memory_allocated()
    engine.clear()
    assert torch.cuda.memory_allocated() < held
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        write(engine, list(range(8)), [engine.encode([window])[0] for window in many(8)], random.Random(5))
        engine.clear()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8")
def test_8_bit_floats_stay_near() -> None:
    plain, rounded = on_gpu(torch.bfloat16), on_gpu(torch.bfloat16, fp8=torch.float8_e4m3fn)
    truth, found = (torch.stack([each.states for each in engine.encode(noise(3))]) for engine in (plain, rounded))
    assert (found - truth).float().norm() / truth.float().norm() < 0.1


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8")
def test_8_bit_floats_of_a_folder_stay_near_too() -> None:
    weights = dict(make_model().named_parameters())
    model = make_model().to("cuda", torch.bfloat16)
    for path in [path for path, _ in model.named_modules()]:
        take_fp8(model, path, lambda path: quantize_fp8(weights[f"{path}.weight"]))
    assert any(isinstance(module, Fp8Linear) for module in model.modules())
    kind = fp8_dtype(resolve("cuda"))
    stored = make_engine(GpuWhisperEngine, model, 16, fp8=kind)
    plain = on_gpu(torch.bfloat16)
    found, truth = (torch.stack([each.states for each in engine.encode(noise(3))]) for engine in (stored, plain))
    assert (found - truth).float().norm() / truth.float().norm() < 0.1
