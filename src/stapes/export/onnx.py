"""``stapes export --to onnx`` and ``--to huggingface``: a model as a folder that is enough by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stapes.checkpoints import catalog
from stapes.checkpoints.load import WAV2VEC2, load_whisper, model_type, open_checkpoint
from stapes.checkpoints.onnx_folder import OnnxFolder, is_onnx
from stapes.checkpoints.save import save_huggingface, write_settings
from stapes.checkpoints.spectrogram_models import (
    KINDS,
    load_spectrogram_model,
    open_spectrogram_model,
    write_spectrogram_settings,
)
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.checkpoints.wav2vec2 import load_wav2vec2, open_wav2vec2, save_wav2vec2, write_wav2vec2_settings
from stapes.errors import ModelError, UsageError
from stapes.export.target import export_target
from stapes.models.ctc_head import CTC
from stapes.progress import Progress

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class ExportReport:
    """What was written. ``checked``: graph → how far its numbers are from PyTorch's, and how far they may be."""

    folder: str
    model: str
    kind: str
    precision: str
    bytes: int
    graphs: tuple[str, ...] = ()
    checked: dict[str, dict[str, float]] | None = None

    def as_json(self) -> dict[str, Any]:
        """For one machine-readable result."""
        return asdict(self)


def find(model: str, model_dir: str | None, progress: Progress, *, offline: bool) -> tuple[str, catalog.Location]:
    """The model of this name on this machine, fetched where it is not here. Raises ModelError."""
    found = catalog.find(model, model_dir) or catalog.Location(catalog.pull(model, model_dir, progress, offline))
    return (found.path.name if found.path == Path(model).expanduser() else model), found


def require(*modules: str) -> None:
    """Raises ModelError for a package that exporting needs and that is not installed."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ModelError(
                f"exporting to ONNX needs {module}, which cannot be imported ({error}): pip install 'stapes[onnx]'"
            ) from error


def export_onnx(
    name: str,
    location: catalog.Location,
    folder: Path,
    *,
    precision: str = "fp32",
    language: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    inspect: Callable[[Path, OnnxFolder], object] = lambda _, __: None,
) -> ExportReport:
    """Write the graphs of a model, checked against PyTorch, and all that belongs to it. Whole or not at all.

    precision: fp32 or fp16, of the weights. language: of a model that has adapters for several. inspect: is shown what
    is written before it takes its place; what it raises prevents that. Raises ModelError where the model is unknown,
    cannot be exported, or its graphs' numbers differ; UsageError, as `check_target` does too; OutputError.
    """
    require("onnx", "onnxscript", "onnxruntime")
    if precision not in _DTYPES:
        raise UsageError(f"--precision {precision}: graphs are written in fp32 or fp16; `stapes quantize` makes int8")
    if is_onnx(location.path):
        raise UsageError(f"{name} is exported already: give the model that it was made from")
    kind = model_type(location.path) or "whisper"
    with export_target(folder) as temporary:
        if kind in WAV2VEC2:
            made = _ctc(name, location, temporary, _DTYPES[precision], language)
        elif kind == "whisper":
            made = _whisper(name, location, temporary, _DTYPES[precision], note)
        elif KINDS.get(kind) == "ctc":
            made = _spectrogram_ctc(name, location, temporary, _DTYPES[precision])
        else:
            raise ModelError(f"{name} is a {kind!r} model; Whisper and CTC models can be exported to ONNX")
        made.write(temporary)
        inspect(temporary, made)
    size = sum(file.stat().st_size for file in folder.iterdir())
    checked = {graph: dict(values) for graph, values in made.checked.items()}
    return ExportReport(str(folder), name, made.kind, precision, size, tuple(made.graphs), checked)


def _whisper(
    name: str, location: catalog.Location, folder: Path, dtype: torch.dtype, note: Callable[[str], None]
) -> OnnxFolder:
    from stapes.export.graphs import OPSET, judge
    from stapes.export.weights import WeightsFile
    from stapes.export.whisper import expect, measure_errors, open_graphs, write_whisper

    checkpoint = open_checkpoint(location.path, name, location.parts)
    write_settings(checkpoint, folder, str(dtype).removeprefix("torch."))
    config, tokenizer = checkpoint.config, open_tokenizer(checkpoint)
    pairs = checkpoint.alignment_heads or tuple(
        (layer, head)
        for layer in range(config.decoder_layers // 2, config.decoder_layers)
        for head in range(config.decoder_heads)
    )
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(pairs):
        heads.setdefault(layer, []).append(head)
    model = load_whisper(checkpoint, torch.float32, torch.device("cpu"))
    if model.decoder.embedding.weight.dtype != torch.float32:
        model.decoder.embedding.float()
    note("computing what PyTorch says")
    expected = expect(model, heads, tokenizer.eot)
    with WeightsFile(folder) as weights:
        files = write_whisper(model, dtype, heads, tokenizer.eot, weights, note)
    made = OnnxFolder(
        kind="whisper",
        graphs=files,
        dtype=str(dtype).removeprefix("torch."),
        opset=OPSET,
        source=name,
        alignment_heads=tuple(sorted(pairs)),
    )
    note("comparing with ONNX Runtime")
    both = [measure_errors(open_graphs(folder, made, model, tuned=tuned), expected) for tuned in (False, True)]
    return replace(made, checked=judge({graph: max(each[graph] for each in both) for graph in both[0]}, dtype))


def _ctc(name: str, location: catalog.Location, folder: Path, dtype: torch.dtype, language: str | None) -> OnnxFolder:
    from stapes.export.ctc import example, expect, measure_errors, write_ctc
    from stapes.export.graphs import OPSET, judge
    from stapes.export.weights import WeightsFile

    checkpoint = open_wav2vec2(location.path, name, language)
    if checkpoint.tokenizer is None or checkpoint.config.vocab_size is None:
        raise ModelError(f"{name} was only pre-trained and writes no text: give a model that was fine-tuned with CTC")
    tokenizer = replace(checkpoint.tokenizer, vocabularies={})  # a graph has the adapters of one language
    alone = replace(checkpoint, tokenizer=tokenizer, languages=())
    write_wav2vec2_settings(alone, folder, str(dtype).removeprefix("torch."))
    network = load_wav2vec2(checkpoint, torch.float32, torch.device("cpu"))
    inputs = example(network)
    expected = expect(network, inputs)
    with WeightsFile(folder) as weights:
        files = write_ctc(network, dtype, inputs, weights)
    made = OnnxFolder(
        kind=checkpoint.kind, graphs=files, dtype=str(dtype).removeprefix("torch."), opset=OPSET, source=name
    )
    return replace(made, checked=judge(measure_errors(folder, made, inputs, expected), dtype))


def _spectrogram_ctc(name: str, location: catalog.Location, folder: Path, dtype: torch.dtype) -> OnnxFolder:
    from stapes.export.graphs import OPSET, judge
    from stapes.export.spectrogram_ctc import example, expect, measure_errors, write_spectrogram_ctc
    from stapes.export.weights import WeightsFile

    checkpoint = open_spectrogram_model(location.path, name)
    network = load_spectrogram_model(checkpoint, torch.float32, torch.device("cpu"))
    assert isinstance(network, CTC)
    write_spectrogram_settings(folder, network.config, checkpoint.tokenizer, dtype)
    inputs = example(network)
    expected = expect(network, inputs)
    with WeightsFile(folder) as weights:
        files = write_spectrogram_ctc(network, dtype, inputs, weights)
    kind = next(name for name, each in KINDS.items() if each == "ctc")
    made = OnnxFolder(kind=kind, graphs=files, dtype=str(dtype).removeprefix("torch."), opset=OPSET, source=name)
    return replace(made, checked=judge(measure_errors(folder, made, inputs, expected), dtype))


def export_huggingface(
    name: str, location: catalog.Location, folder: Path, *, language: str | None = None
) -> ExportReport:
    """Write a model as a folder that ``transformers`` opens. Raises ModelError, OutputError, UsageError."""
    kind = model_type(location.path) or "whisper"
    with export_target(folder) as temporary:
        if kind in WAV2VEC2:
            save_wav2vec2(open_wav2vec2(location.path, name, language), temporary)
        elif kind == "whisper" and not is_onnx(location.path):
            save_huggingface(open_checkpoint(location.path, name, location.parts), temporary)
        else:
            raise ModelError(f"{name} is a {kind!r} model that transformers has no network for, or an exported one")
    size = sum(file.stat().st_size for file in folder.iterdir())
    return ExportReport(str(folder), name, kind, "as it was", size)
