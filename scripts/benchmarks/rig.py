"""What a scenario works with, and how much of it is done in a run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from local_daemon import DaemonError, LocalDaemon, local_daemon
from quickstart import default_layout

from benchmarks.measurements import Measurements
from benchmarks.yardsticks import Yardsticks, yardsticks
from sandboxd.client import Client

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = "bench"
SETTLE_S = 60.0
AT_REST, LOOK_S = 8, 0.02
"""So many looks in a row that see the same, so far apart: longer than the launcher's own pauses."""
SMALL = {"cpus": 1, "memory_mb": 64, "disk_mb": 64, "inodes": 4096, "pids": 64}
"""Limits of one of a thousand. The rest is as by default, or no slot would suit it."""

# A node promises no more than it could keep; the bench asks for more than that at once, of which
# next to nothing is used. Connections are descriptors that sandboxes would need.
SETTINGS = {
    "max_sandboxes": "4096",
    "memory_overcommit": "100000",
    "cpu_overcommit": "100000",
    "pids_overcommit": "1000",
    "pressure_memory_percent": "100",
    "pressure_io_percent": "100",
    "pressure_cpu_percent": "100",
    "max_connections": "1536",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How often things are done. `clients`: concurrencies beyond 1."""

    rounds: int
    slow_rounds: int
    """Of what takes long: hundreds of megabytes, an episode, a cold start."""
    clients: tuple[int, ...]
    bursts: int
    """Rounds at each concurrency, with this many in a row of each client."""
    in_a_row: int
    crowd: int
    forks: int
    many_files: int
    many_megabytes: int
    copied_files: int


FULL = Size(300, 15, (8, 64), 5, 6, 1000, 100, 10_000, 500, 1000)
QUICK = Size(50, 3, (8, 64), 2, 3, 1000, 100, 10_000, 500, 1000)
TINY = Size(3, 1, (4,), 1, 1, 12, 5, 50, 4, 20)
"""To see that everything works; its figures say nothing."""


@dataclass(frozen=True, slots=True)
class Rig:
    daemon: LocalDaemon
    client: Client
    yardsticks: Yardsticks
    measured: Measurements
    size: Size
    sif: Path

    def settle(self) -> None:
        """Wait until the pool of slots is as large as it will be and nothing dead is left, as after
        a pause. Raises DaemonError where that takes longer than a minute."""
        deadline = time.monotonic() + SETTLE_S
        same, before = 0, -1
        while same < AT_REST:
            counts = self.client.node().counts
            ready, busy = int(counts["slots_ready"]), int(counts["in_teardown"])
            same = same + 1 if ready == before and busy == 0 else 0
            before = ready
            if time.monotonic() > deadline:
                raise DaemonError(f"the node does not come to rest: {counts}")
            time.sleep(LOOK_S)


@contextlib.contextmanager
def rig(
    size: Size,
    image: Path | None,
    measured: Measurements,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Rig]:
    """A node of its own with the image `bench` (the task image, or the SIF `image`), and with
    `settings` on top of the bench's."""
    with local_daemon("bench") as daemon, contextlib.ExitStack() as stack:
        sif = daemon.images_dir / f"{IMAGE}.sif"
        if image is None:
            layout = default_layout()
            subprocess.run(
                [REPOSITORY / "scripts/make-task-image", layout], check=True, stdout=sys.stderr
            )
            convert = Path(sys.executable).with_name("sif-tools")
            subprocess.run(
                [convert, "convert", f"oci:{layout}", sif], check=True, stdout=sys.stderr
            )
        else:
            sif.write_bytes(image.read_bytes())
        sif.chmod(0o444)
        scratch = daemon.home / "yardsticks"
        scratch.mkdir()
        rods = stack.enter_context(yardsticks(sif, scratch, measured))
        daemon.start({**SETTINGS, **(settings or {})})
        client = stack.enter_context(Client(daemon.base_url, daemon.token))
        client.prepare_image(IMAGE)
        yield Rig(daemon, client, rods, measured, size, sif)
