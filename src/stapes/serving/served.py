"""The models that are served, by every name that a client may use; ``GET /v1/models``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from stapes.checkpoints.files import ADAPTER_SETTINGS
from stapes.errors import ModelError, UsageError
from stapes.serving.failures import ApiError

OPENAI_NAMES: tuple[str, ...] = (
    "whisper-1",
    "gpt-transcribe",
    "gpt-live-transcribe",
    "gpt-4o-transcribe",
    "gpt-4o-transcribe-diarize",
    "gpt-4o-mini-transcribe",
    "gpt-4o-mini-transcribe-2025-12-15",
    "gpt-realtime-whisper",
)
"""What OpenAI calls its models: all mean the first one that is served."""

router = APIRouter()


class Served:
    """Names to models. models: names, folders or files, the first is the default. aliases: ``NAME=MODEL``. adapters:
    ``MODEL=FOLDER``, or ``FOLDER`` for the first model.
    """

    def __init__(self, models: Iterable[str], aliases: Iterable[str] = (), adapters: Iterable[str] = ()) -> None:
        self.sources = {_label(model): model for model in models}
        if not self.sources:
            raise UsageError("no model is served: give --model")
        self.default = next(iter(self.sources))
        self.aliases: dict[str, str] = dict.fromkeys(OPENAI_NAMES, self.default)
        self.since = int(time.time())
        for alias in aliases:
            name, _, model = alias.partition("=")
            if _label(model) not in self.sources:
                raise UsageError(f"--alias {alias}: {model} is not served; add --model {model}")
            self.aliases[name] = _label(model)
        self.adapters: dict[str, str] = {}
        """Sources of models to the folders of their adapters."""
        for adapter in adapters:
            model, folder = self._adapted(adapter)
            if model in self.adapters:
                raise UsageError(f"--adapter {adapter}: {model} has {self.adapters[model]}; serve the other as --model")
            if not (Path(folder) / ADAPTER_SETTINGS).is_file():
                raise ModelError(f"--adapter {adapter}: {folder} has no {ADAPTER_SETTINGS}; give a LoRA adapter")
            self.adapters[model] = folder

    def _adapted(self, adapter: str) -> tuple[str, str]:
        model, sign, folder = adapter.partition("=")
        if sign and _label(model) in self.sources:
            return self.sources[_label(model)], folder
        if sign and not Path(adapter).exists():
            raise UsageError(f"--adapter {adapter}: {model} is not served; add --model {model}")
        return self.sources[self.default], adapter

    def resolve(self, name: str) -> str:
        """The served model that a client means. Raises ApiError 404: what is not served is never fetched."""
        model = name if name in self.sources else self.aliases.get(name)
        if model is None:
            reason = f"The model {name[:80]!r} is not served here: use {', '.join(self.sources)}"
            raise ApiError(404, reason, code="model_not_found", param="model")
        return model

    def source(self, name: str) -> str:
        """What to load for a served model."""
        return self.sources[name]

    def describe(self, name: str, loaded: Iterable[str]) -> dict[str, Any]:
        """OpenAI's model object, with what the name stands for and whether it is in memory."""
        model = self.resolve(name)
        return {
            "id": name,
            "object": "model",
            "created": self.since,
            "owned_by": "stapes",
            "root": model,
            "aliases": sorted(alias for alias, target in self.aliases.items() if target == model),
            "loaded": self.source(model) in loaded,
        }


def _label(model: str) -> str:
    return Path(model).name if os.sep in model and Path(model).exists() else model


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Every model that is served."""
    services = request.app.state.services
    loaded = services.engines.models
    return {"object": "list", "data": [services.served.describe(name, loaded) for name in services.served.sources]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One model, by any of its names."""
    services = request.app.state.services
    return services.served.describe(name, services.engines.models)
