"""What each process of `test_meshes` does: losses and gradients of small networks on one mesh after another."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from made_corpus import small_config
from torch import Tensor, nn

from stapes.data.batching import IGNORED, Batch
from stapes.data.masking import span_mask
from stapes.models.conformer import ConformerConfig
from stapes.models.ctc_head import CTC, CTCConfig, WhisperEncoderConfig
from stapes.models.hybrid import Hybrid, HybridConfig
from stapes.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config, initialize
from stapes.progress import Silent
from stapes.text.ctc_tokenizer import CTCTokenizer
from stapes.training.config import ParallelOptions, TrainConfig
from stapes.training.layout import whole
from stapes.training.mesh import apply_mesh, mesh_sizes, parse_mesh
from stapes.training.mesh_rules import check_mesh
from stapes.training.networks import layers_of
from stapes.training.objectives import Objective, SpectrogramObjective, Wav2Vec2Objective, prepare
from stapes.training.optimizer import Optimizer
from stapes.training.parallel import (
    Processes,
    choose_strategy,
    divide,
    is_synced,
    losses_and_gradients,
    on_mesh,
    parallelize,
    processes,
)
from stapes.training.setup import open_run

TOKENS = CTCTokenizer({token: id for id, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdef"])})
WAV2VEC2 = Wav2Vec2Config(
    width=32,
    layers=4,
    heads=4,
    mlp_width=64,
    vocab_size=11,
    conv_channels=(16,) * 7,
    position_kernel=26,
    position_groups=4,
    hidden_dropout=0.0,
    activation_dropout=0.0,
    attention_dropout=0.0,
    head_dropout=0.0,
    layer_drop=0.0,
)
CONFORMER = ConformerConfig(
    mel_bins=16, width=32, layers=4, heads=4, mlp_width=64, conv_kernel=7, subsampling_channels=4, dropout=0.0
)


def objectives() -> Iterator[tuple[str, Objective]]:
    """One of each family, with the same weights in every process."""
    hide = partial(span_mask, probability=0.5, length=4)
    large = Wav2Vec2Config(**{**vars(WAV2VEC2), "conv_norm": "layer", "conv_bias": True, "pre_norm": True})
    for name, config in (("wav2vec2-base", WAV2VEC2), ("wav2vec2-large", large)):
        torch.manual_seed(1)
        network = Wav2Vec2(config)
        initialize(network)
        yield name, Wav2Vec2Objective(network, TOKENS, torch.float32, hide=hide)
    torch.manual_seed(2)
    normed = ConformerConfig(**{**vars(CONFORMER), "normalize_recordings": True})
    yield "conformer", SpectrogramObjective(CTC(CTCConfig(normed, 11, head_dropout=0.0)), TOKENS, torch.float32)
    whisper = WhisperEncoderConfig(mel_bins=16, width=32, layers=4, heads=4, audio_context=80)
    yield "whisper", SpectrogramObjective(CTC(CTCConfig(whisper, 11, head_dropout=0.0)), TOKENS, torch.float32)
    hybrid = HybridConfig(CONFORMER, 11, decoder_layers=1, decoder_mlp_width=32, decoder_dropout=0.0, head_dropout=0.0)
    yield "hybrid", SpectrogramObjective(Hybrid(hybrid), TOKENS, torch.float32, ctc_weight=0.3)


def batch_of(rows: int, seconds: float, *, padded: bool) -> Batch:
    """Noise and texts; the rows have different lengths, where padded."""
    generator = torch.Generator().manual_seed(3)
    samples = round(seconds * 16_000)
    lengths = torch.full((rows,), samples)
    if padded:
        lengths = (samples * torch.linspace(1.0, 0.55, rows)).long()
    waveforms = torch.randn(rows, samples, generator=generator)
    waveforms[torch.arange(samples) >= lengths[:, None]] = 0
    counts = torch.randint(2, 5, (rows,), generator=generator) if seconds > 0.5 else torch.ones(rows, dtype=torch.int64)
    targets = torch.randint(5, 11, (rows, 16), generator=generator)
    targets[torch.arange(16) >= counts[:, None]] = IGNORED
    names = tuple(map(str, range(rows)))
    weights = torch.ones(rows)
    keys = torch.arange(rows)
    return Batch(
        waveforms=waveforms,
        lengths=lengths,
        targets=targets,
        target_lengths=counts,
        weights=weights,
        keys=keys,
        rehearsed=torch.zeros(rows, dtype=torch.bool),
        ids=names,
        texts=names,
        speakers=names,
        languages=names,
        samples=samples,
        epoch=0,
        bucket=0,
        ends_step=True,
        ends_epoch=False,
        skipped=(),
        state={},
    )


def plain(objective: Objective, batch: Batch) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients, and each row's loss in evaluation, in one process."""
    objective.train()
    losses = objective(prepare(batch, torch.device("cpu")))
    (losses.total / objective.units(batch)).backward()
    gradients = {name: each.grad for name, each in objective.network.named_parameters() if each.grad is not None}
    objective.eval()
    rows = objective.evaluate(prepare(batch, torch.device("cpu"))).losses.rows
    return float(losses.total.detach()), gradients, rows


def shared(
    objective: Objective, batch: Batch, config: TrainConfig, joined: Processes
) -> tuple[float, dict[str, Tensor], Tensor, float]:
    """The same on a mesh, and the gradient's norm."""
    mesh = on_mesh(joined, config.parallel)
    check_mesh(objective, config, mesh_sizes(config.parallel, joined.world_size))
    divided = divide(objective, layers_of(objective.network), mesh, config.run)
    strategy = choose_strategy(config.parallel, joined.world_size)
    wrapped = parallelize(objective, divided.layers, mesh, strategy, torch.float32)
    optimizer = Optimizer(
        objective.network, config.optimizer, 10, layout=divided.layout, synced=is_synced(wrapped, mesh)
    )
    own = batch.rows(mesh.data_rank * len(batch) // mesh.data_size, (mesh.data_rank + 1) * len(batch) // mesh.data_size)
    units = mesh.sum(torch.tensor(objective.units(own)))
    wrapped.train()
    scale = mesh.data_size / units
    prepared = prepare(own, torch.device("cpu"))
    losses = losses_and_gradients(wrapped, prepared, scale, optimizer.backward, None)
    total = float(mesh.sum(losses.total.detach().clone()))
    if divided.layout is not None:
        named = dict(objective.network.named_parameters())
        divided.layout.finish_gradients(named, synced=is_synced(wrapped, mesh))
        norm = float(divided.layout.norm([p.grad for p in named.values() if p.grad is not None], torch.device("cpu")))
    else:
        gradients = [each.grad for each in objective.network.parameters() if each.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
    gradients = {n: whole(each.grad) for n, each in objective.network.named_parameters() if each.grad is not None}
    if divided.layout is not None:
        gradients = divided.layout.join(gradients, torch.device("cpu"))
    objective.eval()
    with torch.no_grad():
        rows = objective.evaluate(prepared).losses.rows
    return total, gradients, rows, norm


def compare(mesh: str, joined: Processes, turn: int, *, checkpoint_layers: bool) -> list[dict[str, Any]]:
    """How far the loss and the gradients of two of the networks are from those of one process; others each turn."""
    config = TrainConfig()
    config.optimizer.clip_norm = 0.0
    config.run.checkpoint_layers = checkpoint_layers
    apply_mesh(config.parallel, parse_mesh(mesh))
    # An odd number of positions, and rows that are no multiple of the groups of a pipeline.
    rows = 4 if joined.world_size < 4 else 8
    chosen = (turn % 2, 2 + turn % 3)
    cases = [(number, batch_of(rows, 0.93 + 0.1 * number, padded=number != 1)) for number in chosen]
    if config.parallel.cp > 2:  # fewer positions than a convolution sees to each side, and parts without any
        cases += [(number, batch_of(rows, 0.105, padded=False)) for number in chosen]
    return [{"mesh": mesh, **compare_one(number, batch, config, joined)} for number, batch in cases]


def compare_one(number: int, batch: Batch, config: TrainConfig, joined: Processes) -> dict[str, Any]:
    """The same for one network and batch."""
    (name, objective), (_, alone) = (next(islice(objectives(), number, None)) for _ in range(2))
    loss, expected, rows = plain(alone, batch)
    total, gradients, found, norm = shared(objective, batch, config, joined)
    size = float(nn.utils.get_total_norm(list(expected.values())))
    # A gradient that is nothing beside the others, such as that of a key's bias, is rounding.
    worst = {n: float((gradients[n] - g).norm() / g.norm().clamp(min=0.01 * size)) for n, g in expected.items()}
    place = on_rows(joined, config, len(rows) // len(found))
    wanted = rows[place * len(found) : (place + 1) * len(found)]
    return {
        "network": name,
        "seconds": batch.samples / 16_000,
        "loss": abs(total - loss) / abs(loss),
        "norm": abs(norm - size) / size,
        "gradient": max(worst.values()),
        "of": max(worst, key=lambda n: worst[n]),
        "missing": sorted(expected.keys() ^ gradients.keys()),
        "rows": float(((found - wanted).abs() / wanted.abs().clamp(min=1e-3)).max()),
    }


def on_rows(joined: Processes, config: TrainConfig, data: int) -> int:
    """Which part of the batch this process has worked on."""
    sizes = mesh_sizes(config.parallel, joined.world_size)
    return joined.rank // (sizes.cp * sizes.tp) % sizes.data if data > 1 else 0


def config_of(folder: Path, manifest: Path, steps: int) -> TrainConfig:
    """A run whose steps hold two batches, and nothing that is drawn by process."""
    config = small_config(folder, manifest, steps=steps)
    config.model.dropout = config.model.head_dropout = config.model.decoder_dropout = 0.0
    config.model.layers, config.model.decoder_layers, config.model.decoder_mlp_width = 2, 1, 64
    config.objective.kind = "hybrid"
    config.optimizer.accumulate, config.optimizer.ema, config.optimizer.hold_steps = 2, 0.9, 1000
    config.optimizer.clip_norm, config.optimizer.warmup_steps = 0.5, 1
    config.optimizer.epsilon = 1e-3  # where a gradient is rounding, AdamW would make a full step of it
    config.run.log_every = config.run.threads = 1
    return config


def go_on(folder: str, manifest: str, joined: Processes, meshes: Sequence[str]) -> None:
    """Two more steps of a run on each mesh."""
    for number, mesh in enumerate(meshes, 2):
        config = config_of(Path(folder), Path(manifest), 2 * number)
        sizes = parse_mesh(mesh)
        apply_mesh(config.parallel, sizes)
        config.optimizer.accumulate //= sizes.data
        open_run(config, joined, Silent(), resume=True).run()


def work(output: str, folder: str, manifest: str, *meshes: str) -> None:
    """Write what `compare` says of all meshes; where there is a folder, go on with its run."""
    torch.set_num_threads(1)
    with processes("cpu", ParallelOptions()) as joined:
        said = [
            each
            for number, mesh in enumerate(meshes)
            for each in compare(mesh, joined, number, checkpoint_layers=number % 2 == 1)
        ]
        if folder:
            go_on(folder, manifest, joined, ("tp=2,sp", "pp=2", "fsdp=2", "cp=2"))
        everyone = joined.gather(said)
    if joined.rank == 0:
        Path(output).write_text(json.dumps([each for one in everyone for each in one]))


def main(size: int, port: str, arguments: list[str]) -> int:
    """Fork so many processes, for importing takes longer than the work. Returns 1 where one failed."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                work(*arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)  # PyTorch's caches keep gloo's threads alive beyond what they use
        children.append(child)
    failed = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = 1
            for other in children:  # they would wait for the one that failed
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
