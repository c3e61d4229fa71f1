"""When a signal ends the work, and when it waits."""

from __future__ import annotations

import os
import signal

import pytest

from stapes.cli.interrupts import interruptible, shielded


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_interrupts_and_the_second_would_kill(number: int) -> None:
    before = signal.getsignal(number)
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(number) == before


def test_a_shielded_step_is_finished_first() -> None:
    steps: list[str] = []

    def work() -> None:
        with shielded():
            with shielded():
                os.kill(os.getpid(), signal.SIGINT)
                steps.append("inner")
            steps.append("outer")
        steps.append("never")

    with interruptible(), pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["inner", "outer"]


def test_a_background_job_goes_on_ignoring_what_it_was_told_to_ignore() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
