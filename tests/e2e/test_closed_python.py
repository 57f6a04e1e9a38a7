"""A daemon whose Python only root can read, as below a home that is closed (/root/.pyenv).

Each of its processes gives root up sooner or later, and imports nothing after that. Every file
that Python would read then is behind a directory of mode 0700 here: the standard library, what is
installed, and this repository. Programs, libraries and the host's other files stay as they are.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import internet
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.images import REPOSITORY
from tests.framework.internet import EVIL, GOOD, OTHER, Internet
from tests.framework.leaks import LeakCheck
from tests.framework.networks import SETTINGS, egress, logged, lookup, part_of, tcp

_CLOSE = """
mount -t tmpfs none "$0"
number=0
while [ "$1" != -- ]; do
    number=$((number + 1))
    mkdir "$0/upper$number" "$0/work$number"
    mount -t overlay none "$1" -o "lowerdir=$1,upperdir=$0/upper$number,workdir=$0/work$number"
    chmod 0700 "$1"
    shift
done
shift
umount -l "$0"
exec "$@"
"""


def closed(scratch: Path) -> list[str]:
    """Words before a command: whoever is not root finds every directory of Python's closed, in a
    mount namespace of the command's own."""
    found = {REPOSITORY, Path(sys.prefix)}
    found |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")}
    outer = [one for one in found if not any(other in one.parents for other in found)]
    words = ["unshare", "--mount", "sh", "-euc", _CLOSE, str(scratch)]
    return [*words, *map(str, sorted(outer)), "--"]


@pytest.fixture(scope="module")
def world() -> Iterator[Internet]:
    with internet.running() as found:
        yield found


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return closed(tmp_path_factory.mktemp("closed"))


@pytest.fixture(scope="module")
def closed_daemon(
    world: Internet, leak_check: LeakCheck, busybox: Path, words: list[str]
) -> Iterator[Daemon]:
    before = [*world.enter, *words]
    with running_daemon(leak_check, {"busybox": busybox}, (), SETTINGS, before) as daemon:
        daemon.warm_up("busybox")
        with daemon.sandbox("busybox", network={"allow": []}) as box:
            egress(daemon, box)
        pids = {pid for pid in daemon.refresh_family() if pid not in leak_check.daemon_pids}
        with leak_check.long_lived(pids, set()):
            yield daemon


def test_control_nobody_but_root_imports_anything(words: list[str]) -> None:
    for program in ("import sandboxd", "import dns", "import graphlib"):
        command = [*words, sys.executable, "-c"]
        dropped = f"import os; os.setresuid(65534, 65534, 65534); {program}"
        assert subprocess.run([*command, program], check=False).returncode == 0
        done = subprocess.run([*command, dropped], capture_output=True, text=True, check=False)
        assert "ModuleNotFoundError" in done.stderr or "PermissionError" in done.stderr, program


def test_the_views_are_served(closed_daemon: Daemon) -> None:
    assert closed_daemon.http.get("/v1/node").json()["features"]["proc_views"] == "serving"
    with closed_daemon.sandbox("busybox", limits={"memory_mb": 256}) as box:
        seen = closed_daemon.exec(box, "grep MemTotal /proc/meminfo; cat /proc/cpuinfo /proc/stat")
        assert seen["exit_code"] == 0
        assert int(seen["stdout"].split()[1]) < 1 << 20


def test_router_and_resolver_live_through_all_they_do(closed_daemon: Daemon) -> None:
    before = {name: part_of(closed_daemon, name) for name in ("router", "resolver")}
    allow = [f"{GOOD}:80", "example.org:80", "*.example.org"]
    for run in (None, "run-1"):
        said = {"run": run} if run else {}
        with closed_daemon.sandbox("busybox", network={"allow": allow}, **said) as box:
            assert tcp(closed_daemon, box, GOOD, 80) == f"{GOOD}:80"
            assert lookup(closed_daemon, box, "www.example.org") == [OTHER]
            assert lookup(closed_daemon, box, "missing.example.org") == []
            assert lookup(closed_daemon, box, "evil.test") == []
            assert tcp(closed_daemon, box, OTHER, 80) == f"{OTHER}:80"
            assert tcp(closed_daemon, box, EVIL, 80) == ""
            logged(closed_daemon, box, address=EVIL)
    # It would be started anew, and what is allowed would be reached all the same.
    assert {name: part_of(closed_daemon, name) for name in before} == before


def test_every_other_part_of_the_node_does_its_work(closed_daemon: Daemon) -> None:
    """Launcher, mounter, undertaker, copier and spooler, and the API itself."""
    http = closed_daemon.http
    with closed_daemon.sandbox("busybox") as box:
        url = f"/v1/sandboxes/{box}"
        put = http.put(f"{url}/files", params={"path": "/tmp/f"}, content=b"x" * (1 << 20))
        assert put.is_success, put.text
        assert len(http.get(f"{url}/files", params={"path": "/tmp/f"}).content) == 1 << 20
        assert closed_daemon.exec(box, "head -c 3000000 /dev/zero | tr '\\0' x")["exit_code"] == 0
        for path, body in (("pause", None), ("resume", None), ("snapshots", {})):
            answer = http.post(f"{url}/{path}", json=body)
            assert answer.is_success, (path, answer.text)
        assert http.delete(f"/v1/snapshots/{answer.json()['id']}").is_success
