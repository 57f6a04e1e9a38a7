"""An ordinary user for tests, with or without subordinate ids: `sandboxd serve` as him.

The host is not changed for that. He lives in a mount namespace of his command's own, where the
files that name users and their ids are copies with him in them, and where /dev/fuse is another
node, open to all or to root alone. For: tests of the rootless mode. Not for: what is common to all
daemons (`daemon`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxd.linux import cgroup as cgroups
from tests.framework import daemon as framework
from tests.framework import host_state, times
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck

NAME = "sandboxd-test-user"
UID = 77_001
FIRST_SUBID = 2_100_000_000
"""Far from any range that a host gives; nothing is owned by these."""
FILES = ("passwd", "group", "subuid", "subgid")

_ENTER = """
for file in passwd group subuid subgid; do mount --bind "$0/$file" "/etc/$file"; done
mount --bind "$0/fuse" /dev/fuse
exec "$@"
"""


@dataclass(frozen=True)
class OrdinaryUser:
    """`directory` holds what he sees instead of the host's files, and his home."""

    directory: Path
    uid: int = UID

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def words_for_his_files(self) -> list[str]:
        """Before a command, these have it see his files, as whoever runs it."""
        return ["unshare", "--mount", "sh", "-euc", _ENTER, str(self.directory)]

    @property
    def words(self) -> list[str]:
        """Before a command, these make it his; the process stays the same."""
        become = ["setpriv", "--reuid", str(self.uid), "--regid", str(self.uid), "--clear-groups"]
        return [*self.words_for_his_files, *become, "--"]

    def run(
        self,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        cgroup: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*into(cgroup), *self.words, *command],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "XDG_RUNTIME_DIR": str(self.home),
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=times.scaled(60),
        )

    def sandboxd(
        self, *words: str, cgroup: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-m", "sandboxd", *words], environment, cgroup)

    def own(self, *paths: Path) -> None:
        """Make directories of his."""
        for path in paths:
            path.mkdir(exist_ok=True)
            os.chown(path, self.uid, self.uid)


@contextlib.contextmanager
def ordinary_user(
    subids: int, *, fuse_mode: int = 0o666, name: str = NAME, uid: int = UID
) -> Iterator[OrdinaryUser]:
    """`subids`: how many subordinate ids he has; 0 for no entry. `name` and `uid`: of one that the
    host has already."""
    directory = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
    try:
        directory.chmod(0o755)
        user = OrdinaryUser(directory, uid)
        entries = {}
        if name == NAME:
            entries = {
                "passwd": f"{NAME}:x:{UID}:{UID}::{user.home}:/bin/sh\n",
                "group": f"{NAME}:x:{UID}:\n",
            }
        if subids:
            entries |= dict.fromkeys(("subuid", "subgid"), f"{name}:{FIRST_SUBID}:{subids}\n")
        for file in FILES:
            host = Path("/etc", file)
            text = host.read_text() if host.exists() else ""
            (directory / file).write_text(text + entries.get(file, ""))
            (directory / file).chmod(0o644)
        device = os.stat("/dev/fuse").st_rdev
        os.mknod(directory / "fuse", stat.S_IFCHR | 0o600, device)
        (directory / "fuse").chmod(fuse_mode)
        user.own(user.home)
        yield user
    finally:
        shutil.rmtree(directory)


def start(
    user: OrdinaryUser,
    place: Path,
    environment: dict[str, str] | None = None,
    before: Sequence[str] = (),
    cgroup: Path | None = None,
) -> framework.Daemon:
    """Start one with everything in `place`, without waiting for it; in this cgroup."""
    user.own(place, place / "state", place / "run")
    settings = {"HOME": str(user.home), **(environment or {})}
    words = [*into(cgroup), *user.words, *before]
    return framework.start(place, environment=settings, before=words)


def into(cgroup: Path | None) -> list[str]:
    """Before a command, these have root put it into a v2 cgroup."""
    if cgroup is None:
        return []
    return ["sh", "-euc", 'echo 0 >"$0/cgroup.procs"; exec "$@"', str(cgroup)]


@contextlib.contextmanager
def delegated_cgroup(user: OrdinaryUser) -> Iterator[Path]:
    """A v2 cgroup that was given to him, as an admin does it; at the top, beside everybody's. It
    is removed with what is in it, once all of that is dead."""
    hierarchy = cgroups.layout().v2_mount
    assert hierarchy is not None
    controllers = (hierarchy / "cgroup.controllers").read_text().split()
    (hierarchy / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in controllers))
    path = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX, dir=hierarchy))
    try:
        path.chmod(0o755)  # as every cgroup is
        # As a daemon before has left it, which is no leak of the next.
        for one in (path, path / "supervisor"):
            user.own(one)
            for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
                os.chown(one / name, user.uid, user.uid)
        yield path
    finally:
        cgroups.remove_tree(path, time.monotonic() + times.scaled(10))


@contextlib.contextmanager
def running_daemon(
    check: LeakCheck,
    images: dict[str, Path],
    user: OrdinaryUser,
    environment: dict[str, str] | None = None,
    *,
    before: Sequence[str] = (),
    cgroup: Path | None = None,
) -> Iterator[Daemon]:
    """As `daemon.running_daemon`, of this user. `before`: words that change the surroundings of the
    same process."""
    with check.around("the user's daemon"), contextlib.ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
        stack.callback(shutil.rmtree, place)
        place.chmod(0o755)
        (place / "images").mkdir()
        for name, file in images.items():
            shutil.copyfile(file, place / "images" / f"{name}.sif")
            (place / "images" / f"{name}.sif").chmod(0o444)
        daemon = start(user, place, environment, before, cgroup)
        stack.callback(daemon.stop)
        daemon.wait_ready()
        directories = {daemon.state_dir, daemon.runtime_dir, daemon.images_dir}
        with check.long_lived(daemon.family | {daemon.pid}, directories, daemon.settle):
            yield daemon


def host_ids(daemon: Daemon) -> dict[int, tuple[str, int]]:
    """Name and host uid of every process of a daemon's, by pid."""
    family = daemon.refresh_family()
    table = host_state.process_table()
    return {pid: (table[pid].name, table[pid].uid) for pid in family if pid in table}
