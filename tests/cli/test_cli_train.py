"""What `stapes train` says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from stapes.cli import train
from stapes.training.recipes import recipe
from stapes.training.trainer import Result


@pytest.mark.parametrize(("wer", "useless"), [(0.25, False), (0.9, True), (1.0, True), (None, False)])
def test_a_model_that_writes_nothing_useful_is_told(wer: float | None, useless: bool) -> None:
    result = Result(Path("runs/mine/model"), 80, wer, wer, 58.0, False)
    text = train._summary(result, recipe("ctc"))
    assert ("next to nothing useful" in text) == useless
    assert ("dev: WER" in text) == (wer is not None)
    assert "stapes transcribe --model runs/mine/model" in text
