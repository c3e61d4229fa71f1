"""For each machine that users are known to have: the doctor names the cause and the fix."""

from __future__ import annotations

import re

import pytest
from engine_cases import ENGINE_CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_cases import MACHINE_CASES
from machines import CONTAINER, CPU, GIB, Case, amd, kfd, machine, nodes, nvidia, radeon, strix

from stapes.devices.readings import Reading
from stapes.diagnostics.doctor import findings
from stapes.diagnostics.facts import Facts, PciGpu, ToolOutput, Torch

GARBAGE = "\x00\ufffd{]}"
NO_AMD_SMI = ToolOutput(False)
CASES = [*MACHINE_CASES, *ENGINE_CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cause_and_fix_are_named(case: Case) -> None:
    found = findings(case.facts)
    matching = [
        finding
        for finding in found
        if finding.level == case.level
        and re.search(case.cause, f"{finding.subject} {finding.what}", re.IGNORECASE)
        and re.search(case.fix, finding.fix)
    ]
    assert matching, "\n".join(map(str, found))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_is_wrong_has_a_fix(case: Case) -> None:
    for finding in findings(case.facts):
        assert finding.what
        assert finding.fix or finding.level in ("ok", "note"), finding


@pytest.mark.parametrize(
    "facts",
    [
        machine(),
        radeon(),
        nvidia(),
        amd("gfx942", "AMD Instinct MI300X", kfd=tuple(kfd("gfx942", node, 192 * GIB) for node in range(1, 9))),
        amd("gfx950", "AMD Instinct MI355X"),
        amd("gfx90a", "AMD Instinct MI210"),
        amd("gfx1201", "AMD Radeon RX 9070 XT"),
        strix(),
        radeon(system=CONTAINER),
        radeon(environment={"ROCR_VISIBLE_DEVICES": "0", "HSA_ENABLE_SDMA": "1", "AMD_LOG_LEVEL": "0"}),
        radeon(environment={"CUDA_VISIBLE_DEVICES": "0"}, amd_smi=NO_AMD_SMI),
        # Graphics inside the processor of an NVIDIA machine are no AMD machine.
        nvidia(pci=(*nvidia().pci, PciGpu("0000:7a:00.0", "amd", "0x164e", "amdgpu")), kfd=(kfd("gfx1036"),),
               nodes=(*nvidia().nodes, *nodes())),
        machine(pci=(PciGpu("0000:7a:00.0", "amd", "0x164e", "amdgpu"),), kfd=(kfd("gfx1036"),), nodes=nodes()),
        machine(pci=(PciGpu("0000:01:00.0", "amd", "0x744c", "vfio-pci"),)),
    ],
    ids=lambda facts: "-".join([*facts.amd_architectures[:1], *(["nvidia"] if facts.has_nvidia else [])]) or "cpu",
)  # fmt: skip
def test_a_healthy_machine_has_nothing_to_mend(facts: Facts) -> None:
    assert [finding for finding in findings(facts) if finding.level in ("problem", "warning")] == []


def test_an_mi300x_computes_in_its_own_fp8() -> None:
    (found,) = [finding for finding in findings(amd("gfx942", "AMD Instinct MI300X")) if "fnuz" in finding.what]
    assert found.level == "note"


def test_gpus_have_their_product_names_where_anything_tells_them() -> None:
    card = radeon(readings=(Reading(0, "AMD Radeon RX 7900 XTX", "sysfs", "0000:01:00.0"),))
    slice_ = nvidia(
        nvidia_smi=ToolOutput(False), readings=(Reading(0, "NVIDIA H200", "nvml", memory_total_bytes=141 * GIB),)
    )
    assert any(finding.what.startswith("AMD Radeon RX 7900 XTX gfx1100, 24 GiB") for finding in findings(card))
    assert any(finding.what.startswith("NVIDIA H200, 141 GiB, driver 580") for finding in findings(slice_))


def test_nothing_known_at_all() -> None:
    found = findings(Facts())
    assert {finding.level for finding in found} <= {"ok", "note"}


TEXTS = st.one_of(st.just(""), st.just(GARBAGE), st.just("7.2"), st.just("gfx1030"), st.text(max_size=20))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.builds(
        Facts,
        environment=st.dictionaries(
            st.sampled_from(
                ["HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_7", "HIP_VISIBLE_DEVICES", "MIOPEN_FIND_MODE"]
            ),
            TEXTS,
        ),
        packages=st.dictionaries(TEXTS, TEXTS, max_size=3),
    )
)
def test_no_machine_is_too_strange(facts: Facts) -> None:
    for finding in findings(facts):
        assert finding.level in ("ok", "note", "warning", "problem")


def test_the_cpu_alone_is_no_failure_of_the_gpu() -> None:
    facts = radeon(torch=Torch("2.13.0+rocm7.2", "7.2", None, False, 0, (), (CPU,), "", None))
    assert any("sees no GPU, though one is here" in finding.what for finding in findings(facts))
