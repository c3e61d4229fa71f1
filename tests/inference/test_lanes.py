"""Slots that windows join and leave in any order write what each window alone would, by openai/whisper's algorithm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from openai_decoding import ReferenceDecoder
from stapes.decoding.rules import Vocabulary
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.gpu_whisper import Encoding, GpuWhisperEngine
from stapes.inference.lanes import Slot
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.whisper import Whisper, WhisperConfig

TEXT, TIMES = 40, 41
VOCABULARY = Vocabulary(end=TEXT, no_speech=TEXT + 4, no_timestamps=TEXT + 5, timestamp_begin=TEXT + 6, size=0)
VOCABULARY = replace(VOCABULARY, size=VOCABULARY.timestamp_begin + TIMES)
SOT, SOT_PREV, MARKERS = TEXT + 1, TEXT + 2, (TEXT + 1, TEXT + 2, TEXT + 3, TEXT + 4)
BLANK = (5, TEXT)
CONTEXT = 56
CONFIG = WhisperConfig(
    mel_bins=80,
    vocab_size=VOCABULARY.size,
    width=32,
    encoder_layers=1,
    encoder_heads=2,
    decoder_layers=2,
    decoder_heads=2,
    audio_context=60,
    text_context=CONTEXT,
)


def make_model(seed: int) -> Whisper:
    generator = torch.Generator().manual_seed(seed)
    model = Whisper(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "norm.weight" in name else 0.0
            spread = 0.35 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale + spread * torch.randn(parameter.shape, generator=generator))
        model.decoder.positions.mul_(3)
        model.decoder.embedding.weight[VOCABULARY.end] *= 1.6  # ends should come now and then
        if seed % 2:
            model.decoder.positions.zero_()  # nothing tells one place from another: it runs into loops
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


class _GpuEngine(GpuWhisperEngine):
    """Takes bare states, as the other one does."""

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[Any]) -> list[Slot]:
        return super().admit(requests, [Encoding(states, None) for states in encoded])


Maker = Callable[[int, int], TorchWhisperEngine]


@pytest.fixture(params=[TorchWhisperEngine, _GpuEngine], ids=["cpu", "gpu"])
def make_engine(request: pytest.FixtureRequest) -> Maker:
    """Both engines; the one for GPUs without its kernels and graphs, which need one."""

    def make(seed: int, slots: int) -> TorchWhisperEngine:
        return request.param(make_model(seed), VOCABULARY, {"xx": TEXT + 3}, SOT, BLANK, [(1, 0)], slots, 1)

    return make


@cache
def windows(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(CONFIG.audio_context, CONFIG.width, generator=generator) for _ in range(16)]


def some_requests(seed: int) -> list[DecodeRequest]:
    """A request of each kind and more, with prompts from the shortest to the longest."""
    chance = random.Random(seed)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "best_of": 3},
        {"temperature": 0.7, "best_of": 1},
        {"temperature": 0.4, "best_of": 3},
        {"temperature": 1.0, "best_of": 3},
        {"temperature": 0.0, "beam_size": 3},
        {"temperature": 0.0, "beam_size": 3, "patience": 2.0, "length_penalty": 0.6},
        {"temperature": 0.0, "beam_size": 3, "patience": 0.34},
        {"temperature": 0.0, "beam_size": 5, "length_penalty": 0.0},
    ]
    requests = []
    for number in range(14):
        before = [SOT_PREV, *chance.choices(range(TEXT), k=chance.choice([3, 20, CONTEXT // 2 - 2]))]
        previous = before if chance.random() < 0.6 else []
        timestamps = chance.random() < 0.6
        requests.append(
            DecodeRequest(
                prompt=(*previous, SOT, *([] if timestamps else [VOCABULARY.no_timestamps])),
                sot_index=len(previous),
                timestamps=timestamps,
                max_initial_timestamp=chance.choice([-1, 0, 7]),
                suppressed=tuple(chance.sample(range(TEXT), chance.choice([0, 5]))) + MARKERS,
                key=(seed, number),
                stop_loops=chance.random() < 0.7,
                **kinds[number % len(kinds)],
            )
        )
    return requests


@cache
def expected(seed: int) -> list[DecodeResult]:
    reference = ReferenceDecoder(make_model(seed))
    return [
        reference.decode(states, request, VOCABULARY, BLANK)
        for request, states in zip(some_requests(seed), windows(seed), strict=False)
    ]


def check(found: DecodeResult, truth: DecodeResult) -> None:
    assert found.tokens == truth.tokens
    assert found.looped == truth.looped
    assert found.temperature == truth.temperature
    assert found.avg_logprob == pytest.approx(truth.avg_logprob, abs=2e-4)
    assert found.no_speech_prob == pytest.approx(truth.no_speech_prob, rel=1e-3)


def write_alone(engine: TorchWhisperEngine, request: DecodeRequest, states: Tensor, steps: int = 1) -> DecodeResult:
    (slot,) = engine.admit([request], [states])
    for _ in range(2 * CONTEXT):
        ended = engine.harvest()
        if ended:
            assert [found for found, _ in ended] == [slot]
            engine.release(slot)
            return ended[0][1]
        engine.step(steps)
    raise AssertionError("the window never ended")


SEEDS = (0, 1, 2, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_window_alone_is_written_as_openai_does(make_engine: Maker, seed: int, steps: int) -> None:
    engine = make_engine(seed, 5)
    for request, states, truth in zip(some_requests(seed), windows(seed), expected(seed), strict=False):
        check(write_alone(engine, request, states, steps), truth)


def test_the_cases_are_worth_something() -> None:
    """Texts end, run to the limit and loop; otherwise the comparisons above and below would show little."""
    results = [result for seed in SEEDS for result in expected(seed)]
    requests = [request for seed in SEEDS for request in some_requests(seed)]
    room = [CONTEXT - len(request.prompt) - 1 for request in requests]
    full = sum(len(result.tokens) == limit for result, limit in zip(results, room, strict=True))
    assert sum(result.looped for result in results) >= 4
    assert full >= 4
    assert sum(not result.looped for result in results) - full >= 15
    assert len({tuple(result.tokens) for result in results}) > 40


def _kind(request: DecodeRequest) -> tuple[int, bool]:
    return request.candidates, request.is_beam


def mixed(engine: TorchWhisperEngine, seed: int, schedule: int, steps: Callable[[], int]) -> dict[int, DecodeResult]:
    """All windows together: they join in groups, leave from the middle, wait to leave, and are cancelled half-way."""
    chance = random.Random(schedule)
    requests, states = some_requests(seed), windows(seed)
    pending = list(range(len(requests)))
    chance.shuffle(pending)
    active: dict[object, int] = {}
    results: dict[int, DecodeResult] = {}
    cancelled = 3
    for _ in range(3000):
        if len(results) == len(requests) and not active:
            return results
        if pending and chance.random() < 0.5:
            first = requests[pending[0]]
            same = [number for number in pending if _kind(requests[number]) == _kind(first)]
            group = same[: min(engine.free_slots(first), chance.randint(1, 3))]
            if group:
                slots = engine.admit([requests[n] for n in group], [states[n] for n in group])
                active.update(zip(slots, group, strict=True))
                pending = [number for number in pending if number not in group]
            else:
                chance.shuffle(pending)
        engine.step(steps())
        ended = engine.harvest()
        chance.shuffle(ended)
        for slot, result in ended:
            number = active[slot]
            if number in results:
                assert results[number] == result  # standing still until released
            results[number] = result
            if chance.random() < 0.7:
                engine.release(slot)
                del active[slot]
        running = [slot for slot, number in active.items() if number not in results]
        if cancelled and running and chance.random() < 0.1:
            slot = chance.choice(running)
            engine.release(slot)
            pending.append(active.pop(slot))
            cancelled -= 1
    raise AssertionError("some windows never ended")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("schedule", range(4))
def test_neighbours_that_come_and_go_change_nothing(make_engine: Maker, seed: int, schedule: int) -> None:
    engine = make_engine(seed, (3, 6, 12, 15)[schedule])
    chance = random.Random(schedule)
    steps = (lambda: 1, lambda: 3, lambda: 8, lambda: chance.randint(1, 9))[schedule]
    results = mixed(engine, seed, schedule, steps)
    for number, truth in enumerate(expected(seed)):
        check(results[number], truth)
    assert all(engine.free_slots(r) == max(1, engine.slots // r.candidates) for r in some_requests(seed))


def test_scores_of_an_ended_window_ignore_the_others(make_engine: Maker) -> None:
    engine = make_engine(0, 4)
    text, prompt = [3, 7, 9, 2], [SOT, VOCABULARY.no_timestamps]
    request = DecodeRequest(prompt=(SOT,), sot_index=0, timestamps=True)
    slots = engine.admit([request] * 3, windows(0)[:3])
    together = engine.align(slots, [prompt] * 3, [text, text[:2], [*text, 1, 1, 8]])
    assert [tuple(a.scores.shape) for a in together] == [(1, 7, 60), (1, 5, 60), (1, 10, 60)]
    engine.release(slots[0])  # the last takes its row
    (alone,) = engine.align([slots[2]], [prompt], [[*text, 1, 1, 8]])
    torch.testing.assert_close(alone.scores, together[2].scores, rtol=1e-4, atol=1e-4)
    assert alone.probabilities == pytest.approx(together[2].probabilities, rel=1e-4)


@pytest.mark.parametrize("prompt", [(SOT,), (SOT, VOCABULARY.no_timestamps), (SOT, 1, 2, VOCABULARY.no_timestamps)])
def test_longest_text_can_be_read_again_for_its_times(make_engine: Maker, prompt: tuple[int, ...]) -> None:
    engine = make_engine(1, 1)
    timestamps = VOCABULARY.no_timestamps not in prompt
    request = DecodeRequest(
        prompt=prompt, sot_index=0, timestamps=timestamps, stop_loops=False, suppressed=(VOCABULARY.end, *MARKERS)
    )
    (slot,) = engine.admit([request], windows(1)[:1])
    while not (ended := engine.harvest()):
        engine.step(8)
    text = [token for token in ended[0][1].tokens if token < VOCABULARY.end]
    again = prompt if not timestamps else (*prompt, VOCABULARY.no_timestamps)
    assert len(ended[0][1].tokens) == CONTEXT - len(prompt) - 1
    (alignment,) = engine.align([slot], [again], [text])
    assert alignment.scores.shape[1] == len(again) + len(text) + 1


def test_admission_that_fails_leaves_no_slot_behind(make_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(0, 4)
    request = DecodeRequest(prompt=(SOT,), sot_index=0, timestamps=True, suppressed=MARKERS)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("stapes.inference.lanes.apply_rules", out_of_memory)
        with pytest.raises(MemoryError):
            engine.admit([request] * 2, windows(0)[:2])
    assert engine.free_slots(request) == 4
    write_alone(engine, request, windows(0)[0])
