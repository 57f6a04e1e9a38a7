"""One cluster for the run, and jobs in it that end with their test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandboxd.client import Client
from sandboxd.client import slurm as published
from tests.framework import host_state, times
from tests.framework import slurm as framework
from tests.framework.leaks import LeakCheck
from tests.framework.ordinary_user import ordinary_user
from tests.framework.slurm import Slurm

NEEDS = pytest.mark.needs("root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits")
PROGRAM = str(Path(sys.executable).with_name("sandboxd"))
GONE_S = times.scaled(60.0)
INSTANCES = Path("/run")
NOBODY = 65_534


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(NEEDS)


@pytest.fixture(scope="session")
def cluster(leak_check: LeakCheck, busybox: Path) -> Iterator[Slurm]:
    if reason := framework.missing():
        pytest.skip(reason)
    with (
        leak_check.around("the cluster"),
        # On its nodes an account other than root may open /dev/fuse, and has subordinate ids.
        ordinary_user(65_536, name="nobody", uid=NOBODY) as nobody,
        framework.running_slurm(3, before=nobody.words_for_his_files) as running,
    ):
        images = running.home / "images"
        images.mkdir()
        shutil.copyfile(busybox, images / "busybox.sif")
        (images / "busybox.sif").chmod(0o444)
        running.environment |= {
            published.DIRECTORY: str(running.home / "shared"),
            "SANDBOXD_SLURM_PROGRAM": PROGRAM,
            "SANDBOXD_IMAGES_DIR": str(images),
            # So that the leak check knows them for ours.
            "SANDBOXD_CGROUP_ROOT": running.home.name,
            "SANDBOXD_SLOTS_MIN": "1",
            "SANDBOXD_SLOTS_MAX": "1",
            "SANDBOXD_SLOTS_PRIMED": "0",
            "SANDBOXD_PROC_VIEWS": "false",
            "SANDBOXD_NETWORK_POOL": "",
        }
        yield running


@dataclass
class Jobs:
    """sandboxd's verbs in the cluster, and what is to be seen of what they do."""

    cluster: Slurm
    known: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.cluster.home / "shared"

    def verb(
        self, *words: str, check: bool = True, user: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.run([PROGRAM, "slurm", *words], check=check, user=user)

    def launch(self, *words: str) -> str:
        """Submit, wait until all serve, and return the job's id."""
        job = str(json.loads(self.verb("launch", "--json", *words).stdout)[0]["job"])
        self.known.append(job)
        return job

    def submit(self, *words: str) -> str:
        job = self.verb("launch", "--wait", "0", *words).stdout.strip()
        self.known.append(job)
        return job

    def client(self, job: str, node: str) -> Client:
        return Client.from_slurm(node, job=job, directory=self.directory, retry_s=0)

    def output(self, job: str) -> str:
        return (self.cluster.home / f"slurm-{job}.out").read_text(errors="replace")

    def instances(self, job: str) -> list[str]:
        """Directories on the node's own disk."""
        return sorted(path.name for path in INSTANCES.glob(f"sandboxd-slurm-*-{job}-*"))

    def cgroups(self) -> list[str]:
        """All that any daemon of this cluster has, and nobody else."""
        return sorted(
            os.path.join(directory, name)
            for mount in host_state.cgroup_mounts()
            for directory, names, _ in os.walk(mount)
            for name in names
            if name.startswith(self.cluster.home.name)
        )

    def processes(self) -> list[str]:
        """Command lines of what belongs to daemons of this cluster: all below a slurmstepd."""
        table = host_state.process_table()
        ours = table[os.getpid()].descendants()
        steps = [one for one in ours if one.name.startswith("slurmstepd")]
        return [f"{one.name} {one.pid}" for step in steps for one in step.descendants()]

    def left(self, job: str) -> dict[str, list[str]]:
        """What there is of a job, by where it is; empty lists are left out."""
        shared = self.directory / job
        found = {
            "published": [*sorted(os.listdir(shared)), job] if shared.is_dir() else [],
            "instances": self.instances(job),
            "cgroups": self.cgroups(),
            "processes": self.processes(),
        }
        return {what: names for what, names in found.items() if names}

    def wait_nothing_left(self, job: str) -> None:
        wait_for(lambda: not self.left(job), lambda: f"job {job} left {self.left(job)}")

    def end(self) -> None:
        for job in self.cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split():
            self.cluster.run(["scancel", job], check=False)
        wait_for(
            lambda: not self.cluster.run(["squeue", "--noheader"]).stdout.strip(),
            lambda: self.cluster.run(["squeue"]).stdout + self.cluster.log_tail(),
        )
        try:
            for job in self.known:
                self.wait_nothing_left(job)
        finally:
            # For the tests after one that failed.
            self.verb("sweep", check=False)
            for job in self.known:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self.directory / job)


def wait_for(true: Callable[[], object], why: Callable[[], str], within_s: float = GONE_S) -> None:
    """Neither Slurm nor a directory tells of what changes."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(why())
        time.sleep(0.1)


@pytest.fixture
def jobs(cluster: Slurm) -> Iterator[Jobs]:
    """Whatever the test submits has ended after it, and left nothing."""
    cluster.wait_nodes("idle")
    held = Jobs(cluster)
    try:
        yield held
    except BaseException:
        print(cluster.log_tail())
        raise
    finally:
        held.end()
