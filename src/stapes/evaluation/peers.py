"""Other systems behind one small protocol, so that one harness measures them and us.

    faster-whisper:base?compute_type=int8&batch_size=8      a name or a CTranslate2 folder
    transformers:openai/whisper-base?batch_size=8           an id, a name or a folder
    openai:http://127.0.0.1:8000/v1?concurrency=4#whisper-1 any server of OpenAI's HTTP contract

Every one of them hears the same samples: decoded here, 16 kHz, mono. They take those of ``TranscribeOptions`` that they
know; what follows ``?`` says more.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import urllib.error
import urllib.request
import uuid
import wave
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from stapes.audio.decode import SAMPLE_RATE, open_audio
from stapes.checkpoints import catalog
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.save import save_huggingface
from stapes.devices.backend import choose_dtype, resolve
from stapes.errors import AudioError, ModelError, StapesError, UsageError
from stapes.evaluation.results import ModelFacts
from stapes.options import TranscribeOptions

WINDOW = 30 * SAMPLE_RATE
"""Samples that Whisper hears at once."""


_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"}
"""CTranslate2's names of number formats, as ours; what stands after ``int8_`` is the format of the rest."""


class Peer(Protocol):
    """A loaded recogniser. ``system`` is what results call it; ``gpu`` is the number of the GPU it runs on, or None.

    Those that can tell have ``work``: the ``windows`` and ``tokens`` of the recording that was yielded last.
    """

    system: str
    facts: ModelFacts
    gpu: int | None

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """(path, text) of each as it is done, in any order; its error in place of the text where there is none."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """What ``open_peer`` was asked for. ``extra``: what followed ``?``."""

    model: str
    extra: dict[str, str]
    options: TranscribeOptions
    device: str
    threads: int | None
    model_dir: str | None
    offline: bool

    def number(self, name: str, default: int) -> int:
        """A whole number of ``extra``."""
        text = self.extra.get(name, str(default))
        if not text.isdigit() or int(text) < 1:
            raise UsageError(f"{name}={text}: give a whole number from 1")
        return int(text)


def is_peer(name: str) -> bool:
    """Whether a MODEL argument names another system."""
    return name.partition(":")[0] in _PEERS and ":" in name


def open_peer(
    name: str,
    *,
    options: TranscribeOptions | None = None,
    device: str = "auto",
    threads: int | None = None,
    model_dir: str | None = None,
    offline: bool = False,
) -> Peer:
    """Load another system: ``SYSTEM:MODEL?OPTION=VALUE&…``.

    Raises UsageError (what to install, options it has not), ModelError.
    """
    system, _, model = name.partition(":")
    if system not in _PEERS or not model:
        raise UsageError(f"{name!r} is no system: say {', '.join(f'{each}:MODEL' for each in _PEERS)}")
    model, hash, fragment = model.partition("#")
    model, _, query = model.partition("?")
    extra = dict(parse_qsl(query, keep_blank_values=True))
    known, opener = _PEERS[system]
    if unknown := sorted(set(extra) - known):
        raise UsageError(f"{system} has no option {unknown[0]!r}: it has {', '.join(sorted(known))}")
    settings = PeerSettings(
        model=model + hash + fragment,
        extra=extra,
        options=options or TranscribeOptions(),
        device="cuda" if device in ("rocm", "hip") else device,
        threads=threads,
        model_dir=model_dir,
        offline=catalog.is_offline(offline),
    )
    return opener(settings)


def samples(path: str) -> np.ndarray:
    """A recording as every system hears it: float32 ``(samples,)`` at 16 kHz. Raises AudioError."""
    with open_audio(path) as stream:
        chunks = [chunk[0] for chunk in stream]
    if not chunks:
        raise AudioError(f"{path}: there is no sound in it")
    return np.concatenate(chunks)


class FasterWhisper:
    """faster-whisper on CTranslate2. With ``batch_size`` its batched pipeline, else its sequential algorithm."""

    system = "faster-whisper"

    def __init__(self, settings: PeerSettings) -> None:
        try:
            from faster_whisper import BatchedInferencePipeline, WhisperModel  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError as error:
            raise UsageError("faster-whisper is not installed: pip install 'stapes[peers]'") from error
        location = ctranslate2_folder(settings.model, settings.model_dir)
        kind, _, index = settings.device.partition(":")
        model: Any = _loading(
            settings.model,
            lambda: WhisperModel(
                str(location or settings.model),
                device=kind,
                device_index=int(index or 0),
                compute_type=settings.extra.get("compute_type", "default"),
                cpu_threads=settings.threads or 0,
                local_files_only=settings.offline,
            ),
        )
        self.gpu = int(index or 0) if model.model.device == "cuda" else None
        self.work: dict[str, float] = {}
        self.facts = ModelFacts(
            name=settings.model,
            path=str(location) if location else None,
            precision=_PRECISIONS.get(model.model.compute_type.partition("_")[0], model.model.compute_type),
            device="CPU" if self.gpu is None else resolve(f"cuda:{self.gpu}").name,
        )
        given = settings.options
        self._arguments: dict[str, Any] = {
            "task": given.task,
            "beam_size": settings.number("beam_size", given.beam_size),
            "best_of": given.best_of,
            "patience": given.patience,
            "length_penalty": 1.0 if given.length_penalty is None else given.length_penalty,
            "temperature": list(given.temperatures()),
            "compression_ratio_threshold": given.compression_ratio_threshold,
            "log_prob_threshold": given.logprob_threshold,
            "no_speech_threshold": given.no_speech_threshold,
            "condition_on_previous_text": given.condition_on_previous_text,
            "initial_prompt": given.initial_prompt,
            "hotwords": given.hotwords,
            "suppress_tokens": given.suppressed_ids(),
            "without_timestamps": given.without_timestamps,
            "vad_filter": given.vad,
        }
        self._transcribe = model.transcribe
        batch_size = settings.extra.get("batch_size") or given.batch_size
        if batch_size:
            # It cuts one recording at a time into windows; with VAD off it would refuse those above 30 s.
            self._transcribe = BatchedInferencePipeline(model).transcribe
            self._arguments |= {"batch_size": settings.number("batch_size", int(batch_size)), "vad_filter": True}

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """One after the other."""
        for path in paths:
            try:
                segments = list(self._transcribe(samples(path), language=language, **self._arguments)[0])
                self.work = {
                    "windows": len({segment.seek for segment in segments}),
                    "tokens": sum(len(segment.tokens) for segment in segments),
                }
                yield path, "".join(segment.text for segment in segments).strip()
            except StapesError as error:
                yield path, error
            except (RuntimeError, ValueError) as error:
                yield path, ModelError(f"{path}: faster-whisper failed ({error})")

    def close(self) -> None:
        """Let go of the model."""
        del self._transcribe


class Transformers:
    """Hugging Face transformers: Whisper or a CTC model through its pipeline, greedy or beams, without fallback.

    Recordings of at most 30 s run in batches, longer ones by transformers' own sequential algorithm.
    """

    system = "transformers"

    def __init__(self, settings: PeerSettings) -> None:
        try:
            import transformers
        except ImportError as error:
            raise UsageError("transformers is not installed: pip install 'stapes[peers]'") from error
        import torch

        where = resolve(settings.device)
        self.gpu = where.torch.index if where.backend != "cpu" else None
        dtype = choose_dtype(settings.extra.get("dtype", "auto"), where)  # pyright: ignore[reportArgumentType]
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        location = huggingface_folder(settings.model, settings.model_dir)
        transformers.logging.set_verbosity_error()
        build: Any = transformers.pipeline
        self._pipeline: Any = _loading(
            settings.model,
            lambda: build(
                "automatic-speech-recognition",
                model=str(location or settings.model),
                device=where.torch,
                dtype=dtype,
                model_kwargs={"local_files_only": True} if settings.offline else {},
            ),
        )
        network = self._pipeline.model
        self.facts = ModelFacts(
            name=settings.model,
            path=str(location) if location else None,
            precision={torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype],
            device=where.name,
            parameters=sum(parameter.numel() for parameter in network.parameters()),
        )
        self._batch_size = settings.number("batch_size", settings.options.batch_size or 8)
        self._is_whisper = network.config.model_type == "whisper"
        self._is_multilingual = self._is_whisper and bool(network.generation_config.is_multilingual)
        self._task = settings.options.task
        self._beams = settings.number("beam_size", settings.options.beam_size)

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """Batches in the order given."""
        paths = iter(paths)
        while batch := list(islice(paths, self._batch_size)):
            heard: list[tuple[str, np.ndarray]] = []
            for path in batch:
                try:
                    heard.append((path, samples(path)))
                except StapesError as error:
                    yield path, error
            together = [each for each in heard if len(each[1]) <= WINDOW]
            for part in [together, *([each] for each in heard if len(each[1]) > WINDOW)]:
                yield from self._run(part, language)

    def _run(self, part: list[tuple[str, np.ndarray]], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        if not part:
            return
        arguments: dict[str, Any] = {}
        if self._is_whisper:
            generate: dict[str, Any] = {"num_beams": self._beams, "do_sample": False}
            if self._is_multilingual:
                generate |= {"language": language, "task": self._task}
            arguments["generate_kwargs"] = generate
            if len(part[0][1]) > WINDOW:
                arguments["return_timestamps"] = True
        # The pipeline removes the keys of what it is given.
        inputs = [{"raw": audio, "sampling_rate": SAMPLE_RATE} for _, audio in part]
        try:
            results = self._pipeline(inputs, batch_size=len(inputs), **arguments)
        except (RuntimeError, ValueError) as error:
            for path, _ in part:
                yield path, ModelError(f"{path}: transformers failed ({error})")
            return
        for (path, _), result in zip(part, results, strict=True):
            yield path, result["text"].strip()

    def close(self) -> None:
        """Let go of the model."""
        del self._pipeline


class OpenAI:
    """A server of OpenAI's contract: POST /v1/audio/transcriptions. The key is taken from ``$OPENAI_API_KEY``."""

    system = "openai"

    def __init__(self, settings: PeerSettings) -> None:
        self.gpu: int | None = None
        url, _, model = settings.model.partition("#")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"openai:{settings.model}: give the server's address, as openai:http://HOST:8000/v1#MODEL")
        base = url.rstrip("/")
        self._url = (base if parts.path.strip("/") else f"{base}/v1") + "/audio/transcriptions"
        self._fields = {"model": model or "whisper-1", "response_format": "json"}
        if settings.options.initial_prompt:
            self._fields["prompt"] = settings.options.initial_prompt
        self._fields["temperature"] = f"{settings.options.temperature:g}"
        self._concurrency = settings.number("concurrency", 4)
        self._timeout = float(settings.number("timeout", 600))
        self.facts = ModelFacts(name=self._fields["model"], path=base)

    def transcribe_many(self, paths: Iterable[str], language: str | None) -> Iterator[tuple[str, str | StapesError]]:
        """``concurrency`` requests at a time."""
        waiting: list[tuple[str, Future[str]]] = []
        paths = iter(paths)
        with ThreadPoolExecutor(self._concurrency) as pool:
            while True:
                for path in islice(paths, self._concurrency - len(waiting)):
                    waiting.append((path, pool.submit(self._request, path, language)))
                if not waiting:
                    return
                path, answer = waiting.pop(0)
                try:
                    yield path, answer.result()
                except StapesError as error:
                    yield path, error

    def _request(self, path: str, language: str | None) -> str:
        fields = {**self._fields, **({"language": language} if language else {})}
        boundary = uuid.uuid4().hex
        body = b"".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in fields.items()
        )
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="audio.wav"\r\n'.encode()
        body += b"Content-Type: audio/wav\r\n\r\n" + _wav(samples(path)) + f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, body, headers)  # noqa: S310 (http or https: checked above)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:  # noqa: S310
                return str(json.load(answer)["text"]).strip()
        except urllib.error.HTTPError as error:
            said = error.read(300).decode("utf-8", "replace").strip()
            raise ModelError(f"{path}: {self._url} answered {error.code} ({said})") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: {self._url} gave no text ({error}); is the server running?") from None

    def close(self) -> None:
        """Nothing is held."""


def _wav(audio: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((np.clip(audio, -1.0, 32767 / 32768) * 32768).round().astype("<i2").tobytes())
    return buffer.getvalue()


def _loading(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except StapesError:
        raise
    except Exception as error:  # the libraries raise many kinds for a model that is not there or cannot be opened
        why = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{name}: the model cannot be opened ({why}); give a folder, or a name with a network"
        ) from error


def _cache(kind: str, name: str) -> Path:
    return catalog.default_folder().parent / "peers" / kind / name.replace("/", "--")


def ctranslate2_folder(name: str, model_dir: str | None = None) -> Path | None:
    """The folder from which faster-whisper can load a model that is on this machine; None where there is none.

    Weights that a pip package holds in parts are joined in the cache once.
    """
    location = catalog.find(_short(name), model_dir)
    if location is None:
        return None
    if not location.parts:
        return location.path if (location.path / "model.bin").exists() else None
    folder = _cache("ctranslate2", _short(name))
    size = sum(part.stat().st_size for part in location.parts)
    whole = folder / "model.bin"
    if not whole.exists() or whole.stat().st_size != size:
        folder.mkdir(parents=True, exist_ok=True)
        for file in location.path.iterdir():
            if file.is_file() and not file.name.startswith("model.bin"):
                shutil.copyfile(file, folder / file.name)
        partial = folder / f".model.bin.{os.getpid()}"
        with partial.open("wb") as out:
            for part in location.parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
        partial.replace(whole)
    return folder


def huggingface_folder(name: str, model_dir: str | None = None) -> Path | None:
    """The folder from which transformers can load a model that is on this machine; None where there is none.

    A model of another format is converted into the cache once.
    """
    location = catalog.find(_short(name), model_dir)
    if location is None:
        return None
    if location.path.is_dir() and not location.parts and (location.path / "config.json").exists():
        settings = json.loads((location.path / "config.json").read_text(encoding="utf-8"))
        if "model_type" in settings:
            return location.path
    # A folder's own name may be anything: its whole path tells it from others.
    is_path = Path(name).expanduser().exists() and location.path.samefile(Path(name).expanduser())
    label = str(location.path.resolve()).strip("/") if is_path else _short(name)
    folder = _cache("huggingface", label)
    if not (folder / "model.safetensors").exists():
        save_huggingface(open_checkpoint(location.path, name, location.parts), folder)
    return folder


def _short(name: str) -> str:
    """The catalogue's name of a Hugging Face id, where it has one."""
    return next((short for short, known in catalog.KNOWN.items() if known.repository == name), name)


_PEERS: dict[str, tuple[frozenset[str], Callable[[PeerSettings], Peer]]] = {
    "faster-whisper": (frozenset({"compute_type", "batch_size", "beam_size"}), FasterWhisper),
    "transformers": (frozenset({"dtype", "batch_size", "beam_size"}), Transformers),
    "openai": (frozenset({"concurrency", "timeout"}), OpenAI),
}
