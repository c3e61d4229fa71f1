"""Folders of exported models: which graphs there are, and what the runtime must know of them.

Beside the graphs lie the files that any model has (``config.json``, the tokenizer, ``generation_config.json``), so that
the folder alone is enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stapes.errors import ModelError
from stapes.text.files import read_json

MANIFEST = "stapes_onnx.json"
"""What `OnnxFolder` is read from and written to."""

WEIGHTS = "weights.bin"
"""The weights of all graphs, each once."""

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class OnnxFolder:
    """An exported model.

    kind: ``model_type`` of its ``config.json``. dtype: of its weights, "float32" or "float16". scheme: how it was
    quantised, None where it was not. graphs: what each does → its file; those for the
    CPU end in ``@cpu``. alignment_heads: (decoder layer, head) pairs whose scores the graph "align" gives. checked:
    graph → how far its numbers were from PyTorch's, as `error` and `tolerance`.
    """

    kind: str
    graphs: Mapping[str, str]
    dtype: str = "float32"
    scheme: str | None = None
    opset: int = 18
    source: str = ""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    checked: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    """Layers that quantising left as they were."""

    def file(self, graph: str, *, on_cpu: bool) -> str:
        """The file of a graph: the CPU has its own form of most."""
        return self.graphs.get(f"{graph}@cpu" if on_cpu else graph, self.graphs[graph])

    def write(self, folder: Path) -> None:
        """Write the manifest."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def is_onnx(path: Path) -> bool:
    """Whether ``path`` is the folder of an exported model."""
    return (path / MANIFEST).is_file()


def read_onnx_folder(path: Path) -> OnnxFolder:
    """What is in the folder of an exported model. Raises ModelError where something is missing or cannot be."""
    values: dict[str, Any] = read_json(path / MANIFEST)
    if values.pop("format", None) != _FORMAT:
        raise ModelError(f"{path / MANIFEST} is of another version of stapes: export the model again")
    try:
        values["alignment_heads"] = tuple((layer, head) for layer, head in values.get("alignment_heads", ()))
        values["kept"] = tuple(values.get("kept", ()))
        found = OnnxFolder(**values)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path / MANIFEST} is damaged ({error}): export the model again") from error
    missing = [file for file in (*found.graphs.values(), WEIGHTS) if not (path / file).is_file()]
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing)}: export the model again, or copy the whole folder")
    return found
