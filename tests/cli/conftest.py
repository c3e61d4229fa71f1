"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest
from fake_recognizer import FakeRecognizer

import stapes


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRecognizer:
    """``stapes.load`` answers with this recogniser."""
    recognizer = FakeRecognizer()
    # Not setattr: looking the old value up would import the real recogniser.
    monkeypatch.setitem(vars(stapes), "load", recognizer.load)
    return recognizer
