"""Packing loses nothing, keeps the order, fits 30 s, and times find their way back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.audio.vad import SAMPLE_RATE, Region
from stapes.audio.windows import KEPT_GAP, WINDOW, PackedWindow, Piece, WindowPacker, skipped


def regions_from(steps: list[tuple[int, int, int]]) -> list[Region]:
    """From (gap before, length, silence before the speech) of each."""
    regions, at = [], 0
    for gap, length, pause in steps:
        regions.append(Region(at + gap, at + gap + length, pause))
        at += gap + length
    return regions


gaps = st.one_of(st.just(0), st.integers(0, 2 * KEPT_GAP), st.integers(0, 100 * SAMPLE_RATE))
lengths = st.one_of(st.integers(1, 5 * SAMPLE_RATE), st.integers(1, 29 * SAMPLE_RATE), st.integers(1, 3 * WINDOW))
recordings = st.lists(st.tuples(gaps, lengths, st.integers(0, 2 * SAMPLE_RATE)), max_size=40).map(regions_from)
windows_strategy = st.lists(
    st.tuples(st.integers(1, 100 * SAMPLE_RATE), st.integers(1, 3 * SAMPLE_RATE)), min_size=1, max_size=10
).map(lambda steps: window_of([(r.start, r.end) for r in regions_from([(gap, length, 0) for gap, length in steps])]))


def window_of(pieces: list[tuple[int, int]]) -> PackedWindow:
    return PackedWindow(tuple(Piece(start, end) for start, end in pieces))


def pack(regions: list[Region]) -> list[PackedWindow]:
    packer = WindowPacker()
    return packer.feed(regions) + packer.flush()


def seconds(samples: float) -> float:
    return samples / SAMPLE_RATE


# --- packing


@settings(deadline=None, max_examples=300)
@given(recordings)
def test_every_sample_of_every_region_is_in_exactly_one_window(regions: list[Region]) -> None:
    windows = pack(regions)
    pieces = [piece for window in windows for piece in window.pieces]
    assert all(piece.start < piece.end for piece in pieces)
    assert all(before.end <= after.start for before, after in pairwise(pieces))  # in order, none twice
    for region in regions:
        inside = [(max(p.start, region.start), min(p.end, region.end)) for p in pieces]
        assert sum(end - start for start, end in inside if start < end) == region.end - region.start
    assert all(0 < window.length <= WINDOW for window in windows)
    if regions:
        assert pieces[0].start == regions[0].start
        assert pieces[-1].end == regions[-1].end


@settings(deadline=None, max_examples=200)
@given(recordings)
def test_gaps_are_kept_when_short_and_cut_out_when_long(regions: list[Region]) -> None:
    for window in pack(regions):
        assert all(after.start - before.end > KEPT_GAP for before, after in pairwise(window.pieces))
    held = sum(window.length for window in pack(regions))
    speech = sum(region.end - region.start for region in regions)
    short = sum(b.start - a.end for a, b in pairwise(regions) if b.start - a.end <= KEPT_GAP)
    assert speech <= held <= speech + short


@settings(deadline=None, max_examples=200)
@given(recordings, st.data())
def test_as_they_come_equals_all_at_once(regions: list[Region], data: st.DataObject) -> None:
    packer, windows, at = WindowPacker(), [], 0
    while at < len(regions):
        size = data.draw(st.integers(1, 5))
        position = packer.position
        new = packer.feed(regions[at : at + size])
        if position is not None and new:
            assert new[0].start == position
        windows, at = windows + new, at + size
        assert packer.position is not None
    windows += packer.flush()
    assert packer.position is None
    assert windows == pack(regions)


@settings(deadline=None, max_examples=200)
@given(recordings)
def test_windows_are_no_more_than_in_order_filling_needs(regions: list[Region]) -> None:
    """For a better pause at most 9 s of a window are given up, which bounds what pauses can cost in all."""
    regions = [region for region in regions if region.end - region.start <= 5 * SAMPLE_RATE]
    needed, room = 0, -1
    for before, region in zip([None, *regions], regions, strict=False):
        gap = region.start - before.end if before else 0
        length = region.end - region.start + (gap if gap <= KEPT_GAP else 0)
        if length > room:
            needed, room, length = needed + 1, WINDOW, region.end - region.start
        room -= length
    assert len(pack(regions)) <= needed * 1.5 + 1


def test_a_window_is_parted_at_the_longest_of_the_late_pauses() -> None:
    phrases = [(0, 4 * SAMPLE_RATE, round(pause * SAMPLE_RATE)) for pause in (0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.5, 0.05)]
    first, second = pack(regions_from(phrases))
    assert (first.duration, second.duration) == (24.0, 8.0)


def test_a_pause_far_back_is_not_worth_an_empty_window() -> None:
    phrases = [(0, 4 * SAMPLE_RATE, round(pause * SAMPLE_RATE)) for pause in (0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)]
    assert pack(regions_from(phrases))[0].duration == 28.0


def test_a_better_pause_does_not_cost_a_window() -> None:
    """Without the last check the 4 s would leave the first window and then not fit before the 28 s either."""
    regions = regions_from([(0, 10 * SAMPLE_RATE, 0), (0, 4 * SAMPLE_RATE, SAMPLE_RATE), (0, 28 * SAMPLE_RATE, 0)])
    assert [window.duration for window in pack(regions)] == [14.0, 28.0]


def test_nothing_makes_no_window() -> None:
    assert pack([]) == []


# --- samples and times


def test_gather_takes_the_pieces_out_of_a_part_of_the_recording() -> None:
    recording = np.arange(1000, dtype=np.float32)
    window = window_of([(310, 320), (400, 403)])
    expected = [*range(310, 320), 400, 401, 402]
    np.testing.assert_array_equal(window.gather(recording), expected)
    np.testing.assert_array_equal(window.gather(recording[300:403], offset=300), expected)
    assert window.length == len(expected)
    for part, offset in ((recording[311:], 311), (recording[:402], 0)):
        with pytest.raises(ValueError, match="not inside"):
            window.gather(part, offset)


@settings(deadline=None, max_examples=200)
@given(windows_strategy, st.data())
def test_times_are_the_inverse_of_packing(window: PackedWindow, data: st.DataObject) -> None:
    sources = np.concatenate([np.arange(piece.start, piece.end) for piece in window.pieces])
    for index in data.draw(st.lists(st.integers(0, window.length - 1), min_size=1, max_size=20)):
        assert window.to_recording(seconds(index)) == pytest.approx(seconds(sources[index]), abs=1e-6)


times = st.floats(-1, 31, allow_nan=False)


@settings(deadline=None, max_examples=300)
@given(windows_strategy, st.lists(times, min_size=2, max_size=20))
def test_times_keep_their_order_and_stay_inside(window: PackedWindow, moments: list[float]) -> None:
    mapped = [window.to_recording(moment) for moment in sorted(moments)]
    assert mapped == sorted(mapped)
    assert seconds(window.start) <= mapped[0]
    assert mapped[-1] <= seconds(window.end)


@settings(deadline=None, max_examples=300)
@given(windows_strategy, st.lists(times, min_size=2, max_size=20))
def test_spans_that_follow_each_other_do_so_in_the_recording(window: PackedWindow, moments: list[float]) -> None:
    spans = [window.span_to_recording(start, end) for start, end in pairwise(sorted(moments))]
    assert all(start <= end for start, end in spans)
    starts = [start for start, _ in spans]
    assert starts == sorted(starts)
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    for start, end in spans:
        inside = [seconds(p.start) - 1e-6 <= t <= seconds(p.end) + 1e-6 for p in window.pieces for t in (start, end)]
        assert sum(inside) >= 2


@pytest.mark.parametrize("miss", [-0.3, -0.01, 0.0, 0.01, 0.3])
def test_a_span_beside_a_joint_does_not_last_through_what_was_cut_out(miss: float) -> None:
    window = window_of([(SAMPLE_RATE, 6 * SAMPLE_RATE), (100 * SAMPLE_RATE, 105 * SAMPLE_RATE)])  # joint at 5 s
    before, after = window.span_to_recording(2.0, 5.0 + miss), window.span_to_recording(5.0 + miss, 8.0)
    assert before == pytest.approx((3.0, min(6.0, 6.0 + miss)))
    assert after == pytest.approx((max(100.0, 100.0 + miss), 103.0))


def test_a_span_across_a_joint_keeps_both_its_ends() -> None:
    window = window_of([(SAMPLE_RATE, 6 * SAMPLE_RATE), (100 * SAMPLE_RATE, 105 * SAMPLE_RATE)])
    assert window.span_to_recording(4.0, 7.0) == pytest.approx((5.0, 102.0))


# --- what is left out


@settings(deadline=None, max_examples=100)
@given(recordings, st.integers(0, 50 * SAMPLE_RATE))
def test_windows_and_skipped_make_up_the_recording(regions: list[Region], rest: int) -> None:
    length = (regions[-1].end if regions else 0) + rest
    windows = pack(regions)
    left_out = skipped(windows, seconds(length))
    kept = [(seconds(piece.start), seconds(piece.end)) for window in windows for piece in window.pieces]
    edges = sorted([*kept, *left_out])
    assert sum(end - start for start, end in edges) == pytest.approx(seconds(length))
    assert all(before[1] <= after[0] for before, after in pairwise(edges))
    assert all(start < end for start, end in left_out)


def test_without_windows_all_is_skipped() -> None:
    assert skipped([], 12.5) == [(0.0, 12.5)]
    assert skipped([], 0.0) == []
