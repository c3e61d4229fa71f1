"""Our wav2vec 2.0 equals the one of transformers, and neither padding nor neighbours change a result."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Wav2Vec2Config as TheirConfig
from transformers import Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

from small_wav2vec2 import KINDS, Theirs, speech_like, theirs
from stapes.checkpoints.wav2vec2_names import (
    POSITIONS,
    WEIGHT_NORM,
    config_of,
    fold_weight_norm,
    split_weight_norm,
    wav2vec2_names,
)
from stapes.models.wav2vec2 import BASE, LARGE, GroupNormConvLayer, Wav2Vec2, Wav2Vec2Config, initialize
from stapes.models.waveform import normalization, normalize_waveform, window_moments

TINY = Wav2Vec2Config(32, 4, 4, 64, 12, (24,) * 7, position_kernel=16, position_groups=4)


def ours(model: Theirs) -> Wav2Vec2:
    """The same network with the same weights."""
    config = config_of(model.config.to_dict(), Path("config.json"), has_head=True)
    state = model.state_dict()
    weights = {}
    for name, their_name in wav2vec2_names(config, f"{model.config.model_type}."):
        if name == POSITIONS:
            stem = their_name.removesuffix("weight")
            weights[name] = fold_weight_norm(*(state.pop(stem + part) for part in WEIGHT_NORM[1]))
        else:
            weights[name] = state.pop(their_name)
    assert not state
    with torch.device("meta"):
        copy = Wav2Vec2(config)
    copy.load_state_dict(weights, assign=True)
    return copy.eval()


def padded(rows: list[torch.Tensor], extra: int = 0, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of waveforms and their lengths, ``extra`` samples longer than the longest."""
    lengths = torch.tensor([len(row) for row in rows])
    batch = torch.full((len(rows), int(lengths.max()) + extra), fill)
    for row, waveform in zip(batch, rows, strict=True):
        row[: len(waveform)] = waveform
    return batch, lengths


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_logits_equal_those_of_transformers(self, kind: str, seed: int) -> None:
        model = theirs(kind, seed)
        waveform = torch.stack([speech_like(9_000, seed), torch.randn(9_000)])
        with torch.inference_mode():
            wanted = model(waveform).logits
            logits, counts = ours(model)(waveform)
        assert wanted.std() > 0.1
        assert (logits - wanted).abs().max() < 1e-4
        assert counts.tolist() == [wanted.shape[1]] * 2

    @pytest.mark.parametrize("seed", [2, 3, 4])
    def test_alone_or_in_any_padded_batch_logits_are_the_same(self, kind: str, seed: int) -> None:
        """Whatever the padding holds. Alone is also what transformers says of it."""
        draw = random.Random(seed)
        model = theirs(kind, seed)
        copy = ours(model)
        rows = [speech_like(draw.randint(400, 12_000), seed + i) for i in range(4)] + [torch.randn(401)]
        for fill in (0.0, 1e3, float("nan")):
            batch, lengths = padded(rows, extra=draw.randint(0, 3_000), fill=fill)
            with torch.inference_mode():
                together, counts = copy(batch, lengths)
                for row, waveform in enumerate(rows):
                    wanted = model(waveform[None]).logits[0]
                    alone, count = copy(waveform[None])
                    assert counts[row] == count[0] == len(wanted) == copy.config.frame_count(len(waveform))
                    assert (together[row, : len(wanted)] - alone[0]).abs().max() < 1e-4
                    assert (together[row, : len(wanted)] - wanted).abs().max() < 1e-4

    def test_frames_are_counted_exactly(self, kind: str) -> None:
        model = theirs(kind)
        config = config_of(model.config.to_dict(), Path("config.json"), has_head=True)
        samples = torch.arange(400, 4_001)
        assert torch.equal(config.frame_count(samples), model._get_feat_extract_output_lengths(samples))
        assert [config.frame_count(n) for n in samples.tolist()] == config.frame_count(samples).tolist()

    def test_gradients_reach_every_parameter_and_padding_gives_none(self, kind: str) -> None:
        model = ours(theirs(kind, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0))
        model.train().head_dropout.p = 0.0
        rows = [speech_like(5_000), torch.randn(3_000), torch.randn(300)]
        gradients = []
        for extra, fill in ((0, 0.0), (2_000, float("nan"))):
            batch, lengths = padded(rows, extra, fill)
            hidden = torch.zeros(3, model.config.feature_count(batch.shape[1]), dtype=torch.bool)
            hidden[:, 2:4] = True
            logits, counts = model(batch, lengths, hidden=hidden)
            real = torch.arange(logits.shape[1]) < counts[:, None]
            loss = logits.log_softmax(-1)[real].square().mean()
            model.zero_grad()
            loss.backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for name, gradient in gradients[0].items():
            assert gradient.isfinite().all(), name
            # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding.
            assert gradient.abs().max() > 0 or name.endswith("key.bias"), name
            assert (gradient - gradients[1][name]).abs().max() < 1e-4 * max(1, gradient.abs().max()), name


@pytest.mark.parametrize("size", ["base", "large"])
def test_at_the_published_sizes(size: str) -> None:
    """Full width (six layers of large's 24), logits that spread as those of trained models do."""
    large = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 6}
    sizes = {**KINDS[size][1], **(large if size == "large" else {})}
    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(TheirConfig(vocab_size=32, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.05 * torch.randn_like(parameter)
        model.lm_head.weight *= 20
    copy = ours(model)
    batch, lengths = padded([speech_like(12_000), torch.randn(7_000)], extra=1_000, fill=float("nan"))
    batch = normalize_waveform(batch, lengths)
    with torch.inference_mode():
        together, counts = copy(batch, lengths)
        for row, length in enumerate(lengths):
            wanted = model(batch[row : row + 1, :length]).logits[0]
            assert wanted.std() > 5
            assert counts[row] == len(wanted)
            assert (together[row, : len(wanted)] - wanted).abs().max() < 1e-4


class TestFrames:
    def test_published_models_see_400_samples_every_320(self) -> None:
        for config in (BASE, LARGE):
            assert (config.receptive_field, config.hop) == (400, 320)
            assert [config.frame_count(n) for n in (0, 399, 400, 719, 720, 16_000)] == [0, 0, 1, 1, 2, 49]

    @pytest.mark.parametrize("start", range(400, 4_001, 400))
    def test_the_network_puts_out_as_many_as_are_counted(self, start: int) -> None:
        model = Wav2Vec2(TINY).feature_extractor
        with torch.inference_mode():
            for samples in range(start, min(start + 400, 4_001)):
                assert model(torch.zeros(1, samples)).shape[1] == TINY.frame_count(samples)

    @pytest.mark.parametrize("samples", [0, 1, 399])
    @pytest.mark.parametrize("kind", ["base", "large", "downsampled"])
    def test_too_short_audio_has_no_frame_and_harms_nobody(self, kind: str, samples: int) -> None:
        model = ours(theirs(kind))
        with torch.inference_mode():
            logits, counts = model(torch.ones(1, samples))
            assert counts.tolist() == [0]
            assert logits.isfinite().all()
            other = torch.randn(2_000)
            batch, lengths = padded([torch.ones(samples), other])
            together, counts = model(batch, lengths)
            assert counts.tolist() == [0, model.config.frame_count(2_000)]
            assert together.isfinite().all()
            assert (together[1] - model(other[None])[0][0]).abs().max() < 1e-4


class TestWaveform:
    def test_normalisation_equals_that_of_transformers(self) -> None:
        rows = [speech_like(n, n) for n in (8_000, 500, 4_321)] + [torch.zeros(600), torch.full((50,), 0.3)]
        extractor = Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
        wanted = extractor([row.numpy() for row in rows], sampling_rate=16_000, padding=True, return_tensors="pt")
        for fill in (0.0, float("nan")):
            batch, lengths = padded(rows, fill=fill)
            found = normalize_waveform(batch, lengths)
            assert (found - wanted["input_values"]).abs().max() < 1e-4
            assert all((row[length:] == 0).all() for row, length in zip(found, lengths, strict=True))

    def test_moments_of_pieces_add_up_to_those_of_the_whole(self) -> None:
        waveform = speech_like(4_000)[None]
        whole = window_moments(waveform, None, 10, 5)
        pieces = [(0, 1_005), (1_000, 1_505), (1_500, 1_509), (1_500, 4_000)]  # the third holds no window
        parts = [window_moments(waveform[:, start:end], None, 10, 5) for start, end in pieces]
        total = parts[0] + parts[1] + parts[2] + parts[3]
        assert torch.equal(total.count, whole.count)
        assert torch.allclose(total.mean, whole.mean)
        assert torch.allclose(total.covariance, whole.covariance)
        windows = waveform[0].double().unfold(0, 10, 5).numpy()
        assert np.allclose(whole.covariance[0], np.cov(windows, rowvar=False, ddof=0))

    def test_moments_follow_the_waveform_when_it_is_shifted_and_scaled(self) -> None:
        waveform = speech_like(3_000)[None].double()
        shift, scale = torch.tensor([-0.3]).double(), torch.tensor([2.5]).double()
        wanted = window_moments((waveform + shift) * scale, None, 10, 5)
        found = window_moments(waveform, None, 10, 5).scaled(shift, scale)
        assert torch.allclose(found.total, wanted.total)
        assert torch.allclose(found.products, wanted.products)


class TestGroupNorm:
    def test_statistics_are_those_of_the_outputs(self) -> None:
        """Also for kernels that cancel nearly all of the waveform, as those of voices do."""
        layer = GroupNormConvLayer(8, 10, 5, bias=True)
        with torch.no_grad():
            layer.conv.weight[0, 0] = torch.tensor([1.0, -4, 6, -4, 1, 0, 0, 0, 0, 0])  # a fourth difference
        waveform = speech_like(20_000)[None]
        mean, variance = layer.statistics(layer.moments(waveform))
        outputs = torch.nn.functional.conv1d(
            waveform[:, None].double(), layer.conv.weight.double(), layer.conv.bias.double(), stride=5
        )
        assert torch.allclose(mean, outputs.mean(-1), rtol=1e-9, atol=1e-12)
        assert torch.allclose(variance, outputs.var(-1, correction=0), rtol=1e-6)

    def test_windows_with_the_statistics_of_the_whole_give_the_features_of_the_whole(self) -> None:
        """In constant memory: a first pass sums up moments, a second computes windows that overlap by 80 samples."""
        model = ours(theirs("base"))
        extractor, config = model.feature_extractor, model.config
        assert isinstance(extractor.first, GroupNormConvLayer)
        recording = speech_like(30_000)[None]
        with torch.inference_mode():
            whole = extractor(normalize_waveform(recording))
            samples = windows = None
            for start in range(0, 30_000, 6_400):
                piece = recording[:, start : start + 6_400]
                found = window_moments(piece)
                samples = found if samples is None else samples + found
                found = extractor.first.moments(recording[:, start : start + 6_400 + 5])
                windows = found if windows is None else windows + found
            assert samples is not None
            assert windows is not None
            statistics = extractor.first.statistics(windows.scaled(*normalization(samples)))
            features = [
                extractor(normalize_waveform(piece, moments=samples), statistics=statistics)
                for start in range(0, 30_000, 6_400)
                if config.feature_count((piece := recording[:, start : start + 6_400 + 80]).shape[1])
            ]
        assert (torch.cat(features, dim=1) - whole).abs().max() < 1e-4


class TestTraining:
    def test_layers_drop_by_the_seed(self) -> None:
        config = Wav2Vec2Config(
            32, 6, 4, 64, 12, (24,) * 7, position_kernel=16, position_groups=4, layer_drop=0.5, hidden_dropout=0.0,
            activation_dropout=0.0, attention_dropout=0.0, head_dropout=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Wav2Vec2(config)
        initialize(model)
        calls: list[int] = []
        for i, layer in enumerate(model.encoder.layers):
            layer.register_forward_hook(lambda *_, i=i: calls.append(i))

        def dropped(seed: int) -> tuple[int, ...]:
            calls.clear()
            torch.manual_seed(seed)
            model(torch.randn(1, 1_000))
            return tuple(sorted(set(range(6)) - set(calls)))

        model.train()
        first = [dropped(seed) for seed in range(60)]
        assert first == [dropped(seed) for seed in range(60)]
        assert len(set(first)) > 10
        assert 0.35 < sum(map(len, first)) / 360 < 0.65
        model.eval()
        assert dropped(0) == ()

    def test_dropout_is_for_training_only(self) -> None:
        torch.manual_seed(0)
        model = Wav2Vec2(TINY)
        initialize(model)
        waveform = torch.randn(1, 4_000)
        with torch.no_grad():
            model.eval()
            assert torch.equal(model(waveform)[0], model(waveform)[0])
            model.train()
            assert not torch.equal(model(waveform)[0], model(waveform)[0])

    def test_training_from_nothing_learns_to_tell_two_sounds_apart(self) -> None:
        torch.manual_seed(0)
        config = Wav2Vec2Config(32, 2, 4, 64, 3, (24,) * 7, position_kernel=16, position_groups=4, layer_drop=0.0)
        model = Wav2Vec2(config).train()
        initialize(model)
        seconds = torch.arange(4_000) / 16_000
        waveform = torch.stack([torch.sin(2 * torch.pi * pitch * seconds) for pitch in (300, 1_700)])
        targets = torch.tensor([[1], [2]])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(40):
            logits, counts = model(waveform)
            loss = torch.nn.functional.ctc_loss(
                logits.log_softmax(-1).transpose(0, 1), targets, counts, torch.tensor([1, 1])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.2 * losses[0]


def test_weight_norm_comes_back_also_where_it_is_zero() -> None:
    weight = torch.randn(8, 4, 6)
    weight[:, :, 2] = 0
    magnitude, direction = split_weight_norm(weight)
    assert magnitude.shape == (1, 1, 6)
    assert torch.allclose(fold_weight_norm(magnitude, direction), weight, atol=1e-6)
    assert torch.allclose(torch._weight_norm(direction, magnitude, 2), weight, atol=1e-6)
