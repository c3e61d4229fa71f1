"""Which meshes a network and an objective can be trained on, and why not on the others."""

from __future__ import annotations

from typing import Any

from stapes.errors import UsageError
from stapes.models.ctc_head import CTC
from stapes.models.hybrid import Hybrid
from stapes.models.wav2vec2 import Wav2Vec2
from stapes.training.config import TrainConfig
from stapes.training.mesh import MeshSizes
from stapes.training.objectives import Objective, StagedObjective
from stapes.training.pipeline import spread_layers, stage_of
from stapes.training.tensor_parallel import LAYERS


def check_mesh(objective: Objective, config: TrainConfig, sizes: MeshSizes) -> None:
    """Raises UsageError, with the reason and what to use instead, for what cannot be shared out so."""
    network: Any = objective.network
    kind = config.objective.kind
    if sizes.tp > 1:
        _check_tensor(network, kind, sizes.tp)
        if config.run.fp8:
            raise UsageError(
                "run.fp8 does not go with tp: the scale of a matrix is that of all its parts, which no process sees; "
                "use fsdp"
            )
    if sizes.cp * sizes.pp == 1:
        return
    name = "cp" if sizes.cp > 1 else "pp"
    if not isinstance(objective, StagedObjective) or not isinstance(network, CTC | Hybrid | Wav2Vec2):
        raise UsageError(
            f"objective.kind is {kind}, and {name} is for ctc, attention and hybrid: what {kind} compares lies in "
            "different processes then; use dp, fsdp or tp"
        )
    if not isinstance(network, Wav2Vec2) and network.config.encoder.heads == 0:
        raise UsageError(f"model.heads is 0: a model of convolutions alone is small, use dp in the place of {name}")
    if sizes.pp > 1:
        _check_stages(network, config, sizes.pp)


def _check_tensor(network: Any, kind: str, parts: int) -> None:
    layers = list(network.encoder.layers)
    if not all(type(layer) in LAYERS for layer in layers):
        raise UsageError(
            f"objective.kind is {kind}, and tp cuts the encoders of wav2vec 2.0, Conformer and Whisper with a CTC head "
            "only: use fsdp, which shares out any network"
        )
    for layer in layers:
        if layer.attention is None:
            raise UsageError("model.heads is 0: tp shares out attention heads, use dp or fsdp")
        mlp = layer.first_mlp if hasattr(layer, "first_mlp") else layer.mlp
        if layer.attention.heads % parts or mlp.up.out_features % parts:
            raise UsageError(
                f"parallel.tp is {parts}, which divides not both the {layer.attention.heads} attention heads and the "
                f"{mlp.up.out_features} inner widths of the MLPs: use one that does, or fsdp"
            )


def _check_stages(network: Any, config: TrainConfig, stages: int) -> None:
    layers = len(network.encoder.layers)
    if stages > layers:
        raise UsageError(f"parallel.pp is {stages}, and the encoder has {layers} layers: each stage needs one")
    spread = spread_layers(network, stages)
    trained = {stage_of(name, network, spread) for name, each in network.named_parameters() if each.requires_grad}
    if trained != set(range(stages)):
        raise UsageError(
            f"optimizer.freeze is {config.optimizer.freeze}, which leaves a stage of the pipeline nothing to train: "
            "make parallel.pp smaller, or use fsdp"
        )
