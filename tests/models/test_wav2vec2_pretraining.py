"""Pre-training of wav2vec 2.0: losses and gradients are those of ``transformers``, and padding changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Wav2Vec2Config as TheirConfig
from transformers import Wav2Vec2ForPreTraining
from transformers.models.wav2vec2.modeling_wav2vec2 import _sample_negative_indices

from small_wav2vec2 import KINDS, speech_like
from stapes.checkpoints.wav2vec2_names import POSITIONS, fold_weight_norm, wav2vec2_names
from stapes.checkpoints.wav2vec2_pretraining import _NAMES, load_pretraining, open_pretraining, save_pretraining
from stapes.errors import ModelError
from stapes.models.wav2vec2_pretraining import (
    PretrainingOutput,
    Wav2Vec2Pretraining,
    Wav2Vec2PretrainingConfig,
    contrast,
)

GROUPS, CODES, NEGATIVES = 2, 6, 9
SAMPLES = 16_000
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [24] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_codevector_groups": GROUPS,
    "num_codevectors_per_group": CODES,
    "codevector_dim": 20,
    "proj_codevector_dim": 12,
    "num_negatives": NEGATIVES,
}
NO_DROPOUT = ["hidden", "activation", "attention", "final", "feat_proj", "feat_quantizer"]


def theirs(kind: str, seed: int = 0) -> Wav2Vec2ForPreTraining:
    """A network of ``transformers`` whose every parameter is drawn at random, without dropout, in training mode."""
    torch.manual_seed(seed)
    off = {f"{name}_dropout": 0.0 for name in NO_DROPOUT} | {"layerdrop": 0.0}
    model = Wav2Vec2ForPreTraining(TheirConfig(**{**SIZES, **off, **KINDS[kind][1]}))
    for name, parameter in model.named_parameters():
        scale = "norm.weight" in name or name.endswith("original0")
        torch.nn.init.normal_(parameter, mean=1.0 if scale else 0.0, std=0.2)
    return model.train()


def ours(model: Wav2Vec2ForPreTraining, folder: Path) -> Wav2Vec2Pretraining:
    """The same network, by way of its folder."""
    model.save_pretrained(folder)
    checkpoint = open_pretraining(folder)
    config = Wav2Vec2PretrainingConfig(checkpoint.network.config, **checkpoint.sizes)
    return load_pretraining(checkpoint, config)


def draw(model: Wav2Vec2Pretraining, real: list[int], samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden spans within ``real`` samples of each row, their negatives, and noise."""
    random = np.random.default_rng(0)
    frames = model.config.network.feature_count(samples)
    mask = np.zeros((len(real), frames), bool)
    for row, length in enumerate(model.config.network.feature_count(each) for each in real):
        for start in random.integers(0, length - 6, 3):
            mask[row, start : start + 6] = True
    np.random.seed(0)  # theirs knows no other
    negatives = torch.from_numpy(_sample_negative_indices(mask.shape, NEGATIVES, mask)).long()
    negatives = negatives % frames  # theirs counts on over the rows
    noise = torch.from_numpy(random.gumbel(size=(len(real), frames, GROUPS, CODES))).float()
    return torch.from_numpy(mask), negatives, noise


def their_loss(
    model: Wav2Vec2ForPreTraining,
    waveform: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    attention_mask: Tensor | None = None,
) -> Any:
    """Their output with our noise, at the temperature 1.5."""
    mask, negatives, noise = drawn

    def gumbel_softmax(logits: Tensor, tau: float, hard: bool) -> Tensor:
        assert hard
        soft = ((logits + noise.reshape(logits.shape)) / tau).softmax(-1)
        one = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return one - soft.detach() + soft

    monkeypatch.setattr(torch.nn.functional, "gumbel_softmax", gumbel_softmax)
    model.set_gumbel_temperature(1.5)  # pyright: ignore[reportArgumentType]
    counted_on = negatives + mask.shape[1] * torch.arange(len(mask))[:, None, None]
    return model(waveform, attention_mask, mask_time_indices=mask, sampled_negative_indices=counted_on.to(torch.int64))


def total(out: PretrainingOutput, weight: float = 0.1) -> Tensor:
    """Their loss of our output: without a penalty for features."""
    return out.contrastive + weight * out.diversity * out.hidden


def compare_gradients(model: Wav2Vec2Pretraining, other: Wav2Vec2ForPreTraining) -> None:
    """Each parameter's gradient is theirs to a relative 1e-4; those that are nothing but rounding, to the largest."""
    expected = {name: parameter.grad for name, parameter in other.named_parameters() if parameter.grad is not None}
    largest = max(float(gradient.norm()) for gradient in expected.values())
    names = dict(wav2vec2_names(model.config.network, "wav2vec2.")) | _NAMES
    seen = 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        pairs = {names[name]: parameter.grad}
        if name == POSITIONS:  # folded here, a magnitude and a direction there
            stem = names[name].removesuffix("weight") + "parametrizations.weight."
            magnitude, direction = (
                other.get_parameter(f"{stem}original{number}").detach().clone().requires_grad_() for number in (0, 1)
            )
            fold_weight_norm(magnitude, direction).backward(parameter.grad)
            assert magnitude.grad is not None
            assert direction.grad is not None
            pairs = {f"{stem}original0": magnitude.grad, f"{stem}original1": direction.grad}
        for key, gradient in pairs.items():
            seen += 1
            wanted = expected[key].reshape(gradient.shape)
            error, size = float((gradient - wanted).norm()), float(wanted.norm())
            assert error <= 1e-4 * size + 1e-7 * largest, (name, error, size)
    assert seen == len(expected)


@pytest.mark.parametrize("kind", ["base", "large"])
def test_loss_and_gradients_are_theirs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = theirs(kind)
    model = ours(other, tmp_path)
    waveform = torch.stack([speech_like(SAMPLES, 1), speech_like(SAMPLES, 2)]) / 30
    drawn = draw(model, [SAMPLES] * 2, SAMPLES)
    out = model(waveform, None, drawn[0], drawn[1], temperature=1.5, noise=drawn[2])
    expected = their_loss(other, waveform, drawn, monkeypatch)
    torch.testing.assert_close(total(out), expected.loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(out.contrastive, expected.contrastive_loss, rtol=1e-4, atol=0)
    used = (1 - out.diversity) * GROUPS * CODES
    torch.testing.assert_close(used, expected.codevector_perplexity, rtol=1e-4, atol=0)
    total(out).backward()
    expected.loss.backward()
    compare_gradients(model, other)
    with torch.no_grad():  # and in evaluation, where the likeliest codes are taken
        out = model.eval()(waveform, None, drawn[0], drawn[1])
        expected = other.eval()(
            waveform,
            mask_time_indices=drawn[0],
            sampled_negative_indices=drawn[1] + drawn[0].shape[1] * torch.arange(2)[:, None, None],
        )
    torch.testing.assert_close(out.contrastive, expected.contrastive_loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(out.code_perplexity, expected.codevector_perplexity, rtol=1e-4, atol=0)


def test_with_padding_it_is_theirs_where_theirs_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their convolutions see padding only where a norm looks at all frames: not in the large models."""
    other = theirs("large")
    model = ours(other, tmp_path)
    lengths = [SAMPLES, 11_000]
    waveform = torch.stack([speech_like(SAMPLES, 1), speech_like(SAMPLES, 2)]) / 30
    waveform[1, lengths[1] :] = 0
    drawn = draw(model, lengths, SAMPLES)
    attention_mask = (torch.arange(SAMPLES) < torch.tensor(lengths)[:, None]).long()
    out = model(waveform, torch.tensor(lengths), drawn[0], drawn[1], temperature=1.5, noise=drawn[2])
    expected = their_loss(other, waveform, drawn, monkeypatch, attention_mask)
    torch.testing.assert_close(total(out), expected.loss, rtol=1e-4, atol=0)
    total(out).backward()
    expected.loss.backward()
    compare_gradients(model, other)


@pytest.mark.parametrize("kind", ["base", "large"])
def test_padding_never_changes_a_result(kind: str, tmp_path: Path) -> None:
    model = ours(theirs(kind), tmp_path)
    short, long = 11_000, SAMPLES
    drawn = draw(model, [short, short], long)
    waveform = torch.full((2, long), 7.0)
    waveform[:, :short] = torch.stack([speech_like(short, 1), speech_like(short, 2)]) / 30
    padded = model(waveform, torch.tensor([short, short]), *drawn[:2], noise=drawn[2])
    frames = model.config.network.feature_count(short)
    alone = model(waveform[:, :short], None, *(each[:, :frames] for each in drawn[:2]), noise=drawn[2][:, :frames])
    for name, a, b in zip(PretrainingOutput._fields, padded, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_the_contrast_is_a_sum_over_negatives_without_those_of_the_same_code() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, targets = torch.randn(2, 1, 5, 4, generator=generator)
    identities = torch.tensor([[0, 1, 2, 1, 3]])
    negatives = torch.tensor([[[1, 2, 2], [3, 4, 0], [0, 1, 3], [1, 1, 1], [0, 0, 2]]])  # twice counts twice
    losses, right = contrast(predicted, targets, identities, negatives, 0.1)
    for frame in range(5):
        others = [int(each) for each in negatives[0, frame] if identities[0, each] != identities[0, frame]]
        vectors = targets[0, [frame, *others]]
        logits = torch.cosine_similarity(predicted[0, frame][None], vectors) / 0.1
        torch.testing.assert_close(losses[0, frame], torch.logsumexp(logits, 0) - logits[0])
        assert bool(right[0, frame]) == bool((logits[0] > logits[1:]).all())
    assert float(losses[0, 3]) == pytest.approx(0.0, abs=1e-6)  # all its negatives are its own code
    strict, _ = contrast(predicted, targets, torch.arange(5)[None], negatives, 0.1)
    logits = torch.cosine_similarity(predicted[0, 3][None], targets[0, [3, 1, 1, 1]]) / 0.1
    torch.testing.assert_close(strict[0, 3], torch.logsumexp(logits, 0) - logits[0])


def test_what_the_convolutions_learn_is_scaled_and_the_rest_is_not(tmp_path: Path) -> None:
    gradients = []
    for factor in (1.0, 0.1):
        model = ours(theirs("base"), tmp_path)
        drawn = draw(model, [SAMPLES], SAMPLES)
        waveform = speech_like(SAMPLES)[None] / 30
        total(model(waveform, None, *drawn[:2], noise=drawn[2], feature_gradient=factor)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    whole, scaled = gradients
    for name, gradient in whole.items():
        factor = 0.1 if name.startswith("feature_extractor.") else 1.0
        error, size = float((scaled[name] - factor * gradient).norm()), float(gradient.norm())
        assert error <= 0.01 * factor * size + 1e-6, name


@pytest.mark.parametrize("kind", ["base", "large"])
def test_a_model_is_written_as_theirs_and_read_again(kind: str, tmp_path: Path) -> None:
    model = ours(theirs(kind), tmp_path / "first")
    save_pretraining(tmp_path / "second", model.config, dict(model.state_dict()))
    opened = Wav2Vec2ForPreTraining.from_pretrained(tmp_path / "second")
    again = ours(opened, tmp_path / "third")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    assert again.config.network == model.config.network


def test_a_quantiser_that_lacks_weights_is_refused_and_one_that_is_not_there_is_made(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = ours(theirs("base"), tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({name: tensor for name, tensor in state.items() if name != "project_q.bias"}, file)
    with pytest.raises(ModelError, match=r"lacks the weights code_projection\.bias"):
        open_pretraining(tmp_path)
    save_file({name: tensor for name, tensor in state.items() if name.startswith("wav2vec2.")}, file)
    checkpoint = open_pretraining(tmp_path)
    assert not checkpoint.weights
    fresh = load_pretraining(checkpoint, model.config)
    assert torch.equal(fresh.encoder.norm.weight, model.encoder.norm.weight)
    assert all(bool(parameter.isfinite().all()) for parameter in fresh.parameters())
    assert float(fresh.quantizer.projection.weight.detach().std()) == pytest.approx(1.0, rel=0.3)
