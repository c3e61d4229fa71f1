"""Properties of the voice activity detector. Run as a program, this file measures its speed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.audio.vad import (
    CONTEXT,
    FRAME,
    SAMPLE_RATE,
    Region,
    SpeechSegmenter,
    VadOptions,
    VoiceActivityDetector,
    packaged_weights,
    speech_regions,
)
from stapes.audio.windows import WindowPacker, skipped
from stapes.errors import ModelError, UsageError

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_librispeech = pytest.mark.skipif(
    not (DATA / "librispeech").is_dir(), reason="../shared/data/librispeech is not here"
)


@pytest.fixture(scope="module")
def detector() -> VoiceActivityDetector:
    return VoiceActivityDetector()


def read(path: Path) -> np.ndarray:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    with av.open(str(path)) as container:
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


def librispeech(count: int) -> list[np.ndarray]:
    lines = (DATA / "librispeech" / "manifest.jsonl").read_text().splitlines()
    clips = [clip for clip in map(json.loads, lines) if clip["split"] == "test"]
    step = len(clips) // count
    return [read(DATA / "librispeech" / clip["audio"]) for clip in clips[: count * step : step]]


def voices(seconds: float, seed: int = 0) -> np.ndarray:
    """Something like speech: a gliding buzz through changing resonances, in syllables, over noise."""
    rng = np.random.default_rng(seed)
    time_axis = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * time_axis)
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    formant = 800 + 600 * np.sin(2 * np.pi * 2.3 * time_axis)
    sound = sum(
        np.exp(-((((k * pitch) - formant) / 500) ** 2)) * np.sin(k * phase) + 0.1 / k * np.sin(k * phase)
        for k in range(1, 25)
    )
    syllables = np.clip(np.sin(2 * np.pi * 3.5 * time_axis) + 0.3, 0, 1) * (np.sin(2 * np.pi * 0.3 * time_axis) > -0.5)
    return (0.1 * sound * syllables + 0.001 * rng.standard_normal(len(time_axis))).astype(np.float32)


def noise(samples: int, seed: int = 0, level: float = 0.1) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def whole(detector: VoiceActivityDetector, pcm: np.ndarray) -> np.ndarray:
    return detector.probabilities([detector.state()], [pcm], final=True)[0]


def reference(pcm: np.ndarray) -> np.ndarray:
    """The package's own ONNX, frame by frame."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(packaged_weights().parent / "silero_vad_16k_op15.onnx"), options, providers=["CPUExecutionProvider"]
    )
    state = np.zeros((2, 1, 128), np.float32)
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), pcm, np.zeros(-len(pcm) % FRAME, np.float32)])
    values = []
    for start in range(0, len(padded) - CONTEXT, FRAME):
        frame = padded[None, start : start + CONTEXT + FRAME]
        value, state = session.run(None, {"input": frame, "state": state, "sr": np.array(SAMPLE_RATE)})
        values.append(value.item())
    return np.array(values, np.float32)


# --- the network


@pytest.mark.parametrize(
    "pcm",
    [
        voices(30.3),
        noise(200_000),
        noise(100_001, level=1.0),
        np.zeros(50_000, np.float32),
        np.concatenate([noise(40_000, level=1e-4), voices(5.0), np.zeros(30_000, np.float32), voices(7.1, 1)]),
    ],
    ids=["voices", "noise", "loud noise", "zeros", "mixed"],
)
def test_equals_the_packages_own_onnx(detector: VoiceActivityDetector, pcm: np.ndarray) -> None:
    np.testing.assert_allclose(whole(detector, pcm), reference(pcm), rtol=0, atol=1e-4)


@needs_librispeech
def test_equals_the_packages_own_onnx_on_speech(detector: VoiceActivityDetector) -> None:
    pcm = np.concatenate(librispeech(8))
    expected = reference(pcm)
    assert expected.max() > 0.9
    assert expected.min() < 0.1
    np.testing.assert_allclose(whole(detector, pcm), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [(1, 2, 509), (511, 512, 513), (480_000,), (0, 7_000, 0, 100_000)])
def test_pieces_of_any_size_equal_one_call(detector: VoiceActivityDetector, sizes: tuple[int, ...]) -> None:
    pcm = voices(6.0 if max(sizes) < 1_000 else 35.0)
    state, got, at = detector.state(), [], 0
    while at < len(pcm):
        for size in sizes:
            got += detector.probabilities([state], [pcm[at : at + size]])
            at += size
    got += detector.probabilities([state], [pcm[:0]], final=True)
    np.testing.assert_allclose(np.concatenate(got), whole(detector, pcm), rtol=0, atol=1e-5)


def test_many_recordings_equal_each_alone(detector: VoiceActivityDetector) -> None:
    lengths = [0, 1, 63, 511, 512, 513, 40_000, 40_000, 100_001, 333_333]
    recordings = [voices(length / SAMPLE_RATE + 0.1, seed)[:length] for seed, length in enumerate(lengths)]
    together = detector.probabilities([detector.state() for _ in recordings], recordings, final=True)
    for one, pcm in zip(together, recordings, strict=True):
        assert one.dtype == np.float32
        assert len(one) == -(-len(pcm) // FRAME)
        np.testing.assert_allclose(one, whole(detector, pcm), rtol=0, atol=1e-5)


def test_recordings_may_come_and_go_between_calls(detector: VoiceActivityDetector) -> None:
    first, second = voices(9.0, 1), voices(12.0, 2)
    a, b = detector.state(), detector.state()
    got_a = detector.probabilities([a], [first[:70_001]])
    more_a, got_b = detector.probabilities([a, b], [first[70_001:], second[:50_000]], final=[True, False])
    rest_b = detector.probabilities([b], [second[50_000:]], final=True)
    np.testing.assert_allclose(np.concatenate([*got_a, more_a]), whole(detector, first), rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([got_b, *rest_b]), whole(detector, second), rtol=0, atol=1e-5)
    assert a.finished
    with pytest.raises(ValueError, match="ended"):
        detector.probabilities([a], [first])


def test_nothing_in_nothing_out(detector: VoiceActivityDetector) -> None:
    assert detector.probabilities([], []) == []
    assert len(whole(detector, np.zeros(0, np.float32))) == 0
    with pytest.raises(ValueError, match="shorter"):
        detector.probabilities([detector.state()], [])


def test_state_stays_small(detector: VoiceActivityDetector) -> None:
    state = detector.state()
    detector.probabilities([state], [noise(480_123)])
    assert len(state.tail) == CONTEXT + 480_123 % FRAME
    assert state.tail.base is None


def test_threads_may_share_it(detector: VoiceActivityDetector) -> None:
    recordings = [voices(10.0, seed) for seed in range(4)]
    results: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: whole(detector, recordings[i])})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, pcm in enumerate(recordings):
        np.testing.assert_array_equal(results[i], whole(detector, pcm))


def test_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        detector = VoiceActivityDetector(threads=2)
        workers = [detector._workers.submit(torch.get_num_threads).result() for _ in range(4)]
        seen: list[int] = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert workers == [1, 1, 1, 1]
        assert seen == [torch.get_num_threads()] == [2]
    finally:
        torch.set_num_threads(before)


def test_does_not_import_the_package() -> None:
    code = (
        "import sys; from stapes.audio.vad import VoiceActivityDetector as V; V(); "
        "sys.exit(any(name.split('.')[0] in ('silero_vad', 'onnxruntime', 'torchaudio') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reads_the_packages_safetensors_too(detector: VoiceActivityDetector) -> None:
    path = packaged_weights().with_name("silero_vad_16k.safetensors")
    if not path.is_file():
        pytest.skip("this version of silero-vad carries no safetensors")
    pcm = np.concatenate([voices(10.0), noise(160_000)])
    same = (whole(VoiceActivityDetector(path), pcm) >= 0.5) == (whole(detector, pcm) >= 0.5)
    assert same.mean() > 0.9  # another training of the same network


def test_bad_weights_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("damaged.safetensors", "damaged.jit"):
        (tmp_path / name).write_bytes(packaged_weights().read_bytes()[:1000])
    for name in ("damaged.safetensors", "missing.safetensors", "damaged.jit", "missing.jit"):
        with pytest.raises(ModelError, match=name):
            VoiceActivityDetector(tmp_path / name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="silero-vad"):
        VoiceActivityDetector()


def measure(detector: VoiceActivityDetector, count: int, seconds: int) -> tuple[float, float]:
    """Seconds of audio for each second of wall-clock and of processor time; best of 3."""
    recordings = [noise(seconds * SAMPLE_RATE, seed) for seed in range(count)]
    wall, processor = [], []
    for _ in range(3):
        started = time.perf_counter(), time.process_time()
        detector.probabilities([detector.state() for _ in recordings], recordings, final=True)
        wall.append(time.perf_counter() - started[0])
        processor.append(time.process_time() - started[1])
    return count * seconds / min(wall), count * seconds / min(processor)


@pytest.mark.parametrize(("count", "seconds"), [(1, 120), (8, 30)])
def test_is_fast(detector: VoiceActivityDetector, count: int, seconds: int) -> None:
    """Processor time, so that a busy machine does not count; measured 1,500 × and 2,400 × on one core."""
    assert measure(detector, count, seconds)[1] > 300


# --- regions

probabilities_strategy = st.lists(
    st.tuples(st.sampled_from([0.0, 0.2, 0.34, 0.36, 0.49, 0.5, 0.51, 0.9, 1.0]), st.integers(1, 60)), max_size=30
).map(lambda runs: np.array([value for value, count in runs for _ in range(count)], np.float32))


@settings(deadline=None, max_examples=200)
@given(
    probabilities_strategy,
    st.sampled_from([(0.03, 0.5, 0.0), (0.1, 0.03, 0.25), (2.0, 0.4, 0.0), (0.16, 0.4, 0.1), (0.0, 0.0, 0.0)]),
    st.integers(0, FRAME - 1),
)
def test_hysteresis_is_that_of_silero(probabilities: np.ndarray, times: tuple[float, ...], missing: int) -> None:
    from silero_vad.utils_vad import get_speech_timestamps_from_probs

    min_silence, pad, min_speech = times
    samples = max(0, len(probabilities) * FRAME - missing)
    expected = get_speech_timestamps_from_probs(
        probabilities.tolist(),
        min_speech_duration_ms=min_speech * 1000,
        min_silence_duration_ms=min_silence * 1000,
        speech_pad_ms=pad * 1000,
        audio_length_samples=samples,
    )
    options = VadOptions(min_silence=min_silence, pad=pad, min_speech=min_speech, max_speech=1e6)
    regions = speech_regions(probabilities, samples, options)
    assert [(r.start, r.end) for r in regions] == [(e["start"], e["end"]) for e in expected]


@settings(deadline=None, max_examples=200)
@given(probabilities_strategy, st.lists(st.integers(1, 200), min_size=1), st.sampled_from([4.0, 29.0]), st.booleans())
def test_regions_settle_in_order_and_in_time(
    probabilities: np.ndarray, sizes: list[int], max_speech: float, drop_short: bool
) -> None:
    options = VadOptions(max_speech=max_speech, pad=0.3, min_speech=0.2 if drop_short else 0.0)
    segmenter, regions, at, turn = SpeechSegmenter(options), [], 0, 0
    while at < len(probabilities):
        position = segmenter.position
        size = sizes[turn % len(sizes)]
        new = segmenter.feed(probabilities[at : at + size])
        assert all(region.start >= position for region in new)
        assert segmenter.position >= position
        at, turn, regions = at + size, turn + 1, regions + new
        seen = min(at, len(probabilities)) * FRAME
        assert seen - segmenter.position <= (max_speech + 2) * SAMPLE_RATE  # bounded delay
    samples = len(probabilities) * FRAME
    regions += segmenter.feed(probabilities[:0], final=True)
    assert segmenter.position == samples
    assert regions == speech_regions(probabilities, samples, options)
    ends = [0, *(region.end for region in regions)]
    assert all(end <= region.start < region.end <= samples for end, region in zip(ends, regions, strict=False))
    assert all(region.end - region.start <= max_speech * SAMPLE_RATE for region in regions)
    if not drop_short:
        covered = np.zeros(samples, bool)
        for region in regions:
            covered[region.start : region.end] = True
        assert covered.reshape(-1, FRAME)[probabilities >= 0.5].all()


def test_speech_without_pause_is_cut_without_loss() -> None:
    regions = speech_regions(np.ones(60_000, np.float32), 60_000 * FRAME)
    assert regions[0].start == 0
    assert regions[-1].end == 60_000 * FRAME
    assert all(a.end == b.start for a, b in pairwise(regions))
    assert max(region.end - region.start for region in regions) <= 29 * SAMPLE_RATE


def test_cut_is_at_the_longest_dip_else_at_the_least_probable_frame() -> None:
    options = VadOptions(min_silence=0.5)
    probabilities = np.full(1000, 0.9, np.float32)
    probabilities[700] = 0.6
    assert speech_regions(probabilities, 512_000, options)[0].end == 700 * FRAME
    probabilities[800:804] = 0.3
    probabilities[850:852] = 0.0
    first, second = speech_regions(probabilities, 512_000, options)[:2]
    assert first.end == second.start == 802 * FRAME
    assert second.pause == 4 * FRAME


def test_pause_is_the_silence_between_speech() -> None:
    probabilities = np.array([0] * 50 + [1] * 50 + [0] * 10 + [1] * 50 + [0] * 90 + [1] * 10, np.float32)
    regions = speech_regions(probabilities, len(probabilities) * FRAME)
    assert [region.pause for region in regions] == [50 * FRAME, 10 * FRAME, 90 * FRAME]
    assert regions[0].end == regions[1].start == 105 * FRAME
    assert regions[1].end == 160 * FRAME + SAMPLE_RATE // 2


@pytest.mark.parametrize(
    "options",
    [{"threshold": 0.0}, {"threshold": 1.1}, {"neg_threshold": 0.6}, {"pad": -0.1}, {"max_speech": 2.0}],
    ids=lambda options: next(iter(options)),
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        VadOptions(**options)


# --- both together


def regions_of(detector: VoiceActivityDetector, pcm: np.ndarray) -> list[Region]:
    return speech_regions(whole(detector, pcm), len(pcm))


@pytest.mark.parametrize(
    "pcm",
    [
        np.zeros(0, np.float32),
        np.zeros(100, np.float32),
        np.zeros(160_000, np.float32),
        np.full(160_000, 0.5, np.float32),
        noise(160_000),
        noise(160_000, level=0.001),
        (0.5 * np.sin(2 * np.pi * 440 / SAMPLE_RATE * np.arange(160_000))).astype(np.float32),
    ],
    ids=["nothing", "6 ms", "zeros", "constant", "noise", "quiet noise", "sine"],
)
def test_no_speech_no_region(detector: VoiceActivityDetector, pcm: np.ndarray) -> None:
    assert regions_of(detector, pcm) == []


@pytest.mark.skipif(not (DATA / "noise-rir").is_dir(), reason="../shared/data/noise-rir is not here")
def test_real_noises_are_hardly_taken_for_speech(detector: VoiceActivityDetector) -> None:
    """Measured: 5.1 s of 484 s, four single sounds with their padding."""
    recordings = [read(path) for path in sorted((DATA / "noise-rir").glob("*.flac"))]
    speech = sum(region.end - region.start for pcm in recordings for region in regions_of(detector, pcm))
    assert speech < 0.015 * sum(map(len, recordings))


@needs_librispeech
def test_joined_speech_is_covered_and_windows_are_full(detector: VoiceActivityDetector) -> None:
    clips = librispeech(60)
    gap = np.zeros(SAMPLE_RATE // 2, np.float32)
    joined = np.concatenate([part for clip in clips for part in (clip, gap)])
    # Within 40 dB of its clip's peak.
    loud = np.concatenate([part for clip in clips for part in (np.abs(clip) >= 0.01 * np.abs(clip).max(), gap > 0)])
    regions = regions_of(detector, joined)
    assert sum(loud[region.start : region.end].sum() for region in regions) >= 0.999 * loud.sum()
    packer = WindowPacker()
    windows = packer.feed(regions) + packer.flush()
    assert np.mean([window.duration for window in windows[:-1]]) >= 26
    left_out = sum(end - start for start, end in skipped(windows, len(joined) / SAMPLE_RATE))
    assert left_out + sum(window.duration for window in windows) == pytest.approx(len(joined) / SAMPLE_RATE)
    assert left_out < 0.03 * len(joined) / SAMPLE_RATE


if __name__ == "__main__":
    for count, seconds in ((1, 600), (8, 60)):
        wall, processor = measure(VoiceActivityDetector(), count, seconds)
        print(f"{count} × {seconds} s: {wall:.0f} × real time, {processor:.0f} × of processor time")
