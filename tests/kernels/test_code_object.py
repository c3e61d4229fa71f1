"""Reading compiled kernels: whole ones are read right, damaged ones are refused and never misread."""

from __future__ import annotations

import struct
from contextlib import suppress
from functools import lru_cache

import made_kernels
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.kernels.code_object import DamagedCode, _unpack, amd_facts, nvidia_facts
from stapes.kernels.targets import TARGETS

triton = pytest.importorskip("triton", reason="Triton is not installed")


@lru_cache
def compiled(name: str, tmp: str) -> tuple[bytes, str]:
    """Code and text of the made product."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", tmp)
        patch.delenv("TRITON_INTERPRET", raising=False)
        case = made_kernels.product
        source = ASTSource(
            fn=case.kernel.jit, signature={**case.signature, "SIZE": "constexpr"}, constexprs={(3,): 32}, attrs={}
        )
        is_amd = TARGETS[name].is_amd
        gpu = GPUTarget("hip", name, TARGETS[name].wave_size) if is_amd else GPUTarget("cuda", 90, 32)
        asm = triton.compile(source, target=gpu).asm
    return (asm["hsaco"], asm["amdgcn"]) if is_amd else (asm["cubin"], asm["ptx"])


@pytest.fixture(scope="module")
def amd(tmp_path_factory) -> tuple[bytes, str]:
    return compiled("gfx1100", str(tmp_path_factory.mktemp("triton")))


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory) -> tuple[bytes, str]:
    return compiled("sm_90", str(tmp_path_factory.mktemp("triton")))


def test_a_whole_code_object_says_what_its_text_says(amd):
    code, text = amd
    facts = amd_facts(code, text, 1000)
    assert f".vgpr_count:     {facts.registers}\n" in text
    assert f".vgpr_spill_count: {facts.spills}\n" in text
    assert (facts.mach, facts.elf_bytes, facts.lds_bytes) == (0x41, len(code), 1000)
    assert facts.matrix == {"v_wmma_f32_16x16x16_f16": 2}


def test_a_cubin_without_an_assembler_has_no_registers(nvidia):
    facts = nvidia_facts(*nvidia, 64, None)
    assert (facts.mach, facts.registers, facts.spills, facts.lds_bytes) == (90, None, None, 64)
    assert facts.matrix


@pytest.mark.parametrize("part", [0, 1, 16, 63, 64, 300, 0.5, 0.9, -1])
def test_a_code_object_that_is_cut_short_is_refused(amd, nvidia, part):
    for code, text, read in (
        (*amd, lambda c, t: amd_facts(c, t, 0)),
        (*nvidia, lambda c, t: nvidia_facts(c, t, 0, None)),
    ):
        end = int(part * len(code)) if isinstance(part, float) else part
        with pytest.raises(DamagedCode):
            read(code[:end], text)


def test_one_for_another_machine_is_refused(amd, nvidia):
    with pytest.raises(DamagedCode, match="machine 190"):
        amd_facts(nvidia[0], amd[1], 0)
    with pytest.raises(DamagedCode, match="machine 224"):
        nvidia_facts(amd[0], nvidia[1], 0, None)


def test_one_without_metadata_is_refused(amd):
    code, text = amd
    with pytest.raises(DamagedCode, match="metadata"):
        amd_facts(code.replace(b"AMDGPU\0", b"NOBODY\0"), text, 0)
    with pytest.raises(DamagedCode, match="metadata"):
        amd_facts(code.replace(b".vgpr_count", b".vgpr_cnout"), text, 0)


def test_an_assembler_that_fails_is_no_success(nvidia):
    with pytest.raises(DamagedCode, match="no account"):
        nvidia_facts(*nvidia, 0, "/bin/false")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(amd, data):
    code = bytearray(amd[0])
    for at in data.draw(st.lists(st.integers(0, len(code) - 1), min_size=1, max_size=8)):
        code[at] = data.draw(st.integers(0, 255))
    with suppress(DamagedCode):
        amd_facts(bytes(code), amd[1], 0)


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage):
    for code in (garbage, b"\x7fELF\x02\x01" + garbage):
        with pytest.raises(DamagedCode):
            amd_facts(code, "", 0)
        with pytest.raises(DamagedCode):
            nvidia_facts(code, "", 0, None)


def test_message_pack_of_every_kind():
    text = b"\xda\x00\x03abc"
    packed = [
        (b"\x05", 5), (b"\xff", -1), (b"\xc0", None), (b"\xc3", True), (b"\xcd\x01\x00", 256),
        (b"\xd2\xff\xff\xff\xff", -1),
        (b"\xcb" + struct.pack(">d", 0.5), 0.5), (text, "abc"), (b"\xa2hi", "hi"), (b"\xc4\x02\x00\x01", b"\x00\x01"),
        (b"\x92\x01\xa1x", [1, "x"]), (b"\x81\xa1k\x91\x07", {"k": [7]}), (b"\xdc\x00\x01\x01", [1]),
        (b"\xde\x00\x01\xa1a\xc2", {"a": False}),
    ]  # fmt: skip
    for raw, value in packed:
        assert _unpack(raw + b"rest", 0) == (value, len(raw))
    with pytest.raises(ValueError):
        _unpack(text[:-1], 0)
