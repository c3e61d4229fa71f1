"""``stapes serve``: the HTTP and WebSocket server."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter
from cyclopts.config import Env, Toml

from stapes.cli.terminal import Terminal
from stapes.errors import ModelError, UsageError
from stapes.serving.settings import LimitSettings, ModelSettings, NetworkSettings, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

app = App(
    name="serve",
    help_format="markdown",
    usage="Usage: stapes serve [OPTIONS]",
    default_parameter=Parameter(negative_iterable=(), negative_bool=()),
    config=[
        Env("STAPES_", command=False),
        Toml("stapes.toml", root_keys=["serve"], must_exist=False, search_parents=False, use_commands_as_keys=False),
    ],
)


def _group(name: str, order: int) -> Parameter:
    return Parameter(name="*", group=Group(name, sort_key=order))


_NETWORK, _MODELS, _LIMITS = NetworkSettings(), ModelSettings(), LimitSettings()


@app.default
def serve(
    *,
    network: Annotated[NetworkSettings, _group("Network", 1)] = _NETWORK,
    models: Annotated[ModelSettings, _group("Models", 2)] = _MODELS,
    limits: Annotated[LimitSettings, _group("Limits", 3)] = _LIMITS,
    new_key: bool = False,
) -> int:
    """Serve transcriptions over HTTP and WebSocket, as the OpenAI API does.

    `POST /v1/audio/transcriptions`, `/v1/audio/translations`, `GET /v1/models`, `WS /v1/realtime`, `/livez`, `/readyz`,
    `/metrics`. Every option may also come from a variable (STAPES_PORT=9000) or from the table [serve] of stapes.toml
    in this folder; flags go before variables, and variables before the file. The log is JSON lines on stderr, without
    audio and without text.

    For example:

        stapes serve --model base
        stapes serve --host 0.0.0.0 --api-key-file keys.txt --device cuda:0,cuda:1
        stapes serve --new-key                                a key, and the line for keys.txt
        curl localhost:8000/v1/audio/transcriptions -F file=@talk.mp3

    Parameters
    ----------
    new_key:
        Print a new key and the line that the file of keys has to hold for it, and end.
    """
    try:
        from stapes.serving import access
        from stapes.serving.run import run
    except ModuleNotFoundError as error:
        raise UsageError(f"serving needs {error.name}: pip install 'stapes[serve]'") from error

    terminal = Terminal()
    if new_key:
        key = access.new_key()
        terminal.out(f"key, for the client:        {key}\nline, for --api-key-file:   sha256:{access.digest(key)}\n")
        return 0
    if not models.model:
        models = replace(models, model=(_default_model(models),))
    _check_models(models.model, models.model_dir)
    settings = ServerSettings(
        network=network, models=models, limits=limits, keys=os.environ.get("STAPES_API_KEY") or None
    )
    run(settings, started=lambda url: terminal.note(f"serving {', '.join(models.model)} at {url}"))
    return 0


def _default_model(models: ModelSettings) -> str:
    """What suits the first device, or else is there."""
    from stapes.checkpoints import catalog
    from stapes.devices.backend import resolve

    name = catalog.choose_default(resolve(models.devices[0]).memory, False)
    if catalog.find(name, models.model_dir) is None:
        name = catalog.choose_installed(name, False, None, models.model_dir) or name
    return name


def _check_models(names: Sequence[str], folder: str | None) -> None:
    """A slip of the pen is said now. Raises ModelError."""
    from stapes.checkpoints import catalog

    for name in names:
        if catalog.find(name, folder) is None:
            if catalog.repository_of(name) is None:
                raise ModelError(f"There is no model named {name!r} and no such file; {catalog.hint(name)}")
            raise ModelError(f"{name} is not on this machine and the server downloads nothing: {catalog.THREE_WAYS}")
