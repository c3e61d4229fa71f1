"""What a job is: which model reads with which options. Its fingerprint is what reruns are held to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import stapes
from stapes.options import TranscribeOptions

_UNSEEN = frozenset({"batch_size"})
"""Options that change no text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What every worker is told; it travels to other machines."""

    model: str
    revision: str
    """Of the model's files, by `stapes.bulk.model.revision`."""
    options: TranscribeOptions
    settings: dict[str, Any]
    """What `stapes.load` takes, but for the model and the device."""
    decoders: int = 2
    """Processes that decode for one worker."""
    decode_patience: float = 120.0
    """Seconds that a decoder may give nothing before it is ended."""
    max_seconds: float | None = None
    """Longer recordings are refused."""
    engine: str = "stapes.bulk.engine:open_recognizer"
    """Module and function that open what transcribes."""

    def configuration(self) -> dict[str, Any]:
        """Everything that decides what is written, as JSON."""
        return {
            "stapes": stapes.__version__,
            "model": self.model,
            "revision": self.revision,
            "precision": self.settings.get("precision", "auto"),
            "backend": self.settings.get("backend", "auto"),
            "max_seconds": self.max_seconds,
            "options": {name: value for name, value in asdict(self.options).items() if name not in _UNSEEN},
        }

    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for ``configuration``."""
        return digest(self.configuration())


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
