"""Names of devices, and what each can compute in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stapes.devices import backend
from stapes.devices.backend import Device, resolve, usable_dtypes
from stapes.devices.chips import find_chip
from stapes.errors import DeviceError, UsageError


def gpu(architecture: str, name: str = "some GPU", kind: backend.Backend = "rocm") -> Device:
    return Device(torch.device("cuda", 0), kind, name, 16 << 30, architecture, find_chip(architecture, name))


@pytest.mark.parametrize(
    ("architecture", "bf16", "fp8", "named"),
    [
        ("gfx942", "native", "native", "fnuz"),
        ("gfx950", "native", "native", "OCP"),
        ("gfx1201", "native", "native", "OCP"),
        ("gfx90a", "native", "no", "gfx90a"),
        ("gfx1100", "native", "no", "gfx1100"),
        ("gfx1030", "slow", "no", "gfx1030"),
        ("sm_90", "native", "native", "OCP"),
        ("sm_80", "native", "no", "sm_80"),
        ("gfx1399", "no", "no", "gfx1399"),
    ],
)
def test_dtypes_of_architectures(architecture: str, bf16: str, fp8: str, named: str) -> None:
    found = usable_dtypes(gpu(architecture))
    assert (found["bf16"][0], found["fp8"][0]) == (bf16, fp8)
    assert named in found["fp8"][1]
    assert found["fp32"][0] == found["fp16"][0] == "native"
    assert all(reason for use, reason in found.values() if use != "native")


@pytest.fixture
def radeon(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="AMD Radeon RX 7900 XTX", total_memory=24 << 30, gcnArchName="gfx1100:xnack-", major=11, minor=0
    )
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    monkeypatch.setattr(backend.rocm, "apply_defaults", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)


@pytest.mark.usefixtures("radeon")
@pytest.mark.parametrize("name", ["auto", "cuda", "rocm", "hip", "HIP:0"])
def test_an_amd_gpu_answers_to_all_its_names(name: str) -> None:
    device = resolve(name)
    assert (device.backend, device.architecture, device.torch) == ("rocm", "gfx1100", torch.device("cuda", 0))
    assert device.chip is not None
    assert device.chip.bandwidth_gb_s == 960


@pytest.mark.usefixtures("radeon")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="1 GPUs"):
        resolve("cuda:1")


def test_defaults_are_set_before_a_gpu_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(backend.rocm, "apply_defaults", lambda: order.append("defaults"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(order.append("asked")))
    resolve("auto")
    assert order == ["defaults", "asked"]


def test_names_that_mean_nothing() -> None:
    for name in ("gpu", "cuda:x", "cpu:1", ""):
        with pytest.raises(UsageError):
            resolve(name)
