"""``stapes live``: captions of what a microphone hears, or of sound that is piped in."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from stapes.cli.captions import Captions
from stapes.cli.terminal import Terminal
from stapes.cli.transcribe import ModelOptions
from stapes.errors import AudioError, DeviceError, StapesError, UsageError
from stapes.options import Task, TranscribeOptions, TurnOptions

if TYPE_CHECKING:
    from stapes.inference.live_session import Session

_MODEL = ModelOptions()
_BLOCK_SECONDS = 0.05
_READ_BYTES = 1 << 16
_BEHIND_SECONDS = 10.0
_LAST_WORDS_SECONDS = 60.0


def live(
    source: Annotated[str | None, Parameter(name="SOURCE")] = None,
    /,
    *,
    model: Annotated[ModelOptions, Parameter(name="*", group=Group("Model", sort_key=2))] = _MODEL,
    language: str | None = None,
    task: Task = "transcribe",
    initial_prompt: str | None = None,
    hotwords: str | None = None,
    rate: int = 16_000,
    encoding: str = "pcm16",
    microphone: str | None = None,
    threshold: float = 0.5,
    prefix_padding_ms: int = 300,
    silence_duration_ms: int = 500,
    json: bool = False,
) -> int:
    """Write down what is being said: from the microphone, or from raw samples on stdin.

    Words that stand will not change any more; dim ones may. Ctrl-C ends it, after the last words.

    For example:

        stapes live                                        the microphone
        stapes live --language de --model turbo
        arecord -q -f S16_LE -r 16000 -c 1 | stapes live -
        ffmpeg -i talk.mp3 -f s16le -ar 16000 -ac 1 - | stapes live - --json

    Parameters
    ----------
    source:
        Raw samples of one channel on stdin, where it is -. Default: the microphone.
    language:
        Language spoken, as a code (de) or a name (German). Found out when not given.
    task:
        transcribe keeps the language; translate writes English.
    initial_prompt:
        Text that is said to have come before: spelling of names, style.
    hotwords:
        Words to expect.
    rate:
        Samples a second, of stdin and of the microphone.
    encoding:
        Of stdin: pcm16 (16-bit little-endian), g711_ulaw or g711_alaw.
    microphone:
        Its name, or a part of it, or its number. Default: the system's.
    threshold:
        Speech probability from which on sound is speech.
    prefix_padding_ms:
        Sound that is kept from before the speech.
    silence_duration_ms:
        Silence that ends a turn.
    json:
        Print events as JSON lines: speech_started, partial, committed, speech_stopped, final.
    """
    if source not in (None, "-"):
        raise UsageError(f"{source!r} is no live source: say - for stdin, or `stapes transcribe {source}` for a file")
    if source == "-" and microphone is not None:
        raise UsageError("--microphone and -: sound comes from one place; leave one out")
    if source == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("- reads samples from stdin, but nothing is piped in: leave it out for the microphone")
    turns = TurnOptions(
        threshold=threshold, prefix_padding_ms=prefix_padding_ms, silence_duration_ms=silence_duration_ms
    )
    options = TranscribeOptions(language=language, task=task, initial_prompt=initial_prompt, hotwords=hotwords)
    terminal = Terminal()
    chunks: Chunks = queue.SimpleQueue()
    # Before the model, which takes a while to load: what has no sound needs none.
    sound = _Stdin(chunks, encoding, rate) if source == "-" else _Microphone(chunks, microphone, rate)
    try:
        with model.load(terminal, language=options.language, task=options.task) as recognizer, sound:
            session = recognizer.stream(options, turns=turns)
            terminal.note(f"listening with {recognizer.name}; Ctrl-C ends")
            return _listen(session, chunks, terminal, Captions(terminal, json=json))
    except KeyboardInterrupt:
        return 130  # before there was anything to hear


Chunks = queue.SimpleQueue[Any]
"""Float32 samples at 16 kHz as they come; None at their end; an exception that ended them."""


def _listen(session: Session, chunks: Chunks, terminal: Terminal, captions: Captions) -> int:
    is_behind = False
    try:
        while not terminal.out_closed:
            try:
                chunk = chunks.get(timeout=0.1)
            except queue.Empty:
                events = session.events()
            else:
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk is None:
                    break
                events = session.feed(chunk)
            for event in events:
                captions.show(event)
            if chunks.qsize() * _BLOCK_SECONDS > _BEHIND_SECONDS and not is_behind:
                is_behind = True
                terminal.warning("the model is slower than the sound: captions come late; use a smaller --model")
    except KeyboardInterrupt:
        pass  # the way to end it
    except StapesError:
        captions.end()
        raise
    for event in session.finish(timeout=_LAST_WORDS_SECONDS):
        captions.show(event)
    captions.end()
    return 0


class _Stdin:
    """Reads what is piped in, as soon as any of it is there."""

    def __init__(self, chunks: Chunks, encoding: Any, rate: int) -> None:
        from stapes.audio.pcm import PcmDecoder

        self._chunks, self._decoder = chunks, PcmDecoder(encoding, rate)

    def __enter__(self) -> None:
        threading.Thread(target=self._read, name="stapes-stdin", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        """The thread ends with its input, or with the process."""

    def _read(self) -> None:
        file = sys.stdin.fileno()
        is_first = True
        try:
            while data := os.read(file, _READ_BYTES):
                if is_first and data[:4] in (b"RIFF", b"fLaC", b"OggS"):
                    raise AudioError(
                        "<stdin> is a file with a header, not raw samples: use `stapes transcribe -`, or let "
                        "ffmpeg -i - -f s16le -ar 16000 -ac 1 - make samples of it"
                    )
                is_first = False
                self._chunks.put(self._decoder.feed(data))
                while self._chunks.qsize() > 64:  # a file: it need not be in memory
                    time.sleep(0.02)
            self._chunks.put(self._decoder.finish())
            self._chunks.put(None)
        except StapesError as error:
            self._chunks.put(error)
        except OSError as error:
            self._chunks.put(AudioError(f"<stdin> could not be read: {error.strerror}"))


class _Microphone:
    """The system's sound input, through PortAudio."""

    def __init__(self, chunks: Chunks, name: str | None, rate: int) -> None:
        from stapes.audio.pcm import StreamResampler

        try:
            import sounddevice  # pyright: ignore[reportMissingImports]
        except (ImportError, OSError) as error:  # OSError: the package is there, PortAudio is not
            raise DeviceError(
                "the microphone needs the package sounddevice and PortAudio (pip install 'stapes[live]'; on Linux also "
                f"the package libportaudio2): {error}; or pipe samples in: arecord … | stapes live -"
            ) from None
        self._chunks, self._resampler = chunks, StreamResampler(rate)
        device = int(name) if name is not None and name.isdigit() else name
        try:
            self._stream = sounddevice.InputStream(
                samplerate=rate,
                blocksize=round(rate * _BLOCK_SECONDS),
                device=device,
                channels=1,
                dtype="float32",
                callback=self._take,
            )
        except (sounddevice.PortAudioError, ValueError) as error:
            raise DeviceError(
                f"the microphone {name or ''} cannot be opened ({error}): `python -m sounddevice` lists those that "
                "are there; another --rate, such as 48000, may do"
            ) from None

    def __enter__(self) -> None:
        self._stream.start()

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _take(self, samples: Any, frames: int, times: Any, status: Any) -> None:
        """Called in PortAudio's thread."""
        self._chunks.put(self._resampler.feed(samples[:, 0].copy()))
