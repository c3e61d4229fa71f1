"""A Whisper on quantised weights: what is replaced, what it takes, and that it computes what its weights stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stapes.checkpoints.formats import EMBEDDING, WhisperCheckpoint
from stapes.checkpoints.load import load_whisper
from stapes.devices.backend import Device
from stapes.devices.chips import find_chip
from stapes.errors import UsageError
from stapes.inference.gpu_encoder import GpuEncoder
from stapes.inference.planner import count
from stapes.inference.quantized import (
    Fp8Linear,
    NormedQuantized,
    QuantizedEmbedding,
    QuantizedEncoderLayer,
    QuantizedLinear,
    QuantizedMLP,
    bits_of,
    concat,
    quantize,
    quantizer,
    quantizes,
    stored_precision,
)
from stapes.kernels import fp8_weights
from stapes.kernels.fp8_weights import dequantize_fp8, of_kind, quantize_fp8
from stapes.kernels.quantization import dequantize, quantize_int4, quantize_int8
from stapes.models.whisper import EncoderLayer, Whisper, WhisperConfig, sinusoids

CONFIG = WhisperConfig(80, 51864, 128, 2, 2, 2, 2, audio_context=60, text_context=20)
CPU = torch.device("cpu")


def weights(config: WhisperConfig, scale: float = 0.05) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Whisper(config).named_parameters()}
    found = {name: torch.empty(shape).normal_(0, scale, generator=generator) for name, shape in shapes.items()}
    for name in found:
        if "norm" in name:
            found[name] = torch.full_like(found[name], float(name.endswith("weight")))
    found["encoder.positions"] = sinusoids(config.audio_context, config.width)
    return found


def checkpoint(config: WhisperConfig, tensors: dict[str, Tensor]) -> WhisperCheckpoint:
    def read() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(tensors, key=lambda each: each != EMBEDDING):
            yield name, tensors[name]

    return WhisperCheckpoint("made", Path("made"), config, read, None)


def load(precision: str, dtype: torch.dtype = torch.float32, config: WhisperConfig = CONFIG) -> Whisper:
    return load_whisper(checkpoint(config, weights(config)), dtype, CPU, quantizer(precision))  # type: ignore[arg-type]


def widened(model: Whisper) -> Whisper:
    """A plain model of the weights that a quantised one stands for."""
    plain = Whisper(model.config).eval()
    with torch.inference_mode():
        for path, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                place = path.removesuffix(".projection")  # the output projection is under the embedding
                target = plain.get_submodule(place)
                target.weight.copy_(dequantize(module.quantized))
                if module.bias is not None:
                    target.bias.copy_(module.bias)
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    plain.get_submodule(path).get_parameter(name).copy_(parameter)
    return plain


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_model_computes_what_its_weights_stand_for(precision: str) -> None:
    model = load(precision)
    mel = torch.randn(2, 80, 120, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[1, 2, 3], [51_000, 7, 9]])
    with torch.inference_mode():
        found, wanted = model(mel, tokens), widened(model)(mel, tokens)
    assert found.std() > 0.1
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_is_replaced_and_what_stays(precision: str) -> None:
    model = load(precision)
    assert not [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(QuantizedMLP) == CONFIG.encoder_layers + CONFIG.decoder_layers
    assert kinds.count(nn.Conv1d) == 2
    assert kinds.count(QuantizedEmbedding) == 1
    assert model.decoder.embedding.projection is model.decoder.projection
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_loading_quantises_to_the_same_as_quantising_afterwards() -> None:
    plain = load_whisper(checkpoint(CONFIG, weights(CONFIG)), torch.float32, CPU)
    for precision in ("int8", "int4"):
        now, later = load(precision).state_dict(), quantize(copy.deepcopy(plain), precision).state_dict()
        assert now.keys() == later.keys()
        assert all(torch.equal(now[name], later[name]) for name in now)
    assert quantizer("fp16") is None
    assert [each for each in ("auto", "fp16", "fp8", "int8", "int4") if quantizes(each)] == ["int8", "int4"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("width", [128, 1024])
def test_a_model_takes_what_the_planner_counts(precision: str, width: int) -> None:
    config = WhisperConfig(80, 51864 if width == 128 else 500, width, 1, 2, 1, 2, audio_context=60, text_context=20)
    model = load(precision, torch.float16, config)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    counted = count(config, precision, torch.float16, False, 1, 1)  # type: ignore[arg-type]
    assert sum(tensors.values()) == counted.weights


def test_loading_holds_one_full_weight_at_a_time() -> None:
    tensors, alive = weights(CONFIG), []

    def adapt(model: Whisper, path: str) -> None:
        quantize_now(model, path)
        full = [p for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) for p in m.parameters()]
        alive.append(sum(p.numel() for p in full if p.device.type != "meta"))

    quantize_now = quantizer("int4")
    assert quantize_now is not None
    load_whisper(checkpoint(CONFIG, tensors), torch.float16, CPU, adapt)
    assert max(alive) <= 128  # a bias that waits for its weight


def test_rows_of_the_embedding_are_those_of_the_projection() -> None:
    decoder = load("int4").decoder
    tokens = torch.tensor([[0, 5], [51_863, 5]])
    rows = decoder.embedding(tokens)
    assert rows.shape == (2, 2, 128)
    assert torch.equal(rows, dequantize(decoder.embedding.projection.quantized)[tokens])
    assert (rows - weights(CONFIG)[EMBEDDING][tokens]).abs().max() < 0.002


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_merged_layers_compute_what_the_separate_ones_do(precision: str) -> None:
    model = load(precision)
    layer = model.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    merged = QuantizedEncoderLayer(layer)
    assert len(merged.qkv.parts) == (1 if precision == "int8" else 2)  # the value keeps 8 bits in a small model
    x = torch.randn(2, 60, 128, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted, found = layer(x), x.clone().view(120, 128)
        merged(found, 2, 2)
        assert torch.allclose(found.view_as(x), wanted, atol=1e-5)
        cross = model.decoder.layers[0].cross_attention
        both = NormedQuantized([cross.key, cross.value])(x.view(120, 128), dtype=torch.float16)
        assert both.dtype == torch.float16
        assert torch.allclose(both.float(), torch.cat([cross.key(x), cross.value(x)], -1).view(120, -1), atol=1e-2)


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_of_one_input_can_be_one(bits: int) -> None:
    make = quantize_int8 if bits == 8 else quantize_int4
    x = torch.randn(3, 128)
    layers = [QuantizedLinear(make(torch.randn(n, 128)), bias) for n, bias in ((64, torch.randn(64)), (32, None))]
    joined = concat(layers)
    assert torch.allclose(joined(x), torch.cat([layer(x) for layer in layers], dim=1), atol=1e-5)
    assert concat([layers[1], layers[1]]).bias is None
    with pytest.raises(ValueError, match="different bits or inputs"):
        concat([layers[0], QuantizedLinear(make(torch.randn(8, 64)), None)])
    other = quantize_int4 if bits == 8 else quantize_int8
    with pytest.raises(ValueError, match="different bits or inputs"):
        concat([layers[0], QuantizedLinear(other(torch.randn(8, 128)), None)])


def test_layers_that_suffer_keep_8_bits_in_small_models() -> None:
    narrow = [
        path
        for path in (
            *(f"encoder.layers.0.attention.{name}" for name in ("query", "key", "value", "out")),
            *(f"decoder.layers.0.cross_attention.{name}" for name in ("query", "key", "value", "out")),
            *(f"{side}.layers.0.mlp.{name}" for side in ("encoder", "decoder") for name in ("up", "down")),
        )
        if bits_of(path, 512, 512, 4) == 4
    ]
    assert narrow == [
        "encoder.layers.0.attention.query",
        "encoder.layers.0.attention.key",
        "decoder.layers.0.cross_attention.query",
        "decoder.layers.0.cross_attention.key",
        "encoder.layers.0.mlp.up",
    ]
    assert bits_of("decoder.layers.0.mlp.down", 1280, 5120, 4) == 4
    assert bits_of("decoder.layers.0.mlp.down", 512, 2048, 8) == 8
    assert bits_of("encoder.layers.0.attention.query", 40, 40, 4) is None


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_8_bit_floats_are_the_same_numbers_in_either_kind(kind: torch.dtype) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    weight[3], weight[5, :7] = 0.0, -1e-30
    stored = quantize_fp8(weight)
    there = of_kind(stored, kind)
    assert there.values.dtype == kind
    assert torch.equal(dequantize_fp8(there).abs(), dequantize_fp8(stored).abs())  # zeros may have lost their sign
    assert (dequantize_fp8(stored) - weight).abs().max() <= weight.abs().max() / 16
    joined = fp8_weights.concat([there, there])
    assert torch.equal(dequantize_fp8(joined), dequantize_fp8(there).repeat(2, 1))
    with pytest.raises(ValueError, match="cannot be had"):
        of_kind(of_kind(stored, torch.float8_e4m3fnuz), torch.float8_e4m3fn)


def device_of(backend: str, architecture: str | None) -> Device:
    chip = None if architecture is None else find_chip(architecture, "")
    return Device(CPU, backend, "made", None, architecture, chip)  # type: ignore[arg-type]


def test_8_bit_floats_run_where_they_can() -> None:
    """As they are on chips that multiply them, as fp16 on others, in fp32 on the CPU; in any floats if asked for."""
    a100, h100, mi300 = device_of("cuda", "sm_80"), device_of("cuda", "sm_90"), device_of("rocm", "gfx942")
    radeon, cpu = device_of("rocm", "gfx1100"), device_of("cpu", None)
    found = {
        device.architecture: stored_precision("m", "fp8", "auto", device) for device in (h100, mi300, a100, radeon)
    }
    assert found == {"sm_90": "fp8", "gfx942": "fp8", "sm_80": "fp16", "gfx1100": "fp16"}
    assert stored_precision("m", "fp8", "auto", cpu) == "fp32"
    assert stored_precision("m", "fp8", "fp8", h100) == "fp8"
    assert stored_precision("m", "fp8", "bf16", radeon) == "bf16"
    with pytest.raises(UsageError, match="gfx1100 has no fp8 matrix units"):
        stored_precision("m", "fp8", "fp8", radeon)
    for device in (h100, a100, cpu):
        with pytest.raises(UsageError, match="in fp8; leave --precision out"):
            stored_precision("m", "fp8", "int8", device)
    assert stored_precision("m", "int8", "auto", h100) == "int8"
    assert stored_precision("m", None, "auto", h100) == "auto"


def test_an_encoder_computes_in_the_8_bit_floats_that_are_stored() -> None:
    """Exactly what it computes where weights are rounded as it is loaded; a product may stay as it is."""
    mel = torch.randn(2, 80, 120, generator=torch.Generator().manual_seed(1)).bfloat16()
    config = replace(CONFIG, vocab_size=64)

    def encoder(kept: str = "-") -> GpuEncoder:
        rounded = {name: quantize_fp8(value) for name, value in weights(config).items() if value.ndim == 2}
        rounded = {name: value for name, value in rounded.items() if kept not in name}
        plain = weights(config) | {name: dequantize_fp8(value) for name, value in rounded.items()}
        adapt = quantizer("fp8", lambda path: rounded.get(f"{path}.weight"))
        model = load_whisper(checkpoint(config, plain), torch.bfloat16, CPU, adapt)
        assert not any(isinstance(module, Fp8Linear) for module in model.decoder.modules())
        return GpuEncoder(model.encoder, torch.float8_e4m3fn)

    loaded = load_whisper(checkpoint(config, weights(config)), torch.float32, CPU)
    with torch.inference_mode():
        truth = loaded.encoder(mel.float())
        found = encoder()(mel)
        as_loaded = GpuEncoder(loaded.bfloat16().encoder, torch.float8_e4m3fn)(mel)
        better = encoder(kept="attention")(mel)
    errors = [float((each.float() - truth).norm() / truth.norm()) for each in (found, as_loaded, better)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert errors[2] < errors[0] < 0.1


def test_a_width_that_no_group_fills_stays_as_it_is() -> None:
    config = WhisperConfig(80, 500, 40, 1, 2, 1, 2, audio_context=60, text_context=20)
    model = load("int4", config=config)
    assert isinstance(model.encoder.layers[0].attention.query, nn.Linear)
    assert isinstance(model.decoder.embedding, nn.Embedding)
    with torch.inference_mode():
        assert model(torch.zeros(1, 80, 120), torch.tensor([[1]])).shape == (1, 1, 500)
