"""The gate that compiles kernels for GPUs that are not here: what it lets through, and what it stops."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import made_kernels
import pytest

from stapes.cli.main import main
from stapes.errors import DeviceError, UsageError
from stapes.kernels import compile as gate
from stapes.kernels.compile import Outcome, check, compile_all, compile_case, kernel_modules, triton_refusal
from stapes.kernels.targets import TARGETS, nearest_target

pytest.importorskip("triton", reason="Triton is not installed")

GFX1100, GFX90A, SM_90 = TARGETS["gfx1100"], TARGETS["gfx90a"], TARGETS["sm_90"]
ISSUE = {"gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1151", "gfx1201", "sm_90"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))  # the processes of the pool find made_kernels
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def made(**options) -> list[Outcome]:
    return compile_all(["gfx1100"], modules=["made_kernels"], workers=1, **options)


def test_the_table_has_every_target_of_the_project():
    assert set(TARGETS) == ISSUE


@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_is_compiled_or_left_out_with_a_reason_for_every_target(name):
    for module in kernel_modules():
        cases = list(sys.modules[module].compile_cases(TARGETS[name]))
        assert cases, f"{module} says nothing of {name}"
        assert len({(case.name, case.dtype) for case in cases}) == len(cases), f"{module} has two cases of one name"
        assert all(case.skip is None or len(case.skip) > 5 for case in cases)


@pytest.mark.parametrize("name", TARGETS)
def test_a_good_kernel_passes_for_every_target(name):
    target = TARGETS[name]
    facts = compile_case(made_kernels.product, target)
    assert check(made_kernels.product, target, facts) == ()
    assert facts.mach == target.mach
    assert bool(facts.matrix) == ("fp16" in target.matrix)
    assert facts.registers is None or 0 < facts.registers <= 512


@pytest.mark.parametrize("target", [GFX1100, SM_90], ids=lambda target: target.name)
def test_a_kernel_that_spills_fails(target):
    case = made_kernels.spilling if target.is_amd else made_kernels.spilling_on_nvidia
    facts = compile_case(case, target)
    if facts.spills is None:
        pytest.skip("this Triton brings no assembler to ask")
    assert any("spilled" in problem for problem in check(case, target, facts)), facts


def test_a_kernel_that_wants_more_lds_than_there_is_fails():
    problems = check(made_kernels.greedy, GFX90A, compile_case(made_kernels.greedy, GFX90A))
    assert any("of LDS, 65536 are there" in problem for problem in problems)


@pytest.mark.parametrize("name", TARGETS)
def test_a_product_without_matrix_instructions_fails_where_the_chip_has_them(name):
    problems = check(made_kernels.pretender, TARGETS[name], compile_case(made_kernels.pretender, TARGETS[name]))
    assert bool(problems) == ("fp16" in TARGETS[name].matrix)


def test_each_limit_is_checked_by_itself():
    facts = compile_case(made_kernels.good, GFX1100)
    bad = {
        "machine": replace(facts, mach=0x4A),
        "LDS": replace(facts, lds_bytes=65_537),
        "vector registers spilled": replace(facts, spills=1, scratch_bytes=4),
        "scalar registers spilled": replace(facts, scalar_spills=1),
        "scratch": replace(facts, scratch_bytes=16),
    }
    assert check(made_kernels.good, GFX1100, facts) == ()
    for words, changed in bad.items():
        (problem,) = check(made_kernels.good, GFX1100, changed)
        assert words in problem


def test_what_passed_is_not_compiled_again_until_something_changes(monkeypatch):
    monkeypatch.setenv("MADE_KERNELS", "good,left_out")
    first, again, fresh = made(), made(), made(use_cache=False)
    assert [outcome.is_cached for outcome in first + again + fresh] == [False, False, True, False, False, False]
    assert first[0].facts == again[0].facts == fresh[0].facts
    assert [outcome.skipped for outcome in again] == [None, "no bf16 arithmetic"]
    monkeypatch.setattr(made_kernels, "good", replace(made_kernels.good, constants={"BLOCK": 256, "BY": 5.0}))
    assert not made()[0].is_cached


def test_a_damaged_cache_is_compiled_anew(monkeypatch):
    monkeypatch.setenv("MADE_KERNELS", "good")
    (before,) = made()
    (kept,) = gate.cache_folder().glob("*.json")
    for damage in ("", '{"mach": 1', "[]", '{"mach": 65}', "\0"):
        kept.write_text(damage)
        assert gate._read(kept) is None
    (after,) = made()
    assert (after.facts, after.is_cached) == (before.facts, False)
    assert gate._read(kept) == before.facts


def test_a_record_stands_in_for_an_empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MADE_KERNELS", "good,left_out")
    record = tmp_path / "compiled.txt"
    record.write_text("of-another-kernel\n")
    (first, _) = made(record=record)
    kept = record.read_text().split()
    assert len(kept) == 2
    assert "of-another-kernel" in kept
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    (again, _) = made(record=record)
    assert (first.is_cached, again.is_cached, again.problems) == (False, True, ())
    monkeypatch.setenv("MADE_KERNELS", "product,spilling")
    assert [outcome.is_cached for outcome in made(record=record)] == [False, False]
    assert len(record.read_text().split()) == 3


def test_what_fails_is_not_remembered(monkeypatch):
    monkeypatch.setenv("MADE_KERNELS", "good,spilling")
    for _ in range(2):
        good, spilling = made()
        assert not good.problems
        assert spilling.problems
        assert not spilling.is_cached


def test_a_compiler_that_crashes_fails_its_own_kernel_only(monkeypatch):
    monkeypatch.setenv("MADE_KERNELS", "good")
    monkeypatch.setenv("CRASH_FOR", "gfx942")
    outcomes = compile_all(["gfx90a", "gfx942", "gfx1100"], modules=["made_kernels"], workers=2)
    problems = {outcome.target: outcome.problems for outcome in outcomes}
    assert problems == {"gfx90a": (), "gfx942": ("Triton's compiler crashed",), "gfx1100": ()}


def test_versions_of_triton_that_refuse_a_target_leave_it_out():
    assert triton_refusal(TARGETS["gfx1030"], "3.9.0")
    assert triton_refusal(TARGETS["gfx1030"], "4.0.0+git1")
    assert not triton_refusal(TARGETS["gfx1030"], "3.8.0")
    assert not triton_refusal(TARGETS["gfx1100"], "3.9.0")


@pytest.mark.parametrize(
    ("architecture", "like"),
    [("gfx90a:sramecc+:xnack-", "gfx90a"), ("gfx1101", "gfx1100"), ("gfx1200", "gfx1201"), ("gfx1032", "gfx1030"),
     ("gfx908", "gfx90a"), ("sm_80", "sm_90"), ("sm_120", "sm_90"), ("gfx1300", None), ("gfx803", None), (None, None)],
)  # fmt: skip
def test_architectures_beside_the_table_get_the_tiles_of_their_family(architecture, like):
    target = nearest_target(architecture)
    assert (target and target.name) == like


class TestCommand:
    @pytest.fixture(autouse=True)
    def made_kernels_only(self, monkeypatch):
        monkeypatch.setattr(gate, "kernel_modules", lambda: ["made_kernels"])

    def test_json_holds_every_outcome(self, capsys):
        assert main(["kernels", "compile", "--targets", "gfx1100,sm_90", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        outcomes = {(row["target"], row["kernel"], row["dtype"]): row for row in found["outcomes"]}
        assert len(outcomes) == 6
        assert outcomes["gfx1100", "product", "fp16"]["facts"]["matrix"] == {"v_wmma_f32_16x16x16_f16": 2}
        assert outcomes["gfx1100", "scale", "bf16"]["skipped"] == "no bf16 arithmetic"

    def test_a_kernel_that_spills_is_exit_code_1_and_named(self, monkeypatch, capsys):
        monkeypatch.setenv("MADE_KERNELS", "good,spilling")
        assert main(["kernels", "compile", "--targets", "gfx1100"]) == 1
        captured = capsys.readouterr()
        assert "FAILED" in captured.out
        assert "spilling fp16 for gfx1100" in captured.err

    def test_the_page_keeps_other_versions(self, tmp_path, capsys):
        page = tmp_path / "KERNELS.md"
        page.write_text("# Old\n\n## Triton 3.5.0\n\n| kept |\n\n## Triton 3.10.0\n\n| newer |\n")
        for _ in range(2):
            assert main(["kernels", "compile", "--targets", "gfx942", "--table", str(page)]) == 0
        text = page.read_text()
        assert text.count("v_mfma_f32_32x32x8_f16") == 1
        assert text.index("## Triton 3.10.0") < text.index(f"## Triton {gate.triton_version()}")
        assert text.index(f"## Triton {gate.triton_version()}") < text.index("## Triton 3.5.0")
        assert "| kept |" in text
        assert "| newer |" in text

    @pytest.mark.parametrize("words", [["--targets", "gfx000"], ["--kernels", "nothing"], ["--workers", "0"]])
    def test_wrong_names_are_wrong_usage(self, words, capsys):
        assert main(["kernels", "compile", *words]) == 2

    def test_without_triton_it_is_exit_code_3(self, monkeypatch, capsys):
        monkeypatch.setattr(gate, "has_triton", lambda: False)
        assert main(["kernels", "compile"]) == 3
        assert "pip install triton" in capsys.readouterr().err


def test_without_triton_or_with_its_interpreter_the_library_says_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError):
        compile_all()
    monkeypatch.setattr(gate, "has_triton", lambda: False)
    with pytest.raises(DeviceError):
        compile_all()


def test_nothing_imports_triton_before_a_kernel_is_launched():
    code = (
        "import sys, torch, stapes, stapes.cli.main, stapes.audio.features as f; from stapes.kernels.compile import *;"
        "kernel_modules(); f.log_mel_spectrogram(torch.zeros(1, 16000));"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'triton']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
