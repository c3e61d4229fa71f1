"""A small random Whisper and its writers, one for each format that can be read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from stapes.checkpoints.formats import WhisperCheckpoint, whisper_names
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids

CONFIG = WhisperConfig(80, 51865, 32, 3, 2, 2, 4, audio_context=60, text_context=20)
Weights = dict[str, Tensor]
_CT2_TYPES = {torch.float32: 0, torch.int8: 1, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5}


def random_weights(dtype: torch.dtype = torch.float32, config: WhisperConfig = CONFIG) -> Weights:
    """Weights by our names, as a file of this dtype would hold them."""
    torch.manual_seed(1)
    weights = {name: torch.randn_like(value, dtype=dtype) for name, value in Whisper(config).named_parameters()}
    weights["encoder.positions"] = sinusoids(config.audio_context, config.width).to(dtype)
    return weights


def read_all(checkpoint: WhisperCheckpoint) -> Weights:
    return {name: tensor.clone() for name, tensor in checkpoint.read()}


def same(ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)


def write_huggingface(
    folder: Path,
    weights: Weights,
    *,
    shards: int = 1,
    prefix: str = "model.",
    without: Iterable[str] = (),
    config: WhisperConfig = CONFIG,
    generation: dict | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "whisper",
        "num_mel_bins": config.mel_bins,
        "vocab_size": config.vocab_size,
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "encoder_attention_heads": config.encoder_heads,
        "decoder_layers": config.decoder_layers,
        "decoder_attention_heads": config.decoder_heads,
        "max_source_positions": config.audio_context,
        "max_target_positions": config.text_context,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    state = {
        huggingface.replace("model.", prefix, 1): weights[ours].contiguous()
        for ours, huggingface, _ in whisper_names(config)
        if ours not in without
    }
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    places = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: value for n, (name, value) in enumerate(state.items()) if n % shards == i}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def write_openai(path: Path, weights: Weights, config: WhisperConfig = CONFIG) -> Path:
    dims = {
        "n_mels": config.mel_bins,
        "n_vocab": config.vocab_size,
        "n_audio_ctx": config.audio_context,
        "n_audio_state": config.width,
        "n_audio_head": config.encoder_heads,
        "n_audio_layer": config.encoder_layers,
        "n_text_ctx": config.text_context,
        "n_text_state": config.width,
        "n_text_head": config.decoder_heads,
        "n_text_layer": config.decoder_layers,
    }
    state = {openai: weights[ours] for ours, _, openai in whisper_names(config)}
    torch.save({"dims": dims, "model_state_dict": state}, path)
    return path


def ctranslate2_variables(weights: Weights, config: WhisperConfig = CONFIG) -> dict[str, Tensor]:
    """The weights under CTranslate2's names, its fused matrices joined."""
    dtype = weights["decoder.positions"].dtype
    out: dict[str, Tensor] = {"decoder/embeddings/weight": weights["decoder.embedding.weight"]}

    def norm(ours: str, theirs: str) -> None:
        out[f"{theirs}/gamma"], out[f"{theirs}/beta"] = weights[f"{ours}.weight"], weights[f"{ours}.bias"]

    def linear(theirs: str, *ours: str) -> None:
        out[f"{theirs}/weight"] = torch.cat([weights[f"{name}.weight"] for name in ours])
        zeros = torch.zeros(config.width, dtype=dtype)
        out[f"{theirs}/bias"] = torch.cat([weights.get(f"{name}.bias", zeros) for name in ours])

    for side, layers, heads in (
        ("encoder", config.encoder_layers, config.encoder_heads),
        ("decoder", config.decoder_layers, config.decoder_heads),
    ):
        out[f"{side}/num_heads"] = torch.tensor(heads, dtype=torch.int32)
        out[f"{side}/position_encodings/encodings"] = weights[f"{side}.positions"]
        norm(f"{side}.norm", f"{side}/layer_norm")
        for i in range(layers):
            ours, theirs = f"{side}.layers.{i}", f"{side}/layer_{i}"
            attention, cross = f"{ours}.attention", f"{ours}.cross_attention"
            norm(f"{ours}.attention_norm", f"{theirs}/self_attention/layer_norm")
            linear(f"{theirs}/self_attention/linear_0", *(f"{attention}.{part}" for part in ("query", "key", "value")))
            linear(f"{theirs}/self_attention/linear_1", f"{attention}.out")
            if side == "decoder":
                norm(f"{ours}.cross_attention_norm", f"{theirs}/attention/layer_norm")
                linear(f"{theirs}/attention/linear_0", f"{cross}.query")
                linear(f"{theirs}/attention/linear_1", f"{cross}.key", f"{cross}.value")
                linear(f"{theirs}/attention/linear_2", f"{cross}.out")
            norm(f"{ours}.mlp_norm", f"{theirs}/ffn/layer_norm")
            linear(f"{theirs}/ffn/linear_0", f"{ours}.mlp.up")
            linear(f"{theirs}/ffn/linear_1", f"{ours}.mlp.down")
    for part in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        out["encoder/" + part.replace(".", "/")] = weights[f"encoder.{part}"]
    return out


def to_int8(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of linear layers and embeddings as CTranslate2 quantises them: a scale for each row."""
    out = {}
    for name, value in variables.items():
        if value.ndim == 2 and name.endswith("weight"):
            scale = 127 / value.float().abs().amax(dim=1)
            out[name] = (value.float() * scale[:, None]).round().to(torch.int8)
            out[f"{name}_scale"] = scale
        else:
            out[name] = value
    return out


def write_ctranslate2(
    folder: Path, variables: dict[str, Tensor], parts: int = 1, spec: str = "WhisperSpec"
) -> list[Path]:
    """Write ``model.bin``, in ``parts`` where asked; the projection is an alias of the embedding."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"alignment_heads": [[1, 0]], "suppress_ids": [1, 2], "lang_ids": []})
    )
    data = struct.pack("<I", 6) + text(spec) + struct.pack("<II", 3, len(variables))
    for name, value in variables.items():
        raw = value.contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else struct.pack("<i", int(value))
        shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        data += text(name) + shape + struct.pack("<BI", _CT2_TYPES[value.dtype], len(raw)) + raw
    data += struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")
    if parts == 1:
        (folder / "model.bin").write_bytes(data)
        return [folder / "model.bin"]
    files = [folder / f"model.bin.part{i + 1}" for i in range(parts)]
    step = len(data) // parts + 1
    for i, file in enumerate(files):
        file.write_bytes(data[i * step : (i + 1) * step])
    return files
