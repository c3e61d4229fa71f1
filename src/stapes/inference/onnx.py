"""Open an exported model: its folder alone is enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stapes.checkpoints.huggingface import open_huggingface
from stapes.checkpoints.onnx_folder import OnnxFolder, read_onnx_folder
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.decoding.rules import Vocabulary
from stapes.devices.backend import Device
from stapes.errors import ModelError, UsageError
from stapes.inference.ctc_open import CTC_KINDS
from stapes.inference.family import Family
from stapes.inference.onnx_ctc import open_onnx_ctc
from stapes.inference.onnx_session import choose_provider
from stapes.inference.onnx_whisper import OnnxWhisper, OnnxWhisperEngine
from stapes.inference.whisper_family import WhisperFamily
from stapes.options import Precision
from stapes.progress import Progress

_PRECISIONS = {"float32": "fp32", "float16": "fp16"}


def open_onnx(name: str, path: Path, device: Device, precision: Precision, slots: int, progress: Progress) -> Family:
    """Load the exported model in a folder, and say what runs it.

    slots: windows decoded together. Raises ModelError, DeviceError where the device has no provider or it does not
    start, UsageError for another precision than the folder's.
    """
    folder = read_onnx_folder(path)
    has = folder.scheme or _PRECISIONS[folder.dtype]
    if precision not in ("auto", has, has.partition("-")[0]):
        raise UsageError(f"--precision {precision}: {name} was exported in {has}; leave --precision out")
    provider = choose_provider(device)
    if folder.kind == "whisper":
        family: Family = _open_whisper(name, path, folder, device, provider, slots)
    elif folder.kind in CTC_KINDS:
        family = open_onnx_ctc(name, path, folder, device, provider, slots)
    else:
        raise ModelError(f"{path} holds a {folder.kind!r} model, which cannot be run as ONNX: export the model again")
    progress.note(f"{name}: {has}, run by ONNX Runtime's {provider}")
    return family


def _open_whisper(
    name: str, path: Path, folder: OnnxFolder, device: Device, provider: str, slots: int
) -> WhisperFamily:
    checkpoint = replace(open_huggingface(path, name, has_weights=False), alignment_heads=folder.alignment_heads)
    tokenizer = open_tokenizer(checkpoint)
    model = OnnxWhisper(path, folder, checkpoint.config, device, provider)
    begin = checkpoint.begin_suppress_tokens
    engine = OnnxWhisperEngine(
        model,  # pyright: ignore[reportArgumentType]
        Vocabulary(
            end=tokenizer.eot,
            no_speech=tokenizer.no_speech,
            no_timestamps=tokenizer.no_timestamps,
            timestamp_begin=tokenizer.timestamp_begin,
            size=checkpoint.config.vocab_size,
        ),
        tokenizer.language_ids,
        tokenizer.sot,
        begin if begin is not None else (*tokenizer.encode(" "), tokenizer.eot),
        folder.alignment_heads,
        slots,
        encoder_batch=1 if device.backend == "cpu" else min(8, slots),
    )
    return WhisperFamily(name, checkpoint, tokenizer, engine)
