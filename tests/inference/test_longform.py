"""Both ways through a long recording: windows, clocks, what is heard and what is skipped, openai/whisper's walk."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes import BEGIN, EOT, MODEL, SOT_PREV, FakeDetector, FakeEngine, at, result, tone, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.longform import PackedRecording, SequentialRecording
from stapes.inference.recording import Recording, Window
from stapes.inference.segments import slice_segments
from stapes.options import TranscribeOptions

RATE = 16000
SCALE = 1 << 24


def numbered(samples: int) -> np.ndarray:
    """Samples that say which they are, exactly: what a window holds can be read off it."""
    return ((np.arange(samples) + 1) / SCALE).astype(np.float32)


def position(pcm: np.ndarray) -> int:
    return round(float(pcm[0]) * SCALE) - 1


def make(kind: type[Recording], clips: Sequence[tuple[int, int | None]] = ((0, None),), **options: Any) -> Recording:
    return kind(MODEL, TranscribeOptions(**({"language": "en"} | options)), clips)


def transcribe(
    recording: Recording,
    pcm: np.ndarray,
    script: Callable[[np.ndarray, DecodeRequest], DecodeResult] = whole,
    *,
    chunks: Sequence[int] = (20 * RATE,),
    chance: random.Random | None = None,
    engine: FakeEngine | None = None,
) -> list[tuple[Window, DecodeRequest]]:
    """Feed and drain a recording, in one thread; returns its attempts in order. ``chance`` mixes what comes when."""
    chance = chance or random.Random(0)
    engine = engine or FakeEngine()
    detector, state = FakeDetector(), FakeDetector().state()
    open_windows: list[Window] = []
    attempts: list[tuple[Window, DecodeRequest]] = []

    def work(until_idle: bool) -> None:
        while True:
            while (window := recording.take()) is not None:
                assert 0 < len(window.pcm) <= 30 * RATE
                open_windows.append(window)
            if not open_windows or (not until_idle and chance.random() < 0.5):
                return
            window = open_windows.pop(chance.randrange(len(open_windows)))
            assert len(attempts) < 5000, "it never ends"
            request = recording.request(window)
            attempts.append((window, request))
            draft = recording.judge(window, script(window.pcm, request))
            if draft is None:
                open_windows.append(window)
                continue
            words = recording.words_wanted(window, draft)
            if words is not None:
                slot: Any = type("Slot", (), {"pcm": window.pcm})
                recording.add_words(window, draft, words[0], engine.align([slot], [words[0]], [words[1]])[0])
            recording.complete(window, draft)

    begin = number = 0
    while begin < len(pcm):
        end = begin + max(1, chunks[number % len(chunks)])
        part = pcm[begin:end]
        vad = detector.probabilities([state], [part])[0] if recording.options.vad else None
        recording.feed(part, vad)
        begin, number = end, number + 1
        work(False)
    last = detector.probabilities([state], [pcm[:0]], final=True)[0] if recording.options.vad else None
    recording.finish(last)
    work(True)
    assert recording.done
    assert recording.settled == recording.length == len(pcm)
    return attempts


def speech(pattern: Sequence[tuple[float, float]]) -> np.ndarray:
    """Seconds of speech and of silence in turn; every sample says its place."""
    total = sum(round(a * RATE) + round(b * RATE) for a, b in pattern)
    pcm, begin = numbered(total), 0
    for talk, pause in pattern:
        begin += round(talk * RATE)
        pcm[begin : begin + round(pause * RATE)] = 0
        begin += round(pause * RATE)
    return pcm


patterns = st.lists(
    st.tuples(
        st.one_of(st.floats(0.05, 4), st.floats(20, 70)), st.one_of(st.floats(0.1, 3), st.just(0.0), st.floats(40, 200))
    ),
    min_size=0,
    max_size=6,
)
chunkings = st.lists(st.one_of(st.integers(1, 2000), st.integers(RATE, 25 * RATE)), min_size=1, max_size=4).filter(
    lambda sizes: sum(sizes) / len(sizes) > 4000
)


def union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


@settings(max_examples=40, deadline=None)
@given(patterns, chunkings, st.booleans(), st.booleans(), st.integers(0, 99))
def test_every_sample_is_heard_or_skipped_and_windows_hold_their_samples(
    pattern: list[tuple[float, float]], chunks: list[int], packed: bool, early: bool, seed: int
) -> None:
    """However audio arrives and results return; ``early``: texts often end long before their windows."""
    pcm = speech(pattern)

    def script(window: np.ndarray, request: DecodeRequest) -> DecodeResult:
        seconds = len(window) / RATE
        if early and position(window) % 3 and seconds > 2:
            return result([at(0), 7, at(round(seconds * 0.3, 1))])
        return whole(window, request)

    kind = PackedRecording if packed else SequentialRecording
    recording = make(kind)
    attempts = transcribe(recording, pcm, script, chunks=chunks, chance=random.Random(seed))

    pieces = [(piece.start, piece.end) for window, _ in attempts for piece in window.packed.pieces]
    for window, _ in attempts:
        truth = np.concatenate([pcm[piece.start : piece.end] for piece in window.packed.pieces])
        np.testing.assert_array_equal(window.pcm, truth)
    skipped = [(round(a * RATE), round(b * RATE)) for a, b in recording.skipped()]
    heard = union(pieces)
    assert union([*heard, *skipped]) == ([(0, len(pcm))] if len(pcm) else [])
    assert all(a_end <= b_start for (_, a_end), (b_start, _) in pairwise(skipped))
    assert not any(a < d and c < b for a, b in heard for c, d in skipped)
    assert all(not pcm[a:b].any() or b - a < RATE // 10 for a, b in skipped)
    for segment in recording.segments:
        assert 0 <= segment.start <= segment.end <= len(pcm) / RATE + 1e-6
    if packed and not early:  # neither arrival nor completion changes the windows
        other = transcribe(make(kind), pcm, script, chunks=[7 * RATE])
        assert sorted(w.packed.pieces[0].start for w, _ in attempts) == sorted(
            w.packed.pieces[0].start for w, _ in other
        )


# openai/whisper's walk.


def openai_walk(
    script: Callable[[int, int], list[int]], clips: list[tuple[float, float]], condition: bool, initial: list[int]
) -> tuple[list[tuple[float, float, list[int]]], list[tuple[int, int]], list[list[int]]]:
    """``transcribe`` of openai/whisper, in samples, without words: segments, windows, prompts."""
    tokens_so_far, reset = list(initial), 0
    segments, windows, prompts = [], [], []
    for clip_start, clip_end in clips:
        seek = clip_start
        while seek + RATE // 10 <= clip_end:  # we leave out shorter rests
            size = min(30 * RATE, clip_end - seek)
            windows.append((seek, size))
            prompts.append(tokens_so_far[reset:][-223:])
            tokens = script(seek, size)
            stamps = [token >= BEGIN for token in tokens]
            single_ending = stamps[-2:] == [False, True]
            cuts = [i + 1 for i in range(len(tokens) - 1) if stamps[i] and stamps[i + 1]]
            found, step = [], size
            if cuts:
                slices = [*cuts, len(tokens)] if single_ending else cuts
                for low, high in zip([0, *slices], slices, strict=False):
                    part = tokens[low:high]
                    found.append(((part[0] - BEGIN) * 0.02, (part[-1] - BEGIN) * 0.02, part))
                if not single_ending:
                    step = min(size, (tokens[slices[-1] - 1] - BEGIN) * 320)
            elif any(token < EOT for token in tokens):
                times = [token for token in tokens if token >= BEGIN]
                end = (times[-1] - BEGIN) * 0.02 if len(times) > 1 and single_ending else size / RATE
                found.append(((times[0] - BEGIN) * 0.02, end, tokens))
            for start, end, part in found:
                start, end = min(start, size / RATE), min(end, size / RATE)
                if start == end or not any(token < EOT for token in part):
                    continue
                segments.append((seek / RATE + start, seek / RATE + end, part))
                tokens_so_far += part
            if not condition:
                reset = len(tokens_so_far)
            seek += max(step, RATE // 10)
    return segments, windows, prompts


def scripted(seed: int) -> Callable[[int, int], list[int]]:
    """Tokens that obey the rules, whatever they mean: some segments, ended once, twice or not at all."""

    def script(start: int, size: int) -> list[int]:
        chance = random.Random(f"{seed} {start} {size}")
        steps = min(1500, size // 320 + chance.choice([0, 0, 30]))
        count = chance.randint(0, 4)
        times = sorted(chance.sample(range(steps + 1), min(steps + 1, 2 * count + 1)))
        tokens = [BEGIN + times[0]]
        for begin, end in zip(times[1::2], times[2::2], strict=True):
            tokens += [*chance.choices(range(500), k=chance.randint(1, 5)), BEGIN + begin, BEGIN + end]
        if chance.random() < 0.6:
            tokens += chance.choices(range(500), k=3)
            if chance.random() < 0.5:
                tokens.append(BEGIN + chance.randint(times[-1], steps))
        elif chance.random() < 0.5 and len(tokens) > 1:
            tokens.pop()
        return tokens

    return script


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("condition", [False, True])
def test_walk_is_openai_s(seed: int, condition: bool) -> None:
    script = scripted(seed)
    seconds = [200, 31, 30, 29.99, 5, 0.05][seed % 6]
    pcm = numbered(round(seconds * RATE))
    clips = [(0, None)] if seed < 6 else [(0, 40 * RATE), (41 * RATE, 80 * RATE), (150 * RATE, None)]
    initial = [900, 901] if seed % 2 else []
    recording = make(
        SequentialRecording,
        clips,
        vad=False,
        condition_on_previous_text=condition,
        initial_prompt=" ".join(map(str, initial)) or None,
    )
    attempts = transcribe(
        recording, pcm, lambda window, _: result(script(position(window), len(window))), chunks=[20 * RATE, 13 * RATE]
    )
    ends = [(start, min(len(pcm), len(pcm) if end is None else end)) for start, end in clips]
    segments, windows, prompts = openai_walk(script, ends, condition, initial)
    assert [(window.start, len(window.pcm)) for window, _ in attempts] == windows
    told = [list(request.prompt[: request.sot_index]) for _, request in attempts]
    assert told == [[SOT_PREV, *prompt] if prompt else [] for prompt in prompts]
    assert len(recording.segments) == len(segments)
    for segment, (start, end, tokens) in zip(recording.segments, segments, strict=True):
        assert (segment.start, segment.end) == pytest.approx((start, end), abs=1e-6)
        assert segment.tokens == tokens


def test_text_that_was_hard_to_get_is_told_to_nobody() -> None:
    def script(pcm: np.ndarray, request: DecodeRequest) -> DecodeResult:
        number = position(pcm) // (30 * RATE)
        hard = number == 1 and request.temperature < 0.8
        return result([at(0), number, at(30)], temperature=request.temperature, avg_logprob=-2 if hard else -0.2)

    recording = make(SequentialRecording, vad=False, condition_on_previous_text=True, hotwords="700")
    attempts = transcribe(recording, numbered(120 * RATE), script)
    told = [tuple(t for t in request.prompt[: request.sot_index] if t < EOT) for _, request in attempts]
    assert told == [(700,)] + 5 * [(700, 0)] + [(700,), (700, 2)]
    assert [segment.temperature for segment in recording.segments] == [0.0, 0.8, 0.0, 0.0]


def test_prompts_fit_and_keep_what_matters() -> None:
    long = " ".join(map(str, range(300)))
    for kind, options in ((PackedRecording, {}), (SequentialRecording, {"condition_on_previous_text": True})):
        recording = make(kind, initial_prompt=long, **options)
        attempts = transcribe(recording, np.concatenate([tone(25), tone(9, 0.0)] * 4))
        first, second = (list(request.prompt[1 : request.sot_index]) for _, request in attempts[:2])
        assert first == list(range(300))[-223:]
        assert len(second) <= 223
        carried = make(kind, initial_prompt="5 6 7", carry_initial_prompt=True, hotwords="8", **options)
        for _, request in transcribe(carried, np.concatenate([tone(25), tone(9, 0.0)] * 4)):
            assert list(request.prompt[1:5]) == [8, 5, 6, 7]
            assert list(request.prompt[1 : request.sot_index]).count(5) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_only_clips_are_heard(packed: bool) -> None:
    seconds = [(3, 10), (10.5, 20), (400, 405)]
    clips = [(round(a * RATE), round(b * RATE)) for a, b in seconds]
    for vad in (True, False) if not packed else (True,):
        recording = make(PackedRecording if packed else SequentialRecording, clips, vad=vad)
        pcm = numbered(450 * RATE)
        attempts = transcribe(recording, pcm)
        heard = union([(p.start, p.end) for window, _ in attempts for p in window.packed.pieces])
        assert heard == clips


# Where texts end.


def test_packed_window_whose_text_stops_early_is_heard_again_from_there() -> None:
    def script(pcm: np.ndarray, _: DecodeRequest) -> DecodeResult:
        seconds = len(pcm) / RATE
        return result([at(0), 3, at(min(4, seconds))])

    recording = make(PackedRecording)
    attempts = transcribe(recording, np.concatenate([numbered(20 * RATE), np.zeros(3 * RATE, np.float32)]), script)
    starts = [window.start / RATE for window, _ in attempts]
    assert starts == [0, 4, 8, 12, 16]
    assert [round(segment.start, 2) for segment in recording.segments] == starts


def test_open_segment_is_kept_or_heard_again() -> None:
    tokens = [at(0), 1, at(4), at(4), 2, 3]
    kept, done = slice_segments(tokens, BEGIN, 10.0, keep_open=True)
    assert [(s.start, s.end, s.tokens) for s in kept] == [(0, 4, tokens[:3]), (4, 10, tokens[3:])]
    assert done is None
    left, done = slice_segments(tokens, BEGIN, 10.0, keep_open=False)
    assert [(s.start, s.end) for s in left] == [(0, 4)]
    assert done == 4
    closed = [at(0), 1, at(4), at(4), 2, at(6)]
    assert slice_segments(closed, BEGIN, 10.0, keep_open=True)[1] == pytest.approx(6)
    assert slice_segments(closed, BEGIN, 10.0, keep_open=False)[1] is None
    assert slice_segments([], BEGIN, 10.0, keep_open=True) == ([], None)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(BEGIN, BEGIN + 1500)), max_size=12),
    st.floats(0.1, 30),
    st.booleans(),
)
def test_slices_stay_in_their_window_and_lose_no_text(tokens: list[int], duration: float, keep_open: bool) -> None:
    tokens = [BEGIN, *tokens]
    slices, done = slice_segments(tokens, BEGIN, duration, keep_open=keep_open)
    assert all(0 <= part.start <= part.end <= duration for part in slices)
    assert done is None or done >= 0
    text = [token for token in tokens if token < EOT]
    sliced = [token for part in slices for token in part.tokens if token < EOT]
    assert sliced == (text if keep_open else text[: len(sliced)])


# Words and hallucinations.


def test_words_move_the_walk_to_the_last_of_them() -> None:
    def script(pcm: np.ndarray, _: DecodeRequest) -> DecodeResult:
        return result([at(0), 1, 2, at(8), at(8), 4])

    recording = make(SequentialRecording, vad=False, word_timestamps=True)
    attempts = transcribe(recording, numbered(40 * RATE), script)
    first = recording.segments[0]
    assert first.words is not None
    assert attempts[1][0].start == round(first.words[-1].end * RATE)


def test_likely_hallucinations_beside_silence_are_walked_over() -> None:
    """An unlikely word after ten seconds of silence: openai/whisper goes to it and listens again."""

    def script(pcm: np.ndarray, _: DecodeRequest) -> DecodeResult:
        return result([at(0), 1, at(30)]) if position(pcm) == 0 else result([at(0), 2, at(1)])

    engine = FakeEngine(words=lambda text: [12.0] if text == [1] else [0.0], probability=0.05)
    plain = make(SequentialRecording, vad=False, word_timestamps=True)
    transcribe(plain, numbered(35 * RATE), script, engine=engine)
    assert plain.segments[0].tokens[1] == 1
    assert plain.segments[0].words is not None
    guarded = make(SequentialRecording, vad=False, word_timestamps=True, hallucination_silence_threshold=2.0)
    attempts = transcribe(guarded, numbered(35 * RATE), script, engine=engine)
    assert attempts[1][0].start == round(plain.segments[0].words[0].start * RATE) > 10 * RATE
    assert all(1 not in segment.tokens for segment in guarded.segments)


# Every option acts, or is refused.


def test_every_option_of_a_request_is_the_one_given() -> None:
    options = {
        "beam_size": 4,
        "best_of": 3,
        "patience": 2.0,
        "length_penalty": 0.5,
        "temperature": 0.0,
        "temperature_increment_on_fallback": 0.5,
        "seed": 9,
    }

    def script(pcm: np.ndarray, request: DecodeRequest) -> DecodeResult:
        return result([at(0), 1, at(1)], temperature=request.temperature, avg_logprob=-5.0)

    for kind, more in ((PackedRecording, {}), (SequentialRecording, {"vad": False})):
        requests = [request for _, request in transcribe(make(kind, **options, **more), tone(10), script)]
        assert [request.temperature for request in requests] == [0.0, 0.0, 0.5, 1.0]  # the second is a second look
        assert [request.candidates for request in requests] == [4, 4, 3, 3]
        assert {(r.patience, r.length_penalty, r.timestamps, r.max_initial_timestamp) for r in requests} == {
            (2.0, 0.5, True, 50)
        }
        assert [request.key for request in requests] == [(9, 0, 0), (9, 0, 0), (9, 0, 1), (9, 0, 2)]
        plain = transcribe(make(kind, without_timestamps=True, compression_ratio_threshold=None, **more), tone(10))
        assert [(r.timestamps, r.stop_loops, r.max_initial_timestamp) for _, r in plain] == [(False, False, -1)]


@pytest.mark.parametrize("kind", [PackedRecording, SequentialRecording])
def test_thresholds_decide_what_is_tried_again_and_what_is_silence(kind: type[Recording]) -> None:
    def count(found: DecodeResult, **options: Any) -> tuple[int, int]:
        recording = make(kind, **options)
        attempts = transcribe(recording, tone(10), lambda *_: found)
        return len(attempts), len(recording.segments)

    loop, unlikely = result([at(0), *[5] * 99, at(9)]), result([at(0), 1, at(9)], avg_logprob=-1.5)
    silent = result([at(0), 1, at(9)], avg_logprob=-1.5, no_speech_prob=0.7)
    assert count(loop) == (7, 1)  # six temperatures, and a second look at the first
    assert count(loop, compression_ratio_threshold=None) == (1, 1)
    assert count(loop, temperature_increment_on_fallback=None) == (1, 1)
    assert count(unlikely) == (7, 1)
    assert count(unlikely, logprob_threshold=-2.0) == (2, 1)
    assert count(silent) == (1, 0)
    assert count(silent, no_speech_threshold=0.8) == (7, 1)
    assert count(silent, no_speech_threshold=None) == (7, 1)
    assert count(result([at(0), 1, at(9)], no_speech_prob=0.9)) == (1, 1)
    assert count(result([at(0), 1, 2, at(9)], looped=True)) == (7, 1)
