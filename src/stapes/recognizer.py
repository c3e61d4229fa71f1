"""The public object: ``load`` a model, ``transcribe`` recordings."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from stapes.audio.decode import AudioSource
from stapes.audio.vad import VoiceActivityDetector
from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import WAV2VEC2, load_whisper, model_type, open_checkpoint
from stapes.checkpoints.spectrogram_models import KINDS, load_spectrogram_model, open_spectrogram_model
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.checkpoints.wav2vec2 import load_wav2vec2, open_wav2vec2
from stapes.decoding.rules import Vocabulary
from stapes.devices import tuned
from stapes.devices.backend import Device, choose_dtype, fp8_dtype, resolve
from stapes.devices.memory import save_gpu_memory
from stapes.errors import ModelError, UsageError
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.ctc_model import Wav2Vec2CTC, plain
from stapes.inference.family import Family
from stapes.inference.gpu_ctc import GpuCtcEncoder
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.ingest import Ingest, Job, name_of
from stapes.inference.packed import is_worth_packing, pack_module
from stapes.inference.planner import Plan, plan, workspace_bytes
from stapes.inference.quantized import quantizer
from stapes.inference.requests import Priority
from stapes.inference.scheduler import Scheduler
from stapes.inference.spectrogram_ctc import SpectrogramCTC
from stapes.inference.torch_ctc import TorchCTCEngine, batch_seconds
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.inference.whisper_family import WhisperFamily
from stapes.models.whisper import WhisperConfig
from stapes.options import Backend, Precision, TranscribeOptions
from stapes.progress import Progress, Silent
from stapes.text.tokenizers import WhisperTokenizer
from stapes.transcript import Segment, Transcript

_SMALL = 4 << 30
"""Budget of GPU memory, in bytes, below which speed is given for it."""


def load(
    model: str | Path | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    backend: Backend = "auto",
    *,
    max_vram: str | None = None,
    threads: int | None = None,
    model_dir: str | Path | None = None,
    offline: bool = False,
    batch_size: int | None = None,
    task: str = "transcribe",
    language: str | None = None,
    progress: Progress | None = None,
) -> Recognizer:
    """Load a model.

    model: a name (``stapes models`` lists them), a Hugging Face id, a folder or a ``.pt`` file; None chooses for the
    device, ``task`` and ``language``. threads: CPU threads of PyTorch. batch_size: windows decoded together. max_vram:
    the most GPU memory to use, such as ``"6GB"``.
    Raises ModelError, DeviceError and UsageError.
    """
    progress = progress or Silent()
    if backend == "onnx":
        raise UsageError("--backend onnx: ONNX models cannot be run yet; use --backend torch")
    if threads is not None:
        if threads < 1:
            raise UsageError(f"--threads is {threads}: give 1 or more")
        torch.set_num_threads(threads)
    budget = None if max_vram is None else _memory_size(max_vram)
    if budget is not None and budget < _SMALL:
        save_gpu_memory()
    where = resolve(device)
    dtype = choose_dtype(precision, where)
    tuned.activate(where)
    if budget is not None and where.memory is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / where.memory), where.torch)
    name, location = _find(model, where, task, language, model_dir, offline, progress)
    kind = model_type(location.path)
    if kind in WAV2VEC2:
        return _load_ctc(name, location.path, where, precision, dtype, batch_size, language)
    if kind in KINDS:
        return _load_spectrogram_ctc(name, location.path, where, precision, dtype, batch_size)
    checkpoint = open_checkpoint(location.path, name, location.parts)
    tokenizer = open_tokenizer(checkpoint, model_dir)
    slots, encoder_batch = batch_size or _default_slots(where), 1
    int8_cache = precision in ("fp8", "int8", "int4")
    if where.memory is not None:
        found = _plan(checkpoint.config, where, precision, dtype, budget, slots)
        if budget is not None or found.slots < slots:
            progress.note(f"{name}: {found.reason}")
        slots, encoder_batch, dtype = found.slots, found.encoder_batch, found.dtype
        int8_cache |= found.has_int8_cache
        if precision == "auto":
            precision = found.precision
    return assemble(name, checkpoint, tokenizer, where, dtype, slots, precision, int8_cache, encoder_batch)


def _plan(
    config: WhisperConfig, device: Device, precision: Precision, dtype: torch.dtype, budget: int | None, slots: int
) -> Plan:
    """How to fit the model into the memory that is free, or that may be used."""
    free, _ = torch.cuda.mem_get_info(device.torch)
    return plan(
        config,
        min(free, budget or round(0.95 * free)),
        # 8-bit floats are computed with, not kept: the weights are counted as what they are loaded as.
        "bf16" if precision == "fp8" else precision,
        dtypes=(dtype,) if precision != "auto" else (torch.float16,),
        slots=slots,
        workspace=workspace_bytes(device.backend, device.architecture),
    )


def assemble(
    name: str,
    checkpoint: WhisperCheckpoint,
    tokenizer: WhisperTokenizer,
    device: Device,
    dtype: torch.dtype,
    slots: int,
    precision: Precision = "auto",
    int8_cache: bool = False,
    encoder_batch: int | None = None,
) -> Recognizer:
    """Load a checkpoint's weights and put the parts together.

    dtype: of activations and plain weights. slots: windows decoded together. int8_cache: keep keys and values of the
    encoder's states in 8 bits. encoder_batch: windows encoded together.
    """
    adapt = pack_module if is_worth_packing(device.torch, dtype) else quantizer(precision)
    network = load_whisper(checkpoint, dtype, device.torch, adapt)
    config = checkpoint.config
    heads = checkpoint.alignment_heads or tuple(
        (layer, head)
        for layer in range(config.decoder_layers // 2, config.decoder_layers)
        for head in range(config.decoder_heads)
    )
    begin = checkpoint.begin_suppress_tokens
    engine_class: Callable[..., TorchWhisperEngine] = TorchWhisperEngine
    if device.backend != "cpu":
        fp8 = fp8_dtype(device) if precision == "fp8" else None
        engine_class = partial(GpuWhisperEngine, quantize_memory=int8_cache, fp8=fp8)
    engine = engine_class(
        network,
        Vocabulary(
            end=tokenizer.eot,
            no_speech=tokenizer.no_speech,
            no_timestamps=tokenizer.no_timestamps,
            timestamp_begin=tokenizer.timestamp_begin,
            size=config.vocab_size,
        ),
        tokenizer.language_ids,
        tokenizer.sot,
        begin if begin is not None else (*tokenizer.encode(" "), tokenizer.eot),
        heads,
        slots,
        encoder_batch=1 if device.backend == "cpu" else encoder_batch or min(8, slots),
    )
    return Recognizer(WhisperFamily(name, checkpoint, tokenizer, engine), device)


def _load_ctc(
    name: str,
    path: Path,
    device: Device,
    precision: Precision,
    dtype: torch.dtype,
    slots: int | None,
    language: str | None,
) -> Recognizer:
    """Load a model of the kind of wav2vec 2.0; ``language`` chooses among its adapters, where it has any."""
    if precision in ("fp8", "int8", "int4"):
        raise UsageError(f"--precision {precision}: {name} runs in fp32, bf16 or fp16; say one of them, or auto")
    checkpoint = open_wav2vec2(path, name)
    has_several = checkpoint.languages or (checkpoint.tokenizer is not None and checkpoint.tokenizer.vocabularies)
    if language is not None and has_several:
        checkpoint = open_wav2vec2(path, name, language)
    network = load_wav2vec2(checkpoint, dtype, device.torch)
    on_gpu = device.memory is not None
    model = Wav2Vec2CTC(checkpoint, network, partial(GpuCtcEncoder, dtype=dtype) if on_gpu else plain)
    engine = TorchCTCEngine(
        model,
        slots or (_default_slots(device) if on_gpu else 1),
        batch_seconds=batch_seconds(device.torch, dtype),
        shapes="packed" if on_gpu else "tight",
    )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Recognizer(CTCFamily(name, model, engine, checkpoint.config, parameters), device)


def _load_spectrogram_ctc(
    name: str, path: Path, device: Device, precision: Precision, dtype: torch.dtype, slots: int | None
) -> Recognizer:
    """Load a CTC model over log-mel spectrograms, as `stapes train` writes them."""
    if precision in ("fp8", "int8", "int4"):
        raise UsageError(f"--precision {precision}: {name} runs in fp32, bf16 or fp16; say one of them, or auto")
    checkpoint = open_spectrogram_model(path, name)
    network = load_spectrogram_model(checkpoint, dtype, device.torch)
    model = SpectrogramCTC(checkpoint, network)
    engine = TorchCTCEngine(
        model,
        slots or (_default_slots(device) if device.memory is not None else 1),
        batch_seconds=batch_seconds(device.torch, dtype),
    )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Recognizer(CTCFamily(name, model, engine, checkpoint.config, parameters), device)


def _find(
    model: str | Path | None,
    device: Device,
    task: str,
    language: str | None,
    model_dir: str | Path | None,
    offline: bool,
    progress: Progress,
) -> tuple[str, catalog.Location]:
    translate = task == "translate"
    if model is None:
        name = catalog.choose_default(device.memory, translate)
        found = catalog.find(name, model_dir)
        if found is None:
            other = catalog.choose_installed(name, translate, language, model_dir)
            if other is not None:
                progress.note(
                    f"the default model {name} is not on this machine: using {other}; `stapes models pull {name}`"
                )
                name, found = other, catalog.find(other, model_dir)
    else:
        name = str(model)
        found = catalog.find(name, model_dir)
    if found is None:
        if catalog.repository_of(name) is None:
            raise ModelError(f"There is no model named {name!r} and no such file; {catalog.hint(name)}")
        if not catalog.is_offline(offline):
            progress.note(f"{name} is not on this machine: downloading it")
        found = catalog.Location(catalog.pull(name, model_dir, progress, offline))
    # A folder in a folder looks like a Hugging Face id.
    label = found.path.name if found.path == Path(name).expanduser() else name
    return label, found


def _memory_size(size: str) -> int:
    """Bytes of "6GB", "512MiB" or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", size.strip().lower())
    if found is None or not float(found[1]):
        raise UsageError(f"--max-vram is {size!r}: give an amount of memory such as 6GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))


def _default_slots(device: Device) -> int:
    if device.memory is None:
        return 3  # eight are about 10 % faster on two cores, but take base well above 1 GB of memory
    return 16 if device.memory < 12 << 30 else 48 if device.memory < 60 << 30 else 128


class Recognizer:
    """A loaded model. Any number of threads may call it at the same time: their windows share the device."""

    def __init__(self, family: Family, device: Device) -> None:
        self.family, self.device = family, device
        self.name, self.config = family.name, family.config
        self.tokenizer, self.engine = family.tokenizer, family.engine
        self._detector: VoiceActivityDetector | None = None
        self._slots = self.engine.slots
        self._lock = threading.Lock()
        self._scheduler = Scheduler(self.engine, slots=self._slots, resize=partial(_resize, self.engine))

    def transcribe(
        self,
        audio: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Progress | None = None,
        priority: Priority = "interactive",
        **changes: Any,
    ) -> Transcript:
        """Transcribe one recording.

        audio: a path, ``"-"`` for standard input, bytes, a file object, or samples with ``sample_rate``. Options come
        as one object or by name (``word_timestamps=True``). priority: beside other calls, "interactive" goes first and
        "bulk" takes what is left. Raises AudioError when the recording cannot be read; damaged ones give what could be
        read, with ``warnings``.
        """
        from stapes.errors import AudioError

        inputs = [(audio, sample_rate)]
        with closing(self._run(inputs, _options(options, changes), progress, priority, workers=1)) as results:
            (transcript,) = results
        if transcript.error is not None:
            raise AudioError(transcript.error)
        return transcript

    def transcribe_many(
        self,
        audio: Iterable[AudioSource],
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Progress | None = None,
        priority: Priority = "bulk",
        **changes: Any,
    ) -> Iterator[Transcript]:
        """Transcribe recordings together; yield each as it is done, in any order.

        ``path`` tells which it is. A recording that fails is yielded with ``error`` set and stops no other. The work
        goes on between one result and the next, a few recordings ahead of the caller; closing the iterator cancels what
        is left. priority: as in ``transcribe``. ``batch_size`` beside other calls: at most so many windows of this one
        are decoded together.
        """
        inputs = ((source, sample_rate) for source in audio)
        yield from self._run(inputs, _options(options, changes), progress, priority, workers=_workers())

    def close(self) -> None:
        """Let go of the model and its memory. Calls that are not over fail with UsageError."""
        if not self._scheduler.close():
            return  # in the middle of a long operation, which needs that memory
        self.engine.clear()
        if self.device.backend != "cpu":
            torch.cuda.empty_cache()

    def __enter__(self) -> Recognizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        inputs: Iterable[tuple[AudioSource, int | None]],
        options: TranscribeOptions,
        progress: Progress | None,
        priority: Priority,
        workers: int,
    ) -> Generator[Transcript, None, None]:
        if priority not in get_args(Priority):
            raise UsageError(f"priority is {priority!r}: say {' or '.join(get_args(Priority))}")
        options = self.family.check(options)
        progress = progress or Silent()
        ingest = Ingest(
            inputs,
            self.family.feeds(options),
            options,
            self._speech_detector() if options.vad else None,
            progress,
            workers=workers,
            ahead=2 * (options.batch_size or self._slots) + workers,
            replays=self.family.replays,
        )
        # The thread that drives the engine is to work as this one would.
        prepare = partial(_settle_thread, self.device.torch, torch.get_num_threads())
        with closing(self._scheduler.run(ingest, priority, options.batch_size, prepare)) as jobs:
            for job in jobs:
                yield self._transcript(job, progress)

    def _speech_detector(self) -> VoiceActivityDetector:
        with self._lock:
            if self._detector is None:
                self._detector = VoiceActivityDetector(threads=_workers())
            return self._detector

    def _transcript(self, job: Job, progress: Progress) -> Transcript:
        recordings = job.channels
        progress.advance(job.duration - job.reported)
        progress.add_total(job.duration - job.estimate)
        segments: list[Segment] = []
        for number, recording in enumerate(recordings, 1):
            for segment in recording.sorted_segments():
                segment.speaker = f"Speaker {number}" if len(recordings) > 1 else None
                segments.append(segment)
        if len(recordings) > 1:
            segments.sort(key=lambda segment: (segment.start, segment.end))
        for index, segment in enumerate(segments):
            _shift(segment, job.offset)
            segment.id = index
        first = max(recordings, key=lambda recording: len(recording.segments), default=None)
        warnings = list(job.warnings)
        if job.error is not None and segments:
            warnings.append(job.error)
        silent = [recording.skipped() for recording in recordings]
        return Transcript(
            text="".join(segment.text for segment in segments).strip() if len(recordings) < 2 else _dialogue(segments),
            language=first.language if first else None,
            language_probability=first.language_probability if first else None,
            duration=job.duration + job.offset if recordings else 0.0,
            segments=segments,
            error=job.error if not segments else None,
            path=name_of(job.source),  # as given; job.name is the printable form that messages use
            model=self.name,
            timings={"total": time.perf_counter() - job.started},
            skipped=[(a + job.offset, b + job.offset) for a, b in _in_all(silent)],
            warnings=warnings,
            damaged=job.damaged or (job.error is not None and bool(segments)),
        )


def _resize(engine: TorchWhisperEngine | TorchCTCEngine, slots: int) -> None:
    """Make an engine decode that many windows together. Only while it holds none: it drops all slots."""
    engine.clear()
    engine.slots = slots


def _settle_thread(device: torch.device, threads: int) -> None:
    """Give a new thread what belongs to a thread: PyTorch's number of threads, and the GPU that is meant."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _in_all(channels: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """What the sorted stretches of all channels have in common."""
    common = channels[0] if channels else []
    for stretches in channels[1:]:
        pairs = [(max(a, c), min(b, d)) for a, b in common for c, d in stretches]
        common = [(start, end) for start, end in pairs if start < end]
    return common


def _shift(segment: Segment, seconds: float) -> None:
    segment.seek += round(seconds * 100)
    segment.start += seconds
    segment.end += seconds
    for word in segment.words or []:
        word.start += seconds
        word.end += seconds


def _dialogue(segments: list[Segment]) -> str:
    """The text of speakers in turn, a line each."""
    lines: list[str] = []
    for before, segment in zip([None, *segments], segments, strict=False):
        if before is not None and before.speaker == segment.speaker:
            lines[-1] += segment.text
        else:
            lines.append(f"{segment.speaker}:{segment.text}")
    return "\n".join(line.strip() for line in lines)


def _options(options: TranscribeOptions | None, changes: dict[str, Any]) -> TranscribeOptions:
    try:
        return replace(options or TranscribeOptions(), **changes)
    except TypeError as error:
        found = re.search(r"'(\w+)'", str(error))
        raise UsageError(f"There is no option {found[1] if found else error}") from None


def _workers() -> int:
    return max(1, min(4, os.cpu_count() or 1))
