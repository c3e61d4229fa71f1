"""What a compiled kernel says about itself: its machine, registers, spills, memory and matrix instructions.

AMD's code objects are ELF files with a note of MessagePack (LLVM's AMDGPUUsage, "Code Object Metadata"); cubins are ELF
files too, whose registers and spills NVIDIA's assembler tells as it makes them.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_EM_CUDA, _EM_AMDGPU = 190, 224
_SHT_NOTE = 7
_NT_AMDGPU_METADATA = 32

_AMD_MATRIX = re.compile(r"\bv_(?:s?mfma|s?wmma|swmmac)\w*")
_NVIDIA_MATRIX = re.compile(
    r"\b(wgmma|mma)\.(?:mma_async\.)?sync\.aligned\.(m\d+n\d+k\d+)\S*?\.(\w+)\.(\w+)(?:\.\w+)?\s"
)


class DamagedCode(ValueError):  # noqa: N818
    """A compiled kernel is no whole ELF file of the kind that it should be."""


@dataclass(frozen=True)
class CodeFacts:
    """Of one compiled kernel. Registers are those of one lane or thread."""

    mach: int
    """As `Target.mach`."""
    registers: int | None
    """Vector registers; on CDNA with the accumulation registers among them. None: no assembler to ask."""
    spills: int | None
    """Vector registers (AMD) or bytes (NVIDIA) that went to memory for want of registers."""
    scalar_spills: int | None
    scratch_bytes: int | None
    """Private memory of a lane, spills and stack."""
    lds_bytes: int
    matrix: dict[str, int]
    """Matrix instructions and how often each is in the text."""
    elf_bytes: int


def amd_facts(code: bytes, assembly: str, shared_bytes: int) -> CodeFacts:
    """Read an AMD code object and its assembly text. Raises DamagedCode.

    shared_bytes: LDS that Triton asks for at the launch, of which the code object knows nothing.
    """
    flags, _ = _header(code, _EM_AMDGPU)
    metadata = next(
        (value for name, kind, value in _notes(code) if (name, kind) == (b"AMDGPU", _NT_AMDGPU_METADATA)), None
    )
    if metadata is None:
        raise DamagedCode("the code object has no metadata")
    try:
        kernels = _unpack(metadata, 0)[0]["amdhsa.kernels"]
        (kernel,) = kernels
        registers, spills = kernel[".vgpr_count"], kernel[".vgpr_spill_count"]
        scalar_spills, scratch = kernel[".sgpr_spill_count"], kernel[".private_segment_fixed_size"]
        lds = kernel[".group_segment_fixed_size"]
    except (ValueError, KeyError, TypeError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise DamagedCode(f"the code object's metadata cannot be read ({error!r})") from error
    return CodeFacts(
        mach=flags & 0xFF,
        registers=registers,
        spills=spills,
        scalar_spills=scalar_spills,
        scratch_bytes=scratch,
        lds_bytes=lds + shared_bytes,
        matrix=dict(Counter(_AMD_MATRIX.findall(assembly)).most_common()),
        elf_bytes=len(code),
    )


def nvidia_facts(code: bytes, ptx: str, shared_bytes: int, assembler: str | None) -> CodeFacts:
    """Read a cubin and its PTX, asking NVIDIA's assembler (path of ``ptxas``) for registers. Raises DamagedCode."""
    flags, abi = _header(code, _EM_CUDA)
    usage = _assembler_usage(ptx, assembler) if assembler else {}
    return CodeFacts(
        # The capability's place moved with version 8 of the cubin ABI (LLVM's EF_CUDA_SM and EF_CUDA_SM_OFFSET).
        mach=(flags >> 8) & 0xFF if abi >= 8 else flags & 0xFF,
        registers=usage.get("registers"),
        spills=usage.get("spills"),
        scalar_spills=None,
        scratch_bytes=usage.get("stack"),
        lds_bytes=shared_bytes,
        matrix=dict(Counter(" ".join(found) for found in _NVIDIA_MATRIX.findall(ptx)).most_common()),
        elf_bytes=len(code),
    )


def _assembler_usage(ptx: str, assembler: str) -> dict[str, int]:
    found = re.search(r"^\.target (\S+?),?(?:\s|$)", ptx, re.MULTILINE)
    architecture = found[1] if found else "sm_90a"
    command = [assembler, "-v", f"--gpu-name={architecture}", "-", "-o", "/dev/null"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)  # noqa: S603
    text = done.stdout + done.stderr
    usage = re.search(r"Used (\d+) registers", text)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if done.returncode or not usage or not frame:
        raise DamagedCode(f"the assembler gave no account of the kernel ({text.strip()[:200]})")
    return {"registers": int(usage[1]), "stack": int(frame[1]), "spills": int(frame[2]) + int(frame[3])}


def _header(code: bytes, machine: int) -> tuple[int, int]:
    """Flags and ABI version of a whole ELF file for ``machine``."""
    if len(code) < 64 or code[:6] != b"\x7fELF\x02\x01":
        raise DamagedCode("no 64-bit little-endian ELF file")
    (found,) = struct.unpack_from("<H", code, 18)
    if found != machine:
        raise DamagedCode(f"an ELF file for machine {found}, not {machine}")
    for _, offset, size in _sections(code):
        if offset + size > len(code):
            raise DamagedCode("the ELF file is cut short")
    (segments,) = struct.unpack_from("<Q", code, 32)
    size, count = struct.unpack_from("<HH", code, 54)
    if segments + size * count > len(code):
        raise DamagedCode("the ELF file has no whole table of segments")
    (flags,) = struct.unpack_from("<I", code, 48)
    return flags, code[8]


def _sections(code: bytes) -> Iterator[tuple[int, int, int]]:
    """Type, offset and size of each section that has bytes in the file."""
    (table,) = struct.unpack_from("<Q", code, 40)
    entry, count = struct.unpack_from("<HH", code, 58)
    if not table or not count or entry != 64 or table + count * entry > len(code):
        raise DamagedCode("the ELF file has no whole table of sections")
    for number in range(count):
        _, kind, _, _, offset, size = struct.unpack_from("<IIQQQQ", code, table + number * entry)
        if kind not in (0, 8):  # none, and .bss, which is not in the file
            yield kind, offset, size


def _notes(code: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Owner, type and contents of each note."""
    for kind, offset, size in _sections(code):
        end = offset + size
        while kind == _SHT_NOTE and offset + 12 <= end:
            name_size, value_size, note = struct.unpack_from("<III", code, offset)
            name_at = offset + 12
            value_at = name_at + (name_size + 3) // 4 * 4
            offset = value_at + (value_size + 3) // 4 * 4
            if offset > end:
                raise DamagedCode("a note of the ELF file is cut short")
            yield code[name_at : name_at + name_size].rstrip(b"\0"), note, code[value_at : value_at + value_size]


# MessagePack: first byte → (format of the number that follows, what it counts or is).
_SIZED = {
    0xC4: (">B", "bytes"), 0xC5: (">H", "bytes"), 0xC6: (">I", "bytes"),
    0xCA: (">f", "number"), 0xCB: (">d", "number"),
    0xCC: (">B", "number"), 0xCD: (">H", "number"), 0xCE: (">I", "number"), 0xCF: (">Q", "number"),
    0xD0: (">b", "number"), 0xD1: (">h", "number"), 0xD2: (">i", "number"), 0xD3: (">q", "number"),
    0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text"),
    0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map"),
}  # fmt: skip


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value that begins at ``at``, and where it ends."""
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at
    if first < 0xC0:  # small map, list and text carry their size in the byte
        kind, size = ("map", first & 0xF) if first < 0x90 else ("list", first & 0xF)
        if first >= 0xA0:
            kind, size = "text", first & 0x1F
    else:
        layout, kind = _SIZED[first]
        (size,) = struct.unpack_from(layout, data, at)
        at += struct.calcsize(layout)
    if kind == "number":
        return size, at
    if kind in ("text", "bytes"):
        value = data[at : at + size]
        if len(value) < size:
            raise ValueError("text is cut short")
        return (value.decode() if kind == "text" else value), at + size
    items = []
    for _ in range(size * (2 if kind == "map" else 1)):
        item, at = _unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at
