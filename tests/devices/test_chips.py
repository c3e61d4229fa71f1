"""The table of GPUs: consistent, found by full names only, and silent about what it does not know."""

from __future__ import annotations

import pytest

from stapes.devices.chips import ARCHITECTURES, CHIPS, find_chip


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.names[0])
def test_rows_are_complete_and_possible(chip) -> None:
    assert chip.source
    assert chip.names
    assert chip.peak_tflops.keys() <= {"fp32", "fp16", "bf16", "fp8", "int8"}
    assert chip.peak_tflops["fp16"] > chip.peak_tflops["fp32"] > 1
    assert ("fp8" in chip.peak_tflops) == (chip.fp8 is not None)
    if chip.matrix is None or chip.architecture in ("sm_70", "sm_75"):
        assert "bf16" not in chip.peak_tflops
    assert all(find_chip(chip.architecture, name) is chip for name in chip.names)
    # More than 10 operations for a byte of fp16, or a figure slipped a digit.
    assert chip.bandwidth_gb_s is None or 10 < chip.peak_tflops["fp16"] * 1000 / chip.bandwidth_gb_s < 450


def test_names_are_unique() -> None:
    names = [(chip.architecture, name) for chip in CHIPS for name in chip.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("architecture", "name", "tflops"),
    [
        ("gfx942:sramecc+:xnack-", "AMD Instinct MI300X", 1307.4),
        ("gfx1100", "Radeon RX 7900 XTX", 122.8),
        ("gfx1100", "AMD Radeon RX 7900 XT", 103.2),
        ("gfx1151", "AMD Radeon(TM) 8060S Graphics", 59.4),
        ("sm_90", "NVIDIA H200", 989.4),
    ],
)
def test_names_as_drivers_write_them(architecture: str, name: str, tflops: float) -> None:
    chip = find_chip(architecture, name)
    assert chip is not None
    assert chip.peak_tflops["fp16"] == tflops


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gfx942", "AMD Instinct MI308X"),
        ("gfx1201", "AMD Radeon RX 9070 GRE"),
        ("sm_89", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("sm_90", "NVIDIA H200 MIG 1g.18gb"),
        ("gfx1030", "AMD Radeon RX 7900 XTX"),  # by an override: the name belongs to another architecture
    ],
)
def test_a_sibling_gets_no_figures_of_another(architecture: str, name: str) -> None:
    chip = find_chip(architecture, name)
    assert chip is ARCHITECTURES[architecture]
    assert (dict(chip.peak_tflops), chip.bandwidth_gb_s, chip.memory_gb, chip.names) == ({}, None, None, ())


def test_an_unknown_architecture_is_unknown() -> None:
    assert find_chip("gfx1399", "AMD Radeon RX 10900") is None


def test_the_kinds_of_fp8() -> None:
    kinds = {name: chip.fp8 for name, chip in ARCHITECTURES.items()}
    assert (kinds["gfx942"], kinds["gfx950"], kinds["gfx1201"], kinds["sm_89"]) == ("fnuz", "ocp", "ocp", "ocp")
    assert kinds["gfx90a"] is kinds["gfx1100"] is kinds["gfx1030"] is kinds["sm_86"] is None
