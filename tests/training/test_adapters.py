"""A language learnt beside a model that stays as it is: what is trained, what is written, who opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_corpus import opened, small_config, tones, trained, write_corpus
from safetensors.torch import load_file, save_file
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC, Wav2Vec2Processor

import stapes
from small_wav2vec2 import theirs
from stapes.checkpoints.wav2vec2 import load_wav2vec2, open_wav2vec2
from stapes.errors import UsageError
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.config import TrainConfig
from stapes.training.recipes import recipe

MARKERS = ["<pad>", "<s>", "</s>", "<unk>", "|"]
VOCABULARIES = {
    language: {token: id for id, token in enumerate([*MARKERS, *letters])}
    for language, letters in {"eng": "xyz'", "deu": "xyzäöüß"}.items()
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 8)


@pytest.fixture
def mms(tmp_path: Path) -> Path:
    """A small MMS: eng in its own weights, without a file; deu in a file."""
    folder = tmp_path / "mms"
    theirs("mms", vocab_size=len(VOCABULARIES["eng"])).save_pretrained(folder)
    german: Any = theirs("mms", 1, vocab_size=len(VOCABULARIES["deu"]))
    save_file(
        {n: v.detach().contiguous() for n, v in german._get_adapters().items()}, folder / "adapter.deu.safetensors"
    )
    (folder / "vocab.json").write_text(json.dumps(VOCABULARIES))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), target_lang="eng")
    extractor = Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
    Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def _published(kind: str) -> Any:
    return theirs(kind)


def config_of(folder: Path, manifest: Path, base: Path, steps: int = 3) -> TrainConfig:
    config = small_config(folder, manifest, manifest, steps)
    config.recipe, config.model.init, config.model.language = "adapter", str(base), "tone"
    config.masks.time_masks = config.masks.frequency_masks = 0
    config.model.layer_drop, config.model.dropout, config.optimizer.ema = 0.0, 0.1, None
    config.optimizer.peak_lr, config.run.evaluate_every = 1e-2, steps
    return config


def test_only_the_language_is_learnt_and_kept(manifest: Path, mms: Path, tmp_path: Path) -> None:
    trainer, result = trained(config_of(tmp_path / "run", manifest, mms))
    weights = trainer.optimizer.weights()
    assert all(".adapter." in name or name.startswith("head.") for name in weights)
    assert result.model is not None
    own = [path for path in result.model.iterdir() if not path.is_symlink()]
    assert (result.model / "model.safetensors").resolve() == (mms / "model.safetensors").resolve()
    assert "adapter.tone.safetensors" in {path.name for path in own}
    adapter = load_file(result.model / "adapter.tone.safetensors")
    assert adapter.keys() == _published("mms")._get_adapters().keys()
    assert sum(tensor.numel() for tensor in adapter.values()) == sum(tensor.numel() for tensor in weights.values())
    before, after = (dict(open_wav2vec2(path, language="deu").read()) for path in (mms, result.model))
    assert all(torch.equal(before[name], after[name]) for name in before)
    state = tmp_path / "run" / "checkpoints" / "step-3" / "state.pt"
    assert set(torch.load(state, weights_only=True)["network"]) == set(weights)


def test_transformers_hears_the_same(manifest: Path, mms: Path, tmp_path: Path) -> None:
    """In the new language and in the others, of which one was in the model's own weights alone."""
    _, result = trained(config_of(tmp_path / "run", manifest, mms))
    assert result.model is not None
    before = Wav2Vec2ForCTC.from_pretrained(mms).eval()
    waveform = torch.from_numpy(tones(" abc cab ", 3))[None]
    with torch.inference_mode():
        english = before(waveform).logits
        model = Wav2Vec2ForCTC.from_pretrained(result.model, target_lang="tone", ignore_mismatched_sizes=True).eval()
        for language in ("tone", "deu", "eng", "tone"):
            model.load_adapter(language)
            truth = model(waveform).logits
            ours = load_wav2vec2(open_wav2vec2(result.model, language=language), torch.float32, torch.device("cpu"))
            torch.testing.assert_close(ours(waveform)[0], truth, atol=1e-4, rtol=1e-4)
            if language == "eng":
                torch.testing.assert_close(truth, english, atol=1e-4, rtol=1e-4)
    processor = Wav2Vec2Processor.from_pretrained(result.model)
    assert processor.tokenizer.target_lang == "tone"  # pyright: ignore[reportAttributeAccessIssue]
    assert processor.tokenizer("abc").input_ids == CTCTokenizer.from_folder(result.model, "tone").encode("abc")  # pyright: ignore[reportAttributeAccessIssue]


def test_the_language_is_chosen_at_run_time(manifest: Path, mms: Path, tmp_path: Path) -> None:
    _, result = trained(config_of(tmp_path / "run", manifest, mms))
    assert result.model is not None
    pcm = np.concatenate([tones(" abc cab ", seed) for seed in range(3)])
    with stapes.load(result.model, device="cpu") as recognizer:
        texts = {
            language: recognizer.transcribe(pcm, sample_rate=16_000, language=language, vad=False).text
            for language in (None, "tone", "deu", "eng", "tone")
        }
    assert texts[None] == texts["tone"]
    for language, letters in (("tone", "abc "), ("deu", "xyzäöüß "), ("eng", "xyz' ")):
        assert set(texts[language].lower().replace("<unk>", "")) <= set(letters)


def test_a_second_language_is_learnt_beside_the_first(manifest: Path, mms: Path, tmp_path: Path) -> None:
    _, first = trained(config_of(tmp_path / "first", manifest, mms))
    assert first.model is not None
    config = config_of(tmp_path / "second", manifest, first.model)
    config.model.language, config.model.adapter_start = "note", "tone"
    trainer, second = trained(config)
    assert second.model is not None
    assert open_wav2vec2(second.model).languages == ("deu", "eng", "note", "tone")
    assert open_wav2vec2(second.model).language == "note"
    old, kept = (load_file(model / "adapter.tone.safetensors") for model in (first.model, second.model))
    assert all(torch.equal(old[name], kept[name]) for name in old)
    name = "wav2vec2.encoder.layers.0.adapter_layer.linear_1.weight"
    new = load_file(second.model / "adapter.note.safetensors")
    assert 0 < float((new[name] - old[name]).abs().max()) < 0.2  # it started from there
    tokenizer = trainer.objective.tokenizer
    assert isinstance(tokenizer, CTCTokenizer)
    assert tokenizer.language == "note"


def test_new_adapters_change_nothing_at_first(manifest: Path, mms: Path, tmp_path: Path) -> None:
    trainer = opened(config_of(tmp_path / "run", manifest, mms))
    waveform = torch.from_numpy(tones(" abc ", 3))[None]
    network: Any = trainer.objective.network.eval()
    with torch.inference_mode():
        states = network.states(waveform)[0]
        for layer in network.encoder.layers:
            layer.adapter = None
        assert torch.equal(network.states(waveform)[0], states)


def test_going_on_makes_the_same_steps(manifest: Path, mms: Path, tmp_path: Path) -> None:
    whole, _ = trained(config_of(tmp_path / "whole", manifest, mms, steps=6))
    config = config_of(tmp_path / "parts", manifest, mms, steps=6)
    config.run.evaluate_every, config.checkpoint.every = 100, 2
    first = opened(config)
    first.run(lambda: first.step >= 4)
    again, _ = trained(config, resume=True)
    for name, tensor in whole.optimizer.weights().items():
        assert torch.equal(tensor, again.optimizer.weights()[name]), name


def test_a_model_without_adapters_gets_some(manifest: Path, tmp_path: Path) -> None:
    """XLS-R, pre-trained only: no head, no vocabulary, no adapters."""
    base = tmp_path / "xls-r"
    _published("large").wav2vec2.save_pretrained(base)
    config = config_of(tmp_path / "run", manifest, base)
    config.model.adapter_width = 5
    _, result = trained(config)
    assert result.model is not None
    checkpoint = open_wav2vec2(result.model)
    assert (checkpoint.language, checkpoint.languages, checkpoint.config.adapter_width) == ("tone", ("tone",), 5)
    waveform = torch.from_numpy(tones(" abc ", 3))[None]
    model = Wav2Vec2ForCTC.from_pretrained(result.model, target_lang="tone", ignore_mismatched_sizes=True).eval()
    ours = load_wav2vec2(checkpoint, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        torch.testing.assert_close(ours(waveform)[0], model(waveform).logits, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_is_refused_with_the_reason(manifest: Path, mms: Path, tmp_path: Path) -> None:
    theirs("base").save_pretrained(tmp_path / "base")
    other = tmp_path / "other"
    other.mkdir()
    CTCTokenizer({"[PAD]": 0, "[UNK]": 1, " ": 2, "a": 3}, blank="[PAD]", unknown="[UNK]", delimiter=" ").save(other)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model.init": str(tmp_path / "base")}, "layer norms behind attention"),
        ({"model.language": "../tone"}, "give a code such as swa"),
        ({"model.adapter_start": "fra"}, "no vocabulary for the language 'fra'"),
        ({"data.vocabulary": str(other)}, "the vocabulary's blank is"),
        ({"objective.kind": "hybrid"}, "model.language is for an adapter"),
    ]
    for number, (settings, reason) in enumerate(cases):
        config = config_of(tmp_path / f"run-{number}", manifest, mms)
        for path, value in settings.items():
            section, name = path.split(".")
            setattr(getattr(config, section), name, value)
        with pytest.raises(UsageError, match=reason):
            opened(config)


def test_the_recipe_says_so(manifest: Path, mms: Path) -> None:
    config = recipe("adapter")
    assert config.model.layer_drop == 0.0  # in every step every adapter learns
    config.data.train, config.model.language = [str(manifest)], "swa"
    config.check()
