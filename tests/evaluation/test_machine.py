"""Facts of the machine: stable, complete, and naming nobody."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys

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
    # In a process of its own: in this one the block may fit into what earlier tests have left of the heap.
    program = """
import numpy as np
from stapes.devices import machine
np.ones(50_000_000)  # 400 MB, freed at once: the peak that is to be forgotten
machine.reset_peak_memory()
before = machine.peak_rss_bytes()
block = np.ones(25_000_000)
print(before, machine.peak_rss_bytes(), block.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after, size = done.stdout.split()
    if before == "None":
        pytest.skip("this system does not tell a process's peak memory")
    if int(before) > 400_000_000:
        pytest.skip("this system does not let a process forget its peak")
    assert int(after) >= int(before) + 0.9 * int(size)


def test_a_device_without_a_counter_gives_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_energy_counter", lambda gpu: None)
    assert machine.EnergyMeter(None).joules() is None
    readings = iter([10.0, 12.5, 3.0])
    monkeypatch.setattr(machine, "_energy_counter", lambda gpu: lambda: next(readings))
    meter = machine.EnergyMeter(None)
    assert meter.joules() == 2.5
    assert meter.joules() is None  # the counter began anew
