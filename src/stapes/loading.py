"""``load`` a model: found, planned for the device's memory, read, and put together with its engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stapes.checkpoints import catalog
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.load import WAV2VEC2, load_whisper, model_type, open_checkpoint
from stapes.checkpoints.low_rank import with_adapter
from stapes.checkpoints.onnx_folder import is_onnx
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.checkpoints.wav2vec2 import has_languages
from stapes.decoding.rules import Vocabulary
from stapes.devices import tuned
from stapes.devices.backend import Device, choose_dtype, fp8_dtype, resolve, usable_dtypes
from stapes.devices.memory import save_gpu_memory
from stapes.devices.threads import in_own_thread
from stapes.errors import ModelError, UsageError
from stapes.inference.ctc_open import CTC_KINDS, open_ctc
from stapes.inference.draft import open_draft
from stapes.inference.engine import Engine
from stapes.inference.gpu_speculative import GpuSpeculativeEngine
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.onnx import open_onnx
from stapes.inference.onnx_session import check_backend
from stapes.inference.packed import is_worth_packing, packer
from stapes.inference.planner import Plan, plan, workspace_bytes
from stapes.inference.pool_open import open_pool, several, threads_of_each
from stapes.inference.quantized import quantizer, stored_precision
from stapes.inference.speculative import DraftModel, SpeculativeWhisperEngine
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.inference.whisper_family import WhisperFamily
from stapes.models.whisper import WhisperConfig
from stapes.options import Backend, Precision
from stapes.progress import Progress, Silent
from stapes.recognizer import Recognizer
from stapes.text.tokenizers import WhisperTokenizer

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
        _fetch_language(model, location, language, model_dir, progress, offline)
        settings = {
            "precision": precision,
            "backend": backend,
            "max_vram": max_vram,
            "threads": threads_of_each(devices, threads),
            "model_dir": model_dir,
            "adapter": adapter,
            "language": language,
            "batch_size": None if batch_size is None else -(-batch_size // len(devices)),
        }
        source = model if location.parts else location.path
        openers = [(each, partial(open_engine, source, device=each, **settings)) for each in devices]
        return Recognizer(*open_pool(model, location, openers, model_dir, language))
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
        _fetch_language(name, location, language, model_dir, progress, offline)
        slots = batch_size or (1 if where.memory is None else _default_slots(where))
        family = in_own_thread(lambda: open_ctc(name, location.path, kind, where, precision, dtype, slots, language))
        return Recognizer(family, where)
    checkpoint = open_checkpoint(location.path, name, location.parts)
    if adapter is not None:
        checkpoint = with_adapter(checkpoint, Path(adapter))
    asked, precision = precision, stored_precision(name, checkpoint.scheme, precision, where)
    dtype = choose_dtype(precision, where)
    if checkpoint.scheme == "fp8" and (asked, precision) == ("auto", "fp16"):
        progress.note(f"{name}: the weights are in fp8, but {usable_dtypes(where)['fp8'][1]}: they run as fp16")
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


def _fetch_language(
    name: str,
    location: catalog.Location,
    language: str | None,
    model_dir: str | Path | None,
    progress: Progress,
    offline: bool,
) -> None:
    """Fetch what a model of many languages has for one of them, if it is not here."""
    if language is not None and model_type(location.path) in WAV2VEC2 and has_languages(location.path):
        catalog.pull_adapter(name, language, model_dir, progress, offline)


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
