"""Take out of a result what names a person or a computer: paths, users, hosts, addresses."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

# Names that tell nothing about anybody, or are words of ours.
_COMMON = {
    "root",
    "user",
    "users",
    "ubuntu",
    "admin",
    "localhost",
    "localdomain",
    "home",
    "stapes",
    "base",
    "cpu",
    "cuda",
}

# Absolute paths, paths from home, and those that climb out of the current folder.
_PATH = re.compile(
    r"(?<![\w/.>])(?!//)(?:~[\w.-]*|\.{1,2}|[A-Za-z]:(?=[\\/]))?(?:[\\/][^\\/\s'\",;]+)*[\\/](?P<last>[^\\/\s'\",;]*)"
)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<host>[^\s/?#'\"]+)", re.IGNORECASE)


def personal_names() -> list[str]:
    """Names of this user and this computer, the longest first."""
    found: set[str] = {platform.node(), socket.gethostname(), Path.home().name}
    found |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME")}
    with suppress(OSError, KeyError):  # an account without a name
        found.add(getpass.getuser())
    found |= {name.partition(".")[0] for name in found}
    return sorted((name for name in found if len(name) > 1 and name.lower() not in _COMMON), key=len, reverse=True)


def anonymous_text(text: str, names: Iterable[str] | None = None) -> str:
    """``text`` with paths cut to their last part, hosts of URLs, e-mail addresses and ``names`` replaced."""
    text = _URL.sub(r"\g<scheme><host>", text)
    text = re.sub(r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "<address>", text)
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "<address>", text)
    text = _PATH.sub(lambda match: match["last"] if match[0] not in ("/", "\\") else match[0], text)
    for name in personal_names() if names is None else names:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "<name>", text, flags=re.IGNORECASE)
    return text


def anonymous_command(words: Iterable[str]) -> list[str]:
    """A command line: words, and values of options, that are paths keep their last part, whatever is in them."""
    out = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if value.startswith(("/", "~", "./", "../")):
            value = PurePath(value).name
        out.append(anonymous_text(option + equals + value))
    return out


def anonymous(value: Any, names: Iterable[str] | None = None, *, keep: frozenset[str] = frozenset()) -> Any:
    """The same for every text inside of JSON. ``keep``: keys whose values stay as they are."""
    names = list(personal_names() if names is None else names)
    if isinstance(value, str):
        return anonymous_text(value, names)
    if isinstance(value, dict):
        return {key: inner if key in keep else anonymous(inner, names, keep=keep) for key, inner in value.items()}
    if isinstance(value, list):
        return [anonymous(inner, names, keep=keep) for inner in value]
    return value
