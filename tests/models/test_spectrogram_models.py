"""Conformer, Whisper's encoder at any length, hybrid: neither padding nor neighbours change a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stapes.inference.spectrograms import log_mel_rows
from stapes.models.conformer import Conformer, ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig, EncoderConfig, WhisperEncoder, WhisperEncoderConfig, build_encoder
from stapes.models.hybrid import Hybrid, HybridConfig, state_mask
from stapes.models.whisper import AudioEncoder, WhisperConfig

SMALL = ConformerConfig(20, 24, 2, 4, 32, 7, 4, 8, dropout=0.0)
CONFORMERS = {f"conformer-{factor}": replace(SMALL, subsampling=factor) for factor in (2, 4, 8)}
CONVOLUTIONAL = replace(SMALL, heads=0)
ENCODERS: dict[str, EncoderConfig] = {
    **CONFORMERS,
    "convolutional": CONVOLUTIONAL,
    "normalized": replace(CONVOLUTIONAL, normalize_recordings=True),
    "whisper": WhisperEncoderConfig(20, 24, 2, 4, audio_context=200),
}


def shaken(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter random, biases and norms too, so that what a mask forgets shows."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3, mean=1.0 if name.endswith("deviation") else 0.0)
    return module.eval().requires_grad_(False)


def rows_of(lengths: list[int], fill: float, bins: int = 20) -> tuple[Tensor, Tensor]:
    """Spectrograms of these lengths, with ``fill`` beyond them."""
    torch.manual_seed(1)
    mel = torch.full((len(lengths), bins, max(lengths) + 5), fill)
    for row, length in zip(mel, lengths, strict=True):
        row[:, :length] = torch.randn(bins, length)
    return mel, torch.tensor(lengths)


@pytest.mark.parametrize("name", ENCODERS)
class TestEveryEncoder:
    def test_a_row_is_the_same_alone_and_in_a_batch_with_anything_as_padding(self, name: str) -> None:
        config = ENCODERS[name]
        encoder = shaken(build_encoder(config))
        mel, lengths = rows_of([57, 8, 133, 64], fill=7.0)
        states, counts = encoder(mel, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone, count = encoder(mel[row : row + 1, :, :length])
            assert count.tolist() == [counts[row]] == [config.state_count(length)] == [alone.shape[1]]
            torch.testing.assert_close(states[row, : counts[row]], alone[0], rtol=1e-4, atol=1e-4)

    def test_frames_without_sound_give_no_state_and_no_nan(self, name: str) -> None:
        mel, lengths = rows_of([30, 1], fill=0.0)
        lengths[1] = 0
        states, counts = shaken(build_encoder(ENCODERS[name]))(mel, lengths)
        assert counts[1] == 0
        assert bool(states.isfinite().all())

    def test_a_state_knows_what_came_before_and_what_comes(self, name: str) -> None:
        encoder = shaken(build_encoder(ENCODERS[name]))
        mel, _ = rows_of([120], fill=0.0)
        changed = mel.clone()
        changed[:, :, 60] += 1.0
        difference = (encoder(mel)[0] - encoder(changed)[0]).abs().amax(-1)[0]
        if name == "convolutional":  # which hears three states to each side in each of two layers
            assert difference.nonzero()[:, 0].aminmax() == (60 // 4 - 6, 60 // 4 + 6)
        else:
            assert bool((difference[:5] > 0).all())
            assert bool((difference[-5:] > 0).all())


def test_whisper_at_its_full_length_is_whispers_own_encoder() -> None:
    encoder = shaken(WhisperEncoder(WhisperEncoderConfig(20, 24, 2, 4, audio_context=50)))
    original = AudioEncoder(WhisperConfig(20, 1, 24, 2, 4, 1, 1, audio_context=50)).eval()
    original.load_state_dict(encoder.state_dict())
    mel, _ = rows_of([95], fill=0.0)
    torch.testing.assert_close(encoder(mel)[0], original(mel))


def test_conformer_hears_order() -> None:
    """Rotary positions: the same frames in another order give other states, in attention alone too."""
    config = ConformerConfig(20, 24, 1, 4, 32, 1, 2, 8, dropout=0.0)
    encoder = shaken(Conformer(config))
    mel, _ = rows_of([80], fill=0.0)
    mel = mel[:, :, :80]
    swapped = torch.cat([mel[:, :, 40:], mel[:, :, :40]], dim=2)
    first, second = encoder(mel)[0][0], encoder(swapped)[0][0]
    # Away from the seams the convolutions see the same; only attention can tell.
    assert float((first[5:15] - second[25:35]).abs().max()) > 1e-3


@pytest.mark.parametrize("samples", [1, 159, 160, 161, 399, 16_000, 16_001])
def test_spectrograms_do_not_depend_on_padding_or_neighbours(samples: int) -> None:
    torch.manual_seed(samples)
    waveform = torch.randn(samples)
    alone, _ = log_mel_rows(waveform[None], None, 20)
    assert alone.shape[-1] == -(-samples // 160)
    batch = torch.full((3, 17_000), 0.5)
    batch[1, :samples] = waveform
    mel, frames = log_mel_rows(batch, torch.tensor([17_000, samples, 5]), 20)
    assert frames is not None
    torch.testing.assert_close(mel[1, :, : frames[1]], alone[0])


def small_hybrid(encoder: EncoderConfig) -> Hybrid:
    config = HybridConfig(encoder, 12, decoder_layers=2, decoder_heads=4, decoder_mlp_width=32, decoder_dropout=0.0)
    model = shaken(Hybrid(config))
    assert isinstance(model, Hybrid)
    return model


class TestHybrid:
    def test_padding_changes_no_logits(self) -> None:
        model = small_hybrid(CONFORMERS["conformer-4"])
        mel, lengths = rows_of([57, 130], fill=3.0)
        tokens = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 4]])
        written, logits, counts = model(mel, tokens, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone, ctc, _ = model(mel[row : row + 1, :, :length], tokens[row : row + 1])
            torch.testing.assert_close(written[row], alone[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logits[row, : counts[row]], ctc[0], rtol=1e-4, atol=1e-4)

    def test_a_token_does_not_see_those_after_it(self) -> None:
        model = small_hybrid(CONFORMERS["conformer-4"])
        mel, _ = rows_of([57], fill=0.0)
        first, _, _ = model(mel, torch.tensor([[1, 5, 6, 7]]))
        second, _, _ = model(mel, torch.tensor([[1, 5, 6, 2]]))
        torch.testing.assert_close(first[:, :3], second[:, :3])
        assert float((first[:, 3] - second[:, 3]).abs().max()) > 1e-3

    def test_one_by_one_with_a_cache_is_the_same_as_all_at_once(self) -> None:
        model = small_hybrid(CONFORMERS["conformer-4"])
        mel, lengths = rows_of([57, 99], fill=0.0)
        tokens = torch.tensor([[1, 5, 6, 7], [1, 2, 3, 9]])
        states, counts = model.encoder(mel, lengths)
        mask = state_mask(counts, states.shape[1])
        at_once, _ = model.decoder(tokens, states, mask)
        memory, cache = model.decoder.memory(states), None
        for position in range(4):
            logits, cache = model.decoder(tokens[:, position : position + 1], memory, mask, cache)
            torch.testing.assert_close(logits[:, 0], at_once[:, position], rtol=1e-4, atol=1e-4)

    def test_greedy_is_the_likeliest_token_each_time_and_the_same_in_any_batch(self) -> None:
        model = small_hybrid(CONFORMERS["conformer-4"])
        mel, lengths = rows_of([57, 130, 20], fill=0.0)
        states, counts = model.encoder(mel, lengths)
        together = model.greedy(states, counts, start=1, end=2)
        for row, length in enumerate(lengths.tolist()):
            one, count = model.encoder(mel[row : row + 1, :, :length])
            assert model.greedy(one, count, start=1, end=2) == [together[row]]
            assert len(together[row]) <= int(count)
        longest = max(together, key=len)
        row = together.index(longest)
        read = torch.tensor([[1, *longest]])
        logits, _, _ = model(mel[row : row + 1, :, : lengths[row]], read)
        assert logits[0, :-1].argmax(-1).tolist() == longest


def test_ctc_is_its_encoder_and_a_linear_layer() -> None:
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    model = shaken(CTC(CTCConfig(CONFORMERS["conformer-2"], 9)))
    assert isinstance(model, CTC)
    encode = model.encoder
    mel, lengths = rows_of([57, 20], fill=1.0)
    logits, counts = model(mel, lengths)
    states, expected = encode(mel, lengths)
    assert counts.tolist() == expected.tolist()
    torch.testing.assert_close(logits, model.head(states))
