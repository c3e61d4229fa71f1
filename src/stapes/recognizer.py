"""The public object: ``load`` a model, ``transcribe`` recordings."""

from __future__ import annotations

import os
import re
import threading
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
from stapes.checkpoints.low_rank import with_adapter
from stapes.checkpoints.onnx_folder import is_onnx
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.checkpoints.wav2vec2 import has_languages
from stapes.decoding.rules import Vocabulary
from stapes.devices import tuned
from stapes.devices.backend import Device, choose_dtype, fp8_dtype, resolve
from stapes.devices.memory import save_gpu_memory
from stapes.devices.threads import in_own_thread
from stapes.errors import AudioError, ModelError, UsageError
from stapes.inference.ctc_alignment import Aligner
from stapes.inference.ctc_family import CTCFamily
from stapes.inference.ctc_open import CTC_KINDS, open_ctc
from stapes.inference.draft import open_draft
from stapes.inference.engine import Engine
from stapes.inference.family import Family
from stapes.inference.following import Follower, SegmentListener
from stapes.inference.gpu_speculative import GpuSpeculativeEngine
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.ingest import Ingest
from stapes.inference.onnx import open_onnx
from stapes.inference.onnx_session import check_backend
from stapes.inference.packed import is_worth_packing, packer
from stapes.inference.planner import Plan, plan, workspace_bytes
from stapes.inference.pool_open import open_pool, several, threads_of_each
from stapes.inference.quantized import quantizer, stored_precision
from stapes.inference.requests import Priority
from stapes.inference.results import make_transcript
from stapes.inference.scheduler import Scheduler
from stapes.inference.speculative import DraftModel, SpeculativeWhisperEngine
from stapes.inference.streaming import Event, Live, Session, TurnOptions
from stapes.inference.torch_ctc import TorchCTCEngine
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.inference.whisper_family import WhisperFamily
from stapes.models.whisper import WhisperConfig
from stapes.options import Backend, Precision, TranscribeOptions
from stapes.progress import Cancellation, Progress, Silent
from stapes.text.tokenizers import WhisperTokenizer, language_label
from stapes.transcript import Transcript

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
    adapter: str | Path | None = None,
    draft: str | Path | None = None,
    draft_tokens: int = 5,
) -> Recognizer:
    """Load a model.

    model: a name (``stapes models`` lists them), a Hugging Face id, a folder or a ``.pt`` file; None chooses for the
    device, ``task`` and ``language``, which also chooses among the adapters of MMS. threads: CPU threads of PyTorch.
    batch_size: windows decoded together. max_vram: the most GPU memory to use, such as ``"6GB"``. device: several, as
    in ``"cuda:0,cuda:1"``, share the windows, each in a process of its own: the numbers are then of all, and of each.
    adapter: the folder of a LoRA adapter of this Whisper, merged in memory; as ``model`` itself it finds its base.
    draft: a small Whisper that drafts ``draft_tokens`` at a time for this one (`inference.speculative`), greedily: the
    text is the same, sooner, where few windows are decoded together. Raises ModelError, DeviceError and UsageError.
    """
    progress = progress or Silent()
    if devices := several(device):
        if draft is not None:
            raise UsageError("--draft is for few windows at once, on one device: name one, or leave --draft out")
        model, location = _find(model, resolve(devices[0]), task, language, model_dir, offline, progress)
        settings = {
            "precision": precision,
            "backend": backend,
            "max_vram": max_vram,
            "threads": threads_of_each(devices, threads),
            "model_dir": model_dir,
            "adapter": adapter,
            "batch_size": None if batch_size is None else -(-batch_size // len(devices)),
        }
        source = model if location.parts else location.path
        openers = [(each, partial(open_engine, source, device=each, **settings)) for each in devices]
        return Recognizer(*open_pool(model, location, openers, model_dir))
    if threads is not None:
        if threads < 1:
            raise UsageError(f"--threads is {threads}: give 1 or more")
        torch.set_num_threads(threads)
    budget = None if max_vram is None else _memory_size(max_vram)
    if budget is not None and budget < _SMALL:
        save_gpu_memory()
    where = resolve(device)
    tuned.activate(where)
    if budget is not None and where.memory is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / where.memory), where.torch)
    name, location = _find(model, where, task, language, model_dir, offline, progress)
    exported = is_onnx(location.path)
    check_backend(backend, name, exported)
    kind = model_type(location.path)
    if draft is not None and (exported or kind in CTC_KINDS):
        raise UsageError(f"--draft needs a Whisper that PyTorch runs, and {name} is none: leave --draft out")
    if adapter is not None and (exported or kind in CTC_KINDS):
        raise UsageError(f"--adapter needs a Whisper that PyTorch runs, and {name} is none: leave --adapter out")
    if exported:
        slots = batch_size or _default_slots(where)
        return Recognizer(open_onnx(name, location.path, where, precision, slots, progress), where)
    dtype = choose_dtype(precision, where)
    if kind is not None and kind in CTC_KINDS:
        if language is not None and kind in WAV2VEC2 and has_languages(location.path):
            catalog.pull_adapter(name, language, model_dir, progress, offline)
        slots = batch_size or (1 if where.memory is None else _default_slots(where))
        family = in_own_thread(lambda: open_ctc(name, location.path, kind, where, precision, dtype, slots, language))
        return Recognizer(family, where)
    checkpoint = open_checkpoint(location.path, name, location.parts)
    if adapter is not None:
        checkpoint = with_adapter(checkpoint, Path(adapter))
    precision = stored_precision(name, checkpoint.scheme, precision, where)
    tokenizer = open_tokenizer(checkpoint, model_dir)
    slots, encoder_batch = batch_size or _default_slots(where, None if draft is None else draft_tokens), 1
    int8_cache = precision in ("fp8", "int8", "int4")
    if where.memory is not None:
        found = _plan(checkpoint.config, where, precision, dtype, budget, slots)
        if budget is not None or found.slots < slots:
            progress.note(f"{name}: {found.reason}")
        slots, encoder_batch, dtype = found.slots, found.encoder_batch, found.dtype
        int8_cache |= found.has_int8_cache
        if precision == "auto":
            precision = found.precision
    drafts = None
    if draft is not None:
        drafts = open_draft(
            *_find(draft, where, task, language, model_dir, offline, progress),
            checkpoint,
            tokenizer,
            tokens=draft_tokens,
            precision=precision,
            dtype=dtype,
            device=where.torch,
            model_dir=model_dir,
        )
    return in_own_thread(
        lambda: assemble(name, checkpoint, tokenizer, where, dtype, slots, precision, int8_cache, encoder_batch, drafts)
    )


def open_engine(model: str | Path, **settings: Any) -> Engine:
    """The engine of a model that is on this machine, as `load` makes it: for a process of its own."""
    return load(model, offline=True, **settings).engine


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
    draft: DraftModel | None = None,
) -> Recognizer:
    """Load a checkpoint's weights and put the parts together.

    dtype: of activations and plain weights. slots: windows decoded together. int8_cache: keep keys and values of the
    encoder's states in 8 bits. encoder_batch: windows encoded together. draft: what drafts for it, if anything does.
    """
    if is_worth_packing(device.torch, dtype):
        adapt = packer(dtype, int8=precision == "int8")
    else:
        adapt = quantizer(precision, checkpoint.stored)
    network = load_whisper(checkpoint, dtype, device.torch, adapt)
    config = checkpoint.config
    heads = checkpoint.alignment_heads or tuple(
        (layer, head)
        for layer in range(config.decoder_layers // 2, config.decoder_layers)
        for head in range(config.decoder_heads)
    )
    begin = checkpoint.begin_suppress_tokens
    engine_class: Callable[..., TorchWhisperEngine] = TorchWhisperEngine
    if draft is not None:
        engine_class = partial(SpeculativeWhisperEngine, draft=draft)
    if device.backend != "cpu":
        fp8 = fp8_dtype(device) if precision == "fp8" else None
        engine_class = GpuWhisperEngine if draft is None else partial(GpuSpeculativeEngine, draft=draft)
        engine_class = partial(engine_class, quantize_memory=int8_cache, fp8=fp8)
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


def _default_slots(device: Device, draft_tokens: int | None = None) -> int:
    if draft_tokens is not None:  # many windows together read the weights once for all: drafts are only more to compute
        return 1 if device.memory is None else max(1, 16 // (draft_tokens + 1))
    if device.memory is None:
        return 3  # eight are about 10 % faster on two cores, but take base well above 1 GB of memory
    return 16 if device.memory < 12 << 30 else 48 if device.memory < 60 << 30 else 128


class Recognizer:
    """A loaded model. Any number of threads may call it at the same time: their windows share the device."""

    def __init__(self, family: Family, device: Device, on_close: Callable[[], None] = lambda: None) -> None:
        self.family, self.device = family, device
        self._on_close = on_close
        self.name, self.config = family.name, family.config
        self.tokenizer, self.engine = family.tokenizer, family.engine
        self._detector: VoiceActivityDetector | None = None
        self._live: Live | None = None
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
        on_segments: SegmentListener | None = None,
        cancellation: Cancellation | None = None,
        **changes: Any,
    ) -> Transcript:
        """Transcribe one recording.

        audio: a path, ``"-"`` for standard input, bytes, a file object, or samples with ``sample_rate``. Options come
        as one object or by name (``word_timestamps=True``). priority: beside other calls, "interactive" goes first and
        "bulk" takes what is left. on_segments: gets the transcript's segments, each once and in order, as soon as they
        are settled; it is called in a thread that others wait for and must return at once. cancellation: to give the
        call up from another thread. Raises AudioError when the recording cannot be read, CancelledError; damaged ones
        give what could be read, with ``warnings``.
        """
        checked = _options(options, changes)
        with closing(
            self._run([(audio, sample_rate)], checked, progress, priority, 1, on_segments, cancellation)
        ) as results:
            (transcript,) = results
        if transcript.error is not None:
            raise AudioError(transcript.error)
        return transcript

    def check_language(self, language: str) -> None:
        """Raise UsageError where the model cannot listen for this language but would only write its name down.

        Calls that name a language take it: beside recordings of a corpus it says how their texts are written.
        """
        family = self.family
        if not isinstance(family, CTCFamily) or family.model.languages:
            return
        trained = family.tokenizer.language
        if trained is None or language_label(language) != language_label(trained):
            hint = "it knows the one it was trained for" if trained is None else f"it knows {trained}"
            raise UsageError(
                f"--language {language} cannot be chosen with {self.name}, a model of one language ({hint}): leave "
                "--language out, or take a model of that language"
            )

    def transcribe_many(
        self,
        audio: Iterable[AudioSource],
        options: TranscribeOptions | None = None,
        *,
        sample_rate: int | None = None,
        progress: Progress | None = None,
        priority: Priority = "bulk",
        cancellation: Cancellation | None = None,
        **changes: Any,
    ) -> Iterator[Transcript]:
        """Transcribe recordings together; yield each as it is done, in any order.

        ``path`` tells which it is. A recording that fails is yielded with ``error`` set and stops no other. The work
        goes on between one result and the next, a few recordings ahead of the caller; closing the iterator cancels what
        is left. priority, cancellation: as in ``transcribe``. ``batch_size`` beside other calls: at most so many
        windows of this one are decoded together.
        """
        inputs = ((source, sample_rate) for source in audio)
        checked = _options(options, changes)
        yield from self._run(inputs, checked, progress, priority, _workers(), cancellation=cancellation)

    def align(
        self,
        audio: AudioSource,
        text: str | Path,
        *,
        language: str | None = None,
        open_ends: bool = False,
        channels: str = "mix",
        sample_rate: int | None = None,
        progress: Progress | None = None,
    ) -> Transcript:
        """Find when each word of a known text is said, with a CTC model; however long the recording is.

        text: what is said, or the `Path` of a file (UTF-8) that holds it. Its lines become segments, its sentences
        where it has one line; a word's probability is 0 where the model cannot write it and only its neighbours tell
        its time. open_ends: the recording may hold other speech before and after the text. Raises AudioError;
        UsageError where the model is no CTC model, or the text does not fit into the recording. One that fits but is
        probably not what is said has its warning in ``warnings``.
        """
        settings = {"language": language, "open_ends": open_ends, "channels": channels, "sample_rate": sample_rate}
        return replace(self._aligner(progress, settings).align(audio, text), model=self.name)

    def align_many(
        self,
        pairs: Iterable[tuple[AudioSource, str | Path]],
        *,
        language: str | None = None,
        open_ends: bool = False,
        channels: str = "mix",
        progress: Progress | None = None,
    ) -> Iterator[Transcript]:
        """`align` for many recordings, in order: one that fails is yielded with ``error`` set."""
        settings = {"language": language, "open_ends": open_ends, "channels": channels}
        for transcript in self._aligner(progress, settings).align_many(pairs):
            yield replace(transcript, model=self.name)

    def _aligner(self, progress: Progress | None, settings: dict[str, Any]) -> Aligner:
        if not isinstance(self.family, CTCFamily):
            raise UsageError(
                f"{self.name} is no CTC model and cannot align a text that is given: use one such as wav2vec 2.0, or "
                "`transcribe` with word timestamps"
            )
        batch = 1 if self.device.backend == "cpu" else 8
        return Aligner(self.family.model, progress or Silent(), batch=batch, **settings)

    def stream(
        self,
        options: TranscribeOptions | None = None,
        *,
        turns: TurnOptions | None = None,
        sample_rate: int = 16_000,
        on_event: Callable[[Event], None] | None = None,
        **changes: Any,
    ) -> Session:
        """Begin to listen to live sound: ``feed`` the session samples, and ``finish`` it.

        Words come as `Partial`, which may still change, and `Committed`, which never do; `Final` has all words of a
        turn, or of a part of a long one, with their times in the session. Any number of sessions share each batch.
        turns: when a turn begins and ends. sample_rate: of what is fed. on_event: called with each event at once, and
        must not take long; otherwise they are returned by ``feed`` and ``finish``. Options come as in ``transcribe``.
        """
        checked = self.family.check(_options(options, changes))
        return self.live.open(checked, turns or TurnOptions(), on_event, sample_rate=sample_rate)

    @property
    def live(self) -> Live:
        """All live sessions."""
        detector = self._speech_detector()
        with self._lock:
            if self._live is None:
                prepare = partial(_settle_thread, self.device.torch, torch.get_num_threads())
                self._live = Live(self.family, self._scheduler, detector, prepare)
            return self._live

    def close(self) -> None:
        """Let go of the model and its memory. Calls that are not over fail with UsageError."""
        if self._live is not None:
            self._live.close()
        if not self._scheduler.close():
            return  # in the middle of a long operation, which needs that memory
        self.engine.clear()
        self._on_close()
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
        on_segments: SegmentListener | None = None,
        cancellation: Cancellation | None = None,
    ) -> Generator[Transcript, None, None]:
        if priority not in get_args(Priority):
            raise UsageError(f"priority is {priority!r}: say {' or '.join(get_args(Priority))}")
        options = self.family.check(options)
        progress = progress or Silent()
        make, follower = self.family.feeds(options), None
        if on_segments is not None:
            follower = Follower(on_segments, make, progress, options.clips()[0][0])
        ingest = Ingest(
            inputs,
            follower.make if follower else make,
            options,
            self._speech_detector() if options.vad else None,
            follower or progress,
            workers=workers,
            ahead=2 * (options.batch_size or self._slots) + workers,
            replays=self.family.replays,
        )
        # The thread that drives the engine is to work as this one would.
        prepare = partial(_settle_thread, self.device.torch, torch.get_num_threads())
        with closing(self._scheduler.run(ingest, priority, options.batch_size, prepare, cancellation)) as jobs:
            for job in jobs:
                progress.advance(job.duration - job.reported)
                progress.add_total(job.duration - job.estimate)
                transcript = make_transcript(job, self.name)
                if follower is not None:
                    follower.finish(transcript.segments)
                yield transcript

    def _speech_detector(self) -> VoiceActivityDetector:
        with self._lock:
            if self._detector is None:
                self._detector = VoiceActivityDetector(threads=_workers())
            return self._detector


def _resize(engine: TorchWhisperEngine | TorchCTCEngine, slots: int) -> None:
    """Make an engine decode that many windows together. Only while it holds none: it drops all slots."""
    engine.clear()
    engine.slots = slots


def _settle_thread(device: torch.device, threads: int) -> None:
    """Give a new thread what belongs to a thread: PyTorch's number of threads, and the GPU that is meant."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _options(options: TranscribeOptions | None, changes: dict[str, Any]) -> TranscribeOptions:
    try:
        return replace(options or TranscribeOptions(), **changes)
    except TypeError as error:
        found = re.search(r"'(\w+)'", str(error))
        raise UsageError(f"There is no option {found[1] if found else error}") from None


def _workers() -> int:
    return max(1, min(4, os.cpu_count() or 1))
