"""Every format gives the weights that were written, and a damaged file is named, whatever is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from small_whisper import (
    CONFIG,
    Weights,
    ctranslate2_variables,
    random_weights,
    read_all,
    same,
    to_int8,
    write_ctranslate2,
    write_huggingface,
    write_openai,
)

from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.errors import ModelError
from stapes.inference.packed import can_pack, pack_module
from stapes.models.whisper import WhisperConfig

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def load(path: Path, parts: list[Path] | None = None, dtype: torch.dtype = torch.float32):
    return load_whisper(open_checkpoint(path, parts=parts), dtype, CPU)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(torch.float16)


class TestRoundTrips:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shards", [1, 3])
    def test_huggingface(self, tmp_path, dtype, shards):
        wanted = random_weights(dtype)
        checkpoint = open_checkpoint(write_huggingface(tmp_path / "m", wanted, shards=shards))
        assert checkpoint.config == CONFIG
        assert same(read_all(checkpoint), wanted)

    def test_huggingface_without_its_prefix(self, tmp_path, weights):
        assert same(read_all(open_checkpoint(write_huggingface(tmp_path / "m", weights, prefix=""))), weights)

    def test_huggingface_without_encoder_positions(self, tmp_path):
        wanted = random_weights()
        folder = write_huggingface(tmp_path / "m", wanted, without=["encoder.positions"])
        assert torch.allclose(load(folder).encoder.positions, wanted["encoder.positions"])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_openai(self, tmp_path, dtype):
        wanted = random_weights(dtype)
        checkpoint = open_checkpoint(write_openai(tmp_path / "mine.pt", wanted))
        assert (checkpoint.name, checkpoint.config) == ("mine", CONFIG)
        assert same(read_all(checkpoint), wanted)

    def test_openai_in_a_folder(self, tmp_path, weights):
        write_openai(tmp_path / "mine.pt", weights)
        assert same(read_all(open_checkpoint(tmp_path)), weights)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("parts", [1, 2])
    def test_ctranslate2(self, tmp_path, dtype, parts):
        wanted = random_weights(dtype)
        files = write_ctranslate2(tmp_path, ctranslate2_variables(wanted), parts)
        checkpoint = open_checkpoint(tmp_path, parts=files if parts > 1 else None)
        assert (checkpoint.config, checkpoint.suppress_tokens) == (CONFIG, (1, 2))
        assert same(read_all(checkpoint), wanted)

    def test_ctranslate2_int8_is_within_half_a_step(self, tmp_path):
        wanted = random_weights()
        write_ctranslate2(tmp_path, to_int8(ctranslate2_variables(wanted)))
        for name, value in read_all(open_checkpoint(tmp_path)).items():
            quantised = value.ndim == 2 and not name.endswith("positions")
            step = wanted[name].abs().amax(dim=-1, keepdim=True) / 127 if quantised else torch.zeros(1)
            assert ((value - wanted[name]).abs() <= 0.51 * step).all(), name

    @pytest.mark.parametrize("format", ["huggingface", "openai", "ctranslate2"])
    def test_all_formats_load_the_same_network(self, tmp_path, weights, format):
        path = tmp_path / "m"
        if format == "huggingface":
            write_huggingface(path, weights)
        elif format == "openai":
            write_openai(path, weights)
        else:
            write_ctranslate2(path, ctranslate2_variables(weights))
        state = load(path).state_dict()
        assert same({name: value.float() for name, value in state.items()}, {n: w.float() for n, w in weights.items()})
        assert state["decoder.embedding.weight"].dtype == torch.float16  # widened row by row when it is looked up
        assert state["decoder.positions"].dtype == torch.float32

    @pytest.mark.skipif(not can_pack(), reason="this PyTorch has no packed layers")
    def test_packing_while_reading_changes_no_logit(self, tmp_path):
        config = WhisperConfig(80, 51865, 32, 2, 2, 2, 2, text_context=8)
        weights = {name: 0.1 * value for name, value in random_weights(config=config).items()}
        checkpoint = open_checkpoint(write_openai(tmp_path / "m.pt", weights, config))
        mel, tokens = torch.randn(1, 80, 3000), torch.tensor([[50258, 7, 8]])
        with torch.inference_mode():
            plain = load_whisper(checkpoint, torch.float32, CPU)(mel, tokens)
            packed = load_whisper(checkpoint, torch.float32, CPU, pack_module)(mel, tokens)
        assert (plain - packed).abs().max() < 1e-5


class Danger:
    """A pickle that makes a file when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


def damaged(tmp_path: Path, weights: Weights, kind: str) -> tuple[Path, str]:
    """Make a model with something wrong; return its path and the name that the error must mention."""
    path = tmp_path / "m"
    if kind.startswith("pt"):
        write_openai(path, weights)
        whole = path.read_bytes()
        if kind == "pt truncated":
            path.write_bytes(whole[: len(whole) // 2])
        elif kind == "pt empty":
            path.write_bytes(b"")
        elif kind == "pt noise":
            path.write_bytes(os.urandom(5000))
        elif kind == "pt malicious":
            torch.save({"dims": {}, "model_state_dict": {}, "extra": Danger(tmp_path / "executed")}, path)
        elif kind == "pt no dims":
            torch.save({"model_state_dict": {}}, path)
        elif kind == "pt lacks a weight":
            state = torch.load(path, weights_only=True)
            del state["model_state_dict"]["decoder.ln.weight"]
            torch.save(state, path)
        elif kind == "pt strange dims":
            torch.save({"dims": {"n_mels": "eighty"}, "model_state_dict": {}}, path)
        return path, str(path)
    if kind.startswith("hf"):
        write_huggingface(path, weights, shards=2 if "shard" in kind or "index" in kind else 1)
        file, config = path / "model.safetensors", path / "config.json"
        settings = json.loads(config.read_text())
        if kind == "hf truncated":
            os.truncate(file, file.stat().st_size // 2)
        elif kind == "hf noise":
            file.write_bytes(os.urandom(5000))
        elif kind == "hf empty":
            file.write_bytes(b"")
        elif kind == "hf no weights":
            file.unlink()
            return path, str(path)
        elif kind == "hf pickled weights":
            file.rename(path / "pytorch_model.bin")
            return path, "pytorch_model.bin"
        elif kind == "hf shard missing":
            file = path / "model-00002-of-00002.safetensors"
            file.unlink()
        elif kind == "hf index leads outside":
            file = path / "model.safetensors.index.json"
            file.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
        elif kind == "hf index broken":
            file = path / "model.safetensors.index.json"
            file.write_text("[]")
        elif kind == "hf no config":
            config.unlink()
            file = config
        elif kind == "hf broken config":
            config.write_text('{"model_type": "whisper", ')
            file = config
        elif kind == "hf config without sizes":
            config.write_text('{"model_type": "whisper"}')
            file = config
        elif kind == "hf config of another size":
            config.write_text(json.dumps(settings | {"d_model": 64}))
            file = path
        elif kind == "hf impossible heads":
            config.write_text(json.dumps(settings | {"decoder_attention_heads": 7}))
            file = config
        elif kind == "hf another model":
            config.write_text('{"model_type": "bert"}')
            file = path
        elif kind == "hf lacks a weight":
            write_huggingface(path, weights, without=["decoder.norm.weight"])
            file = path
        return path, str(file)
    variables = ctranslate2_variables(weights)
    if kind == "ct2 lacks a weight":
        del variables["encoder/layer_1/ffn/linear_1/bias"]
    if kind == "ct2 lacks the embedding":
        del variables["decoder/embeddings/weight"]
    (file,) = write_ctranslate2(
        path, variables, spec="TransformerSpec" if kind == "ct2 another model" else "WhisperSpec"
    )
    whole = file.read_bytes()
    if kind == "ct2 truncated":
        file.write_bytes(whole[: len(whole) // 2])
    elif kind == "ct2 empty":
        file.write_bytes(b"")
    elif kind == "ct2 noise":
        file.write_bytes(os.urandom(5000))
    elif kind == "ct2 wrong size":
        file.write_bytes(
            whole.replace(b"\x02\x20\x00\x00\x00\x20\x00\x00\x00", b"\x02\x20\x00\x00\x00\x21\x00\x00\x00")
        )
    return path, str(file)


DAMAGES = [
    *(
        f"pt {kind}"
        for kind in ("truncated", "empty", "noise", "malicious", "no dims", "lacks a weight", "strange dims")
    ),
    *(f"hf {kind}" for kind in ("truncated", "noise", "empty", "no weights", "pickled weights", "shard missing")),
    *(f"hf {kind}" for kind in ("index leads outside", "index broken", "no config", "broken config", "another model")),
    *(f"hf config {kind}" for kind in ("without sizes", "of another size")),
    *(f"hf {kind}" for kind in ("impossible heads", "lacks a weight")),
    *(f"ct2 {kind}" for kind in ("truncated", "empty", "noise", "another model", "lacks a weight", "wrong size")),
    "ct2 lacks the embedding",
]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_models_are_named(tmp_path, weights, kind):
    path, name = damaged(tmp_path, weights, kind)
    with pytest.raises(ModelError) as raised:
        load(path)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "executed").exists()


def test_a_missing_part_is_named(tmp_path, weights):
    files = write_ctranslate2(tmp_path, ctranslate2_variables(weights), parts=2)
    files[1].unlink()
    with pytest.raises(ModelError, match="part2"):
        load(tmp_path, files)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


class TestAlignmentHeads:
    def test_the_files_own_heads_count(self, tmp_path, weights):
        generation = {"alignment_heads": [[0, 1], [1, 3]], "suppress_tokens": [5], "begin_suppress_tokens": [220]}
        checkpoint = open_checkpoint(write_huggingface(tmp_path / "m", weights, generation=generation))
        assert checkpoint.alignment_heads == ((0, 1), (1, 3))
        assert (checkpoint.suppress_tokens, checkpoint.begin_suppress_tokens) == ((5,), (220,))

    def test_heads_of_a_teacher_are_left_out(self, tmp_path, weights):
        generation = {"alignment_heads": [[7, 0], [1, 2], [1, 9]]}
        checkpoint = open_checkpoint(write_huggingface(tmp_path / "m", weights, generation=generation))
        assert checkpoint.alignment_heads == ((1, 2),)

    def test_unknown_sizes_have_none(self, tmp_path, weights):
        assert open_checkpoint(write_openai(tmp_path / "m.pt", weights)).alignment_heads is None
