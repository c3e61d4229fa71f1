"""The bucket sampler: every utterance once, the same shape everywhere, little padding, going on from anywhere."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_data import DATA
from stapes.data.buckets import BatchPlan, BucketSampler, bucket_lengths
from stapes.errors import UsageError


def samplers(lengths: np.ndarray, budget: float, ranks: int, **options) -> list[BucketSampler]:
    return [BucketSampler(lengths, budget, ranks, rank, **options) for rank in range(ranks)]


def step(group: list[BucketSampler]) -> list[BatchPlan]:
    """One step of all ranks."""
    return [next(sampler) for sampler in group for _ in range(sampler.accumulate)]


def real(plans: list[BatchPlan]) -> list[int]:
    return [int(index) for plan in plans for index in plan.indices[plan.weights > 0]]


def padding(lengths: np.ndarray, group: list[BucketSampler]) -> float:
    computed = heard = 0.0
    for _ in range(group[0].steps()):
        for plan in step(group):
            computed += len(plan.indices) * plan.samples / 16_000
            heard += float((lengths[plan.indices] / plan.speeds * plan.weights).sum())
    return 1 - heard / computed


some_lengths = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=150).map(np.array)


@settings(deadline=None, max_examples=60)
@given(
    lengths=some_lengths,
    ranks=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    budget=st.floats(22.5, 200),
    seed=st.integers(0, 3),
    max_rows=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
    speeds=st.sampled_from([(1.0,), (0.9, 1.0, 1.1)]),
)
def test_each_utterance_once_an_epoch_and_one_shape_at_a_step(
    lengths, ranks, accumulate, budget, seed, max_rows, shuffle, speeds
):
    group = samplers(
        lengths, budget, ranks, accumulate=accumulate, seed=seed, max_rows=max_rows, shuffle=shuffle, speeds=speeds
    )
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for number in range(count := group[0].steps(epoch)):
            plans = step(group)
            seen.update(real(plans))
            assert len({(plan.samples, len(plan.indices)) for plan in plans}) == 1
            for plan in plans:
                assert plan.epoch == epoch
                assert len(plan.indices) * plan.samples / 16_000 <= budget + 1e-6
                assert max_rows is None or len(plan.indices) <= max_rows
                assert np.all(lengths[plan.indices] / plan.speeds * 16_000 <= plan.samples + 1)
            assert [plan.ends_step for plan in plans] == ([False] * (accumulate - 1) + [True]) * ranks
            assert plans[-1].ends_epoch == (number == count - 1)
        assert seen == Counter(range(len(lengths)))
        assert group[0].epoch == epoch + 1


@settings(deadline=None, max_examples=40)
@given(
    lengths=some_lengths,
    stops=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    ranks=st.permutations([1, 2, 3]),
    budgets=st.permutations([21.0, 21.0, 60.0]),
)
def test_going_on_with_other_ranks_and_budgets_still_gives_each_utterance_once(lengths, stops, ranks, budgets):
    seen: Counter[int] = Counter()
    state = None
    for world, budget, stop in zip([*ranks, 2], [*budgets, 30.0], [*stops, 10_000], strict=True):
        group = samplers(lengths, budget, world, seed=5)
        if state is not None:
            for sampler in group:
                sampler.load_state_dict(json.loads(json.dumps(state)))  # as a checkpoint keeps it
        while stop and group[0].epoch == 0:
            seen.update(real(step(group)))
            stop -= 1
        assert len({json.dumps(sampler.state_dict()) for sampler in group}) == 1
        state = group[0].state_dict()
    assert seen == Counter(range(len(lengths)))


def test_going_on_with_the_same_ranks_gives_the_same_batches_bit_for_bit():
    lengths = np.random.default_rng(0).uniform(1, 15, 300)
    straight, stopped = (BucketSampler(lengths, 60, 2, 1, seed=3, speeds=(0.9, 1.1)) for _ in range(2))
    for _ in range(25):  # into the second epoch
        a, b = next(straight), next(stopped)
        resumed = BucketSampler(lengths, 60, 2, 1, seed=3, speeds=(0.9, 1.1))
        resumed.load_state_dict(b.state)
        stopped = resumed
        assert a.indices.tolist() == b.indices.tolist()
        assert a.speeds.tolist() == b.speeds.tolist()
        assert a.samples == b.samples
        assert a.state == b.state


def test_a_step_is_the_same_utterances_however_it_is_shared_out():
    lengths = np.random.default_rng(1).uniform(1, 15, 200)
    groups = [samplers(lengths, 60, ranks, accumulate=6 // ranks) for ranks in (1, 2, 3, 6)]
    for _ in range(groups[0][0].steps()):
        sets = [sorted(real(step(group))) for group in groups]
        assert sets[1:] == sets[:1] * 3


def test_a_state_in_the_middle_of_a_step_is_that_of_its_beginning():
    lengths = np.random.default_rng(2).uniform(1, 15, 200)
    sampler = BucketSampler(lengths, 30, accumulate=3)
    for _ in range(3):
        next(sampler)
    first, second, third = (next(sampler) for _ in range(3))
    assert first.state == second.state != third.state
    resumed = BucketSampler(lengths, 30, accumulate=3)
    resumed.load_state_dict(second.state)
    assert next(resumed).indices.tolist() == first.indices.tolist()


def test_epochs_and_seeds_have_orders_of_their_own_and_nothing_else_changes_them():
    lengths = np.random.default_rng(3).uniform(1, 15, 200)

    def epochs(seed: int) -> list[list[list[int]]]:
        sampler = BucketSampler(lengths, 60, seed=seed)
        return [[sorted(real([next(sampler)])) for _ in range(sampler.steps(epoch))] for epoch in range(2)]

    assert epochs(0) == epochs(0)
    orders = [*epochs(0), *epochs(1)]
    for number, order in enumerate(orders):
        assert order != sorted(order)
        for other in orders[:number]:  # not the same batches in another order either
            assert sorted(order) != sorted(other)


def test_an_utterance_is_played_at_a_speed_of_its_own_in_each_epoch():
    keys = np.arange(3000, dtype=np.uint64)
    sampler = BucketSampler(np.full(3000, 5.0), 600, speeds=(0.9, 1.0, 1.1), keys=keys)
    speeds = np.zeros((2, 3000))
    for epoch in range(2):
        for _ in range(sampler.steps(epoch)):
            plan = next(sampler)
            speeds[epoch, plan.indices] = plan.speeds
    for epoch in speeds:
        counts = [int((epoch == speed).sum()) for speed in (0.9, 1.0, 1.1)]
        assert all(880 < count < 1120 for count in counts)  # 1000 ± 4.6 standard deviations
    assert 0.28 < (speeds[0] == speeds[1]).mean() < 0.39


def test_trial_batches_are_full_and_the_longest_comes_first():
    lengths = np.random.default_rng(4).uniform(1, 15, 300)
    sampler = BucketSampler(lengths, 60)
    before = sampler.state_dict()
    plans = list(sampler.trial_plans())
    assert [plan.samples for plan in plans] == sorted((plan.samples for plan in plans), reverse=True)
    assert plans[0].samples >= lengths.max() * 16_000
    rows = {bucket.samples: bucket.rows for bucket in sampler.buckets}
    assert all(len(plan.indices) == rows[plan.samples] and plan.weights.all() for plan in plans)
    assert sampler.state_dict() == before


def test_a_changed_manifest_seed_or_speed_is_refused():
    lengths = np.random.default_rng(5).uniform(1, 15, 50)
    state = BucketSampler(lengths, 60).state_dict()
    others = [
        BucketSampler(lengths[:-1], 60),
        BucketSampler(lengths, 60, seed=1),
        BucketSampler(lengths, 60, speeds=(0.9,)),
        BucketSampler(lengths, 60, keys=np.arange(1, 51, dtype=np.uint64)),
    ]
    for other in others:
        with pytest.raises(UsageError, match="not those of the checkpoint"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], 10.0), "at least one"),
        (([1.0, float("nan")], 10.0), "above 0"),
        (([1.0, 12.0], 10.0), "longest utterance is 12.0 s"),
        (([1.0], 10.0, 2, 2), "rank 2 of 2"),
    ],
)
def test_arguments_that_make_no_sense(arguments, words):
    with pytest.raises(UsageError, match=words):
        BucketSampler(*arguments)


def test_bucket_lengths_are_the_best_there_are():
    random = np.random.default_rng(6)
    for _ in range(5):
        lengths = random.integers(1, 12, 40) * 0.1
        values = np.unique(np.round(lengths / 0.1)).astype(int)

        def padded(edges, lengths=lengths) -> float:
            return float(edges[np.searchsorted(edges, lengths - 1e-9)].sum())

        found = bucket_lengths(lengths, 3)
        best = min(padded(np.array([a, b, values[-1]]) * 0.1) for a in values[:-2] for b in values[1:-1] if a < b)
        assert len(found) == 3
        assert padded(found) == pytest.approx(best)


def librispeech_lengths() -> np.ndarray:
    lines = (DATA / "librispeech" / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([json.loads(line)["duration"] for line in lines])


@pytest.mark.data
def test_padding_on_librispeech_is_below_five_per_cent():
    """dev-clean is 2 hours, so that only batches of a minute or two are many enough to be told apart by length."""
    lengths = librispeech_lengths()
    for budget in (60, 120):
        group = samplers(lengths, budget, 1)
        assert padding(lengths, group) < 0.05
        assert len(group[0].buckets) <= 32


def test_padding_of_a_large_corpus_on_eight_ranks():
    """Lengths as in LibriSpeech's training part: three quarters from 12 to 17 s, the rest shorter."""
    random = np.random.default_rng(7)
    long = random.normal(14.2, 1.6, 30_000)
    lengths = np.where(random.random(30_000) < 0.75, long, random.uniform(1.5, 14, 30_000)).clip(1.5, 17)
    group = samplers(lengths, 480, 8)
    assert padding(lengths, group) < 0.05
    assert len(group[0].buckets) <= 16
