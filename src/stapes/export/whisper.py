"""Export Whisper: its graphs, and the check of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim

from stapes.audio.features import WINDOW_SAMPLES, log_mel_spectrogram
from stapes.checkpoints.onnx_folder import OnnxFolder
from stapes.devices.backend import resolve
from stapes.export.graphs import Graph, relative_error, write_graph
from stapes.export.weights import WeightsFile
from stapes.export.whisper_graphs import AlignGraph, Decoder, EncoderGraph, FirstStepGraph, StepGraph
from stapes.inference.onnx_session import CPU
from stapes.inference.onnx_whisper import OnnxWhisper
from stapes.models.whisper import Whisper

_PROMPT = 4
"""Tokens of the example that are read as a prompt; those behind them are steps."""

_STEPS = 3
_WINDOWS = 2


@dataclass(frozen=True)
class Expected:
    """What the network says in PyTorch of one example."""

    mel: Tensor
    tokens: Tensor
    states: Tensor
    logits: Tensor
    scores: Tensor
    probabilities: Tensor


@torch.inference_mode()
def expect(model: Whisper, heads: Mapping[int, Sequence[int]], end: int) -> Expected:
    """Run the network on made-up sound: noise that comes and goes. ``end``: see `AlignGraph`."""
    config, count = model.config, _PROMPT + _STEPS
    generator = torch.Generator().manual_seed(0)
    loud = torch.rand(_WINDOWS, WINDOW_SAMPLES // 8000, generator=generator).repeat_interleave(8000, dim=1)
    noise = torch.randn(_WINDOWS, WINDOW_SAMPLES, generator=generator) * loud.square() * 0.3
    mel = log_mel_spectrogram(noise, config.mel_bins)[..., : 2 * config.audio_context]
    tokens = torch.randint(0, min(end, 10_000), (_WINDOWS, count), generator=generator)
    states = model.encoder(mel)
    shape = (_WINDOWS, config.decoder_heads, count, config.width // config.decoder_heads)
    cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.decoder_layers)]
    positions = torch.arange(count).expand(_WINDOWS, -1)
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    read, scores = model.decoder(tokens, positions, cache, model.decoder.memory(states), mask, heads)
    assert scores is not None
    logits = model.decoder.logits(read)
    following = tokens.roll(-1, dims=1)
    probabilities = logits[..., :end].softmax(dim=-1).gather(2, following[..., None])[..., 0]
    return Expected(mel, tokens, states, logits, scores, probabilities)


def write_whisper(
    model: Whisper,
    dtype: torch.dtype,
    heads: Mapping[int, Sequence[int]],
    end: int,
    weights: WeightsFile,
    note: Callable[[str], None],
) -> dict[str, str]:
    """Write the graphs of a model, whose weights are taken out of it: graph → file. Weights in ``dtype``."""
    files = {}
    model = model.to(dtype)
    for name, graph in _graphs(model, heads, end):
        note(f"exporting {name}")
        files |= write_graph(graph(), weights)
    return files


def _graphs(model: Whisper, heads: Mapping[int, Sequence[int]], end: int) -> list[tuple[str, Callable[[], Graph]]]:
    """The graphs, made one after another: each takes memory."""
    config, dtype = model.config, model.decoder.positions.dtype
    layers, head_count, width = config.decoder_layers, config.decoder_heads, config.width // config.decoder_heads
    context = config.audio_context
    windows, candidates = Dim("windows", min=1, max=4096), Dim("candidates", min=1, max=64)
    tokens, cached = Dim("tokens", min=1, max=config.text_context), Dim("cached", min=1, max=config.text_context)
    names = [f"{part}.{layer}" for layer in range(layers) for part in ("key", "value")]
    new, kept = [f"new.{name}" for name in names], [f"memory.{name}" for name in names]
    shapes = [(width, context), (context, width)] * layers
    memory = [torch.zeros(3, head_count, *shape, dtype=dtype) for shape in shapes]
    cache = [torch.zeros(3, 2, head_count, 7, width, dtype=dtype) for _ in names]
    ids = torch.ones(3, 5, dtype=torch.int64)
    decoders: list[Decoder] = []

    def decoder() -> Decoder:
        if not decoders:
            decoders.append(Decoder(model))
        return decoders[0]

    def encoder() -> Graph:
        mel = torch.zeros(3, config.mel_bins, 2 * context)
        return Graph("encoder", EncoderGraph(model), (mel,), ({0: windows},), ["mel"], ["states"], config.encoder_heads)

    def first() -> Graph:
        states = torch.zeros(3, context, config.width, dtype=dtype)
        return Graph(
            "first",
            FirstStepGraph(decoder()),
            (states, ids, ids[:, :2]),
            ({0: windows}, {0: windows, 1: tokens}, {0: windows, 1: Dim("picked", min=1, max=64)}),
            ["states", "tokens", "picked"],
            ["logits", *new, *kept],
        )

    def step() -> Graph:
        return Graph(
            "step",
            StepGraph(decoder()),
            (ids[:, :2], ids[:, 2:4], cache, memory),
            (
                {0: windows, 1: candidates},
                {0: windows, 1: candidates},
                [{0: windows, 1: candidates, 3: cached}] * len(names),
                [{0: windows}] * len(names),
            ),
            ["tokens", "positions", *(f"cache.{name}" for name in names), *kept],
            ["logits", *new],
        )

    def align() -> Graph:
        return Graph(
            "align",
            AlignGraph(decoder(), heads, end),
            (ids, ids.clone(), memory),  # one tensor for two inputs would make them one
            ({0: windows, 1: tokens}, {0: windows, 1: tokens}, [{0: windows}] * len(names)),
            ["tokens", "following", *kept],
            ["scores", "probabilities"],
        )

    return [("encoder", encoder), ("first", first), ("step", step), ("align", align)]


@torch.inference_mode()
def measure_errors(model: OnnxWhisper, expected: Expected) -> dict[str, float]:
    """How far each graph is from ``expected``, run by ONNX Runtime (see `relative_error`)."""
    config, dtype = model.config, model.dtype
    states = model.session("encoder")({"mel": expected.mel})["states"]
    # In half precision three of 3000 frames of tiny.en are 0.02 to 0.16 off, in PyTorch as in ONNX Runtime, and the
    # median 0.001: all frames together tell whether the graph is right.
    half = dtype == torch.float16
    errors = {"encoder": relative_error(states.float(), expected.states, of_all=half)}
    # From here on the states are PyTorch's, so that errors do not add up.
    states = expected.states.to(dtype)
    tokens, count = expected.tokens, expected.tokens.shape[1]
    picked = torch.tensor([[0, _PROMPT - 1]] * _WINDOWS)
    found = model.session("first")({"states": states, "tokens": tokens[:, :_PROMPT].contiguous(), "picked": picked})
    errors["first"] = relative_error(found["logits"], expected.logits[:, [0, _PROMPT - 1]])
    memory = {f"memory.{name}": found[f"memory.{name}"] for name in model.names}
    width = config.width // config.decoder_heads
    cache = {name: torch.zeros(_WINDOWS, 1, config.decoder_heads, count, width, dtype=dtype) for name in model.names}
    for name in model.names:
        cache[name][:, 0, :, :_PROMPT] = found[f"new.{name}"]
    worst = 0.0
    for position in range(_PROMPT, count):
        inputs = {"tokens": tokens[:, position, None].contiguous(), "positions": torch.full((_WINDOWS, 1), position)}
        caches = {f"cache.{name}": cache[name] for name in model.names}
        found = model.session("step")({**inputs, **caches, **memory})
        worst = max(worst, relative_error(found["logits"][:, 0], expected.logits[:, position]))
        for name in model.names:
            cache[name][:, :, :, position] = found[f"new.{name}"]
    errors["step"] = worst
    found = model.session("align")({"tokens": tokens, "following": tokens.roll(-1, dims=1), **memory})
    errors["align"] = max(
        relative_error(found["scores"], expected.scores),
        # Probabilities are small numbers between 0 and 1; where they matter they are large.
        float((found["probabilities"] - expected.probabilities).abs().max()),
    )
    return errors


def open_graphs(path: Path, folder: OnnxFolder, model: Whisper, *, tuned: bool) -> OnnxWhisper:
    """The graphs of a folder on the CPU, the plain ones or those for it."""
    return OnnxWhisper(path, folder, model.config, resolve("cpu"), CPU, tuned=tuned)
