"""The daemon's figures under their names, in Prometheus' text format.

No figure has the name of a sandbox, a run or an image in its labels: a node makes a million
sandboxes, and a series of each would end whoever collects them. ``deploy/grafana`` draws these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from sandboxd import __version__
from sandboxd.errors import SandboxdError
from sandboxd.runtime import own_process
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.meters import Histogram

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
NODE_S: Final = 2.0
"""For the launcher to answer; without its answer its figures are left out, and ``sandboxd_node_up``
is 0."""


async def exposition(runtime: Runtime) -> bytes:
    """All of it, read now."""
    counts: dict[str, Any] | None = None
    with suppress(SandboxdError, TimeoutError):
        async with asyncio.timeout(NODE_S):
            counts = (await runtime.node()).get("counts") or {}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Node(runtime, counts))
    return generate_latest(registry)


class _Node(Collector):
    def __init__(self, runtime: Runtime, counts: dict[str, Any] | None) -> None:
        self._runtime = runtime
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield gauge("build_info", "The version that serves.", 1, version=__version__)
        yield from self._sandboxes()
        yield from self._commands()
        yield from self._failures()
        yield from self._launcher()
        yield from self._images()
        yield from self._admission()
        yield from self._process()

    def _sandboxes(self) -> Iterator[Metric]:
        runtime, meters = self._runtime, self._runtime.meters
        yield gauges("sandboxes", "Sandboxes by state.", "state", runtime.counts())
        yield histograms(
            "create_seconds",
            "Creates that ended well, by phase; total is the whole of it without waiting for room.",
            "phase",
            meters.create_phases,
        )
        yield histogram("delete_seconds", "Deletions that ended well.", meters.deletes)
        runs = runtime.runs.counts()
        states = {name: runs[name] for name in ("active", "ended")}
        yield gauges("runs", "Runs that were set up or ended.", "state", states)
        yield gauge("leases", "Runs that end without a heartbeat.", runs["leased"])
        yield gauge("snapshots", "Snapshots.", sum(1 for _ in runtime.snapshots))

    def _commands(self) -> Iterator[Metric]:
        meters = self._runtime.meters
        yield histogram(
            "exec_seconds", "Commands, from their start to their end.", meters.exec_seconds
        )
        yield counters(
            "execs", "Commands by how they ended.", ("end",), one_label(meters.exec_ends)
        )
        yield counters(
            "exec_failures",
            "Commands that gave no result, by the error's code and whose fault it was.",
            ("code", "cause"),
            meters.exec_failures.counts,
        )

    def _failures(self) -> Iterator[Metric]:
        meters = self._runtime.meters
        for sandbox in self._runtime.table.values():
            sandbox.count_oom_kills()
        yield counters(
            "request_failures",
            "Requests answered with an error, by its code, whose fault it was, and its reason.",
            ("code", "cause", "reason"),
            meters.refusals.counts,
        )
        yield counters(
            "sandbox_failures",
            "Sandboxes in which nothing can run any more, by code and reason.",
            ("code", "reason"),
            meters.sandbox_failures.counts,
        )
        yield counter("oom_kills", "Processes that the kernel killed for memory.", meters.oom_kills)
        yield counters("events", "Events by kind.", ("kind",), one_label(meters.events))

    def _launcher(self) -> Iterator[Metric]:
        counts = self._counts
        ready = self._runtime.ready and counts is not None
        yield gauge("node_up", "Whether the launcher answers and creates work.", float(ready))
        if counts is None:
            return
        yield gauges(
            "slots",
            "Slots made ahead of need: ready (primed ones included), primed with a root, going.",
            "kind",
            {
                kind: counts[name]
                for kind, name in (
                    ("ready", "slots_ready"),
                    ("primed", "slots_primed"),
                    ("teardown", "in_teardown"),
                )
                if name in counts
            },
        )
        for name, key, words in (
            ("mounts", "mounts", "Mounts of images and of what is being made."),
            ("fuse_processes", "fuse_processes", "Image servers that run."),
            ("sandboxes_memory_bytes", "memory_bytes", "Of all sandboxes and slots together."),
            ("launcher_memory_bytes", "launcher_memory_bytes", "Resident, of the launcher."),
        ):
            if counts.get(key) is not None:
                yield gauge(name, words, counts[key])
        if counts.get("swept") is not None:
            words = "What the node had lost track of and removed."
            yield counter("orphans_swept", words, counts["swept"])

    def _images(self) -> Iterator[Metric]:
        images = self._runtime.images
        mounted = images.mounted()
        in_use = sum(mount.users > 0 for mount in mounted)
        use = {"in-use": in_use, "idle": len(mounted) - in_use}
        yield gauges("images_mounted", "Images that are mounted.", "use", use)
        yield counters(
            "image_acquires",
            "Layers that were mounted already when one was wanted (hit), or not (miss).",
            ("cache",),
            one_label(images.acquired),
        )

        copies = images.copies
        yield gauge("image_copies", "Images' files copied to this node.", copies.count)
        yield gauge("image_copies_bytes", "What they take on its disk.", copies.bytes)
        done = {"made": copies.made, "evicted": copies.evicted, "failed": copies.failed}
        words = "Copies of images' files that were made, evicted for others, or failed."
        yield counters("image_copies", words, ("outcome",), one_label(done))

    def _admission(self) -> Iterator[Metric]:
        admission = self._runtime.admission
        told = admission.to_json()
        yield gauge("admission_open", "Whether anything more is taken on.", float(told["open"]))
        yield gauge("draining", "Whether the node is being emptied.",
                    float(self._runtime.drain.draining))  # fmt: skip
        yield gauge("admission_waiting", "Creates that wait for room.", told["waiting"])
        yield gauges("admission_capacity", "What may be promised.", "resource", told["capacity"])
        yield gauges("admission_used", "What is promised.", "resource", told["used"])
        yield counters(
            "admission_refusals",
            "Creates that were sent away, by what there was too little of.",
            ("reason",),
            one_label(admission.refused),
        )
        pressure = told["pressure"]
        yield gauge("memory_available_bytes", "Of the machine.", pressure["available_mb"] << 20)
        stalls = GaugeMetricFamily(
            "sandboxd_pressure_ratio",
            "Of the last 10 s in which some or all (full) waited for the resource (PSI).",
            labels=("resource", "who"),
        )
        for kind, stall in pressure["stalls"].items():
            for who in ("some", "full"):
                stalls.add_metric((kind, who), stall[who] / 100)
        yield stalls
        closed = dict.fromkeys(pressure["closed_by"], 1)
        yield gauges("pressure_closed", "What keeps the node from taking more on.", "by", closed)

    def _process(self) -> Iterator[Metric]:
        yield histogram(
            "event_loop_lag_seconds",
            "How late the daemon's event loop was, felt twice a second.",
            self._runtime.meters.loop_lag,
        )
        # The names that every Prometheus client gives its own process.
        for name, value in (
            ("process_resident_memory_bytes", own_process.memory_bytes()),
            ("process_open_fds", own_process.open_fds()),
            ("process_max_fds", own_process.max_fds()),
            ("process_start_time_seconds", own_process.started_at()),
        ):
            yield GaugeMetricFamily(name, "Of the daemon.", value)
        yield CounterMetricFamily(
            "process_cpu_seconds", "Of the daemon.", own_process.cpu_seconds()
        )


def one_label(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(name,): count for name, count in counts.items()}


def gauge(name: str, words: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"sandboxd_{name}", words, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def gauges(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"sandboxd_{name}", words, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"sandboxd_{name}", words, value)


def counters(
    name: str, words: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
) -> Metric:
    family = CounterMetricFamily(f"sandboxd_{name}", words, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, words: str, meter: Histogram) -> Metric:
    family = HistogramMetricFamily(f"sandboxd_{name}", words, labels=())
    family.add_metric((), buckets(meter), meter.total)
    return family


def histograms(name: str, words: str, label: str, meters: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"sandboxd_{name}", words, labels=(label,))
    for key, meter in meters.items():
        family.add_metric((key,), buckets(meter), meter.total)
    return family


def buckets(meter: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as the format wants them."""
    bounds: Iterable[str] = (*map(str, meter.bounds), "+Inf")
    return list(zip(bounds, map(float, accumulate(meter.counts)), strict=True))
