"""A model with a decoder in the engine for CTC models: its likeliest path says what the search chose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stapes.checkpoints.spectrogram_models import SpectrogramCheckpoint, save_spectrogram_model
from stapes.decoding.ctc import greedy
from stapes.decoding.joint import joint_search
from stapes.errors import ModelError
from stapes.inference.torch_hybrid import TorchHybrid, _in_order
from stapes.loading import load
from stapes.models.conformer import ConformerConfig
from stapes.models.hybrid import Hybrid, HybridConfig
from stapes.text.ctc_tokenizer import CTCTokenizer

TOKENIZER = CTCTokenizer({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5, "b": 6, "c": 7})
ENCODER = ConformerConfig(20, 24, 1, 4, 32, 7, 4, 8, dropout=0.0)


def made(has_ctc: bool, seed: int = 0) -> Hybrid:
    torch.manual_seed(seed)
    network = Hybrid(HybridConfig(ENCODER, 8, 1, 4, 32, decoder_dropout=0.0, has_ctc=has_ctc, search_beam=3))
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("deviation") else 0.0, std=0.5)
    with torch.no_grad():
        network.decoder.embedding.weight[2] = 0.0  # so that it does not end at once
    return network.eval()


def sounds() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    return torch.randn(3, 16_000) * 0.1, torch.tensor([16_000, 7_000, 12_345])


@pytest.mark.parametrize("has_ctc", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_likeliest_path_says_what_the_search_chose(has_ctc: bool, seed: int) -> None:
    network = made(has_ctc, seed)
    model = TorchHybrid(SpectrogramCheckpoint("small", Path("small"), network.config, (), TOKENIZER), network)
    waveform, lengths = sounds()
    with torch.inference_mode():
        logits, counts = model(waveform, lengths)
        states, _ = model.encode(waveform, lengths)
        log_probs = network.ctc_logits(states).log_softmax(-1) if has_ctc else None
    if log_probs is None:
        expected = [[id for id in ids if id > 1] for ids in network.greedy(states, counts, 1, 2)]
    else:
        expected = joint_search(network.decoder, states, counts, 1, 2, log_probs=log_probs, ctc_weight=0.3, beam=3)
    found = [[token.id for token in row] for row in greedy(logits, counts, 0)]
    for ours, wanted in zip(found, expected, strict=True):
        assert ours == wanted[: len(ours)]
        assert len(ours) == len(wanted) or len(ours) > 5  # as many as the frames can say
    assert any(found)
    for row, length in enumerate(lengths.tolist()):
        with torch.inference_mode():
            alone, _ = model(waveform[row : row + 1, :length], lengths[row : row + 1])
        assert [token[:3] for token in greedy(alone, [alone.shape[1]], 0)[0]] == [
            token[:3] for token in greedy(logits, counts, 0)[row]
        ]


def test_places_grow_and_are_near_where_the_decoder_looked() -> None:
    assert _in_order([3, 9, 12], [5, 6, 7], 20) == [3, 9, 12]
    assert _in_order([9, 3, 3], [5, 6, 6], 20) == [9, 10, 12]
    assert _in_order([19, 19, 19], [5, 6, 6], 20) == [16, 17, 19]
    assert _in_order([0, 0], [5, 5], 3) == [0, 2]
    assert _in_order([], [], 3) == []


@pytest.mark.parametrize("has_ctc", [True, False])
def test_it_is_a_recogniser(has_ctc: bool, tmp_path: Path) -> None:
    network = made(has_ctc)
    save_spectrogram_model(tmp_path / "model", network.config, network.state_dict(), TOKENIZER)
    with load(tmp_path / "model", device="cpu") as recognizer:
        waveform = sounds()[0][0].numpy()
        transcript = recognizer.transcribe(waveform, sample_rate=16_000, vad=False, word_timestamps=True)
        times = [word.start for segment in transcript.segments for word in segment.words or []]
        assert times == sorted(times)
    lacking = CTCTokenizer({"<pad>": 0, "|": 1, "a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "f": 7})
    save_spectrogram_model(tmp_path / "lacking", network.config, network.state_dict(), lacking)
    with pytest.raises(ModelError, match="start and end token"):
        load(tmp_path / "lacking", device="cpu")
