"""Recordings as they come in real life: odd, damaged, hostile. Each case builds one input around a payload signal.

``CASES[name].build(folder, speech)`` writes the file and returns its path; ``speech`` is float32 (samples,) at 16 kHz,
by default a synthetic signal with speech's rhythm and band. What has to come of it:

- ``works``: all of the payload, ``silence_before`` seconds late, without damage
- ``partial``: at least the fraction ``keeps`` of it, marked as damaged, with a warning
- ``error``: one AudioError whose sentence contains the input's name and ``says``
"""

from __future__ import annotations

import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
from recordings import RATE, encode, encoded, pcm16, resampled, signal, wav

Expectation = Literal["works", "partial", "error"]
Build = Callable[[Path, np.ndarray], Path]


@dataclass(frozen=True)
class Case:
    name: str
    expect: Expectation
    builder: Build
    says: str = ""  # in the error or in a warning
    correlation: float = 0.95  # of what is read with the payload, at least; 0 where the payload is not in it
    keeps: float = 1.0  # of the payload's duration
    tolerance: float = 0.06  # seconds of duration; codecs pad to whole frames
    silence_before: float = 0.0
    seconds: float | None = None  # duration where it does not follow from the payload
    needs_user: bool = False  # means nothing to root

    def build(self, folder: Path, speech: np.ndarray | None = None) -> Path:
        """Write the input into ``folder`` and return its path."""
        return self.builder(folder, signal() if speech is None else np.asarray(speech, np.float32))


CASES: dict[str, Case] = {}


def case(expect: Expectation, **properties: Any) -> Callable[[Build], Build]:
    def register(builder: Build) -> Build:
        name = builder.__name__
        CASES[name] = Case(name, expect, builder, **properties)
        return builder

    return register


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def scrambled(data: bytes, start: float, stop: float) -> bytes:
    """``data`` with noise between two fractions of its length."""
    begin, end = int(len(data) * start), int(len(data) * stop)
    return data[:begin] + np.random.default_rng(1).bytes(end - begin) + data[end:]


# -- too little


@case("error", says="empty")
def empty(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "empty.mp3", b"")


@case("error")
def one_byte(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "one.wav", b"R")


@case("error", says="no audio samples")
def wav_header_only(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "header.wav", wav(b""))


@case("works", correlation=0, seconds=0.01)
def ten_milliseconds(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "short.wav", wav(pcm16(speech[:160])))


# -- WAV and its kin


@case("works")
def wav_data_size_zero(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "size-zero.wav", wav(pcm16(speech), size=0))


@case("works")
def wav_data_size_unknown(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "size-max.wav", wav(pcm16(speech), size=0xFFFFFFFF))


@case("works")
def wav_data_size_two_gigabytes(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "size-2g.wav", wav(pcm16(speech), size=0x7FFFF000))


@case("partial", keeps=0.6, says="truncated")
def wav_truncated(folder: Path, speech: np.ndarray) -> Path:
    data = wav(pcm16(speech))
    return write(folder / "cut.wav", data[: int(len(data) * 0.6) + 1])


@case("works")
def wav_odd_chunks(folder: Path, speech: np.ndarray) -> Path:
    chunks = b"bext" + struct.pack("<I", 602) + bytes(602) + b"odd " + struct.pack("<I", 3) + b"abc\0"
    info = b"LIST" + struct.pack("<I", 18) + b"INFOINAM" + struct.pack("<I", 6) + b"caf\xe9\0\0"  # Latin-1, as ever
    return write(folder / "chunks.wav", wav(pcm16(speech), before=chunks + info, after=info))


@case("works")
def wav_extensible(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "extensible.wav", speech, RATE, format="WAVEX", subtype="PCM_24")
    return folder / "extensible.wav"


@case("works")
def rf64(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "rf64.wav", speech, RATE, format="RF64", subtype="PCM_16")
    return folder / "rf64.wav"


@case("works")
def w64(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "wave.w64", speech, RATE, format="W64", subtype="PCM_16")
    return folder / "wave.w64"


@case("partial", keeps=0.5, says="truncated")
def w64_truncated(folder: Path, speech: np.ndarray) -> Path:
    data = w64(folder, speech).read_bytes()
    return write(folder / "cut.w64", data[: len(data) // 2])


@case("works")
def aiff(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "a.aiff", speech, RATE, format="AIFF", subtype="PCM_16")
    return folder / "a.aiff"


@case("partial", keeps=0.5, says="truncated")
def aiff_truncated(folder: Path, speech: np.ndarray) -> Path:
    data = aiff(folder, speech).read_bytes()
    return write(folder / "cut.aiff", data[: len(data) // 2])


def _wav_subtype(name: str, subtype: str, correlation: float = 0.99) -> None:
    def builder(folder: Path, speech: np.ndarray) -> Path:
        soundfile.write(folder / f"{name}.wav", speech, RATE, format="WAV", subtype=subtype)
        return folder / f"{name}.wav"

    CASES[name] = Case(name, "works", builder, correlation=correlation)


for _name, _subtype in {
    "wav_u8": "PCM_U8", "wav_s24": "PCM_24", "wav_s32": "PCM_32", "wav_f32": "FLOAT", "wav_f64": "DOUBLE",
    "wav_mulaw": "ULAW", "wav_alaw": "ALAW", "wav_ima_adpcm": "IMA_ADPCM", "wav_ms_adpcm": "MS_ADPCM",
    "wav_gsm": "GSM610",
}.items():  # fmt: skip
    _wav_subtype(_name, _subtype, 0.9 if _subtype == "GSM610" else 0.98)


def _float_wav(path: Path, speech: np.ndarray) -> Path:
    return write(path, wav(speech.astype("<f4").tobytes(), bits=32, code=3))


@case("works", says="not numbers")
def float_nan_inf(folder: Path, speech: np.ndarray) -> Path:
    broken = speech.copy()
    broken[1000:1010], broken[2000], broken[2001] = np.nan, np.inf, -np.inf
    return _float_wav(folder / "nan.wav", broken)


@case("works", says="beyond full scale", correlation=0.7)
def float_huge(folder: Path, speech: np.ndarray) -> Path:
    broken = speech.copy()
    broken[5000:5003], broken[9000] = 1e30, -3e38
    return _float_wav(folder / "huge.wav", broken)


@case("works", says="16-bit")
def float_scaled_as_integers(folder: Path, speech: np.ndarray) -> Path:
    return _float_wav(folder / "scaled.wav", speech * 32767)


@case("works")
def float_denormals(folder: Path, speech: np.ndarray) -> Path:
    return _float_wav(folder / "denormal.wav", np.where(np.abs(speech) < 0.01, np.float32(1e-40), speech))


@case("works", correlation=0.85)
def dc_offset_and_clipping(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "clipped.wav", wav(pcm16(np.clip(3 * speech + 0.2, -1, 1))))


# -- channels


@case("works", says="opposite phase")
def stereo_opposite_phase(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "phase.wav", wav(pcm16(np.stack([speech, -speech])), channels=2))


@case("works")
def stereo_one_sided(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "sided.wav", wav(pcm16(np.stack([speech * 0, speech])), channels=2))


@case("works")
def six_channels(folder: Path, speech: np.ndarray) -> Path:
    channels = np.zeros((6, len(speech)), np.float32)
    channels[2] = speech
    return write(folder / "six.wav", wav(pcm16(channels), channels=6))


@case("works")
def eight_channels(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "eight.flac", np.tile(speech[:, None], (1, 8)), RATE)
    return folder / "eight.flac"


@case("works")
def seven_one_planar(folder: Path, speech: np.ndarray) -> Path:
    return _m4a(folder / "film.m4a", np.stack([speech] * 8), bit_rate=384000)


@case("error", says="channels")
def three_hundred_channels(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "many.wav", wav(pcm16(speech) * 2, channels=300))


@case("error")
def absurd_channels(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "absurd.wav", wav(pcm16(speech) * 2, channels=65535))


# -- sample rates


def _rate(rate: int) -> None:
    def builder(folder: Path, speech: np.ndarray) -> Path:
        return write(folder / f"{rate}.wav", wav(pcm16(resampled(speech, rate)), rate=rate))

    CASES[f"rate_{rate}"] = Case(f"rate_{rate}", "works", builder, correlation=0.97 if rate > 4000 else 0)


for _hertz in (100, 8000, 11025, 22050, 44100, 48000, 192000, 384000):
    _rate(_hertz)


@case("works", correlation=0, seconds=50.0)
def rate_one_hertz(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "1hz.wav", wav(pcm16(speech[:50]), rate=1))


@case("error")
def rate_zero(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "0hz.wav", wav(pcm16(speech), rate=0))


# -- MP3, ADTS, AMR


def _mp3(speech: np.ndarray, *, xing: bool = True, vbr: bool = False) -> bytes:
    codec_options = {"compression_level": "7"} if not vbr else {"global_quality": "236", "flags": "+qscale"}
    how: dict[str, Any] = {"options": {"write_xing": str(int(xing)), "id3v2_version": "0"}}
    return encoded(speech, "libmp3lame", "mp3", codec_options=codec_options, **how)


@case("works")
def mp3(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "plain.mp3", _mp3(speech))


@case("works", tolerance=0.15)
def mp3_variable_rate_without_xing(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "vbr.mp3", _mp3(speech, xing=False, vbr=True))


@case("works")
def mp3_cover_art(folder: Path, speech: np.ndarray) -> Path:
    image = b"APIC" + struct.pack(">I", 4 + 10 + len(PNG) + 70000) + b"\0\0" + b"\0image/png\0\3\0" + PNG + bytes(70000)
    size = len(image)
    tag = b"ID3\3\0\0" + bytes([size >> 21 & 127, size >> 14 & 127, size >> 7 & 127, size & 127])
    return write(folder / "cover.mp3", tag + image + _mp3(speech))


@case("works", tolerance=0.15)
def mp3_garbage_head(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "garbage.mp3", b"\x13\x37 not audio " * 60 + _mp3(speech, xing=False))


@case("partial", keeps=0.5, tolerance=0.15, says="truncated")
def mp3_cut(folder: Path, speech: np.ndarray) -> Path:
    data = _mp3(speech)
    return write(folder / "cut.mp3", data[: int(len(data) * 0.6) + 13])


@case("partial", keeps=0.6, correlation=0.6, tolerance=0.5, says="damaged")
def mp3_corrupt_middle(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "corrupt.mp3", scrambled(_mp3(speech), 0.5, 0.6))


@case("works", tolerance=0.15)
def adts(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "raw.aac", encoded(speech, "aac", "adts"))


@case("partial", keeps=0.6, tolerance=0.5, says="damaged")
def adts_cut(folder: Path, speech: np.ndarray) -> Path:
    data = encoded(speech, "aac", "adts")
    return write(folder / "cut.aac", data[: int(len(data) * 0.7) + 11])


@case("works", correlation=0.5, tolerance=0.1)
def amr(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "phone.amr", encoded(speech, "libopencore_amrnb", "amr", rate=8000, bit_rate=12200))


# -- MP4


def _m4a(path: Path, speech: np.ndarray, codec: str = "aac", **how: Any) -> Path:
    encode(path, speech, codec, "mp4", rate=44100, **how)
    return path


@case("works")
def m4a_index_at_end(folder: Path, speech: np.ndarray) -> Path:
    return _m4a(folder / "end.m4a", speech)


@case("works")
def m4a_index_first(folder: Path, speech: np.ndarray) -> Path:
    return _m4a(folder / "first.m4a", speech, options={"movflags": "+faststart"})


@case("works", tolerance=0.1)
def m4a_fragmented(folder: Path, speech: np.ndarray) -> Path:
    return _m4a(folder / "fragments.mp4", speech, options={"movflags": "frag_keyframe+empty_moov+default_base_moof"})


@case("works")
def alac(folder: Path, speech: np.ndarray) -> Path:
    return _m4a(folder / "lossless.m4a", speech, "alac")


@case("works")
def mp4_video_named_wav(folder: Path, speech: np.ndarray) -> Path:
    return _m4a(folder / "film.wav", speech, video=True)


@case("error", says="index")
def m4a_cut_before_index(folder: Path, speech: np.ndarray) -> Path:
    data = _m4a(folder / "whole.m4a", speech).read_bytes()
    return write(folder / "cut-end.m4a", data[: len(data) // 2])


@case("partial", keeps=0.4, says="truncated")
def m4a_cut_after_index(folder: Path, speech: np.ndarray) -> Path:
    data = m4a_index_first(folder, speech).read_bytes()
    return write(folder / "cut-first.m4a", data[: len(data) * 6 // 10])


# -- Matroska, WebM, Ogg


def _webm(speech: np.ndarray, **how: Any) -> bytes:
    return encoded(speech, "libopus", "webm", rate=48000, bit_rate=48000, **how)


@case("works", correlation=0.9)
def webm_without_duration(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "browser.webm", _webm(speech, options={"live": "1"}))


@case("partial", correlation=0.9, keeps=0.5, says="truncated")
def webm_cut(folder: Path, speech: np.ndarray) -> Path:
    data = _webm(speech)
    return write(folder / "cut.webm", data[: len(data) * 6 // 10])


@case("error", says="no audio track")
def video_only(folder: Path, speech: np.ndarray) -> Path:
    encode(folder / "silent.mkv", speech, "aac", "matroska", video=True, tracks=0)
    return folder / "silent.mkv"


@case("works", says="3 audio tracks")
def mkv_three_tracks(folder: Path, speech: np.ndarray) -> Path:
    encode(folder / "tracks.mkv", speech, "aac", "matroska", tracks=3)
    return folder / "tracks.mkv"


@case("works", correlation=0.9)
def ogg_opus(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "opus.ogg", encoded(speech, "libopus", "ogg", rate=48000))


@case("works")
def ogg_vorbis(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "vorbis.ogg", speech, RATE, format="OGG", subtype="VORBIS")
    return folder / "vorbis.ogg"


@case("works", correlation=0.8, tolerance=0.1)
def ogg_chained(folder: Path, speech: np.ndarray) -> Path:
    half = len(speech) // 2
    links = []
    for number, part in enumerate((speech[:half], speech[half:])):
        soundfile.write(folder / f"link{number}.ogg", part, RATE, format="OGG", subtype="VORBIS")
        links.append((folder / f"link{number}.ogg").read_bytes())
        (folder / f"link{number}.ogg").unlink()
    return write(folder / "chained.ogg", links[0] + links[1])


@case("works", says="2 audio tracks")
def ogg_multiplexed(folder: Path, speech: np.ndarray) -> Path:
    encode(folder / "two.ogg", speech, "flac", "ogg", tracks=2)
    return folder / "two.ogg"


@case("partial", keeps=0.4, says="truncated")
def ogg_cut(folder: Path, speech: np.ndarray) -> Path:
    data = encoded(speech, "libopus", "ogg", rate=48000, options={"page_duration": "200000"})
    return write(folder / "cut.ogg", data[: len(data) * 6 // 10])


@case("partial", keeps=0.3, correlation=0.5, tolerance=1.0, says="damaged")
def ogg_corrupt_middle(folder: Path, speech: np.ndarray) -> Path:
    data = encoded(speech, "libopus", "ogg", rate=48000, options={"page_duration": "200000"})
    return write(folder / "corrupt.ogg", scrambled(data, 0.5, 0.6))


@case("works")
def flac(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "a.flac", speech, RATE)
    return folder / "a.flac"


@case("partial", keeps=0.6, correlation=0.5, tolerance=1.0, says="damaged")
def flac_corrupt_middle(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "corrupt.flac", scrambled(flac(folder, speech).read_bytes(), 0.5, 0.55))


@case("partial", keeps=0.8, correlation=0.7, says="damaged")
def flac_one_bit(folder: Path, speech: np.ndarray) -> Path:
    data = bytearray(flac(folder, speech).read_bytes())
    data[len(data) // 2] ^= 1
    return write(folder / "bit.flac", bytes(data))


@case("partial", keeps=0.4, tolerance=0.5, says="truncated")
def flac_cut(folder: Path, speech: np.ndarray) -> Path:
    data = flac(folder, speech).read_bytes()
    return write(folder / "cut.flac", data[: len(data) * 6 // 10])


@case("works", silence_before=2.0, tolerance=0.1)
def video_with_late_sound(folder: Path, speech: np.ndarray) -> Path:
    encode(folder / "late.mkv", speech, "aac", "matroska", video=True, pts=lambda n: n + 2 * RATE)
    return folder / "late.mkv"


@case("works", tolerance=0.1)
def negative_timestamps(folder: Path, speech: np.ndarray) -> Path:
    encode(folder / "negative.mkv", speech, "aac", "matroska", pts=lambda n: n - 8000)
    return folder / "negative.mkv"


@case("works", correlation=0.6, tolerance=2.2)
def timestamps_jump(folder: Path, speech: np.ndarray) -> Path:
    encode(folder / "jump.mkv", speech, "pcm_s16le", "matroska", pts=lambda n: n + 32000 * (n > len(speech) // 2))
    return folder / "jump.mkv"


# -- not recordings

PNG = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(4))),
        (b"IEND", b""),
    )
)


def _not_audio(name: str, data: bytes, says: str, file: str | None = None) -> None:
    def builder(folder: Path, speech: np.ndarray) -> Path:
        return write(folder / (file or f"{name}.mp3"), data)

    CASES[name] = Case(name, "error", builder, says=says)


_not_audio("text", b"These are the minutes of the meeting.\n" * 200, "text")
_not_audio("html", b"<!DOCTYPE html>\n<html><body>404</body></html>\n" * 20, "web page")
_not_audio("png", PNG, "PNG")
_not_audio("elf", b"\x7fELF\x02\x01\x01" + np.random.default_rng(2).bytes(50_000), "ELF")
_not_audio("pdf", b"%PDF-1.7\n" + np.random.default_rng(3).bytes(5_000), "PDF")
_not_audio("zeros_file", bytes(3_000_000), "not recognised", "sparse.wav")
_not_audio("playlist_hls", b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n", "playlist")
_not_audio("playlist_concat", b"ffconcat version 1.0\nfile '/etc/passwd'\n", "list of files")
_not_audio("playlist_sdp", b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n", "SDP", "call.sdp")
_not_audio("playlist_dash", b'<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>', "XML")
_not_audio("git_lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull")


@case("error", says="ZIP")
def zip_with_recording(folder: Path, speech: np.ndarray) -> Path:
    with zipfile.ZipFile(folder / "zipped.mp3", "w") as archive:
        archive.writestr("a.mp3", _mp3(speech))
    return folder / "zipped.mp3"


# -- nothing said, or much of nothing


@case("works", correlation=0, seconds=5.0)
def all_zeros(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "zeros.wav", wav(bytes(5 * 2 * RATE)))


@case("works", correlation=0, seconds=5.0)
def noise_only(folder: Path, speech: np.ndarray) -> Path:
    noise = np.random.default_rng(4).standard_normal(5 * RATE).astype(np.float32)
    return write(folder / "noise.wav", wav(pcm16(0.05 * noise)))


@case("works", correlation=0, seconds=5.0)
def tone_only(folder: Path, speech: np.ndarray) -> Path:
    return write(folder / "tone.wav", wav(pcm16(0.3 * np.sin(2 * np.pi * 440 * np.arange(5 * RATE) / RATE))))


@case("works", silence_before=60.0)
def speech_after_a_minute(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "late.flac", np.concatenate([np.zeros(60 * RATE, np.float32), speech]), RATE)
    return folder / "late.flac"


@case("works", correlation=0, seconds=1800.0, tolerance=1.0)
def bomb_of_silence(folder: Path, speech: np.ndarray) -> Path:
    soundfile.write(folder / "bomb.flac", np.zeros(1800 * 8000, np.int16), 8000)  # 100 kB, 58 MB as float32
    return folder / "bomb.flac"


# -- names and places


@case("works")
def fifo(folder: Path, speech: np.ndarray) -> Path:
    path = folder / "pipe.wav"
    os.mkfifo(path)
    threading.Thread(target=lambda: path.write_bytes(wav(pcm16(speech))), daemon=True).start()
    return path


@case("error", says="device")
def device(folder: Path, speech: np.ndarray) -> Path:
    return Path("/dev/zero")


@case("error", says="folder")
def directory(folder: Path, speech: np.ndarray) -> Path:
    (folder / "folder.wav").mkdir()
    return folder / "folder.wav"


@case("error", says="link")
def dangling_link(folder: Path, speech: np.ndarray) -> Path:
    (folder / "link.wav").symlink_to(folder / "nowhere.wav")
    return folder / "link.wav"


@case("error", says="does not exist")
def missing(folder: Path, speech: np.ndarray) -> Path:
    return folder / "missing.wav"


@case("error", says="permission", needs_user=True)
def no_permission(folder: Path, speech: np.ndarray) -> Path:
    path = write(folder / "secret.wav", wav(pcm16(speech)))
    path.chmod(0)
    return path


def _named(name: str, file: str) -> None:
    CASES[name] = Case(name, "works", lambda folder, speech: write(folder / file, wav(pcm16(speech))))


_named("name_not_utf8", os.fsdecode(b"caf\xe9.wav"))
_named("name_long", "n" * 250 + ".wav")
_named("name_dash", "-rf.wav")
_named("name_newline", "two\nlines.wav")
_named("name_like_a_protocol", "concat:a.wav|b.wav")
_named("name_percent", "image%03d.wav")


@case("error", says="name too long")
def name_too_long(folder: Path, speech: np.ndarray) -> Path:
    return folder / ("n" * 5000 + ".wav")


@case("works")
def name_with_parent(folder: Path, speech: np.ndarray) -> Path:
    (folder / "sub").mkdir()
    write(folder / "up.wav", wav(pcm16(speech)))
    return folder / "sub" / ".." / "up.wav"
