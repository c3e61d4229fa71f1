"""Options and markers of the whole suite."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from shared_data import DATA

# How long an example takes says nothing where others use the same processors.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's `command &` has Ctrl-C ignored, by all processes that tests begin too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accuracy", action="store_true", help="run the long comparisons against kept reference transcripts too"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = pytest.mark.skip(reason="a long comparison; run it with --accuracy")
    no_data = pytest.mark.skip(reason=f"the recordings are not here: {DATA} is absent")
    for item in items:
        if item.get_closest_marker("accuracy") and not config.getoption("--accuracy"):
            item.add_marker(long)
        if item.get_closest_marker("data") and not DATA.is_dir():
            item.add_marker(no_data)
