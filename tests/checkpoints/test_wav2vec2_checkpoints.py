"""Checkpoints of wav2vec 2.0 and HuBERT: what transformers saves we open, what we save it opens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCTC,
    HubertModel,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2ForPreTraining,
    Wav2Vec2Model,
    Wav2Vec2Processor,
)

from small_wav2vec2 import KINDS, speech_like, theirs
from stapes.checkpoints.wav2vec2 import Wav2Vec2Checkpoint, load_wav2vec2, open_wav2vec2, save_wav2vec2, set_language
from stapes.errors import ModelError, OutputError, UsageError
from stapes.models.wav2vec2 import BASE, Wav2Vec2, Wav2Vec2Config, initialize
from stapes.text.ctc_tokenizer import CTCTokenizer

CPU = torch.device("cpu")
MARKERS = ["<pad>", "<s>", "</s>", "<unk>", "|"]
ENGLISH = {token: id for id, token in enumerate([*MARKERS, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"])}
WAVEFORM = torch.stack([speech_like(5_000), torch.randn(5_000)])


def load(checkpoint: Wav2Vec2Checkpoint) -> Wav2Vec2:
    return load_wav2vec2(checkpoint, torch.float32, CPU)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out = model(WAVEFORM)
    return out[0] if isinstance(model, Wav2Vec2) else out.logits


def same(model: Any, other: Any) -> bool:
    first, second = logits(model), logits(other)
    return first.shape == second.shape and bool((first - second).abs().max() < 1e-4)


def write_tokenizer(folder: Path, vocabulary: dict, **settings: Any) -> None:
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), **settings)
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers, and its folder."""
    model = theirs(request.param)
    model.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs", ENGLISH)
    return model, tmp_path / "theirs"


def small(folder: Path, kind: str = "base", **settings: Any) -> Path:
    theirs(kind, **settings).save_pretrained(folder)
    return folder


def change(folder: Path, **settings: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


class TestRoundTrips:
    def test_there_and_back(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        model, folder = saved
        checkpoint = open_wav2vec2(folder)
        assert same(load(checkpoint), model)
        assert checkpoint.normalize is False
        for _ in range(2):  # again over the first
            save_wav2vec2(checkpoint, tmp_path / "ours")
        opened, report = AutoModelForCTC.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(report.values()), report
        assert type(opened) is type(model)
        assert same(opened.eval(), model)
        processor = Wav2Vec2Processor.from_pretrained(tmp_path / "ours")
        assert processor.tokenizer.get_vocab() == ENGLISH
        assert processor.feature_extractor.do_normalize is False
        again = open_wav2vec2(tmp_path / "ours")
        assert again.config == checkpoint.config
        assert again.tokenizer == checkpoint.tokenizer
        assert same(load(again), model)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]  # nothing temporary is left
        assert opened.config.ctc_loss_reduction == model.config.ctc_loss_reduction

    def test_settings_for_training_only_are_kept(self, tmp_path: Path) -> None:
        checkpoint = open_wav2vec2(change(small(tmp_path / "a"), mask_time_prob=0.31, num_codevectors_per_group=111))
        save_wav2vec2(checkpoint, tmp_path / "b")
        written = json.loads((tmp_path / "b" / "config.json").read_text())
        assert (written["mask_time_prob"], written["num_codevectors_per_group"]) == (0.31, 111)

    def test_a_model_made_from_nothing(self, tmp_path: Path) -> None:
        """As training saves it: there is no source but the network and a tokenizer."""
        config = Wav2Vec2Config(32, 2, 4, 64, 32, (24,) * 7, position_kernel=16, position_groups=4)
        model = Wav2Vec2(config).eval()
        initialize(model)
        checkpoint = Wav2Vec2Checkpoint("new", tmp_path, "hubert", config, (), CTCTokenizer(ENGLISH))
        save_wav2vec2(checkpoint, tmp_path / "new", model)
        assert same(AutoModelForCTC.from_pretrained(tmp_path / "new").eval(), model)
        assert same(load(open_wav2vec2(tmp_path / "new")), model)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_narrow_weights_stay_narrow(self, tmp_path: Path, dtype: torch.dtype) -> None:
        theirs("large").to(dtype).save_pretrained(tmp_path / "a")
        before = open_wav2vec2(tmp_path / "a")
        save_wav2vec2(before, tmp_path / "b")
        assert {tensor.dtype for tensor in load_file(tmp_path / "b" / "model.safetensors").values()} == {dtype}
        for (name, found), (_, wanted) in zip(open_wav2vec2(tmp_path / "b").read(), before.read(), strict=True):
            assert torch.allclose(found.float(), wanted.float(), rtol=2e-2), name
        model = load_wav2vec2(before, torch.bfloat16, CPU)
        assert logits(model).dtype == torch.bfloat16

    def test_trained_weights_are_saved(self, tmp_path: Path) -> None:
        checkpoint = open_wav2vec2(small(tmp_path / "a"))
        model = load_wav2vec2(checkpoint, torch.float32, CPU, trainable=True)
        assert model.training
        model(WAVEFORM)[0].square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        save_wav2vec2(checkpoint, tmp_path / "b", model)
        after = AutoModelForCTC.from_pretrained(tmp_path / "b").eval()
        assert same(after, model.eval())
        assert not same(after, load(checkpoint))

    def test_a_new_head_for_another_vocabulary(self, tmp_path: Path) -> None:
        checkpoint = open_wav2vec2(small(tmp_path / "a"))
        model = load(checkpoint)
        model.set_head(torch.nn.Linear(32, len(FRENCH)))
        save_wav2vec2(replace(checkpoint, tokenizer=CTCTokenizer(FRENCH)), tmp_path / "b", model)
        assert same(AutoModelForCTC.from_pretrained(tmp_path / "b").eval(), model)
        opened = open_wav2vec2(tmp_path / "b")
        assert opened.tokenizer == CTCTokenizer(FRENCH)
        assert opened.config == model.config


class TestFiles:
    def test_all_names_of_the_weight_norm_give_one_weight(self, tmp_path: Path) -> None:
        """As published (weight_g), as saved today (parametrizations), and already folded."""
        wanted = load(open_wav2vec2(small(tmp_path / "m")))
        file = tmp_path / "m" / "model.safetensors"
        state = load_file(file)
        stem = "wav2vec2.encoder.pos_conv_embed.conv."
        magnitude = state.pop(f"{stem}parametrizations.weight.original0")
        direction = state.pop(f"{stem}parametrizations.weight.original1")
        save_file({**state, f"{stem}weight_g": magnitude, f"{stem}weight_v": direction}, file)
        assert same(load(open_wav2vec2(tmp_path / "m")), wanted)
        save_file({**state, f"{stem}weight": torch._weight_norm(direction, magnitude, 2)}, file)
        assert same(load(open_wav2vec2(tmp_path / "m")), wanted)

    @pytest.mark.parametrize("new_format", [True, False])
    def test_pickles_of_tensors(self, tmp_path: Path, new_format: bool) -> None:
        model = theirs("hubert-large")
        model.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        file = tmp_path / "pytorch_model.bin"
        torch.save(model.state_dict(), file, _use_new_zipfile_serialization=new_format)
        assert same(load(open_wav2vec2(tmp_path)), model)
        assert same(load(open_wav2vec2(file)), model)

    def test_a_pickle_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        small(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save({"lm_head.weight": print}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match="cannot be read as weights"):
            open_wav2vec2(tmp_path)

    def test_shards(self, tmp_path: Path) -> None:
        model = theirs("base")
        model.save_pretrained(tmp_path, max_shard_size="40KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert same(load(open_wav2vec2(tmp_path)), model)

    def test_a_single_file_beside_its_configuration(self, tmp_path: Path) -> None:
        model = theirs("large")
        model.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "step-7.safetensors")
        checkpoint = open_wav2vec2(tmp_path / "step-7.safetensors")
        assert checkpoint.name == "step-7"
        assert same(load(checkpoint), model)

    @pytest.mark.parametrize(
        ("kind", "their_class"),
        [("base", Wav2Vec2Model), ("large", Wav2Vec2ForPreTraining), ("hubert-base", HubertModel)],
    )
    def test_models_without_a_head(self, kind: str, their_class: Any, tmp_path: Path) -> None:
        model = their_class(theirs(kind).config).eval()
        model.save_pretrained(tmp_path / "m")
        checkpoint = open_wav2vec2(tmp_path / "m")
        assert checkpoint.config.vocab_size is None
        assert checkpoint.tokenizer is None
        save_wav2vec2(checkpoint, tmp_path / "n")
        network = getattr(model, "wav2vec2", model)
        again = type(network).from_pretrained(tmp_path / "n").eval()
        with torch.inference_mode():
            states, _ = load(checkpoint).states(WAVEFORM)
            assert (states - network(WAVEFORM).last_hidden_state).abs().max() < 1e-4
            assert (states - again(WAVEFORM).last_hidden_state).abs().max() < 1e-4
            assert (states - load(open_wav2vec2(tmp_path / "n")).states(WAVEFORM)[0]).abs().max() < 1e-4

    def test_the_mask_embedding_may_be_missing(self, tmp_path: Path) -> None:
        folder = small(tmp_path / "m", mask_time_prob=0.0)
        checkpoint = open_wav2vec2(folder)
        assert (load(checkpoint).encoder.mask_embedding == 0).all()
        save_wav2vec2(checkpoint, tmp_path / "n")
        _, report = Wav2Vec2ForCTC.from_pretrained(tmp_path / "n", output_loading_info=True)
        assert not any(report.values())


# A small model is loaded first, so that what the libraries set up once does not count.
_PROGRAM = """
import ctypes, re, sys
from pathlib import Path
import torch
from stapes.checkpoints.wav2vec2 import load_wav2vec2, open_wav2vec2

def mebibytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def load(path):
    return load_wav2vec2(open_wav2vec2(Path(path)), torch.float32, torch.device("cpu"))

load(sys.argv[1])
ctypes.CDLL(None).malloc_trim(0)
before = mebibytes("VmRSS")
model = load(sys.argv[2])
print(max(mebibytes("VmHWM"), mebibytes("VmRSS")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("format", ["safetensors", "pickle"])
def test_loading_takes_the_memory_of_the_weights_and_little_more(tmp_path: Path, format: str) -> None:
    config = replace(BASE, layers=6, vocab_size=32)
    network = Wav2Vec2(config).half()
    save_wav2vec2(Wav2Vec2Checkpoint("m", tmp_path, "wav2vec2", config, ()), tmp_path / "m", network)
    if format == "pickle":
        torch.save(load_file(tmp_path / "m" / "model.safetensors"), tmp_path / "m" / "pytorch_model.bin")
        (tmp_path / "m" / "model.safetensors").unlink()
    size = 4 * sum(parameter.numel() for parameter in network.parameters()) / 2**20
    command = [sys.executable, "-c", _PROGRAM, str(small(tmp_path / "small")), str(tmp_path / "m")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert size < float(result.stdout) < 1.15 * size


class TestRefusals:
    @pytest.mark.parametrize("kind", ["wavlm", "wav2vec2-conformer", "wav2vec2-bert", "whisper", None])
    def test_other_networks(self, kind: str | None, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="wav2vec2 and hubert are supported"):
            open_wav2vec2(change(small(tmp_path), model_type=kind))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
            ({"feat_extract_activation": "silu"}, "feat_extract_activation is 'silu'"),
            ({"conv_pos_batch_norm": True}, "conv_pos_batch_norm is True"),
            ({"feat_extract_norm": "batch"}, "feat_extract_norm is 'batch'"),
            ({"conv_dim": [24] * 6}, "not of one length"),
            ({"conv_stride": [0] * 7}, "not lists of positive"),
            ({"conv_kernel": 3}, "not lists of positive"),
            ({"num_attention_heads": 5}, "no multiple"),
            ({"hidden_size": "32"}, "hidden_size is '32'"),
            ({"layerdrop": 1.5}, "dropout"),
            ({"layer_norm_eps": 0}, "layer_norm_eps"),
            ({"adapter_attn_dim": 4}, "do_stable_layer_norm"),
            ({"do_stable_layer_norm": "yes"}, "do_stable_layer_norm is 'yes'"),
            ({"vocab_size": None}, "vocab_size"),
            ({"num_hidden_layers": 4}, "lacks the weights encoder.layers.3"),
            ({"num_hidden_layers": 2}, r"does not tell of, encoder\.layers\.2"),
        ],
    )
    def test_configurations(self, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=message):
            open_wav2vec2(change(small(tmp_path), **settings))

    def test_sizes_that_the_weights_have_not(self, tmp_path: Path) -> None:
        checkpoint = open_wav2vec2(change(small(tmp_path), intermediate_size=80))
        with pytest.raises(ModelError, match=r"mlp\.up\.weight has the shape \(64, 32\), expected \(80, 32\)"):
            load(checkpoint)

    def test_another_sample_rate(self, tmp_path: Path) -> None:
        small(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text('{"sampling_rate": 8000}')
        with pytest.raises(ModelError, match="8000 Hz"):
            open_wav2vec2(tmp_path)

    def test_a_tokenizer_with_more_tokens_than_the_model(self, tmp_path: Path) -> None:
        small(tmp_path)
        (tmp_path / "vocab.json").write_text(json.dumps({**ENGLISH, "Ä": 32}))
        with pytest.raises(ModelError, match="has 33 tokens but the model 32"):
            open_wav2vec2(tmp_path)

    def test_a_folder_without_weights_and_one_without_anything(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"config\.json is missing"):
            open_wav2vec2(tmp_path)
        small(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"no model\.safetensors and no pytorch_model\.bin"):
            open_wav2vec2(tmp_path)

    def test_damaged_weights(self, tmp_path: Path) -> None:
        small(tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
            open_wav2vec2(tmp_path)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        checkpoint = open_wav2vec2(small(tmp_path / "m"))
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="choose another folder"):
            save_wav2vec2(checkpoint, tmp_path / "file" / "n")


GERMAN = {token: id for id, token in enumerate([*MARKERS, *"abcdefghijklmnopqrstuvwxyzäöüß"])}
FRENCH = {token: id for id, token in enumerate([*MARKERS, *"abcdefghijklmnopqrstuvwxyzéèêàâçùœ'-"])}


@pytest.fixture
def mms(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with adapters and vocabularies as MMS has them, and the model of transformers in each language."""
    folder = tmp_path / "mms"
    models: dict[str, Any] = {}
    base = theirs("mms", vocab_size=len(GERMAN))
    for seed, (language, vocabulary) in enumerate({"deu": GERMAN, "fra": FRENCH, "eng": ENGLISH}.items()):
        model = theirs("mms", seed, vocab_size=len(vocabulary))
        weights = {name: value.detach().contiguous() for name, value in model._get_adapters().items()}
        model.load_state_dict({**base.state_dict(), **weights})
        models[language] = model
        if seed == 0:
            model.save_pretrained(folder)
        if language == "eng":
            torch.save(weights, folder / "adapter.eng.bin")
        else:
            save_file(weights, folder / f"adapter.{language}.safetensors")
    write_tokenizer(folder, {"deu": GERMAN, "fra": FRENCH, "eng": ENGLISH}, target_lang="deu")
    return folder, models


class TestLanguages:
    def test_each_language_has_its_adapters_head_and_vocabulary(self, mms: tuple[Path, dict[str, Any]]) -> None:
        folder, models = mms
        default = open_wav2vec2(folder)
        assert (default.language, default.languages) == ("deu", ("deu", "eng", "fra"))
        assert same(load(default), models["deu"])
        for language, vocabulary in (("deu", GERMAN), ("fra", FRENCH), ("eng", ENGLISH)):
            checkpoint = open_wav2vec2(folder, language=language)
            assert checkpoint.tokenizer is not None
            assert checkpoint.tokenizer.vocabulary == vocabulary
            assert checkpoint.config.vocab_size == len(vocabulary)
            assert same(load(checkpoint), models[language])
        assert not same(models["deu"], load(open_wav2vec2(folder, language="fra")))

    def test_a_loaded_model_changes_its_language(self, mms: tuple[Path, dict[str, Any]]) -> None:
        folder, models = mms
        checkpoint = open_wav2vec2(folder)
        model = load(checkpoint)
        for language in ("fra", "eng", "fra", "deu"):
            other = set_language(model, checkpoint, language)
            assert other.language == language
            assert model.config == other.config
            assert same(model, models[language])
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_languages_that_are_not_there(self, mms: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
        folder, models = mms
        checkpoint = open_wav2vec2(folder)
        model = load(checkpoint)
        with pytest.raises(UsageError, match="did you mean fra"):
            set_language(model, checkpoint, "fr")
        (folder / "adapter.fra.safetensors").unlink()
        with pytest.raises(UsageError, match="no adapter for the language 'fra'"):
            set_language(model, checkpoint, "fra")
        save_file({"lm_head.weight": torch.zeros(len(FRENCH), 31)}, folder / "adapter.fra.safetensors")
        with pytest.raises(ModelError, match=r"head\.weight has the shape"):
            set_language(model, checkpoint, "fra")
        assert same(model, models["deu"])
        small(tmp_path / "base")
        write_tokenizer(tmp_path / "base", ENGLISH)
        with pytest.raises(UsageError, match="knows no languages"):
            open_wav2vec2(tmp_path / "base", language="eng")

    def test_saved_in_one_language_transformers_changes_to_the_others(
        self, mms: tuple[Path, dict[str, Any]], tmp_path: Path
    ) -> None:
        folder, models = mms
        save_wav2vec2(open_wav2vec2(folder, language="fra"), tmp_path / "ours")
        shutil.rmtree(folder)
        opened = Wav2Vec2ForCTC.from_pretrained(tmp_path / "ours").eval()
        assert same(opened, models["fra"])
        opened.load_adapter("deu")
        assert same(opened, models["deu"])
        processor = Wav2Vec2Processor.from_pretrained(tmp_path / "ours")
        assert processor.tokenizer.target_lang == "fra"
        assert processor.tokenizer("é").input_ids == [FRENCH["é"]]
        for language in models:
            assert same(load(open_wav2vec2(tmp_path / "ours", language=language)), models[language])

    def test_a_trained_adapter_replaces_the_one_of_its_language(
        self, mms: tuple[Path, dict[str, Any]], tmp_path: Path
    ) -> None:
        folder, models = mms
        checkpoint = open_wav2vec2(folder, language="eng")
        model = load(checkpoint)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".adapter." in name:
                    parameter += 0.05
        save_wav2vec2(checkpoint, tmp_path / "ours", model)
        assert same(load(open_wav2vec2(tmp_path / "ours", language="eng")), model)
        assert not same(model, models["eng"])
        assert same(load(open_wav2vec2(tmp_path / "ours", language="deu")), models["deu"])


def test_a_language_of_the_vocabulary_alone(tmp_path: Path) -> None:
    """Models fine-tuned for one language have its vocabulary by name, and their adapters among the weights."""
    model = theirs("mms", vocab_size=len(GERMAN))
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, {"deu": GERMAN}, target_lang="deu")
    for language in (None, "deu"):
        checkpoint = open_wav2vec2(tmp_path, language=language)
        assert (checkpoint.language, checkpoint.languages) == ("deu", ())
        assert same(load(checkpoint), model)
