"""How the server is set up, once: name, default, range and doc. Flags, ``STAPES_…`` variables and ``stapes.toml``
all fill this one object (`stapes.cli.serve`)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stapes.errors import UsageError
from stapes.options import Precision

SWITCH_SECONDS = 0.0005
"""How long a thread may keep others from running Python. The one that drives a GPU lets them at every operation, and
with Python's own 5 ms would not have it back in time where others find speech or read messages."""

USUAL_BATCH = 16
"""Windows decoded together on a GPU where nothing else is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """Where the server listens, and to whom."""

    host: str = "127.0.0.1"
    """Address to listen at: this machine alone, unless you say 0.0.0.0 or an address of it."""

    port: int = 8000
    """Port to listen at; 0 takes any that is free."""

    api_key_file: Path | None = None
    """Keys that clients must have, as digests; `--new-key` makes one. The variable STAPES_API_KEY holds keys as they
    are, separated by commas."""

    no_auth: bool = False
    """Listen to other machines without keys: whoever reaches the port may use it."""

    allow_origin: tuple[str, ...] = ()
    """Web site whose pages may use the server from a browser: https://example.org. Repeat for several."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}: give 0 to 65535")
        for origin in self.allow_origin:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise UsageError(f"--allow-origin is {origin!r}: give scheme and host, such as https://example.org")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the port."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Which models are served, and on what."""

    model: tuple[str, ...] = ()
    """Model to serve: name, folder (of a LoRA adapter too, which finds its base) or .pt file. Repeat for several; the
    first answers to OpenAI's names. Default: what suits the device. Nothing is ever downloaded: `stapes models pull`
    first."""

    alias: tuple[str, ...] = ()
    """NAME=MODEL: a further name that clients may call a model by."""

    adapter: tuple[str, ...] = ()
    """MODEL=FOLDER: LoRA adapter of a served model, merged in memory as it is loaded; FOLDER alone is one of the first.
    Repeat for several models, which have one each."""

    preload: tuple[str, ...] = ()
    """Model to load at the start; others are loaded when first asked for. Default: the first."""

    idle_timeout: float = 0.0
    """Let go of a model that nobody used for so many seconds; 0: never."""

    device: str = "auto"
    """auto, cpu, cuda, or GPUs separated by commas: cuda:0,cuda:1 have an engine each."""

    precision: Precision = "auto"
    """Number format that the models run in; auto suits the device."""

    max_vram: str | None = None
    """Most GPU memory to use, such as 6GB."""

    threads: int | None = None
    """CPU threads for the models. Default: all cores."""

    model_dir: str | None = None
    """Folder where models are looked for."""

    max_batch: int | None = None
    """Windows of up to 30 s, of any requests, that are decoded together. Default: 16 on a GPU; on a CPU 3 of short
    recordings and 3 of long ones, for more take memory and hardly any time less."""

    max_wait_ms: float = 50.0
    """Milliseconds that a request may wait for others to be begun with, while requests of its class are at work. An
    idle device never waits."""

    def __post_init__(self) -> None:
        if self.max_batch is not None:
            _between("max_batch", self.max_batch, 1, 4096)
        _between("max_wait_ms", self.max_wait_ms, 0, 10_000)
        _between("idle_timeout", self.idle_timeout, 0, 1e9)
        if self.threads is not None:
            _between("threads", self.threads, 1, 4096)
        if "" in self.devices:
            raise UsageError(f"--device is {self.device!r}: give devices separated by commas: cuda:0,cuda:1")
        for alias in self.alias:
            if not re.fullmatch(r"[^=\s]+=\S+", alias):
                raise UsageError(f"--alias is {alias!r}: give NAME=MODEL")

    @property
    def devices(self) -> list[str]:
        """One for each engine."""
        return [device.strip() for device in self.device.split(",")]


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitSettings:
    """How much is taken on."""

    max_upload: str = "512MB"
    """Largest request."""

    max_audio_seconds: float = 14_400.0
    """Longest recording, all channels that are transcribed apart together, counted while it is decoded."""

    max_queue: int = 256
    """Requests that may wait or be at work; more are told to come again (429)."""

    max_queue_seconds: float = 300.0
    """A request that could not begin for so long is handed back (503)."""

    jobs_per_key: int = 64
    """Requests of one key at a time."""

    max_sessions: int = 512
    """Live sessions at a time."""

    interactive_seconds: float = 60.0
    """Recordings up to this long go before longer ones."""

    decoders: int = 2
    """Processes that decode uploads."""

    decode_seconds: float = 300.0
    """A recording whose decoding takes longer is given up (504), and the process that hung is replaced."""

    upload_idle_seconds: float = 30.0
    """An upload that stands still for so long is given up (408)."""

    header_seconds: float = 20.0
    """A connection that has not sent a request for so long is closed."""

    spool_dir: Path | None = None
    """Folder for uploads on their way. Default: the system's for temporary files."""

    canary_seconds: float = 30.0
    """While nothing else is at work, a second of silence is transcribed so often: /readyz tells whether it was."""

    stall_seconds: float = 120.0
    """An engine that came no further for so long is ended and begun again."""

    shutdown_seconds: float = 30.0
    """Requests on their way get so long to end when the server is told to stop; then they are handed back (503)."""

    def __post_init__(self) -> None:
        size_in_bytes(self.max_upload)
        _between("max_audio_seconds", self.max_audio_seconds, 0.1, 1e7)
        for name in ("max_queue", "jobs_per_key", "max_sessions"):
            _between(name, getattr(self, name), 1, 1_000_000)
        _between("decoders", self.decoders, 1, 256)
        for name in ("max_queue_seconds", "decode_seconds", "upload_idle_seconds", "header_seconds", "stall_seconds"):
            _between(name, getattr(self, name), 0.1, 1e6)
        _between("canary_seconds", self.canary_seconds, 0.1, 3600)
        _between("interactive_seconds", self.interactive_seconds, 0, 1e7)
        _between("shutdown_seconds", self.shutdown_seconds, 0, 1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """All of it."""

    network: NetworkSettings = field(default_factory=NetworkSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    keys: str | None = None
    """Keys as they are, separated by commas, beside those of the file."""


def size_in_bytes(size: str) -> int:
    """Bytes of "512MB", "1GiB" or plain bytes. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", size.strip().lower())
    if found is None or not float(found[1]):
        raise UsageError(f"--max-upload is {size!r}: give a size such as 512MB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))


def _between(name: str, value: Any, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"--{name.replace('_', '-')} is {value:g}: give {low:g} to {high:g}")
