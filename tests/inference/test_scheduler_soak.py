"""A few windows of the soak (``soak.py``), so that it works when it is needed, and a check that it would notice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import soak
from soak import Rest, growth

from stapes.inference.ingest import Job
from stapes.inference.requests import Request

pytestmark = pytest.mark.timeout(300)


def test_a_short_soak_loses_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # A few rounds are too short to tell a leak from what the allocator keeps: the objects must tell.
    for what in ("resident", "heap"):
        monkeypatch.setitem(soak.LIMITS, what, (1.0, 1e9))
    arguments = "--windows 30 --rounds 3 --random small --tokens 16 --callers 3 --slots 4 --longest 15 --device cpu"
    code = soak.main(arguments.split())
    said = capsys.readouterr().out
    assert code == 0, said
    assert "every call was answered" in said


def test_growth_is_noticed_and_scatter_is_not() -> None:
    def rests(leak: int) -> list[Rest]:
        scatter = [0, 9, 3, 12, 6, 1]
        grown = [600_000_000 + (scatter[i % 6] * 1_000_000 + i * leak) for i in range(24)]
        return [Rest(100, 1.0, resident, 400_000_000, 100_000, None, 1_000_000, 2_000_000) for resident in grown]

    assert not growth(rests(0))
    assert not growth(rests(1000))
    (line,) = growth(rests(5_000_000))
    assert line.startswith("resident grew")


def test_a_lost_slot_and_a_lost_request_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--windows 4 --rounds 1 --random small --tokens 16 --callers 1 --slots 2 --longest 5 --device cpu"
    genuine = soak.Watch.over

    def over(watch: soak.Watch, engine: object) -> soak.Watch:
        watch.occupied = 1
        return genuine(watch, engine)

    with monkeypatch.context() as patched:
        patched.setattr(soak.Watch, "over", over)
        assert soak.main(arguments.split()) == 1
        assert "1 slots are taken" in capsys.readouterr().out
    genuine_deliver = Request.deliver

    def deliver(self: Request, jobs: Sequence[Job]) -> None:
        genuine_deliver(self, jobs[:-1])

    monkeypatch.setattr(Request, "deliver", deliver)
    assert soak.main(arguments.split()) == 1
    assert "WRONG" in capsys.readouterr().out
