"""The processes of a job on a mesh: who works on the same data, who holds which part of the network.

    pp      pipeline: stages, one after the other, each with some of the layers
    dp      data: whole copies, which work on different utterances
    fsdp    data: processes that share one copy (FSDP2) and work on different utterances too
    cp      context: parts of each recording, whose ends are told to the neighbours
    tp      tensor: parts of each layer's matrices; with sp, parts of what is between them as well

From the slowest to the fastest: neighbours in tp talk several times a layer and ought to be in one machine, stages
once a batch. The ranks of a group of tp follow each other, then those of cp, fsdp, dp, pp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stapes.errors import UsageError
from stapes.training.config import ParallelOptions

DIMENSIONS = ("dp", "fsdp", "tp", "cp", "pp")


@dataclass(frozen=True)
class MeshSizes:
    """How many processes there are in each direction."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    sp: bool = False
    """tp: whether what is between the matrices is shared out too, over time."""
    sharded: bool = False
    """Whether FSDP2 holds the weights, if only for one process."""

    @property
    def processes(self) -> int:
        """In all."""
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def data(self) -> int:
        """That work on different utterances."""
        return self.dp * self.fsdp

    @property
    def divides(self) -> bool:
        """Whether the work on one utterance is shared out."""
        return self.tp * self.cp * self.pp > 1

    def text(self) -> str:
        """As ``--parallel`` takes it."""
        parts = [f"{name}={getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        return ",".join(parts + ["sp"] * self.sp) or "dp=1"


def parse_mesh(text: str) -> MeshSizes:
    """``dp=4,tp=2,sp`` in sizes. Raises UsageError."""
    sizes: dict[str, int] = {}
    sp = False
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name == "sp" and number in ("", "1", "true"):
            sp = True
        elif name in DIMENSIONS and number.isdigit() and int(number) and name not in sizes:
            sizes[name] = int(number)
        else:
            raise UsageError(
                f"--parallel is {text!r}: say each of {', '.join(f'{each}=…' for each in DIMENSIONS)} at most once, "
                "and sp beside tp, such as dp=4,tp=2,sp"
            )
    if sp and sizes.get("tp", 1) == 1:
        raise UsageError(f"--parallel is {text!r}: sp shares out what is between the parts of tp, so give tp=2 or more")
    return MeshSizes(**sizes, sp=sp, sharded=sizes.get("fsdp", 1) > 1)


def apply_mesh(options: ParallelOptions, sizes: MeshSizes) -> None:
    """Have the options say what ``--parallel`` says."""
    options.tp, options.cp, options.pp, options.sp = sizes.tp, sizes.cp, sizes.pp, sizes.sp
    if sizes.fsdp > 1:
        options.strategy, options.shards = "fsdp", sizes.fsdp
    else:
        options.strategy = "ddp"


def mesh_sizes(options: ParallelOptions, processes: int) -> MeshSizes:
    """The mesh of so many processes. Raises UsageError for options that do not fit them or each other."""
    tp, cp, pp = options.tp, options.cp, options.pp
    inner = tp * cp * pp
    if processes % inner:
        raise UsageError(
            f"parallel.tp × cp × pp is {tp} × {cp} × {pp} = {inner}, which does not divide {processes} processes: "
            "start so many more, or make one of them smaller"
        )
    data = processes // inner
    if options.sp and tp == 1:
        raise UsageError("parallel.sp shares out what is between the parts of tp: set parallel.tp=2 or more")
    if options.sp and cp > 1:
        raise UsageError("parallel.sp and cp both share out time: leave sp out, cp does its work too")
    if cp > 1 and pp > 1:
        raise UsageError("parallel.cp does not go with pp, whose stages pass on whole recordings: use cp with fsdp")
    if inner > 1 and options.strategy == "deepspeed":
        raise UsageError("parallel.strategy deepspeed has a mesh of its own: use fsdp with tp, cp or pp")
    if options.strategy != "fsdp":
        return MeshSizes(dp=data, tp=tp, cp=cp, pp=pp, sp=options.sp)
    shards = options.shards or data
    if data % shards:
        raise UsageError(f"parallel.shards is {shards}, which does not divide {data} processes with different data")
    return MeshSizes(data // shards, shards, tp, cp, pp, options.sp, sharded=True)


class Mesh:
    """The groups of processes that this one belongs to. All processes must make it, in the same order."""

    def __init__(self, sizes: MeshSizes, kind: str) -> None:
        self.sizes = sizes
        places = init_device_mesh(
            kind, (sizes.pp, sizes.data, sizes.cp, sizes.tp), mesh_dim_names=("pp", "data", "cp", "tp")
        )
        self.pp, self.data, self.cp, self.tp = (places.get_group(name) for name in ("pp", "data", "cp", "tp"))
        if sizes.sharded:
            # FSDP2 shards a tensor that tp has sharded before where both are dimensions of one mesh.
            whole = init_device_mesh(
                kind, (sizes.pp, sizes.dp, sizes.fsdp * sizes.cp, sizes.tp), mesh_dim_names=("pp", "dp", "fsdp", "tp")
            )
            self.shards: DeviceMesh | None = whole["dp", "fsdp"] if sizes.dp > 1 else whole["fsdp"]
            self.copies: dist.ProcessGroup | None = None
            self.tensor = whole["tp"]
        else:
            self.shards = None
            whole = init_device_mesh(
                kind, (sizes.pp, sizes.data * sizes.cp, sizes.tp), mesh_dim_names=("pp", "dp", "tp")
            )
            self.copies = whole.get_group("dp")
            self.tensor = whole["tp"]

    @property
    def stage(self) -> int:
        """Which stage of the pipeline this process is."""
        return dist.get_rank(self.pp)

    @property
    def data_rank(self) -> int:
        """Which of the different data this process works on."""
        return dist.get_rank(self.data)

    @property
    def tp_rank(self) -> int:
        """Which part of each matrix this process has."""
        return dist.get_rank(self.tp)
