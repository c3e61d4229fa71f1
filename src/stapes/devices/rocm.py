"""Safe defaults for AMD's GPUs, and self-tests that any device can be asked to pass.

The defaults are environment variables of AMD's and PyTorch's libraries, read when the GPU is first used. What the user
has set stays as it is. One variable is never set here: HSA_OVERRIDE_GFX_VERSION makes a GPU claim to be another one
and can hang the machine; ``stapes doctor`` explains it to those who have it set.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stapes.devices.kfd import read_gpus

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

HIPBLASLT_ARCHITECTURES = frozenset(
    {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1103"}
    | {"gfx1150", "gfx1151", "gfx1200", "gfx1201"}
)
"""Where ROCm 7's hipBLASLt has kernels. On others PyTorch would only warn and take rocBLAS."""


def miopen_folder() -> Path:
    """Where MIOpen keeps what it found and compiled: ``stapes/miopen`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stapes" / "miopen"


def defaults(architectures: list[str], folder: Path) -> dict[str, str]:
    """The variables that make ROCm safe and quick to start, for GPUs of these architectures."""
    chosen = {
        # MIOpen's default search compiles and times every kernel that might fit, for each new shape of a convolution:
        # minutes at a first start (pytorch #179795: 13 min, against 1 min with FAST). FAST takes its database's or its
        # heuristics' choice. For the last percent there is `stapes tune`.
        "MIOPEN_FIND_MODE": "FAST",
        # What MIOpen did find and compile outlives the process, in one folder that a container can have on a volume.
        "MIOPEN_USER_DB_PATH": str(folder),
        "MIOPEN_CUSTOM_CACHE_DIR": str(folder),
        # Growing segments hang in the first copy to the GPU on some ROCm versions (pytorch #192259).
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }
    if architectures and HIPBLASLT_ARCHITECTURES.issuperset(architectures):
        # rocBLAS, the default on Radeon, is slower there in fp16 and has no TF32 on gfx942.
        chosen["TORCH_BLAS_PREFER_HIPBLASLT"] = "1"
    return chosen


def apply_defaults(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the defaults that the user has not set, where this PyTorch is ROCm's. Returns what was set.

    To be called before the GPU is first used; later calls find everything set.
    """
    if not torch.version.hip:
        return {}
    folder = miopen_folder()
    users = set(environment)
    if users.intersection(ALLOCATOR_VARIABLES):  # the old names of one setting
        users.update(ALLOCATOR_VARIABLES)
    added = {}
    for name, value in defaults([gpu.architecture for gpu in read_gpus()], folder).items():
        if name in users:
            continue
        if value == str(folder):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:  # a home that cannot be written to: MIOpen then does as it would without us
                continue
        environment[name] = added[name] = value
    if "TORCH_BLAS_PREFER_HIPBLASLT" in added:
        _prefer_hipblaslt()
    return added


def _prefer_hipblaslt() -> None:
    """PyTorch reads its own variable when it is imported, before us: the variable is for processes that we start."""
    with warnings.catch_warnings(), suppress(RuntimeError):  # a build without hipBLASLt refuses: rocBLAS it is
        warnings.simplefilter("ignore")  # the choice is announced as experimental
        torch.backends.cuda.preferred_blas_library("hipblaslt")


@dataclass(frozen=True)
class ParityResult:
    """One operation on a device against the CPU in fp64. ``error``: largest difference by the largest value.

    ``seconds``: a second run of it. ``failure``: why it did not run at all.
    """

    name: str
    error: float | None
    passed: bool
    seconds: float | None = None
    failure: str | None = None


TOLERANCE = 1e-4
"""Relative to the largest value; fp32 sums of a few hundred terms come within 1e-5, a wrong result is off by 1e-2."""


def check_parity(device: torch.device) -> list[ParityResult]:
    """Run an LSTM over packed sequences and the convolutions of speech models; compare with the CPU in fp64.

    PyTorch's LSTM has been silently wrong on ROCm for long packed sequences (pytorch #177834), and has failed outright
    in MIOpen (#189618). A recogniser that uses either asks here first.
    """
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lstm = nn.LSTM(48, 64, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64)
    lengths = torch.tensor([700, 512, 33, 1])
    frames = random(4, 700, 48)
    mel, first, second = random(2, 80, 3000), random(96, 80, 3) * 0.05, random(96, 96, 3) * 0.05
    wave, filters = random(2, 1, 16000), random(64, 1, 10) * 0.1

    def run_lstm(where: torch.device, dtype: torch.dtype) -> Tensor:
        module = copy.deepcopy(lstm).to(where, dtype).eval()
        packed = nn.utils.rnn.pack_padded_sequence(frames.to(where, dtype), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)[0]

    def run_whisper_front(where: torch.device, dtype: torch.dtype) -> Tensor:
        x = F.gelu(F.conv1d(mel.to(where, dtype), first.to(where, dtype), padding=1))
        return F.conv1d(x, second.to(where, dtype), stride=2, padding=1)

    def run_wave_front(where: torch.device, dtype: torch.dtype) -> Tensor:
        return F.conv1d(wave.to(where, dtype), filters.to(where, dtype), stride=5)

    runs = {"LSTM": run_lstm, "convolution (log-mel)": run_whisper_front, "convolution (waveform)": run_wave_front}
    cudnn = torch.backends.cudnn
    # In TF32, which cuDNN may use unasked, a right result is off by 1e-3.
    with torch.inference_mode(), cudnn.flags(cudnn.enabled, cudnn.benchmark, deterministic=False, allow_tf32=False):
        return [_compare(name, run, device) for name, run in runs.items()]


def _compare(name: str, run: Callable[[torch.device, torch.dtype], Tensor], device: torch.device) -> ParityResult:
    try:
        wanted = run(torch.device("cpu"), torch.float64)
        run(device, torch.float32)
        begin = time.perf_counter()
        found = run(device, torch.float32).cpu().double()
        seconds = time.perf_counter() - begin
    except Exception as error:  # whatever a driver or MIOpen raises is the result of this test
        return ParityResult(name, None, False, failure=one_line(error))
    difference = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return ParityResult(name, difference, difference < TOLERANCE, seconds)  # NaN fails


class _Step(nn.Module):
    """What decoding does in a step: norm, products, a cache written at a position that changes, attention over it."""

    def __init__(self, width: int = 128, heads: int = 4, positions: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        shape = (2, heads, positions, width // heads)
        self.keys, self.values = nn.Buffer(torch.zeros(shape)), nn.Buffer(torch.zeros(shape))
        self.steps = nn.Buffer(torch.arange(positions))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, 1, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        mask = (self.steps <= position)[None, None, None]
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask)
        return x + self.out(attended.flatten(1))


@torch.inference_mode()
def graphs_agree(device: torch.device, dtype: torch.dtype = torch.float16) -> tuple[bool, str]:
    """Whether a captured graph replays what eager PyTorch computes, and if not, why.

    On ROCm a capture can go wrong without an error (pytorch #155684), so that the engine asks at start-up: a decoding
    step is captured once and replayed with new inputs and positions, with other work on the allocator in between.
    """
    if device.type != "cuda":
        return False, "graphs are for GPUs"
    try:
        with torch.cuda.device(device):
            return _replay_agrees(device, dtype)
    except Exception as error:  # refusing to capture is one of the answers
        return False, f"capturing a step failed: {one_line(error)}"


def _replay_agrees(device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    with torch.random.fork_rng(devices=[device]):
        torch.manual_seed(1)
        eager = _Step().to(device, dtype)
        inputs = torch.randn(8, 2, 128, device=device, dtype=dtype)
    captured = copy.deepcopy(eager)
    x, position = inputs[0].clone(), torch.zeros(1, dtype=torch.int64, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # libraries must have made their workspaces before the capture
        for _ in range(3):
            captured(x, position)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured(x, position)
    captured.keys.zero_()
    captured.values.zero_()
    for index, wanted in enumerate(inputs):
        expected = eager(wanted, torch.full_like(position, index))
        x.copy_(wanted)
        position.fill_(index)
        graph.replay()
        difference = (out - expected).abs().max().item()
        if not difference <= 2e-2:  # NaN too; fp16 in another order differs by 1e-3
            return False, f"replay {index} of a captured step differs from eager by {difference:.2g}"
        torch.arange(1 << 16, 0, -1, device=device).sort()
    return True, "8 replays of a captured step are what eager computes"


def one_line(error: BaseException) -> str:
    """The first line of an error's text, with its kind."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
