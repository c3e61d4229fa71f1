"""Numbers for Prometheus: requests, queues, batches, audio, latencies, engines, GPUs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from stapes.devices import monitor

if TYPE_CHECKING:
    from stapes.serving.services import Services

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Upper bounds of the classes in which engines count batch sizes; larger ones come after the last."""

_LATENCIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300, 600)
_GPU_SECONDS = 5.0


class Metrics:
    """What is counted as it happens; the rest is looked up when somebody asks (`collect_from`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("stapes_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self.latency = Histogram(
            "stapes_request_seconds",
            "From a request's arrival to the end of its answer",
            ["route"],
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self.audio = Counter("stapes_audio_seconds", "Audio transcribed", ["model"], registry=self.registry)
        self.engine_time = Histogram(
            "stapes_transcribe_seconds",
            "From a request's turn to its transcript",
            ["model"],
            buckets=_LATENCIES,
            registry=self.registry,
        )

    def audio_done(self, model: str, seconds: float, took: float) -> None:
        """A recording was transcribed."""
        self.audio.labels(model).inc(seconds)
        self.engine_time.labels(model).observe(took)

    def collect_from(self, services: Services) -> None:
        """Look these services up whenever somebody asks."""
        self._lookups = _Lookups(services)
        self.registry.register(self._lookups)  # type: ignore[arg-type]

    async def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        await asyncio.to_thread(self._lookups.read_gpus)  # drivers may take their time
        return generate_latest(self.registry)


class _Lookups:
    """Numbers that are there already."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # PyTorch, the last resort for GPU numbers, is not for this process.
        self._monitor = monitor.Monitor(fallback={"none": list})
        self._gpus: Sequence[Metric] = []
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: collecting has to wait until there is something."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All families."""
        yield from self._queues()
        yield from self._engines()
        yield from self._gpus

    def _queues(self) -> Iterable[Metric]:
        limits = self._services.limits
        waiting = GaugeMetricFamily("stapes_requests_waiting", "Requests that wait for their turn", labels=["class"])
        at_work = GaugeMetricFamily("stapes_requests_at_work", "Requests in an engine", labels=["class"])
        for priority, count in limits.waiting.items():
            waiting.add_metric([priority], count)
            at_work.add_metric([priority], limits.at_work[priority])
        yield from (waiting, at_work)
        inside = "Requests that are being read, decoded, wait or are at work"
        yield GaugeMetricFamily("stapes_requests_inside", inside, limits.inside)
        yield GaugeMetricFamily("stapes_live_sessions", "Live sessions that are open", limits.sessions)
        killed = "Decoders ended because they hung, crashed or had no one to decode for"
        yield GaugeMetricFamily("stapes_decoders_killed", killed, self._services.decoders.killed)

    def _engines(self) -> Iterable[Metric]:
        now = time.monotonic()
        gauges: dict[str, tuple[str, Callable[[Any], float]]] = {
            "stapes_engine_up": ("Whether the engine process has its models", lambda engine: engine.up),
            "stapes_engine_restarts": ("How often the process was begun again", lambda engine: engine.restarts),
            "stapes_engine_idle_seconds": ("Since the device came further", lambda engine: now - engine.advanced_at),
            "stapes_engine_audio_seconds_outstanding": ("Audio on its way", lambda engine: engine.outstanding),
            "stapes_engine_windows_in_slots": (
                "Windows being written",
                lambda engine: engine.stats.get("windows_in_slots", 0),
            ),
        }
        engines = self._services.engines.all
        for name, (help, value) in gauges.items():
            family = GaugeMetricFamily(name, help, labels=["engine"])
            for engine in engines:
                family.add_metric([engine.name], float(value(engine)))
            yield family
        for key, help in {"encoded": "Windows encoded together", "decoded": "Windows written together"}.items():
            histogram = HistogramMetricFamily(f"stapes_batch_{key}", help, labels=["engine"])
            for engine in engines:
                if (sizes := engine.stats.get(key)) is not None:
                    histogram.add_metric([engine.name], _cumulative(sizes["counts"]), sizes["total"])
            yield histogram

    def read_gpus(self) -> None:
        """Ask the drivers, if that is some seconds ago."""
        with self._lock:
            if time.monotonic() - self._read_at < _GPU_SECONDS:
                return
            families: dict[str, GaugeMetricFamily] = {}
            for reading in self._monitor.gpus():
                for name, value in monitor.as_metrics(reading).items():
                    if name not in families:
                        families[name] = GaugeMetricFamily(f"stapes_{name}", "As the driver tells it", labels=["gpu"])
                    families[name].add_metric([str(reading.index)], value)
            self._gpus, self._read_at = [*families.values()], time.monotonic()


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    buckets, total = [], 0
    for bound, count in zip([*map(str, BATCH_SIZES), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
