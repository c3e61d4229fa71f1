"""Reading decoded frames out of any container: FFmpeg, through PyAV, kept on a short lead.

Security. FFmpeg is handed bytes, never a name. The file is opened by ``sources``, so none of FFmpeg's protocols is
involved, and ``protocol_whitelist`` allows none, so that no format can open a second resource. The demuxers are an
allow-list (``format_whitelist``: FFmpeg checks it when it has recognised the content, before the demuxer reads a
byte): playlists and formats that refer to other files (hls, concat, dash, sdp, image2, lavfi …) are not on it. With no
name there is nothing to guess from an extension either: an MP4 called .wav is an MP4.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Generator, Iterator
from typing import Any

import av
import av.error
import numpy as np
from av.stream import Disposition

from stapes.audio.sources import Reader, reason
from stapes.errors import AudioError

# Demuxers of files that hold their audio themselves. Raw formats without a header (g722, s16le …) cannot be recognised
# and are absent; so is everything that names other files.
_DEMUXERS = (
    "aa,aac,ac3,ac4,adx,aea,aiff,amr,amrnb,amrwb,ape,asf,au,avi,avr,caf,dsf,dts,dtshd,dv,eac3,flac,flv,gxf,iff,"
    "ircam,kux,live_flv,loas,matroska,mlp,mov,mp3,mpc,mpc8,mpeg,mpegts,mxf,nistsphere,nsv,nut,ogg,oma,osq,paf,pvf,qcp,"
    "qoa,rm,rso,shn,sox,tak,truehd,tta,voc,w64,wav,wtv,wv,xwma"
)
# Tags in a broken encoding must not stop anyone; PyAV 19 sees to that by itself and knows the argument no more.
_TAGS: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
_OPTIONS = {"protocol_whitelist": "none", "format_whitelist": _DEMUXERS}

# Where a seek lands on a known sample: uncompressed or indexed, and timestamps in units of one sample. MP3, ADTS and
# Matroska (millisecond timestamps) are decoded from the start instead.
_SEEKABLE_CODECS = {
    "wav": "pcm_", "w64": "pcm_", "aiff": "pcm_", "caf": "pcm_", "au": "pcm_", "flac": "flac", "mov": ""
}  # fmt: skip
# Where the header says how long the audio is, and healthy files keep to it.
_DECLARES_DURATION = {"flac", "mov", "matroska", "ogg", "tta", "ape", "wv", "caf", "tak"}
_EXACT = {"flac", "tta", "ape", "wv", "tak", "caf"}
_HEADER_SLACK = 64  # bytes; writers that count their header in make healthy files claim this much more
_MAX_READ_FAILURES = 64  # in a row; FFmpeg repeats some errors for ever
_MAX_PACKET_SECONDS = 1.0  # silence put in for one lost packet
# Formats whose packets carry times that can be trusted over counting samples. Gaps become silence, so that what follows
# keeps its place: packets lost on the air, silence that was not transmitted, or damage where there can be no gap.
_TIMED = {"matroska", "flv", "mpegts", "asf", "mov", "flac", "ogg"}
_GAPLESS = {"flac", "ogg"}
_MIN_GAP_SECONDS = 0.1
_MAX_GAP_SECONDS = 600.0  # beyond this it is the clock that jumped
_KINDS = (  # contents that FFmpeg might take for MP3, or that deserve a better sentence than "not recognised"
    (b"PK\x03\x04", "a ZIP archive: unpack it first"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive: unpack it first"),
    (b"\x89PNG\r\n", "a PNG picture, not a recording"),
    (b"\xff\xd8\xff", "a JPEG picture, not a recording"),
    (b"GIF8", "a GIF picture, not a recording"),
    (b"\x7fELF", "a program (ELF), not a recording"),
    (b"%PDF-", "a PDF document, not a recording"),
    (b"SQLite format 3\0", "an SQLite database, not a recording"),
    (b"version https://git-lfs", "a Git LFS pointer: run `git lfs pull` to get the recording itself"),
    (b"#EXTM3U", "a playlist: give the recordings it lists"),
    (b"[playlist]", "a playlist: give the recordings it lists"),
    (b"ffconcat", "a list of files (ffconcat): give the recordings it lists"),
    (b"v=0\no=", "a session description (SDP), not a recording"),
    (b"v=0\r\no=", "a session description (SDP), not a recording"),
)


class ContainerFrames:
    """The best audio track of a container, as float32 ``(channels, samples)`` frames at its native rate.

    The first frame is decoded on opening, so ``rate`` and ``channels`` are what the decoder gives, not what the
    header claims. ``seconds`` is the expected duration of the whole, None where unknown.

    Raises:
        AudioError: nothing in it can be decoded as audio.
    """

    def __init__(self, name: str, reader: Reader) -> None:
        self.name = name
        self.warnings: list[str] = []
        self.damaged = False
        self._reader = reader
        self._failed_packets = 0
        self._lost_seconds = 0.0  # missing in the middle of formats that cannot have gaps
        self._truncated = False
        self._position = 0.0  # seconds up to the end of the last frame handed out, from the start of the track
        self._container, self._stream = self._open()
        if len(self._container.streams.audio) > 1:
            number = self._container.streams.audio.index(self._stream) + 1
            self.warnings.append(
                f"{name} has {len(self._container.streams.audio)} audio tracks: only track {number} is read."
            )
        self._lead = self._lead_seconds()
        self._decoded = self._decode(self._lead)
        self._first = next(self._decoded, None)
        if self._first is None:
            raise self._no_samples()
        self.rate, first = self._first
        self.channels = len(first)
        self.seconds = self._estimate()

    # -- opening

    def _open(self) -> tuple[Any, Any]:
        name, head = self.name, self._reader.head
        if not head:
            raise AudioError(f"{name} is empty: it has no audio samples")
        if kind := _kind(head):
            raise AudioError(f"{name} is {kind}")
        try:
            container = av.open(self._reader, options=_OPTIONS, **_TAGS)
        except Exception as error:  # FFmpeg's errors, and whatever a file object raises
            raise AudioError(f"{name} {_why_not(head, error)}") from error
        tracks = list(container.streams.audio)
        default = [track for track in tracks if track.disposition & Disposition.default]
        for track in default + [track for track in tracks if track not in default]:
            if track.codec_context is None:
                continue
            if (
                track.codec_context.name == "flac"
            ):  # damage is found by the checksum of a frame, which is off by default
                track.codec_context.options = {"err_detect": "crccheck+explode"}
            track.codec_context.thread_count = 1
            with contextlib.suppress(av.error.FFmpegError, ValueError):
                track.codec_context.open(strict=False)
                return container, track
        videos = len(container.streams.video)
        container.close()
        if tracks:
            raise AudioError(f"{name} has audio that no decoder here can read: convert it to WAV, FLAC or MP3 first")
        raise AudioError(f"{name} has {'video but ' if videos else ''}no audio track: choose a file with sound")

    def _no_samples(self) -> AudioError:
        if self._failed_packets:
            return AudioError(f"{self.name} is damaged: not one packet of its audio could be decoded; copy it again")
        return AudioError(f"{self.name} has no audio samples: it is empty or cut off; record or copy it again")

    def _formats(self) -> set[str]:
        return set(self._container.format.name.split(","))

    def _lead_seconds(self) -> float:
        """How much later than the file's other tracks (its picture) the sound begins: subtitles count from there."""
        track, whole = self._stream.start_time, self._container.start_time
        if track is None or whole is None or len(self._container.streams) == 1:
            return 0.0
        lead = float(track * self._stream.time_base) - whole / av.time_base
        return lead if _MIN_GAP_SECONDS < lead <= _MAX_GAP_SECONDS else 0.0

    def _estimate(self) -> float | None:
        if self._stream.duration and self._stream.duration > 0:
            return float(self._stream.duration * self._stream.time_base) + self._lead
        if self._container.duration and self._container.duration > 0:
            return self._container.duration / av.time_base
        return None

    # -- reading

    def seek(self, seconds: float) -> int:
        """Go to a frame at or before ``seconds`` where that is sample-exact.

        Returns:
            The index of the sample that ``frames`` begins with: 0 where the container cannot do it.
        """
        codec = self._stream.codec_context.name
        exact = any(codec.startswith(_SEEKABLE_CODECS[f]) for f in self._formats() if f in _SEEKABLE_CODECS)
        base = self._stream.time_base
        if not exact or not self._reader.seekable() or base is None or base * self.rate > 1:
            return 0
        origin = self._stream.start_time or 0
        # Codecs that lean on what came before (AAC, Opus) need some packets to be themselves again.
        target = origin + int((seconds - self._lead - 1.0) / base)
        with contextlib.suppress(av.error.FFmpegError):
            self._container.seek(target, stream=self._stream)
            self._decoded = self._decode(lead=0.0)
            self._first = next(self._decoded, None)
            if self._first is not None and self._first_pts is not None:
                index = round((float((self._first_pts - origin) * base) + self._lead) * self.rate)
                if 0 <= index <= seconds * self.rate and self._first[0] == self.rate:
                    self._position = index / self.rate
                    return index
        self._reopen()
        return 0

    def _reopen(self) -> None:
        self._container.close()
        self._reader.seek(0)
        self._failed_packets, self._lost_seconds, self._truncated, self.damaged = 0, 0.0, False, False
        self._container, self._stream = self._open()
        self._decoded = self._decode(self._lead)
        self._first = next(self._decoded, None)

    def frames(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (rate in Hz, float32 (channels, samples)); rate and channels may change on the way."""
        first, self._first = self._first, None
        if first is not None:
            self._position += first[1].shape[1] / first[0]
            yield first
        for rate, samples in self._decoded:
            self._position += samples.shape[1] / rate
            yield rate, samples
        self._finish()

    def _decode(self, lead: float) -> Generator[tuple[int, np.ndarray], None, None]:
        """Decode to the end; silence of ``lead`` seconds first, and wherever the track's own clock jumps ahead."""
        self._first_pts: int | None = None
        rate = channels = 0
        clock = self._formats() & _TIMED
        least = 0.001 if "flac" in clock else _MIN_GAP_SECONDS  # FLAC counts samples exactly; a lost frame is 20–250 ms
        expected: float | None = None  # when the next frame is due
        for packet in self._packets():
            try:
                frames = packet.decode() if packet is not None else self._stream.codec_context.decode(None)
            except av.error.EOFError:
                continue
            except av.error.FFmpegError as error:
                if isinstance(error, av.error.ArgumentError) and packet is not None and not packet.size:
                    continue  # an empty packet holds nothing to lose; a file that still grows ends with one
                self._failed_packets += 1
                self.damaged = True
                if rate and packet is not None and packet.duration and packet.time_base:
                    lost = min(float(packet.duration * packet.time_base), _MAX_PACKET_SECONDS)
                    yield from _silence(rate, channels, lost)  # what follows stays where it was
                    expected = None if expected is None else expected + lost
                continue
            for frame in frames:
                if not frame.samples or not frame.sample_rate:
                    continue
                samples = _to_float(frame)
                if not rate:
                    self._first_pts = frame.pts
                    yield from _silence(frame.sample_rate, len(samples), lead)
                rate, channels = frame.sample_rate, len(samples)
                if clock and frame.time is not None:
                    gap = 0.0 if expected is None else frame.time - expected
                    if least < gap <= _MAX_GAP_SECONDS:
                        self._lost_seconds += gap if clock & _GAPLESS else 0.0
                        yield from _silence(rate, channels, gap)
                    if expected is None or abs(gap) > least:  # smaller ones are rounding: they add up to 0
                        expected = frame.time
                expected = None if expected is None else expected + frame.samples / rate
                yield rate, samples

    def _packets(self) -> Iterator[Any]:
        """Packets of the track; errors between them are counted and passed over; None at the end flushes."""
        failures = 0
        while failures < _MAX_READ_FAILURES:
            try:
                for packet in self._container.demux(self._stream):
                    failures = 0
                    yield packet
                return
            except av.error.FFmpegError:
                failures += 1
                self._truncated = self.damaged = True
        yield None

    # -- damage

    def _finish(self) -> None:
        """The input has ended: was that all that its header promised?"""
        if self._failed_packets:
            count = "1 packet was" if self._failed_packets == 1 else f"{self._failed_packets} packets were"
            self.warnings.append(f"{self.name} is damaged: {count} skipped at unreadable places.")
        if self._lost_seconds:
            self.damaged = True
            self.warnings.append(f"{self.name} is damaged: {self._lost_seconds:.1f} s in the middle could not be read.")
        declared, tolerance = self._declared()
        if declared is not None and self._position < declared - tolerance:
            self._truncated = True
            self.warnings.append(
                f"{self.name} is truncated or damaged: {self._position:.1f} s of {declared:.1f} s could be read."
            )
        elif self._truncated or self._cut_short():
            self._truncated = True
            self.warnings.append(f"{self.name} is truncated or damaged: it breaks off after {self._position:.1f} s.")
        self.damaged |= self._truncated

    def _declared(self) -> tuple[float | None, float]:
        """(Seconds that the header promises, how much less a healthy file may hold); None where it is a guess."""
        formats = self._formats()
        # Encoders' delay and padding: at most a few codec frames.
        tolerance = 0.01 if formats & _EXACT else 0.1 + 4096 / self.rate
        if formats & _DECLARES_DURATION or ("mp3" in formats and self._counts_frames()):
            if "matroska" in formats:
                return self._matroska_duration(), tolerance + 0.05
            return self.seconds, tolerance
        return None, tolerance

    def _matroska_duration(self) -> float | None:
        """A track's own duration; the file's where this is the only track."""
        tag = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", self._stream.metadata.get("DURATION", ""))
        start = float((self._stream.start_time or 0) * self._stream.time_base)
        if tag:
            hours, minutes, seconds = tag.groups()
            return int(hours) * 3600 + int(minutes) * 60 + float(seconds) - max(0.0, start - self._lead)
        if len(self._container.streams) == 1 and self._container.duration:
            return self._container.duration / av.time_base
        return None

    def _counts_frames(self) -> bool:
        """Whether an MP3 says how many frames it has (Xing, Info or VBRI header). Else its duration is a guess."""
        head = self._reader.head
        if head[:3] == b"ID3" and len(head) > 10:
            size = 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9])
            if size > len(head) - 256:
                if not self._reader.seekable():
                    return False
                self._reader.seek(size)
                head = self._reader.read(256)
            else:
                head = head[size : size + 256]
        return any(mark in head[:256] for mark in (b"Xing", b"Info", b"VBRI"))

    def _cut_short(self) -> bool:
        """Whether a length written in the file goes beyond its end. FFmpeg trims such lengths silently."""
        head, formats = self._reader.head, self._formats()
        size, tail = self._reader.tail(1 << 17) if self._reader.seekable() else (self._reader.total, b"")
        if formats & {"wav", "w64", "aiff", "au"}:
            return _promised_bytes(head) > size + _HEADER_SLACK
        if "ogg" in formats and (at := tail.rfind(b"OggS")) >= 0:
            page = tail[at:]
            return len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])
        return False

    def close(self) -> None:
        """Close the container and the file."""
        self._decoded.close()
        self._container.close()
        self._reader.close()


def _kind(head: bytes) -> str | None:
    """What a file is that is certainly no recording."""
    text = head[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    for mark, kind in _KINDS:
        if head.startswith(mark) or (mark[:1] in b"#[vf" and text.startswith(mark)):
            return kind
    if re.match(rb"(<!doctype html|<html|<head|<body)", text, re.IGNORECASE):
        return "a web page (HTML), not a recording: was the download refused?"
    if text.startswith((b"<?xml", b"<MPD")):
        return "an XML document, not a recording"
    return None


def _why_not(head: bytes, error: Exception) -> str:
    if not isinstance(error, av.error.FFmpegError):
        return f"could not be read: {reason(error)}"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "is an MP4 file without its index: it was cut off or never finished; copy it again or repair it"
    if head[:4] in (b"RIFF", b"RF64", b"FORM", b"fLaC", b"OggS", b"\x1a\x45\xdf\xa3", b"caff", b".snd"):
        return "has a damaged or impossible header: copy or export it again"
    sample = head[:4096]
    if sum(32 <= byte < 127 or byte in b"\t\r\n" for byte in sample) > 0.97 * len(sample) and len(sample) > 3:
        return "is text, not a recording"
    return "is not a recording that can be read: its content is not recognised as audio or video"


def _promised_bytes(head: bytes) -> int:
    """Where the audio of a WAV, RF64, W64, AIFF or AU file ends by its own header; 0 where it does not say."""
    if head[:4] == b".snd" and len(head) >= 12:
        offset, size = struct.unpack(">II", head[4:12])
        return 0 if size == 0xFFFFFFFF else offset + size
    if head[:4] == b"riff":  # W64: 16-byte identifiers, 64-bit sizes that include their own header
        at = 40
        while at + 24 <= len(head):
            size = int.from_bytes(head[at + 16 : at + 24], "little")
            if head[at : at + 4] == b"data":
                return at + size if size < 1 << 62 else 0
            at += max(24, (size + 7) & ~7)
        return 0
    order = "big" if head[:4] in (b"FORM", b"RIFX") else "little"
    at, long_size = 12, 0
    while at + 8 <= len(head):
        tag, size = head[at : at + 4], int.from_bytes(head[at + 4 : at + 8], order)
        if tag == b"ds64":
            long_size = int.from_bytes(head[at + 16 : at + 24], "little")
        if tag in (b"data", b"SSND"):
            # A recorder that never went back to fill it in writes 0 or the largest it can (sox, arecord: 2 GiB).
            if size == 0 or 0x7FFFF000 <= size <= 0x80000000 or size >= 0xFFFFF000:
                size = long_size if size and long_size < 1 << 62 else 0
            return at + 8 + size if size else 0
        at += 8 + size + (size & 1)
    return 0


_DTYPES = {"u8": np.uint8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "flt": np.float32, "dbl": np.float64}


def _to_float(frame: Any) -> np.ndarray:
    """A decoded frame as float32 (channels, samples); integers become fractions of full scale.

    Not by ``frame.to_ndarray()``: PyAV counts planes up to a null pointer, and the eight of 7.1 have none after them,
    so it reads a ninth from an address that is none.
    """
    channels, dtype = frame.layout.nb_channels, _DTYPES[frame.format.name.removesuffix("p")]
    if frame.format.is_planar:
        planes = frame.planes[:channels]
        samples = np.stack([np.frombuffer(plane, dtype, frame.samples) for plane in planes])
    else:
        samples = np.frombuffer(frame.planes[0], dtype, frame.samples * channels).reshape(-1, channels).T
    if samples.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is cleaned with the rest
            return samples.astype(np.float32)
    half = 2.0 ** (8 * samples.dtype.itemsize - 1)
    exact = samples.astype(np.float32 if samples.dtype.itemsize < 4 else np.float64)
    return ((exact - (half if samples.dtype.kind == "u" else 0.0)) / half).astype(np.float32)


def _silence(rate: int, channels: int, seconds: float) -> Iterator[tuple[int, np.ndarray]]:
    """Frames of silence, a second each at most."""
    left = round(seconds * rate)
    while left > 0:
        count = min(left, rate)
        yield rate, np.zeros((channels, count), np.float32)
        left -= count
