"""Exported CTC models: the same text and times as PyTorch's, in windows and batches; what differs is not written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stapes
from ctc_models import LETTERS, babble, load, save
from stapes.checkpoints import catalog
from stapes.checkpoints.spectrogram_models import save_spectrogram_model
from stapes.checkpoints.wav2vec2 import load_wav2vec2, open_wav2vec2, save_wav2vec2
from stapes.errors import ModelError, UsageError
from stapes.export import ctc as export_ctc
from stapes.export.onnx import export_onnx
from stapes.export.weights import WeightsFile
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig
from stapes.text.ctc_tokenizer import CTCTokenizer

SECOND = 16_000


def test_the_same_text_as_pytorch(ctc: tuple[Path, Path]) -> None:
    clips = [babble(seconds, seed) for seed, seconds in enumerate((0.02, 1.3, 4.0, 41.0))]
    ours, theirs = (load(folder) for folder in ctc)
    alone: dict[float, str] = {}
    for clip in clips:
        both = [each.transcribe(clip, sample_rate=SECOND, vad=False, word_timestamps=True) for each in (ours, theirs)]
        assert both[0].text == both[1].text
        words = [
            [(word.word, word.start, word.end) for part in each.segments for word in part.words or ()] for each in both
        ]
        assert words[0] == words[1]
        alone[round(both[0].duration, 2)] = both[0].text
    assert len(alone[41.0]) > 100
    together = theirs.transcribe_many(clips, sample_rate=SECOND, vad=False)
    assert {round(each.duration, 2): each.text for each in together} == alone


def test_several_devices_write_what_one_writes(ctc: tuple[Path, Path]) -> None:
    clips = [babble(seconds, seed) for seed, seconds in enumerate((1.3, 41.0, 2.0))]
    found: list[dict[float, str]] = []
    for device in ("cpu", "cpu,cpu"):
        with stapes.load(ctc[1], device=device, threads=2) as recognizer:
            results = recognizer.transcribe_many(clips, sample_rate=SECOND, vad=False)
            found.append({round(each.duration, 2): each.text for each in results})
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_a_known_text_is_aligned_alike(ctc: tuple[Path, Path]) -> None:
    clip = babble(4.0, 3)
    ours, theirs = (load(folder) for folder in ctc)
    text = ours.transcribe(clip, sample_rate=SECOND, vad=False).text
    both = [each.align(clip, text, sample_rate=SECOND) for each in (ours, theirs)]
    times = [[word.start for part in each.segments for word in part.words or ()] for each in both]
    assert times[0] == pytest.approx(times[1], abs=0.021)


def test_padding_changes_no_row(ctc: tuple[Path, Path]) -> None:
    model = load(ctc[1]).family.model  # type: ignore[attr-defined]
    clips = [babble(seconds, 5) for seconds in (3.0, 1.1)]
    batch = np.zeros((2, len(clips[0])), np.float32)
    for row, clip in zip(batch, clips, strict=True):
        row[: len(clip)] = clip
    lengths = torch.tensor([len(clip) for clip in clips])
    logits, counts = model(torch.from_numpy(batch), lengths)
    alone, count = model(torch.from_numpy(clips[1])[None], lengths[1:])
    assert counts[1] == count[0] == alone.shape[1]
    assert torch.allclose(logits[1, : counts[1]], alone[0], atol=1e-5)


def test_a_graph_that_differs_is_not_written(
    ctc: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(network: Any, dtype: torch.dtype, inputs: Any, weights: WeightsFile) -> dict[str, str]:
        for file in ctc[1].iterdir():
            shutil.copyfile(file, weights.folder / file.name)
        return {"ctc": "ctc.onnx"}

    monkeypatch.setattr(export_ctc, "write_ctc", another)
    save(tmp_path / "model", "group")
    export_onnx("model", catalog.Location(tmp_path / "model"), tmp_path / "same")
    checkpoint = open_wav2vec2(tmp_path / "model")
    network = load_wav2vec2(checkpoint, torch.float32, torch.device("cpu"))
    assert network.head is not None
    network.head.weight[5] += 1.0  # one letter
    save_wav2vec2(checkpoint, tmp_path / "model", network)
    with pytest.raises(ModelError, match="differs from PyTorch"):
        export_onnx("model", catalog.Location(tmp_path / "model"), tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "same"}


def test_what_is_exported_already_is_not_exported_again(ctc: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exported already"):
        export_onnx("onnx", catalog.Location(ctc[1]), tmp_path / "out")
    with pytest.raises(UsageError, match="fp32 or fp16"):
        export_onnx("model", catalog.Location(ctc[0]), tmp_path / "out", precision="int8")


def test_models_over_spectrograms(tmp_path: Path) -> None:
    encoder = ConformerConfig(
        width=32, layers=1, heads=2, mlp_width=48, subsampling_channels=16, normalize_recordings=True
    )
    config = CTCConfig(encoder, vocab_size=len(LETTERS))
    torch.manual_seed(0)
    network = CTC(config).eval()
    network.head.weight.data.normal_()
    network.head.bias.data[1:4] -= 100.0  # markers
    save_spectrogram_model(tmp_path / "model", config, network.state_dict(), CTCTokenizer(LETTERS))
    report = export_onnx("model", catalog.Location(tmp_path / "model"), tmp_path / "onnx")
    assert report.kind == "stapes-ctc"
    ours, theirs = (load(tmp_path / folder) for folder in ("model", "onnx"))
    assert theirs.family.parameters == ours.family.parameters
    for seconds in (0.05, 2.0, 33.0):
        clip = babble(seconds, 1)
        texts = [each.transcribe(clip, sample_rate=SECOND, vad=False).text for each in (ours, theirs)]
        assert texts[0] == texts[1]
    assert len(texts[0]) > 4
