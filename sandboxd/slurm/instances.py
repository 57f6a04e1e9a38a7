"""Directories of daemons on a node's own disk, one for each job and node name, and their end.

Several "nodes" may be one host (slurmd -N), and several jobs may share a node: runtime directory,
state and with them locks, cgroups and network names are never another's::

    /run/sandboxd-slurm-UID-JOB-NODE/     0755 for root (the API's account has to get through)
        lock        held by the step as long as it lives
        cgroup_root the name below which the daemon's cgroups are, for whoever sweeps
        run/        runtime_dir
        state/      state_dir: the token

A directory whose lock is free belongs to nobody any more: its step was killed with all the rest.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.config import load_config
from sandboxd.errors import ConfigError, SandboxdError

PREFIX: Final = "sandboxd-slurm"
LOCK: Final = "lock"
CGROUP_ROOT: Final = "cgroup_root"
END_S: Final = 20.0
PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class InstanceDirectory:
    """One that is ours, with its lock held until ``remove`` or the end of this process."""

    path: Path
    lock: int

    @property
    def runtime_dir(self) -> Path:
        return self.path / "run"

    @property
    def state_dir(self) -> Path:
        return self.path / "state"

    def remove(self) -> list[str]:
        """Sweep what the daemon left, if it left anything; what could not be removed, in words."""
        failures = sweep(self.path) if os.geteuid() == 0 else []
        if not failures:
            # A mount below would be walked into; a sweep has told of one that stays.
            shutil.rmtree(self.path, ignore_errors=True)
            if self.path.exists():
                failures.append(f"{self.path} could not be removed")
        os.close(self.lock)
        return failures


def base() -> Path:
    """Root's is a tmpfs that only root writes to; another user's the one of his login, if any."""
    if os.geteuid() == 0:
        return Path("/run")
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if own and os.path.isabs(own) and os.access(own, os.W_OK):
        return Path(own)
    return Path("/tmp")


def claim(
    job: str, node: str, cgroup_root: str = "sandboxd", where: Path | None = None
) -> InstanceDirectory:
    """The directory of this job on this node, empty. Raises ConfigError where it is in use."""
    where = where or base()
    path = where / f"{PREFIX}-{os.geteuid()}-{job}-{node}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700)
    status = path.lstat()
    if status.st_uid != os.geteuid() or path.is_symlink() or not path.is_dir():
        raise ConfigError(f"{path} belongs to another user")
    lock = _lock(path)
    if lock is None:
        raise ConfigError(
            f"another sandboxd of job {job} serves on node {node}",
            hint="one is enough: Client.from_slurm finds it",
        )
    found = InstanceDirectory(path, lock)
    if os.geteuid() == 0:
        sweep(path)
    for directory in (found.runtime_dir, found.state_dir):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700)
    (path / CGROUP_ROOT).write_text(cgroup_root, encoding="utf-8")
    return found


def remove_dead(where: Path | None = None) -> Iterator[tuple[Path, list[str]]]:
    """Remove what steps left that were killed: each directory of ours whose lock is free."""
    mine = re.compile(rf"{PREFIX}-{os.geteuid()}-\d+-.+")
    for path in sorted((where or base()).glob(f"{PREFIX}-*")):
        if not mine.fullmatch(path.name) or path.is_symlink():
            continue
        with suppress(FileNotFoundError):  # another sweep was faster
            lock = _lock(path)
            if lock is not None:
                yield path, InstanceDirectory(path, lock).remove()


def sweep(path: Path) -> list[str]:
    """End and remove what a dead daemon left on the host; what could not be removed, in words."""
    # The kernel layer, for root only.
    from sandboxd.host import sweep as host  # noqa: PLC0415
    from sandboxd.host.command import cgroup_name  # noqa: PLC0415
    from sandboxd.network import uplink  # noqa: PLC0415

    overrides: dict[str, object] = {
        "runtime_dir": f"{path}/run",
        "state_dir": f"{path}/state",
    }
    with suppress(FileNotFoundError):
        overrides["cgroup_root"] = (path / CGROUP_ROOT).read_text(encoding="utf-8")
    config = load_config(env={}, overrides=overrides)
    deadline = time.monotonic() + END_S
    while True:
        try:
            with host.instance(config) as instance:
                if not instance.node_lives:
                    done = host.sweep(instance)
                    uplink.remove_table(uplink.instance_of(cgroup_name(config)))
                    return [f"{leftover}: {failure}" for leftover, failure in done if failure]
            failure = f"a node still lives in {path}"
        except (SandboxdError, OSError) as error:
            failure = str(error)
        # A hostd whose daemon was killed takes its node down by itself.
        if time.monotonic() > deadline:
            return [failure]
        time.sleep(PAUSE_S)


def _lock(path: Path) -> int | None:
    """The lock's fd, close-on-exec; None while a step lives."""
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
