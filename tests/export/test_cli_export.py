"""``stapes export`` and ``stapes quantize`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from borrowed_tokenizer import a_tokenizer
from onnx import TensorProto
from small_whisper import random_weights, write_huggingface

from ctc_models import LETTERS, babble, save
from stapes.checkpoints.formats import WhisperCheckpoint
from stapes.checkpoints.onnx_folder import read_onnx_folder
from stapes.checkpoints.spectrogram_models import save_spectrogram_model
from stapes.cli.main import main
from stapes.export import engines
from stapes.export.target import check_target
from stapes.loading import load
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig
from stapes.text.ctc_tokenizer import CTCTokenizer

SECOND = 16_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model"
    save(folder, layers=1)
    return folder


def save_spectrograms(folder: Path) -> None:
    """A small random Conformer with CTC."""
    encoder = ConformerConfig(width=32, layers=1, heads=2, mlp_width=48, subsampling_channels=16)
    config = CTCConfig(encoder, vocab_size=len(LETTERS))
    torch.manual_seed(0)
    save_spectrogram_model(folder, config, CTC(config).state_dict(), CTCTokenizer(LETTERS))


@pytest.fixture(scope="module")
def half(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict]:
    """The model in half precision for MIGraphX, whose tool is not here; the exit code, and what was printed."""
    out, printed = tmp_path_factory.mktemp("half") / "out", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(model))
        patch.setattr("stapes.cli.terminal.Terminal.out", lambda _, text: printed.append(text))
        code = main(["export", str(model), "--to", "migraphx", "--architecture", "gfx942", "-o", str(out), "--json"])
    return out, code, json.loads(printed[0])


def test_a_missing_tool_leaves_its_commands(half: tuple[Path, int, dict]) -> None:
    out, code, printed = half
    assert code == 3
    (engine,) = printed["engines"]
    assert "migraphx-driver is not installed" in engine["failure"]
    script = (out / "build-migraphx.sh").read_text()
    assert "--gpu-arch gfx942 --fp16 --input-dim @waveform 8 480000 --input-dim @lengths 8 --binary" in script


def test_half_precision_is_near_and_runs(half: tuple[Path, int, dict], model: Path) -> None:
    out, _, printed = half
    assert read_onnx_folder(out).dtype == "float16"
    assert printed["precision"] == "fp16"
    assert 1e-5 < printed["checked"]["ctc"]["error"] <= printed["checked"]["ctc"]["tolerance"]
    ours, theirs = (load(folder, device="cpu") for folder in (model, out))
    texts = [each.transcribe(babble(4.0, 3), sample_rate=SECOND, vad=False).text for each in (ours, theirs)]
    assert len(texts[0]) > 20
    assert texts[0][:10] == texts[1][:10]


def test_a_whisper_in_half_precision_for_a_vendors_tool(
    whisper: WhisperCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    assert main(["export", str(whisper.path), "--to", "tensorrt", "-o", str(out), "--json"]) == 3
    told = capfd.readouterr()
    printed = json.loads(told.out)
    assert printed["precision"] == "fp16"
    assert all(0 < each["error"] <= each["tolerance"] for each in printed["checked"].values())
    assert (out / "build-tensorrt.sh").read_text().count("--fp16") == len(printed["engines"]) == 4
    assert "trtexec is not installed" in told.err
    assert "torch" not in told.err
    graph = onnx.load(str(out / "encoder.onnx"), load_external_data=False).graph
    assert [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)] == [
        TensorProto.FLOAT,  # a spectrogram is computed in float32
        TensorProto.FLOAT16,
    ]
    assert load(out, device="cpu").transcribe(babble(3.0, 1), sample_rate=SECOND, vad=False, language="en").text
    check_target(out)  # with what the tool's step wrote, it is still an export


def test_a_spectrograms_frames_are_compiled_for_half_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_spectrograms(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["export", str(tmp_path / "model"), "--windows", "4", "-o", str(tmp_path / "out"), "--to"]
    assert main([*words, "migraphx"]) == 3
    script = (tmp_path / "out" / "build-migraphx.sh").read_text()
    assert "--input-dim @mel 4 80 3000 --input-dim @lengths 4" in script
    monkeypatch.delitem(engines.SIZES, "frames")  # type: ignore[arg-type]
    words[words.index("-o") + 1] = str(tmp_path / "another")
    assert main([*words, "migraphx"]) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_huggingface_layout_of_a_whisper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_huggingface(tmp_path / "model", random_weights())
    (folder / "tokenizer.json").symlink_to(a_tokenizer())
    assert main(["export", str(folder), "--to", "huggingface", "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "whisper"
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["export", "{model}"], "-o FOLDER"),
        (["export", "{model}", "-o", "{model}"], "holds the model"),
        (["export", "{model}", "-o", "{model}/.."], "holds the model"),
        (["export", "{model}", "-o", "out", "--architecture", "gfx942"], "--to migraphx"),
        (["export", "{model}", "-o", "out", "--to", "huggingface", "--precision", "fp16"], "leave --precision out"),
        (["export", "{model}", "-o", "out", "--to", "tensorrt", "--windows", "0"], "--windows is 0"),
        (["quantize", "{model}"], "-o FOLDER"),
        (["quantize", "{model}", "-o", "{model}"], "holds the model"),
        (["quantize", "{model}", "-o", "out", "--limit", "0"], "--limit is 0"),
        (["quantize", "{model}", "-o", "out", "--sensitive", "-1"], "--sensitive"),
        (["quantize", "{model}", "-o", "out", "--manifest", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_done(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.format(model=model) for word in words]) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert (model / "config.json").is_file()
