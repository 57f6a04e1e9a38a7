"""Reset, snapshot, rollback and fork, of a clean sandbox and of one that wrote much; a snapshot by
copy beside a live process; many forks of one snapshot."""

from __future__ import annotations

import asyncio
import time

from benchmarks.measurements import Key
from benchmarks.rig import IMAGE, SMALL, Rig
from sandboxd.client import AsyncClient, Sandbox, SandboxdError

LIMITS = {"memory_mb": 512, "disk_mb": 1024, "inodes": 65_536}
WRITE_FILES = """
import os, sys
count, size = int(sys.argv[1]), int(sys.argv[2])
os.makedirs("/work/much", exist_ok=True)
for n in range(count):
    if n % 500 == 0:
        os.makedirs(f"/work/much/{n // 500}", exist_ok=True)
    fd = os.open(f"/work/much/{n // 500}/{n}", os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, os.urandom(size))
    os.close(fd)
"""
WRITE_MEGABYTES = """
import os, sys
piece = os.urandom(1 << 20)
with open("/work/much", "wb") as file:
    for _ in range(int(sys.argv[1])):
        file.write(piece)
"""
SMALL_FILE = 64


class WriteFailed(Exception):
    """What was to be measured was not there; the message is of the program that should write it."""


def files(rig: Rig) -> None:
    """The same steps on each state. Nothing in the way of a peer keeps a state but nitrobox, which
    is reset in its clean one."""
    size = rig.size
    many = f"{size.many_files:,} files"
    megabytes = f"{size.many_megabytes} MB"
    for _ in range(size.rounds // 3):
        steps(rig, "clean", [])
        rig.yardsticks.sample("files: clean", "reset", "nitrobox reset")
        for measure in ("reset", "fork"):
            rig.yardsticks.sample("files: clean", measure, "floor_sandbox")
    for _ in range(size.slow_rounds):
        steps(rig, many, [WRITE_FILES, str(size.many_files), str(SMALL_FILE)])
        steps(rig, megabytes, [WRITE_MEGABYTES, str(size.many_megabytes)])
        for state in (many, megabytes):
            rig.yardsticks.sample(f"files: {state}", "reset", "floor_sandbox")


def steps(rig: Rig, state: str, writer: list[str]) -> None:
    scenario = f"files: {state}"
    measured, client = rig.measured, rig.client
    with client.create(IMAGE, limits=LIMITS) as sandbox:
        write(sandbox, writer)
        with measured.timed(scenario, "snapshot"):
            snapshot = sandbox.snapshot()
        try:
            if snapshot.how != "frozen":
                measured.fail(f"{scenario}: the snapshot was {snapshot.how}, not frozen")
            with measured.timed(scenario, "fork"):
                fork = client.fork(snapshot, limits=LIMITS)
            fork.delete()
            write(sandbox, writer)
            with measured.timed(scenario, "rollback"):
                sandbox.rollback(snapshot)
        finally:
            client.delete_snapshot(snapshot)
    with client.create(IMAGE, limits=LIMITS) as sandbox:
        write(sandbox, writer)
        with measured.timed(scenario, "reset"):
            sandbox.reset()
        if writer and sandbox.exec(["test", "-e", "/work/much"]).ok:
            measured.fail(f"{scenario}: there is still what was written before the reset")


def write(sandbox: Sandbox, writer: list[str]) -> None:
    """Raises WriteFailed."""
    if writer:
        result = sandbox.exec(["python3", "-c", *writer], timeout_s=120)
        if not result.ok:
            raise WriteFailed(f"{result.exit_code}: {result.stderr}")


def copy(rig: Rig) -> None:
    """10 MB in 1,000 files, and a process that lives."""
    count = rig.size.copied_files
    scenario = f"snapshot by copy, {count / 100:g} MB in {count:,} files"
    for _ in range(rig.size.slow_rounds * 2):
        with rig.client.create(IMAGE, limits=LIMITS) as sandbox:
            write(sandbox, [WRITE_FILES, str(count), "10000"])
            sandbox.start_process(["sleep", "600"])
            with rig.measured.timed(scenario, "total"):
                snapshot = sandbox.snapshot(on_running="copy")
            rig.client.delete_snapshot(snapshot)
            if snapshot.how != "copied" or snapshot.frozen_ms is None:
                rig.measured.fail(f"{scenario}: it was {snapshot.how}, not copied")
            else:
                rig.measured.add(Key(scenario, "frozen"), snapshot.frozen_ms)
        # The floor: as many files written anew by one program of the host, in memory.
        command = ["python3", "-c", WRITE_FILES, str(count), "10000"]
        rig.yardsticks.sample(scenario, "total", "chroot", command=command)
    rig.measured.note(
        "chroot", "chroot(2) and spawn, in C; no wall. By copy: writing the files anew"
    )


def forks(rig: Rig) -> None:
    """All in one request (`all`), and each in its own, all at once (`all, one by one`)."""
    count = rig.size.forks
    scenario = f"{count} forks of one snapshot"
    for _ in range(rig.size.slow_rounds):
        with rig.client.create(IMAGE, limits=LIMITS) as sandbox:
            write(sandbox, [WRITE_FILES, str(count), "10000"])
            snapshot = sandbox.snapshot()
        try:
            rig.settle()
            with rig.measured.timed(scenario, "all"):
                made = rig.client.fork_many(snapshot, count, limits=SMALL)
            for one in made:
                if isinstance(one, SandboxdError):
                    rig.measured.fail(f"{scenario}: {one}")
                else:
                    one.delete()
            rig.settle()
            asyncio.run(one_by_one(rig, scenario, snapshot.id, count))
        finally:
            rig.client.delete_snapshot(snapshot)
        took = sum(sum(rig.yardsticks.take("floor_sandbox")) for _ in range(count))
        rig.measured.add(Key(scenario, "all", "floor_sandbox"), took)


async def one_by_one(rig: Rig, scenario: str, snapshot: str, count: int) -> None:
    async with AsyncClient(rig.daemon.base_url, rig.daemon.token) as client:
        await asyncio.gather(*(client.node() for _ in range(count)))
        started = time.perf_counter()
        made = await asyncio.gather(
            *(client.fork(snapshot, limits=SMALL) for _ in range(count)), return_exceptions=True
        )
        elapsed_ms = (time.perf_counter() - started) * 1000
        rig.measured.add(Key(scenario, "all, one by one"), elapsed_ms)
        for one in made:
            if isinstance(one, BaseException):
                rig.measured.fail(f"{scenario}: {one}")
            else:
                await one.delete()
