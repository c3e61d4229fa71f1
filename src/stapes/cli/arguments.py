"""Read command lines the way users of openai/whisper write them, before cyclopts sees them.

- ``--word_timestamps True``: a boolean's value may follow it, and is never taken for an input.
- ``--suppress_words -1,50``: a value may begin with ``-`` unless it looks like an option.
- ``--initial_prompt None``: ``None`` is no value, for every option that has none by default.
- ``-`` is an input, and inputs and options come in any order; after ``--`` everything is an input.
- Where the input is itself a command line (``stapes profile COMMAND…``), all that follows its first word is its own.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

if TYPE_CHECKING:
    from cyclopts import App, Argument

_LOOKS_LIKE_OPTION = re.compile(r"--\w|-[A-Za-z]")


def normalise(app: App, words: Sequence[str]) -> list[str]:
    """The same command line as ``COMMAND… --name=value… -- INPUT…``, which leaves nothing to guess."""
    command, apps, _ = app.parse_commands(words)
    if not command or apps[-1].default_command is None or command[-1].startswith("-"):
        return list(words)
    arguments = list(apps[-1].assemble_argument_collection())
    takes_a_command = any(argument.parameter.allow_leading_hyphen for argument in arguments)
    known: dict[str, Argument] = {
        name.replace("_", "-"): argument for argument in arguments for name in argument.names if name.startswith("-")
    }
    options: list[str] = []
    inputs: list[str] = []
    rest = list(words[len(command) :])
    while rest:
        word = rest.pop(0)
        if word == "--":
            inputs += rest
            break
        if word == "-" or not word.startswith("-"):
            inputs.append(word)
            if takes_a_command:
                inputs += rest
                break
            continue
        name, equals, value = word.partition("=")
        # Only an option's name takes either sign; short options are left as they are.
        name = name.replace("_", "-")
        argument = known.get(name)
        if argument is None:  # unknown, --help, or a short option with its value attached: cyclopts knows
            options.append(name + equals + value if name.startswith("--") else word)
            continue
        if not equals and rest and _takes(argument, rest[0]):
            equals, value = "=", rest.pop(0)
        if value == "None" and _is_optional_text(argument.hint):
            # Back to the default, also where an earlier mention gave a value.
            options = [option for option in options if known.get(option.partition("=")[0]) is not argument]
            continue
        options.append(name + equals + value)
    return [*words[: len(command)], *options, *(["--", *inputs] if inputs else [])]


def _takes(argument: Argument, following: str) -> bool:
    """Whether the word after an option is its value."""
    if bool in _alternatives(argument.hint):
        return following in {"True", "False", "true", "false"}
    return not _LOOKS_LIKE_OPTION.match(following) and following != "--"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_optional_text(hint: Any) -> bool:
    """cyclopts reads None for numbers and booleans by itself; for text it would be the word."""
    alternatives = set(_alternatives(hint))
    return type(None) in alternatives and not {int, float, bool} & alternatives
