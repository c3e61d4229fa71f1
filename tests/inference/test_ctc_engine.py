"""CTC models as recognisers: the same text whole or in windows, alone or in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeDetector, living_workers

from ctc_models import LETTERS, babble, config, load, network, said, save, text_of, whole
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint
from stapes.decoding.ctc import CTCToken
from stapes.errors import ModelError
from stapes.inference import ctc_recording, ctc_windows
from stapes.inference.ctc_model import Wav2Vec2CTC, plain
from stapes.inference.ctc_recording import CTCRecording, CTCSound, CTCTask
from stapes.inference.ctc_windows import Emissions, cut
from stapes.inference.gpu_ctc import GpuCtcEncoder
from stapes.inference.torch_ctc import TorchCTCEngine
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.models.waveform import normalize_waveform
from stapes.progress import Silent
from stapes.recognizer import Recognizer
from stapes.text.ctc_tokenizer import CTCTokenizer

pytestmark = pytest.mark.timeout(120)
TOKENIZER = CTCTokenizer(LETTERS)
SECOND = 16_000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def sound_is_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stapes.recognizer.VoiceActivityDetector", lambda **_: FakeDetector())


def made(norm: str, *, window: int = 4, context: int = 1, make: Any = plain, **changes: Any) -> Wav2Vec2CTC:
    """A model with windows of so many seconds."""
    sizes = config(norm, **changes)
    checkpoint = Wav2Vec2Checkpoint("made", Path("made"), "wav2vec2", sizes, (), TOKENIZER)
    model = Wav2Vec2CTC(checkpoint, network(sizes), make)
    model.window, model.context = window * SECOND, context * SECOND
    return model


# One recording.


@pytest.mark.parametrize("norm", ["layer", "group"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_short_recording_has_the_text_of_the_plain_model(tmp_path: Path, norm: str, normalize: bool) -> None:
    model = save(tmp_path / "model", norm, normalize=normalize)
    pcm = babble(3.1)
    with load(tmp_path / "model") as recognizer:
        transcript = recognizer.transcribe(pcm, sample_rate=SECOND, vad=False, word_timestamps=True)
    expected = said(whole(model, pcm, normalize))
    assert len(text_of(expected)) > 20
    assert transcript.text == text_of(expected)
    words = [word for segment in transcript.segments for word in segment.words or []]
    assert " ".join(word.word.strip() for word in words) == transcript.text
    spoken = [token for token in expected if TOKENIZER.decode([token.id])]
    assert words[0].start == pytest.approx(spoken[0].start * 0.02)
    assert words[-1].end == pytest.approx(spoken[-1].end * 0.02)
    assert all(0 < word.probability <= 1 for word in words)
    assert all(segment.avg_logprob < 0 for segment in transcript.segments)
    assert transcript.duration == pytest.approx(3.1)
    assert transcript.timings["total"] > 0


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_the_text_is_that_of_transformers(tmp_path: Path, norm: str) -> None:
    from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor

    save(tmp_path / "model", norm)
    theirs = Wav2Vec2ForCTC.from_pretrained(tmp_path / "model")
    processor: Any = Wav2Vec2Processor.from_pretrained(tmp_path / "model")
    pcm = babble(2.3, seed=5)
    with torch.inference_mode():
        logits = theirs(**processor(pcm, sampling_rate=SECOND, return_tensors="pt")).logits
    (expected,) = processor.batch_decode(logits.argmax(-1))
    with load(tmp_path / "model") as recognizer:
        text = recognizer.transcribe(pcm, sample_rate=SECOND, vad=False).text
    assert len(text) > 20
    assert text == " ".join(expected.split())


@pytest.mark.parametrize(("norm", "downsampling"), [("layer", 0), ("group", 0), ("layer", 1)])
def test_windows_say_what_the_whole_says_where_nothing_looks_farther_than_the_overlap(
    norm: str, downsampling: int
) -> None:
    # Without attention a frame sees 16 frames of the positional convolution: seams must not show at all, nor must it
    # show that each window was normalised without the others being there.
    model = made(norm, layers=0, downsampling_layers=downsampling)
    pcm = babble(17.3) * np.linspace(0.1, 2, round(17.3 * SECOND), dtype=np.float32)
    emissions = Emissions(model, pcm, sample_rate=SECOND, batch=2)
    assert model.network is not None
    expected = whole(model.network, pcm).log_softmax(-1)
    windows = list(emissions)
    assert len(windows) > 5
    frame = 0
    for first, part in windows:
        assert first == frame
        assert (part - expected[first : first + len(part)]).abs().max() < 1e-3
        frame += len(part)
    assert frame == len(expected) == emissions.frames


def test_windows_with_attention_are_those_of_an_explicit_loop() -> None:
    model = made("group")
    pcm = babble(9.7)
    normalized = normalize_waveform(torch.from_numpy(pcm)[None])
    first = model.network.feature_extractor.first
    statistics = first.statistics(first.moments(normalized))  # type: ignore[union-attr,operator]
    expected = []
    frames, count = model.frame_count(len(pcm)), 5
    for i in range(count):
        begin, end = frames * i // count, frames * (i + 1) // count
        start = max(0, begin * 320 - SECOND)
        stop = len(pcm) if i == count - 1 else end * 320 + SECOND
        with torch.inference_mode():
            logits, _ = model.network(normalized[:, start:stop], None, statistics)
        expected.append(logits[0, begin - start // 320 : end - start // 320].log_softmax(-1))
    found = torch.cat([part for _, part in Emissions(model, pcm, sample_rate=SECOND)])
    assert (found - torch.cat(expected)).abs().max() < 1e-3


@pytest.mark.parametrize("samples", [0, 399, 400, 4 * SECOND, 4 * SECOND + 1, 63_999, 1_000_003, 12_345_678])
@pytest.mark.parametrize("start", [0, 777])
def test_windows_hold_every_frame_once_and_none_is_too_long(samples: int, start: int) -> None:
    model = made("layer", layers=0)
    frame = 0
    for window in cut(start, start + samples, model):
        assert window.frame == frame
        frame += window.last - window.first
        assert start <= window.start < window.end <= start + samples
        assert window.end - window.start <= model.window
        assert window.start == start or (window.start - start) // 320 + window.first == window.frame
        assert window.last <= model.frame_count(window.end - window.start)
        assert window.first * 320 >= model.context or window.start == start
        assert window.end == start + samples or window.end - window.start - window.last * 320 >= model.context
    assert frame == model.frame_count(samples)


@pytest.mark.parametrize("norm", ["layer", "group"])
@pytest.mark.parametrize("once", [False, True])
def test_a_long_recording_has_the_text_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str, once: bool
) -> None:
    if not once:  # read twice
        monkeypatch.setattr(ctc_recording, "HELD", 2 * SECOND)
    network = save(tmp_path / "model", norm, attends=False)
    pcm = babble(21.0, seed=3)
    with load(tmp_path / "model") as recognizer:
        _shorten_windows(recognizer)
        transcript = recognizer.transcribe(pcm, sample_rate=SECOND, vad=False)
    expected = said(whole(network, pcm))
    assert transcript.text == text_of(expected)
    assert len(transcript.segments) > 1


def _shorten_windows(recognizer: Recognizer) -> None:
    model: Any = recognizer.family.model  # type: ignore[attr-defined]
    model.window, model.context = 4 * SECOND, SECOND


def test_memory_does_not_grow_with_the_recording() -> None:
    model = made("group", window=30, context=2)
    recording = CTCRecording(CTCTask(model, TOKENIZER, vad=False), [(0, None)])
    chunk = babble(20)
    most = 0
    for _ in range(90):  # half an hour
        recording.feed(chunk, None)
        most = max(most, sum(map(len, recording._chunks)))
    recording.finish(None)
    assert recording.again
    windows = 0
    for _ in range(90):
        recording.feed_again(chunk)
        most = max(most, sum(map(len, recording._cutter._chunks)) + recording.backlog)
        while recording.take():
            windows += 1
    assert recording.finish_again()
    assert windows > 60
    assert most <= ctc_windows.HELD


def test_a_pipe_is_read_twice_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    import soundfile

    monkeypatch.setattr(ctc_recording, "HELD", 2 * SECOND)
    save(tmp_path / "model", "group")
    pcm = babble(9)
    soundfile.write(tmp_path / "sound.wav", pcm, SECOND, subtype="FLOAT")
    content = (tmp_path / "sound.wav").read_bytes()

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.inner = io.BytesIO(content)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return self.inner.readinto(buffer)

    file = io.BytesIO(b"before" + content)
    file.seek(6)
    with load(tmp_path / "model") as recognizer:
        _shorten_windows(recognizer)
        texts = [
            recognizer.transcribe(source, vad=False).text for source in (tmp_path / "sound.wav", content, Pipe(), file)
        ]
    assert len(texts[0]) > 50
    assert len(set(texts)) == 1


def test_channels_are_speakers_that_know_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_recording, "HELD", 2 * SECOND)
    save(tmp_path / "model", "group")
    voices = np.stack([babble(6, seed=1), 0.1 * babble(6, seed=2)])
    with load(tmp_path / "model") as recognizer:
        _shorten_windows(recognizer)
        both = recognizer.transcribe(voices, sample_rate=SECOND, vad=False, channels="separate")
        alone = [recognizer.transcribe(voice, sample_rate=SECOND, vad=False).text for voice in voices]
    for number, text in enumerate(alone, 1):
        said = [segment.text.strip() for segment in both.segments if segment.speaker == f"Speaker {number}"]
        assert " ".join(said) == text


@pytest.mark.parametrize("norm", ["layer", "group"])
@pytest.mark.parametrize("once", [True, False])
def test_silence_is_skipped_and_normalises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str, once: bool
) -> None:
    if not once:
        monkeypatch.setattr(ctc_recording, "HELD", 2 * SECOND)
    model = save(tmp_path / "model", norm)
    silence = np.zeros(5 * SECOND, np.float32)
    pcm = np.concatenate([silence, babble(2, seed=1), silence, babble(3, seed=2), silence])
    with load(tmp_path / "model") as recognizer:
        transcript = recognizer.transcribe(pcm, sample_rate=SECOND)
    edges = [time for skip in transcript.skipped for time in skip]
    assert edges == pytest.approx([0, 4.5, 7.5, 11.5, 15.5, 20], abs=0.05)
    pieces = [pcm[round(a * SECOND) : round(b * SECOND)] for a, b in (edges[1:3], edges[3:5])]
    heard = normalize_waveform(torch.from_numpy(np.concatenate(pieces))[None]).split(list(map(len, pieces)), dim=1)
    statistics = None
    if norm == "group":
        first: Any = model.feature_extractor.first
        statistics = first.statistics(first.moments(heard[0]) + first.moments(heard[1]))
    for piece, start, end in zip(heard, edges[1:4:2], edges[2:5:2], strict=True):
        with torch.inference_mode():
            expected = text_of(said(model(piece, None, statistics)[0][0]))
        segments = [segment for segment in transcript.segments if start - 0.01 < segment.start < end]
        assert len(expected) > 10
        assert " ".join(segment.text.strip() for segment in segments) == expected


# Many recordings.


def sounds(model: Wav2Vec2CTC, seconds: Sequence[float], measured: bool = False) -> list[CTCSound]:
    out = []
    for seed, length in enumerate(seconds):
        pcm = babble(length, seed)
        result = None
        if measured and seed % 2:
            meter = model.meter()
            meter.feed(pcm * 2 + 1)
            result = meter.result()
        out.append(CTCSound(pcm, 0, model.frame_count(len(pcm)), result, None, False))
    return out


@pytest.mark.parametrize("norm", ["layer", "group"])
@pytest.mark.parametrize("make", [plain, partial(GpuCtcEncoder, dtype=torch.float32)], ids=["plain", "packed"])
def test_neither_batch_nor_bucket_nor_order_changes_a_result(norm: str, make: Any) -> None:
    model = made(norm, window=30, make=make)
    windows = sounds(model, [0.026, 0.4, 1.0, 1.1, 2.5, 2.6, 3.9, 4.0, 6.2, 7.7], measured=True)

    def run(order: Sequence[int], **settings: Any) -> dict[int, list[CTCToken]]:
        engine = TorchCTCEngine(model, len(order), **settings)
        slots = engine.admit([], engine.encode([windows[i] for i in order]))
        engine.step(1)
        return {order[slot]: output.tokens for slot, output in engine.harvest() if slot in slots}

    order = list(range(len(windows)))
    alone = run(order, batch_seconds=0.001)
    assert sum(map(len, alone.values())) > 100
    shuffled = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    for settings in (
        {"batch_seconds": 12.0},
        {"batch_seconds": 40.0},
        {"batch_seconds": 40.0, "shapes": "fixed"},
        {"batch_seconds": 15.0, "shapes": "packed"},
    ):
        for each in (order, shuffled):
            found = run(each, **settings)
            for index, tokens in alone.items():
                assert [token[:3] for token in found[index]] == [token[:3] for token in tokens]
                np.testing.assert_allclose([t.probability for t in found[index]], [t.probability for t in tokens], 1e-3)


def test_fixed_shapes_are_few() -> None:
    model = made("layer", window=30, layers=0)
    shapes = set()
    compute = model._run

    def watched(waveform: torch.Tensor, lengths: torch.Tensor, statistics: Any) -> Any:
        shapes.add(tuple(waveform.shape))
        return compute(waveform, lengths, statistics)

    model._run = watched
    engine = TorchCTCEngine(model, 64, batch_seconds=60, shapes="fixed")
    rng = np.random.default_rng(0)
    for _ in range(4):
        engine.encode(sounds(model, rng.uniform(0.1, 8, 12).tolist()))
    assert {shape[1] for shape in shapes} <= {SECOND * s for s in (1, 2, 3, 4, 5, 6, 8)}
    assert {shape[0] for shape in shapes} <= {1, 2, 4, 8, 16}


def test_a_bad_input_stops_no_other(tmp_path: Path) -> None:
    import soundfile

    save(tmp_path / "model", "layer")
    for seed in range(3):
        soundfile.write(tmp_path / f"{seed}.wav", babble(1 + seed, seed), SECOND)
    (tmp_path / "bad.wav").write_bytes(b"RIFF nonsense")
    paths = [tmp_path / name for name in ("0.wav", "bad.wav", "1.wav", "missing.wav", "2.wav")]
    soundfile.write(tmp_path / "short.wav", np.zeros(300), SECOND)
    with load(tmp_path / "model", batch_size=2) as recognizer:
        results = {Path(t.path or "").name: t for t in recognizer.transcribe_many([*paths, tmp_path / "short.wav"])}
    assert {name for name, transcript in results.items() if transcript.error} == {"bad.wav", "missing.wav"}
    assert all(results[f"{seed}.wav"].text for seed in range(3))
    assert results["short.wav"].text == ""


def test_progress_is_all_of_it_and_what_is_cancelled_leaves_the_recogniser_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctc_recording, "HELD", 2 * SECOND)

    class Seconds(Silent):
        total = done = 0.0

        def add_total(self, seconds: float) -> None:
            self.total += seconds

        def advance(self, seconds: float) -> None:
            self.done += seconds

    save(tmp_path / "model", "group")
    clips = [babble(seconds, seed) for seed, seconds in enumerate((0.5, 3, 9, 1, 5))]
    progress = Seconds()
    with load(tmp_path / "model") as recognizer:
        _shorten_windows(recognizer)
        texts = {t.duration: t.text for t in recognizer.transcribe_many(clips, sample_rate=SECOND, progress=progress)}
        assert progress.total == pytest.approx(18.5)
        assert progress.done == pytest.approx(18.5)
        for _ in range(3):
            unfinished: Any = recognizer.transcribe_many(clips * 3, sample_rate=SECOND)
            next(unfinished)
            unfinished.close()
        assert {t.duration: t.text for t in recognizer.transcribe_many(clips, sample_rate=SECOND)} == texts
    assert not living_workers()


def test_a_network_that_gives_no_numbers_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model", "layer")
    with load(tmp_path / "model") as recognizer:
        network: Any = recognizer.family.model.network  # type: ignore[attr-defined]
        network.head.bias.fill_(float("nan"))
        transcript = next(iter(recognizer.transcribe_many([babble(1)], sample_rate=SECOND, vad=False)))
    assert transcript.error is not None
    assert "not a number" in transcript.error


def test_a_pre_trained_model_writes_no_text(tmp_path: Path) -> None:
    sizes = config(vocab_size=None)
    checkpoint = Wav2Vec2Checkpoint("made", tmp_path, "wav2vec2", sizes, ())
    with pytest.raises(ModelError, match="only pre-trained"):
        Wav2Vec2CTC(checkpoint, Wav2Vec2(sizes))
