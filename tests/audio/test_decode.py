"""Reading recordings: whatever comes in, 16 kHz samples, a warning or one sentence come out."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from damaged import CASES, Case
from recordings import RATE, encode, encoded, pcm16, resampled, signal, similarity, wav

from stapes.audio import containers
from stapes.audio.decode import open_audio, read_audio
from stapes.errors import AudioError, UsageError

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    return signal()


# -- bad inputs


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_every_kind_of_input_works_or_says_why_not(
    case: Case, tmp_path: Path, speech: np.ndarray, capfd: pytest.CaptureFixture[str]
) -> None:
    if case.needs_user and os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = case.build(tmp_path, speech)
    if case.expect == "error":
        with pytest.raises(AudioError) as caught:
            read_audio(path)
        assert path.name in str(caught.value)
        assert case.says in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        with open_audio(path) as stream:
            chunks = list(stream)
        samples = np.concatenate(chunks, axis=1)[0]
        assert samples.dtype == np.float32
        assert np.isfinite(samples).all()
        assert stream.position == len(samples) / RATE
        assert stream.damaged == (case.expect == "partial")
        assert bool(stream.warnings) == (stream.damaged or bool(case.says))
        assert case.says in " ".join(stream.warnings)
        whole = len(speech) / RATE + case.silence_before if case.seconds is None else case.seconds
        assert case.keeps * whole - case.tolerance <= stream.position <= whole + case.tolerance
        if case.correlation:
            correlation, late = similarity(samples, speech)
            assert correlation >= case.correlation
            assert abs(late - case.silence_before * RATE) < 0.08 * RATE
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/urandom"])
def test_endless_file_objects_end(source: str) -> None:
    with Path(source).open("rb") as file, pytest.raises(AudioError):
        read_audio(file, max_seconds=60)


def test_names_are_shown_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"a\\nb\\udce9"):
        read_audio(tmp_path / os.fsdecode(b"a\nb\xe9"))


@pytest.mark.parametrize("url", ["https://example.com/a.mp3", "file:///etc/passwd", "rtsp://camera"])
def test_urls_are_not_opened(url: str) -> None:
    with pytest.raises(AudioError, match="download it first"):
        read_audio(url)


def test_formats_that_name_other_files_are_refused_by_the_demuxer_list_itself(
    tmp_path: Path, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "_kind", lambda head: None)  # the friendlier check before it
    (tmp_path / "secret.wav").write_bytes(wav(pcm16(speech)))
    for name, text in {
        "a.vtt": "WEBVTT\n\n00:00.000 --> 00:01.000\nFFmpeg reads this, were it allowed to.\n",
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{tmp_path}/secret.wav\n#EXT-X-ENDLIST\n",
        "a.ffconcat": f"ffconcat version 1.0\nfile {tmp_path}/secret.wav\n",
        "a.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(AudioError, match="is text, not a recording"):
            read_audio(tmp_path / name)


@pytest.mark.parametrize("container", ["wav", "flac", "mp3", "ogg", "m4a", "webm", "aac"])
def test_mutilated_files_give_finite_audio_or_an_audio_error(container: str, speech: np.ndarray) -> None:
    codec, muxer, rate = {
        "wav": ("pcm_s16le", "wav", RATE), "flac": ("flac", "flac", RATE), "mp3": ("libmp3lame", "mp3", RATE),
        "ogg": ("libopus", "ogg", 48000), "m4a": ("aac", "mp4", RATE), "webm": ("libopus", "webm", 48000),
        "aac": ("aac", "adts", RATE),
    }[container]  # fmt: skip
    healthy = encoded(speech[:RATE], codec, muxer, rate=rate)
    generator = np.random.default_rng(5)
    for _ in range(40):
        data = bytearray(healthy)
        for place in generator.integers(0, min(len(data), generator.choice([64, 1000, len(data)])), 8):
            data[place] = generator.integers(256)
        with contextlib.suppress(AudioError), open_audio(bytes(data), max_seconds=600) as stream:
            for chunk in stream:
                assert np.isfinite(chunk).all()


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the recordings in ../shared/data")
def test_healthy_recordings_raise_no_alarm() -> None:
    for folder in filter(Path.is_dir, DATA.iterdir()):
        files = sorted(p for p in folder.rglob("*") if p.suffix in {".flac", ".mp3", ".ogg", ".opus", ".wav"})
        for path in files[:: max(1, len(files) // 20)]:
            with open_audio(path) as stream:
                for _ in stream:
                    pass
            assert (stream.damaged, stream.warnings) == (False, [])
            assert stream.duration == pytest.approx(stream.position, abs=0.1)


# -- samples


def test_chunks_are_the_one_shot_resampling_of_the_whole() -> None:
    whole = resampled(signal(95.0), 44100)
    data = io.BytesIO()
    soundfile.write(data, whole, 44100, format="WAV", subtype="FLOAT")
    with open_audio(data.getvalue()) as stream:
        assert stream.duration == pytest.approx(95.0)
        chunks = list(stream)
    assert all(1 <= chunk.shape[1] / RATE <= 30 for chunk in chunks)
    expected = soxr.resample(whole, 44100, RATE, quality="HQ")
    np.testing.assert_allclose(np.concatenate(chunks, axis=1)[0], expected, atol=1e-5, rtol=0)


def test_16_khz_is_left_as_it_is() -> None:
    samples = (signal(25.0) * 32767).astype(np.int16)
    np.testing.assert_array_equal(read_audio(wav(samples.tobytes()))[0], samples / np.float32(32768))


# AAC fills bands with noise from a generator that a seek cannot set back; its samples stay in place.
@pytest.mark.parametrize(
    ("name", "codec", "muxer", "rate", "tolerance"),
    [
        ("a.wav", "pcm_s16le", "wav", 44100, 1e-5), ("odd.wav", "pcm_s16le", "wav", 7919, 2e-5),
        ("a.flac", "flac", "flac", 48000, 1e-5), ("a.aiff", "pcm_s16be", "aiff", 22050, 1e-5),
        ("alac.m4a", "alac", "mp4", 44100, 1e-5), ("aac.m4a", "aac", "mp4", 44100, 5e-3),
        ("video.mp4", "aac", "mp4", 48000, 5e-3), ("a.mp3", "libmp3lame", "mp3", 44100, 1e-5),
        ("a.ogg", "libopus", "ogg", 48000, 1e-5), ("a.mkv", "aac", "matroska", 44100, 1e-5),
    ],
)  # fmt: skip
def test_start_and_end_are_exact_to_the_sample(
    tmp_path: Path, name: str, codec: str, muxer: str, rate: int, tolerance: float
) -> None:
    path = tmp_path / name
    encode(path, signal(80.0), codec, muxer, rate=rate, video=name.startswith("video"))
    whole = read_audio(path)
    for start, end in [(0.0, 7.25), (1.2345, 3.3), (50.12345, 61.1), (69.99, None), (40.0, 40.5)]:
        with open_audio(path, start=start, end=end) as stream:
            part = np.concatenate(list(stream), axis=1)
        expected = whole[:, round(start * RATE) : None if end is None else round(end * RATE)]
        assert part.shape == expected.shape
        np.testing.assert_allclose(part, expected, atol=tolerance, rtol=0)
        assert not stream.warnings
        assert stream.duration == pytest.approx(stream.position, abs=0.1)


def test_what_is_outside_start_and_end_is_not_read() -> None:
    class Counting(io.BytesIO):
        count = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.count += len(data)
            return data

    data = wav(pcm16(signal(300.0)))
    file = Counting(data)
    assert read_audio(file, start=290.0).shape == (1, 10 * RATE)
    assert file.count < len(data) / 10
    file = Counting(data)
    assert read_audio(file, end=3.0).shape == (1, 3 * RATE)
    assert file.count < len(data) / 30


def test_start_after_the_end_is_said() -> None:
    with open_audio(wav(pcm16(signal(1.0))), start=5.0) as stream:
        assert list(stream) == []
    assert "ends before 5 s" in stream.warnings[0]


def test_rate_and_layout_may_change_on_the_way(speech: np.ndarray) -> None:
    other = encoded(np.stack([speech, speech]), "aac", "adts", rate=44100, bit_rate=128000)
    joined = encoded(speech, "aac", "adts", rate=16000) + other
    with open_audio(joined) as stream:
        samples = np.concatenate(list(stream), axis=1)[0]
    assert len(samples) / RATE == pytest.approx(2 * len(speech) / RATE, abs=0.3)
    for half in (samples[: len(speech)], samples[-len(speech) :]):
        assert similarity(half, speech)[0] > 0.9


# -- channels


def test_a_mix_is_the_mean(speech: np.ndarray) -> None:
    other = np.random.default_rng(0).standard_normal(len(speech)).astype(np.float32) * 0.05
    stream = open_audio(np.stack([speech, other]), sample_rate=RATE)
    np.testing.assert_allclose(next(stream)[0], (speech + other) / 2, atol=1e-7)
    assert stream.warnings == []


@pytest.mark.parametrize("rate", [16000, 44100])
def test_opposite_phases_switch_to_the_louder_channel_once_and_for_all(rate: int) -> None:
    left = resampled(signal(60.0), rate)
    right = left * 0.9
    right[20 * rate : 40 * rate] *= -1  # then in phase again: the choice stands
    with open_audio(np.stack([left, right]), sample_rate=rate) as stream:
        mixed = np.concatenate(list(stream), axis=1)[0]
    assert len(stream.warnings) == 1
    assert "20.0 s" in stream.warnings[0]
    assert "channel 1" in stream.warnings[0]
    expected = resampled_back(left, rate)
    np.testing.assert_allclose(mixed[RATE : 19 * RATE], 0.95 * expected[RATE : 19 * RATE], atol=1e-4)
    np.testing.assert_allclose(mixed[21 * RATE :], expected[21 * RATE :], atol=1e-4)


def resampled_back(samples: np.ndarray, rate: int) -> np.ndarray:
    return samples if rate == RATE else soxr.resample(samples, rate, RATE, quality="HQ")


def test_quiet_opposite_noise_does_not_count(speech: np.ndarray) -> None:
    hum = np.float32(0.001) * np.sin(2 * np.pi * 50 * np.arange(3 * RATE) / RATE)
    left = np.concatenate([hum, speech]).astype(np.float32)
    right = np.concatenate([-hum, speech]).astype(np.float32)
    with open_audio(np.stack([left, right]), sample_rate=RATE) as stream:
        assert sum(chunk.shape[1] for chunk in stream) == len(left)
    assert stream.warnings == []


def test_channels_apart_or_one_of_them(speech: np.ndarray) -> None:
    channels = np.stack([speech, speech[::-1]])
    data = wav(pcm16(channels), channels=2)
    with open_audio(data, channels="separate") as stream:
        assert stream.channels == 2
        apart = np.concatenate(list(stream), axis=1)
    np.testing.assert_allclose(apart, channels, atol=1e-4)
    np.testing.assert_array_equal(read_audio(data, channels="2"), apart[1:])
    with pytest.raises(AudioError, match="2 channels: there is no channel 3"):
        open_audio(data, channels="3")


def test_all_eight_channels_of_planar_audio_are_read(tmp_path: Path, speech: np.ndarray) -> None:
    path = CASES["seven_one_planar"].build(tmp_path, speech)
    with open_audio(path, channels="separate") as stream:
        assert stream.channels == 8
        samples = np.concatenate(list(stream), axis=1)
    # The fourth of 7.1 is the bass channel, which AAC cuts off above 120 Hz or so.
    assert all(similarity(channel, speech)[0] > 0.9 for channel in np.delete(samples, 3, axis=0))


# -- sources


class Pipe(io.RawIOBase):
    """A file object that cannot seek and gives little at a time."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        data = self.file.read(min(len(buffer), 1000))
        buffer[: len(data)] = data
        return len(data)


def test_every_kind_of_source_gives_the_same(tmp_path: Path, speech: np.ndarray) -> None:
    data = wav(pcm16(speech))
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    expected = read_audio(path)
    behind = io.BytesIO(b"something else" + data)
    behind.seek(14)
    for source in (str(path), data, bytearray(data), memoryview(data), io.BytesIO(data), behind, Pipe(data)):
        np.testing.assert_array_equal(read_audio(source), expected)
    with path.open("rb") as file:
        np.testing.assert_array_equal(read_audio(file), expected)
        assert not file.closed


def pour(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def test_stdin(speech: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (wav(pcm16(speech), size=0xFFFFFFFF), encoded(speech, "alac", "mp4")):  # the index of MP4 is at its end
        reading, writing = os.pipe()
        thread = threading.Thread(target=pour, args=(writing, data))
        thread.start()
        with os.fdopen(reading) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with open_audio("-") as stream:
                samples = np.concatenate(list(stream), axis=1)[0]
        thread.join()
        assert (stream.name, stream.damaged, len(samples)) == ("<stdin>", False, len(speech))
        assert similarity(samples, speech)[0] > 0.999


@pytest.mark.parametrize("kind", ["text", "greedy", "failing", "failing later"])
def test_file_objects_that_misbehave_end_in_an_audio_error(kind: str) -> None:
    class Bad(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if kind == "greedy":
                return bytes(1 << 20)  # more than was asked for: PyAV would write it past its buffer
            if kind == "failing" or self.tell() > 300_000:
                raise OSError("the disk is gone")
            return super().read(size)

    source = io.StringIO("RIFF") if kind == "text" else Bad(wav(pcm16(signal(30.0))))
    reason = {"text": "binary", "greedy": "more bytes than were asked for"}.get(kind, "the disk is gone")
    with pytest.raises(AudioError, match=f"<file>.*{reason}"):
        read_audio(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8", "int8", "float16", "float32", "float64"])
def test_arrays_of_every_type_and_shape(dtype: str, speech: np.ndarray) -> None:
    scale = 1.0 if dtype.startswith("f") else np.iinfo(dtype).max // (2 if dtype == "uint8" else 1)
    array = (speech * scale + (128 if dtype == "uint8" else 0)).astype(dtype)
    step = 2.0**-6 if dtype in {"int8", "uint8"} else 1e-3
    for shape in (array, array[None], array[:, None], np.stack([array, array], axis=1)):
        samples = read_audio(shape, sample_rate=RATE)
        assert samples.shape == (1, len(speech))
        np.testing.assert_allclose(samples[0], speech, atol=step)


def test_arrays_and_arguments_that_make_no_sense() -> None:
    array = np.zeros(RATE, np.float32)
    for arguments in (
        {}, {"sample_rate": 0}, {"sample_rate": RATE, "start": -1.0}, {"sample_rate": RATE, "start": 2.0, "end": 1.0},
        {"sample_rate": RATE, "channels": "left"}, {"sample_rate": RATE, "channels": "0"},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            open_audio(array, **arguments)
    with pytest.raises(UsageError, match="sample_rate"):
        open_audio(b"RIFF", sample_rate=RATE)
    for bad in (array[:0], array.astype(complex), array.reshape(10, 40, 40), np.array(["a"])):
        with pytest.raises(AudioError, match="<array>"):
            open_audio(bad, sample_rate=RATE)


# -- limits, memory, threads


def test_max_seconds_stops_the_decoder_not_the_caller() -> None:
    samples = np.zeros(600 * RATE, np.int16)
    data = io.BytesIO()
    soundfile.write(data, samples, RATE, format="FLAC")
    stream = open_audio(data.getvalue(), max_seconds=60.0)
    with pytest.raises(AudioError, match="longer than the 60 s allowed"):
        list(stream)
    assert stream.position <= 60
    assert read_audio(data.getvalue(), max_seconds=60.0, end=60.0).shape == (1, 60 * RATE)
    assert read_audio(data.getvalue(), max_seconds=600.0).shape == (1, 600 * RATE)


def test_an_hour_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "hour.flac"
    minute = np.zeros((60 * 8000, 2), np.int16)
    minute[::800] = 9000
    with soundfile.SoundFile(path, "w", samplerate=8000, channels=2) as file:
        for _ in range(60):
            file.write(minute)
    script = (
        "import resource, sys\n"
        "from stapes.audio.decode import open_audio\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "stream = open_audio(sys.argv[1]); next(stream); before = peak()\n"
        "for chunk in stream: pass\n"
        "print(stream.position, (peak() - before) // 1024)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    seconds, grown = run.stdout.split()
    assert float(seconds) == 3600
    assert int(grown) < 40  # MiB; the hour is 220 MiB


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    paths = []
    for number, (codec, muxer, rate) in enumerate(
        [("libmp3lame", "mp3", 44100), ("flac", "flac", 22050), ("aac", "mp4", 48000), ("libopus", "ogg", 48000)]
    ):
        paths.append(tmp_path / f"{number}.{muxer}")
        encode(paths[-1], signal(25.0 + number), codec, muxer, rate=rate)
    alone = [read_audio(path) for path in paths]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(read_audio, itertools.chain(paths, paths, paths)))
    for expected, samples in zip(itertools.cycle(alone), together, strict=False):
        np.testing.assert_array_equal(samples, expected)


def test_leaving_early_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(pcm16(signal(60.0))))

    def is_open() -> bool:
        return any(link.resolve() == path for link in Path("/proc/self/fd").iterdir())

    with open_audio(path) as stream:
        next(stream)
        assert is_open()
    assert not is_open()
    stream.close()
    assert list(stream) == []
    with pytest.raises(AudioError):
        open_audio(path, channels="7")
    assert not is_open()
