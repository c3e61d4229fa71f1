"""Samples depend on their key and count alone, and follow the distribution."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from stapes.decoding.sampling import counter_uniform, random_key, sample

LARGEST = 1 - 2.0**-24


def uniforms(key: int, count: int) -> torch.Tensor:
    return counter_uniform(torch.full((count,), key), torch.arange(count))


def test_number_depends_on_its_key_and_count_alone() -> None:
    keys = torch.tensor([random_key(0, window) for window in range(50)])
    counts = torch.arange(50) % 7
    together = counter_uniform(keys, counts)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(counter_uniform(keys[order], counts[order]), together[order])
    alone = torch.cat([counter_uniform(keys[i : i + 1], counts[i : i + 1]) for i in range(50)])
    assert torch.equal(alone, together)


def test_every_part_of_a_key_counts() -> None:
    parts = [0, 1, 2, 160_000, 2**40, 2**63 - 1]
    keys = [random_key(*key) for length in (1, 2, 3) for key in itertools.product(parts, repeat=length)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    first = counter_uniform(torch.tensor(keys), torch.zeros(len(keys), dtype=torch.int64))
    assert len(first.unique()) > len(keys) - 3


def test_splitmix_is_the_published_one() -> None:
    """SplitMix64 from state 1234567, the test vector that implementations of the xoshiro generators use."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = torch.tensor([(value >> 40) * 2.0**-24 for value in published])
    assert torch.equal(uniforms(1234567, 3), expected)


def test_numbers_are_uniform_and_independent() -> None:
    for numbers in (
        uniforms(random_key(3, 5), 65536),
        counter_uniform(torch.tensor([random_key(7, window, 1) for window in range(65536)]), torch.tensor(0)),
    ):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = torch.histc(numbers, 256, 0, 1)
        chi_square = float(((counts - 256) ** 2 / 256).sum())
        assert 170 < chi_square < 350  # 255 expected; one in 10⁴ lies outside
        correlation = np.corrcoef(numbers[:-1].numpy(), numbers[1:].numpy())[0, 1]
        assert abs(correlation) < 0.02


def test_samples_follow_the_softmax_at_their_temperature() -> None:
    logits = torch.tensor([0.3, -torch.inf, 2.0, 1.0, -1.0, -torch.inf])
    numbers = uniforms(random_key(11), 20_000)
    for temperature in (0.2, 1.0):
        drawn = sample(logits.expand(20_000, -1), torch.full((20_000,), temperature), numbers)
        expected = (logits / temperature).softmax(dim=-1) * 20_000
        counts = torch.bincount(drawn, minlength=6).double()
        possible = expected > 5
        chi_square = (((counts - expected) ** 2) / expected)[possible].sum()
        assert chi_square < 20
        assert counts[expected == 0].sum() == 0


def test_forbidden_tokens_are_never_drawn() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(400, 2000, generator=generator) * 4
    logits[torch.rand(400, 2000, generator=generator) < 0.7] = -torch.inf
    logits[:200, :5] = logits[:200, -5:] = -torch.inf
    logits[0] = -torch.inf
    logits[0, 700] = 0.0
    temperature = torch.full((400,), 0.8)
    rows = torch.arange(400)
    for uniform in (0.0, 2.0**-24, 0.5, LARGEST):
        drawn = sample(logits, temperature, torch.full((400,), uniform))
        assert torch.isfinite(logits[rows, drawn]).all()
    first = sample(logits, temperature, torch.zeros(400))
    last = sample(logits, temperature, torch.full((400,), LARGEST))
    assert first[0] == last[0] == 700
    finite = torch.isfinite(logits)
    assert torch.equal(first, finite.int().argmax(dim=1))  # u = 0 is the first token that has any mass
    assert (last >= first).all()


def test_draw_of_a_row_ignores_its_neighbours() -> None:
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(2))
    temperature, uniform = torch.linspace(0.2, 1, 9), torch.linspace(0, LARGEST, 9)
    together = sample(logits, temperature, uniform)
    alone = [int(sample(logits[i : i + 1], temperature[i : i + 1], uniform[i : i + 1])) for i in range(9)]
    assert together.tolist() == alone
