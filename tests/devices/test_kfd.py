"""The kernel's list of AMD GPUs, from a made /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from stapes.devices.kfd import architecture_name, read_gpus


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (100306, "gfx1036"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_architecture_names(version: int, name: str) -> None:
    assert architecture_name(version) == name


def write_node(nodes: Path, number: int, properties: str, banks: str = "") -> None:
    folder = nodes / str(number)
    (folder / "mem_banks" / "0").mkdir(parents=True)
    (folder / "properties").write_text(properties)
    (folder / "mem_banks" / "0" / "properties").write_text(banks)


def test_processors_are_left_out_and_gpus_come_in_order(tmp_path: Path) -> None:
    write_node(tmp_path, 0, "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\n")
    write_node(
        tmp_path,
        10,
        "cpu_cores_count 0\ngfx_target_version 110000\ndrm_render_minor 129\nlocation_id 768\ndomain 0\n",
        "heap_type 1\nsize_in_bytes 25753026560\nflags 0\n",
    )
    write_node(tmp_path, 2, "cpu_cores_count 16\nsimd_count 4\ngfx_target_version 100306\ndrm_render_minor 128\n")
    apu, card = read_gpus(tmp_path)
    assert (apu.node, apu.architecture, apu.is_apu, apu.memory_bytes, apu.pci) == (2, "gfx1036", True, None, None)
    assert (card.node, card.architecture, card.is_apu, card.render_minor) == (10, "gfx1100", False, 129)
    assert card.memory_bytes == 25753026560
    assert card.pci == "0000:03:00.0"


def test_absent_and_garbage(tmp_path: Path) -> None:
    assert read_gpus(tmp_path / "nowhere") == []
    write_node(tmp_path, 1, "gfx_target_version many\n\x00\x00 two words here\n-1\n")
    (tmp_path / "2").mkdir()
    (tmp_path / "not a number").mkdir()
    assert read_gpus(tmp_path) == []
