from __future__ import annotations

import os

import pytest
from made_bulk import HERE


@pytest.fixture(autouse=True)
def workers_find_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are begun here can import what the tests are made of."""
    places = [str(HERE), str(HERE.parent), str(HERE.parent / "audio"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
