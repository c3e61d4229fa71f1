"""An option of the guard against work that grows."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-work", action="store_true", help="write the counts of test_work_done anew")
