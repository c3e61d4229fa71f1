"""Nested dataclasses that are set from TOML and from ``--set a.b=value``, and print themselves with their docs.

A dataclass's fields are the only list of settings there is: their types say what is accepted, the docstrings below
them say what they mean. Unknown names are refused with the nearest one.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from stapes.errors import UsageError

T = TypeVar("T")


def apply_toml(settings: T, path: Path) -> T:
    """The settings with the fields that a TOML file names. Raises UsageError for what it should not name."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML ({error}); `--print-config` shows how it looks") from None
    return apply_mapping(settings, values, str(path))


def apply_mapping(settings: T, values: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """The settings with fields from nested mappings. ``source`` is what errors blame."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        hint = _hint(settings, name, source, prefix)
        current = getattr(settings, name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(current):
            changed[name] = apply_mapping(current, value, source, f"{prefix}{name}.")
        elif dataclasses.is_dataclass(current):
            raise UsageError(f"{source}: {prefix}{name} has parts: set {prefix}{name}.NAME")
        else:
            changed[name] = _convert(value, hint, f"{source}: {prefix}{name}")
    return dataclasses.replace(settings, **changed)  # pyright: ignore[reportArgumentType, reportCallIssue]


def apply_assignment(settings: T, assignment: str) -> T:
    """The settings with one field from ``a.b=value``: a TOML value, or text without quotes. Raises UsageError."""
    path, equals, text = assignment.partition("=")
    names = [name.strip().replace("-", "_") for name in path.split(".")]
    if not equals or not all(names):
        raise UsageError(f"--set {assignment!r}: write section.name=value, such as optimizer.peak_lr=1e-4")
    place: Any = settings
    prefix = ""
    for depth, name in enumerate(names):
        hint = _hint(place, name, "--set", prefix)
        place, prefix = getattr(place, name), f"{prefix}{name}."
        if isinstance(place, dict):  # the rest is a key of it
            value = {**place, ".".join(names[depth + 1 :]): _parse(text.strip(), get_args(hint)[1])}
            return apply_mapping(settings, _nested(names[: depth + 1], value), "--set")
        if depth + 1 == len(names):
            return apply_mapping(settings, _nested(names, _parse(text.strip(), hint)), "--set")
        if not dataclasses.is_dataclass(place):
            raise UsageError(f"--set {assignment!r}: {prefix[:-1]} has no parts")
    raise AssertionError("unreachable: every name leads somewhere")


def _nested(names: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(names):
        value = {name: value}
    return value


def _hint(settings: Any, name: str, source: str, prefix: str) -> Any:
    """The type of a field. Raises UsageError, with the nearest name, where there is none."""
    hints = _hints(type(settings))
    if name in hints:
        return hints[name]
    close = difflib.get_close_matches(name, list(hints), n=1)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(hints)}"
    raise UsageError(f"{source}: there is no setting {prefix}{name}; {hint}")


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _parse(text: str, hint: Any) -> Any:
    if str in _alternatives(hint) or Path in _alternatives(hint):
        return None if text.lower() == "none" and type(None) in _alternatives(hint) else _unquoted(text)
    if text.lower() == "none":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    # Lists may be written without brackets, numbers as Python writes them (1e-4), text without quotes.
    if any(get_origin(kind) in (list, tuple) for kind in _alternatives(hint)):
        inner = get_args(next(kind for kind in _alternatives(hint) if get_origin(kind) in (list, tuple)))[0]
        return [_parse(part.strip(), inner) for part in text.strip("[]").split(",") if part.strip()]
    try:
        return float(text)
    except ValueError:
        return text


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert(value: Any, hint: Any, place: str) -> Any:
    """``value`` as the type ``hint``. Raises UsageError that says what is accepted."""
    for kind in _alternatives(hint):
        converted = _as(value, kind, place)
        if converted is not _NO:
            return converted
    raise UsageError(f"{place} is {value!r}: give {' or '.join(map(_name, _alternatives(hint)))}")


_NO = object()


def _as(value: Any, kind: Any, place: str) -> Any:
    origin = get_origin(kind)
    if kind is type(None):
        return None if value is None else _NO
    if origin is Literal:
        return value if value in get_args(kind) else _NO
    if origin in (list, tuple):
        if value is None or isinstance(value, Mapping):
            return _NO
        value = value if isinstance(value, list | tuple) else [value]
        return origin(_convert(each, get_args(kind)[0], place) for each in value)
    if origin is dict:
        inner = get_args(kind)[1]
        if not isinstance(value, Mapping):
            return _NO
        return {str(key): _convert(each, inner, f"{place}.{key}") for key, each in value.items()}
    if kind is bool:
        return value if isinstance(value, bool) else _NO
    if isinstance(value, bool):
        return _NO
    if kind is int:
        return int(value) if isinstance(value, int | float) and value == int(value) else _NO
    if kind is float:
        return float(value) if isinstance(value, int | float) else _NO
    if kind is str:
        return value if isinstance(value, str) else _NO
    if kind is Path:
        return Path(value) if isinstance(value, str | Path) else _NO
    return _NO


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (list, tuple):
        return f"a list of {_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a table of {_name(get_args(kind)[1])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return "none" if kind is type(None) else names.get(kind, str(kind))


@lru_cache(maxsize=64)
def docs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    out: dict[str, str] = {}
    before: str | None = None
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            before = statement.target.id
        elif before is not None and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            out[before], before = " ".join(str(statement.value.value).split()), None
    return out


def to_mapping(settings: Any) -> dict[str, Any]:
    """The settings as nested plain values, which `apply_mapping` reads."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        out[field.name] = to_mapping(value) if dataclasses.is_dataclass(value) else _plain(value)
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def to_toml(settings: Any) -> str:
    """The settings as TOML with their docs as comments. What is none is shown as a comment, for TOML has no none."""
    return "\n".join(_lines(settings, "")).lstrip("\n") + "\n"


def _lines(settings: Any, prefix: str) -> Iterator[str]:
    nested = []
    described = docs(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            nested.append((field.name, value))
            continue
        yield from textwrap.wrap(described.get(field.name, ""), 110, initial_indent="# ", subsequent_indent="# ")
        yield f"# {field.name} =" if value is None else f"{field.name} = {_toml(value)}"
    for name, value in nested:
        yield f"\n[{prefix}{name}]"
        yield from _lines(value, f"{prefix}{name}.")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else repr(value)
