"""Downloads from a Hugging Face hub that may stop at any moment and go on from there.

A model arrives in a hidden ``.NAME.REVISION.partial`` folder and is renamed when it is whole and checked, so that a
killed download is never taken for a model. huggingface_hub's own ``hf_hub_download`` starts a file again when its
process was killed, hence the transfer here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from stapes.checkpoints.files import sha256
from stapes.errors import ModelError
from stapes.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json")
_CTC_FILES = ("vocab.json", "tokenizer_config.json", "special_tokens_map.json", "processor_config.json")
"""What a CTC model has in place of tokenizer.json. Whisper has some of it too, and merges.txt."""
_CHUNK = 1 << 20
# Seconds without an answer, and tries in a row that bring nothing, before a hub counts as gone: under 30 s in all.
_TIMEOUT = 8.0
_TRIES = 3


def download(name: str, repository: str, folder: Path, progress: Progress, otherwise: str) -> None:
    """Fetch the model ``repository`` into ``folder``.

    Progress is counted in bytes. Everything is held against the publisher's checksums. ``otherwise`` is what to do
    where that is impossible. Raises ModelError.
    """
    with _explained(name, repository, folder, otherwise):
        info = _describe(repository)
        partial = folder.with_name(f".{folder.name}.{(info.sha or 'main')[:12]}.partial")
        with _alone(partial, name, progress):
            if folder.is_dir() and any(folder.iterdir()):
                if (folder / "config.json").exists():
                    return  # another process was faster
                raise ModelError(f"{folder} is in the way and holds no model; remove it and pull {name} again")
            _fetch_all(repository, info, partial, progress)
            partial.rename(folder)
        for stale in folder.parent.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)


def download_file(name: str, repository: str, folder: Path, file: str, progress: Progress, otherwise: str) -> bool:
    """Fetch one file more of a model that is in ``folder``. False: there is none of this name. Else as `download`."""
    with _explained(name, repository, folder, otherwise):
        info = _describe(repository)
        found = next((sibling for sibling in info.siblings or [] if sibling.rfilename == file), None)
        partial = folder.with_name(f".{folder.name}.{file}.partial")
        if found is None or (folder / file).exists():
            return found is not None
        with _alone(partial, name, progress):
            progress.add_total(found.size or 0)
            _fetch(repository, info.sha, found, partial, progress)
            (partial / file).rename(folder / file)
        shutil.rmtree(partial, ignore_errors=True)
    return True


@contextmanager
def _explained(name: str, repository: str, folder: Path, otherwise: str) -> Iterator[None]:
    """Say what went wrong with a download as a ModelError."""
    # HTTPError is that of the HTTP library beneath, which is httpx up to huggingface_hub 1 and httpx2 from 2 on.
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise ModelError(
            f"{repository} is only for those who accepted its terms on the hub: do so and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(f"The hub has no public model {repository}: check its name; {otherwise}") from None
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise ModelError(f"{repository} cannot be fetched ({_first_line(error)}); {otherwise}") from None
    except HTTPError as error:
        raise ModelError(
            f"{name} cannot be downloaded, the hub does not answer ({_first_line(error)}); {otherwise}"
        ) from None
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise ModelError(f"{folder} cannot be written ({reason}): free space or choose another --model-dir") from None


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _describe(repository: str) -> ModelInfo:
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint()).model_info(repository, files_metadata=True, timeout=_TIMEOUT)


@contextmanager
def _alone(partial: Path, name: str, progress: Progress) -> Iterator[None]:
    """Let one process at a time download into ``partial``; the lock goes with the process, however it ends."""
    partial.mkdir(parents=True, exist_ok=True)
    lock = partial / ".lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"another process is downloading {name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_all(repository: str, info: ModelInfo, partial: Path, progress: Progress) -> None:
    files = {file.rfilename: file for file in info.siblings or []}
    weights = _choose_weights(list(files))
    if not weights:
        raise ModelError(f"{repository} has no safetensors weights: name another model, or give a folder")
    partial.mkdir(parents=True, exist_ok=True)  # gone where the process that was waited for has finished with it
    names = _FILES if "merges.txt" in files else (*_FILES, *_CTC_FILES)
    wanted = [files[file] for file in (*names, *weights) if file in files]
    progress.add_total(sum(file.size or 0 for file in wanted))
    for file in wanted:
        _fetch(repository, info.sha, file, partial, progress)
    (partial / ".lock").unlink(missing_ok=True)


def _choose_weights(files: list[str]) -> list[str]:
    if "model.safetensors" in files:
        return ["model.safetensors"]
    shards = [file for file in files if re.fullmatch(r"model-[\w.-]+\.safetensors", file)]
    return ["model.safetensors.index.json", *sorted(shards)] if "model.safetensors.index.json" in files else []


def _fetch(repository: str, revision: str | None, file: RepoSibling, partial: Path, progress: Progress) -> None:
    from huggingface_hub import hf_hub_url

    whole, part = partial / file.rfilename, partial / f"{file.rfilename}.part"
    if whole.exists():  # renamed only after it was checked
        progress.advance(file.size or 0)
        return
    progress.note(f"fetching {file.rfilename}")
    url = hf_hub_url(repository, file.rfilename, revision=revision, endpoint=_endpoint())
    _transfer(url, part, file.size, progress)
    if not _is_intact(part, file):
        part.unlink()
        raise ModelError(f"{file.rfilename} of {repository} arrived damaged (its checksum differs): pull it again")
    part.rename(whole)


def _transfer(url: str, part: Path, size: int | None, progress: Progress) -> None:
    """Fetch ``url`` into ``part``, going on behind what is there."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    have = part.stat().st_size if part.exists() else 0
    progress.advance(have)
    failed = 0
    while size is None or have < size:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={have}-"}
        try:
            with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as response:
                hf_raise_for_status(response)
                if response.status_code != HTTPStatus.PARTIAL_CONTENT:  # the server knows no ranges: from the start
                    progress.advance(-have)
                    have = 0
                with part.open("ab" if have else "wb") as out:
                    for chunk in response.iter_bytes(_CHUNK):
                        out.write(chunk)
                        have += len(chunk)
                        progress.advance(len(chunk))
                        failed = 0
            if size is None:
                return
            failed += have < size
        except HfHubHTTPError:  # an answer, if a bad one
            raise
        except HTTPError:
            failed += 1
            if failed >= _TRIES:
                raise
        if failed >= _TRIES:
            raise HTTPError(f"{url} ends after {have} bytes of {size}")
        if failed:
            time.sleep(failed)


def _is_intact(path: Path, file: RepoSibling) -> bool:
    """Large files are published with their SHA-256, small ones with git's SHA-1 of them."""
    if file.size is not None and path.stat().st_size != file.size:
        return False
    if file.lfs is not None:
        return sha256(path) == file.lfs.sha256
    if file.blob_id is not None:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == file.blob_id
    return True


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
