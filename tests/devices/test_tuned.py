"""Tables of tuned products: kept whole, found again for the same GPU and versions, and used without tuning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stapes.devices import tuned
from stapes.devices.backend import Device
from stapes.errors import ModelError, OutputError

MI300X = Device(torch.device("cuda", 0), "rocm", "AMD Instinct MI300X", 192 << 30, "gfx942")
CPU = Device(torch.device("cpu"), "cpu", "CPU", None)
RESULTS = [("GemmTunableOp_Half_TN", "tn_512_8_512_ld_512_512_512", "Gemm_Hipblaslt_1219", 0.0123)]
VALIDATORS = [("PT_VERSION", "2.13.0"), ("ROCM_VERSION", "7.2.0")]


class FakeTunable:
    """``torch.cuda.tunable`` that notes what it was told."""

    def __init__(self, fits: bool = True) -> None:
        self.fits = fits
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self.told.append((name, *arguments))
            return self.fits

        return call


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STAPES_TUNED", raising=False)
    for name in list(os.environ):
        if name.startswith("PYTORCH_TUNABLEOP_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch) -> FakeTunable:
    fake = FakeTunable()
    monkeypatch.setattr(torch.cuda, "tunable", fake)
    return fake


def test_a_kept_table_is_in_tunableops_format_and_used_without_tuning(tunable: FakeTunable, cache: Path) -> None:
    assert tuned.activate(MI300X) is None
    assert not tunable.told  # nothing is touched where there is nothing to use
    folder = tuned.keep(MI300X, RESULTS, VALIDATORS, {"models": {"base": {}}})
    table = folder / tuned.GEMMS
    assert cache in folder.parents
    assert table.read_text() == (
        "Validator,PT_VERSION,2.13.0\nValidator,ROCM_VERSION,7.2.0\n"
        "GemmTunableOp_Half_TN,tn_512_8_512_ld_512_512_512,Gemm_Hipblaslt_1219,0.0123\n"
    )
    assert tuned.activate(MI300X) == table
    assert ("enable", True) in tunable.told
    assert ("tuning_enable", False) in tunable.told
    assert ("read_file", str(table)) in tunable.told
    assert ("set_filename", str(table)) not in tunable.told  # it would be written to


def test_a_table_that_pytorch_refuses_turns_tunableop_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep(MI300X, RESULTS, VALIDATORS, {})
    fake = FakeTunable(fits=False)
    monkeypatch.setattr(torch.cuda, "tunable", fake)
    assert tuned.activate(MI300X) is None
    assert fake.told[-1] == ("enable", False)


def test_other_gpus_other_versions_and_the_cpu_have_their_own_or_none(
    tunable: FakeTunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tuned.keep(MI300X, RESULTS, VALIDATORS, {})
    sibling = Device(torch.device("cuda", 0), "rocm", "AMD Instinct MI300A", 128 << 30, "gfx942")
    assert tuned.activate(sibling) is None
    assert tuned.activate(CPU) is None
    monkeypatch.setattr(torch.version, "hip", "9.9")
    assert tuned.folder_for(MI300X) != folder
    assert tuned.activate(MI300X) is None


def test_the_user_decides(tunable: FakeTunable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned.keep(MI300X, RESULTS, VALIDATORS, {})
    monkeypatch.setenv("STAPES_TUNED", "0")
    assert tuned.activate(MI300X) is None
    tuned.write_table(tmp_path / "mine", RESULTS, VALIDATORS, {})
    monkeypatch.setenv("STAPES_TUNED", str(tmp_path / "mine"))
    assert tuned.activate(MI300X) == tmp_path / "mine" / tuned.GEMMS
    monkeypatch.delenv("STAPES_TUNED")
    tunable.told.clear()
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    assert tuned.activate(MI300X) is None
    assert not tunable.told


def test_a_new_table_takes_the_place_of_the_old_one_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    folder = tuned.keep(MI300X, RESULTS, VALIDATORS, {"models": {"base": {}}})
    assert tuned.keep(MI300X, [], VALIDATORS, {"models": {"tiny": {}}}) == folder
    assert tuned.read_facts(folder) == {"models": {"tiny": {}}}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuned, "write_table", full)
    with pytest.raises(OutputError, match="No space left"):
        tuned.keep(MI300X, RESULTS, VALIDATORS, {})
    assert tuned.read_facts(folder) == {"models": {"tiny": {}}}
    (folder / tuned.FACTS).write_text("{broken")
    assert tuned.read_facts(folder) == {}


def test_loading_a_model_asks_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from stapes.loading import load

    asked: list[Device] = []
    monkeypatch.setattr(tuned, "activate", asked.append)
    with pytest.raises(ModelError):
        load("no-such-model", device="cpu", offline=True)
    assert [device.backend for device in asked] == ["cpu"]
