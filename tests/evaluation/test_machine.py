"""Facts of the machine: stable, complete, and naming nobody."""

from __future__ import annotations

import getpass
import json
import platform

import numpy as np
import pytest

from stapes.devices import machine


def test_facts_are_json_stable_and_name_neither_machine_nor_user() -> None:
    facts = machine.facts()
    text = json.dumps(facts)
    assert json.loads(text) == facts == machine.facts()
    assert facts["cores"] == machine.available_cores() >= 1
    assert facts["versions"]["torch"]
    for name in (platform.node(), getpass.getuser()):
        assert len(name) < 4 or name == "root" or name not in text


def test_peak_memory_counts_from_the_reset() -> None:
    machine.reset_peak_memory()
    before = machine.peak_rss_bytes()
    if before is None:
        pytest.skip("this system does not tell a process's peak memory")
    block = np.ones(25_000_000)  # 200 MB
    assert machine.peak_rss_bytes() >= before + 0.9 * block.nbytes  # type: ignore[operator]


def test_a_device_without_a_counter_gives_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_energy_counter", lambda gpu: None)
    assert machine.EnergyMeter(None).joules() is None
    readings = iter([10.0, 12.5, 3.0])
    monkeypatch.setattr(machine, "_energy_counter", lambda gpu: lambda: next(readings))
    meter = machine.EnergyMeter(None)
    assert meter.joules() == 2.5
    assert meter.joules() is None  # the counter began anew
