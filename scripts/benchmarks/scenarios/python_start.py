"""Starting Python in a sandbox: from a warm image, and from one of which nothing is in memory.

Cold means: the image is unmounted and what the kernel keeps of its SIF dropped
(posix_fadvise(2), POSIX_FADV_DONTNEED); nothing else of the machine is. For storage slower than
this machine's see `image`.
"""

from __future__ import annotations

import os
import shutil
import time

from local_daemon import DaemonError

from benchmarks.measurements import Key
from benchmarks.rig import IMAGE, Rig
from sandboxd.client import SandboxdError

SCENARIO = "Python start"
PYTHON = ["python3", "-c", "import json, asyncio, unittest"]
COLD_IMAGE = "cold"
EVICT_S = 30.0


def python_start(rig: Rig) -> None:
    with rig.client.create(IMAGE) as sandbox:
        sandbox.exec(PYTHON)
        for _ in range(max(1, rig.size.rounds // 10)):
            with rig.measured.timed(SCENARIO, "warm"):
                result = sandbox.exec(PYTHON, timeout_s=60)
            if not result.ok:
                rig.measured.fail(f"{SCENARIO}: {result.stderr}")
            rig.yardsticks.sample(SCENARIO, "warm", "chroot", "bwrap", "crun", command=PYTHON)
    shutil.copyfile(rig.sif, rig.daemon.images_dir / f"{COLD_IMAGE}.sif")
    (rig.daemon.images_dir / f"{COLD_IMAGE}.sif").chmod(0o444)
    for _ in range(rig.size.slow_rounds):
        cold(rig)


def cold(rig: Rig) -> None:
    """From nothing in memory: the create, which mounts the image, and Python's first start."""
    evict(rig)
    drop_from_memory(str(rig.daemon.images_dir / f"{COLD_IMAGE}.sif"))
    started = time.perf_counter()
    with rig.client.create(COLD_IMAGE) as sandbox:
        created = time.perf_counter()
        result = sandbox.exec(PYTHON, timeout_s=120)
        ended = time.perf_counter()
    if not result.ok:
        rig.measured.fail(f"{SCENARIO}: {result.stderr}")
    rig.measured.add(Key(SCENARIO, "cold create"), (created - started) * 1000)
    rig.measured.add(Key(SCENARIO, "cold"), (ended - created) * 1000)


def evict(rig: Rig) -> None:
    """Slots that are primed with it let go of it a moment later. Raises DaemonError."""
    deadline = time.monotonic() + EVICT_S
    # What was asked for last is what slots are primed with.
    rig.client.create(IMAGE).delete()
    while True:
        try:
            rig.client.evict_image(COLD_IMAGE)
        except SandboxdError as error:
            if time.monotonic() > deadline:
                raise DaemonError(f"the image cannot be unmounted: {error}") from error
            time.sleep(0.05)
        else:
            return


def drop_from_memory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)  # pages that are not on the disk yet are kept
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
