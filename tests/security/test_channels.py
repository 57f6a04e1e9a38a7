"""The walls are the same whichever way a command comes in, and whatever became of the sandbox.

The other files judge hundreds of tries one by one, through an exec of a fresh sandbox. Here those
that need nothing around them are made all at once, by one process, through each channel and after
each thing that can happen to a sandbox; the table at the end tells the answers.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.background import Background
from tests.e2e.restarts import running_node
from tests.framework import times
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck
from tests.security import test_kernel_settings as settings
from tests.security import test_mounts as mounts
from tests.security import test_pid1 as pid1
from tests.security import test_privileges as privileges
from tests.security import test_system_calls as calls
from tests.security.probing import IDENTITIES, Host, build, install

REFUSED = frozenset({"EPERM"})
NOT_THERE = frozenset({"ENOSYS"})
DENIED = frozenset(pid1.DENIED)

TRIES: dict[str, frozenset[str]] = {
    **dict.fromkeys(calls.REFUSED, REFUSED),
    **dict.fromkeys((*calls.NOT_THERE, "clone3", "int80_getpid", "x32_getpid"), NOT_THERE),
    **{f"{call}:1": DENIED for call in pid1.CALLS.split()},
    **{f"proc_read:1,{name}": pid1.nothing(name) for name in pid1.READS.split()},
    **{f"proc_open_w:1,{name}": DENIED | {"ENOENT"} for name in pid1.WRITES.split()},
    **{f"proc_list:1,{name}": DENIED for name in ("fd", "fdinfo", "root", "cwd", "ns")},
    **{f"proc_open_r:1,{name}": DENIED for name in ("exe", "root", "ns/mnt", "ns/user", "fd/3")},
    **{
        f"open_w:/proc/sys/{name}": frozenset(settings.WALLS) for name in settings._SETTINGS.split()
    },
    **{f"read:{path}": frozenset(settings.CLOSED) for path in mounts.MASKS[:3]},
    **{f"umount:{path}": REFUSED for path in (*mounts.MASKS, "/", "/proc", "/sys", "/dev")},
    **{f"remount:{path}": REFUSED for path in ("/", "/sys", "/proc/sys", "/dev")},
    **dict.fromkeys(("mount_proc:/tmp", "mount_tmpfs:/tmp", "bind:/", "shared:/"), REFUSED),
    **{f"setns_file:/proc/self/ns/{name}": REFUSED for name in ("mnt", "pid", "net", "user")},
    **{f"unshare:{flag}": REFUSED for flag in privileges.NAMESPACES.values()},
    **dict.fromkeys(("nice:-1", "scheduler:1", "ioprio_realtime", "prctl_mm"), DENIED),
    **{f"raise_limit:{limit}": frozenset({"EPERM", "ERANGE"}) for limit in (4, 7, 8, 11, 12)},
    "oom_score:-1": frozenset({"EACCES"}),
    "mknod_c:1,3,/tmp/node": REFUSED,
    "setxattr:/tmp,trusted.overlay.opaque": REFUSED,
}
ALLOWED = (
    *(f"{call}:child" for call in pid1.CALLS.split()),
    *(f"proc_read:child,{name}" for name in ("maps", "environ", "auxv")),
    "open_w:/dev/null",
    "read:/proc/self/stat",
    "unshare:400",
    "clone:0",
)
"""The control: what a sandbox's program may do to itself."""

CHANNELS = ("exec", "session", "process", "exclusive")
FATES = ("fresh", "reset", "paused", "rolled-back", "forked", "copied", "restarted")


def test_most_tries_reach_the_kernel_outside(host: Host) -> None:
    """What is refused inside is refused by a wall, and not because it cannot be done at all."""
    words = [word for word in TRIES if ":1" not in word and "/" not in word]
    answers = [host.ask(word) for word in words if word not in ("vhangup", "reboot", "acct")]
    outside = sum(answer not in ("EPERM", "EACCES", "ENOSYS") for answer in answers)
    assert outside > len(answers) * 2 // 3


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("probe", tmp_path_factory.mktemp("channels"))


@pytest.fixture(params=FATES)
def met(
    request: pytest.FixtureRequest,
    daemon: Daemon,
    leak_check: LeakCheck,
    busybox: Path,
    probe: Path,
) -> Iterator[tuple[Daemon, str]]:
    """A sandbox that something has become of, and its daemon."""
    fate = str(request.param)
    if fate != "restarted":
        with _sandbox(daemon, probe, fate) as sandbox:
            yield daemon, sandbox
        return
    with running_node(leak_check, {"busybox": busybox}) as node:
        first = node.serve()
        sandbox = first.create("busybox")
        install(first, sandbox, {"probe": probe})
        node.kill_daemon(first)
        again = node.serve()
        yield again, sandbox
        again.delete(sandbox)


@contextmanager
def _sandbox(daemon: Daemon, probe: Path, fate: str) -> Iterator[str]:
    with daemon.sandbox("busybox") as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        programs = {"probe": probe}
        install(daemon, sandbox, programs)
        snapshot = ""
        made = ""
        if fate in ("rolled-back", "forked"):
            taken = daemon.http.post(f"{url}/snapshots", json={"on_running": "kill"})
            assert taken.is_success, taken.text
            snapshot = str(taken.json()["id"])
        if fate == "reset":
            assert daemon.http.post(f"{url}/reset", json={}).is_success
            install(daemon, sandbox, programs)
        elif fate == "paused":
            assert daemon.http.post(f"{url}/pause").is_success
            assert daemon.http.post(f"{url}/resume").is_success
        elif fate == "rolled-back":
            answer = daemon.http.post(f"{url}/rollback", json={"snapshot": snapshot})
            assert answer.is_success, answer.text
        elif fate in ("forked", "copied"):
            origin = {"sandbox": sandbox, "paths": ["/probes"]}
            spec = {"snapshot": snapshot} if snapshot else {"copy_from": origin}
            answer = daemon.http.post("/v1/sandboxes", json=spec)
            assert answer.status_code == 201, answer.text
            made = str(answer.json()["id"])
        try:
            yield made or sandbox
        finally:
            if made:
                daemon.delete(made)
            if snapshot:
                daemon.http.delete(f"/v1/snapshots/{snapshot}")


def said(daemon: Daemon, sandbox: str, channel: str, identity: str) -> dict[str, str]:
    """The answers to all tries, by word, through one channel."""
    command = ["/probes/probe", *TRIES, *ALLOWED]
    if channel == "process":
        process = Background.start(daemon.http, sandbox, command, user=identity)
        output = process.read().decode()
    elif channel == "session":
        url = f"/v1/sandboxes/{sandbox}/sessions"
        session = daemon.http.post(url, json={"user": identity}).json()["id"]
        line = {"command": shlex.join(command), "timeout_s": times.scaled(60)}
        output = daemon.http.post(f"{url}/{session}/exec", json=line).json()["stdout"]
        assert daemon.http.delete(f"{url}/{session}").is_success
    else:
        alone = {"exclusive": True} if channel == "exclusive" else {}
        output = daemon.exec(sandbox, command, user=identity, **alone)["stdout"]
    pairs = (line.split(" ", 1) for line in output.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_walls_hold(
    met: tuple[Daemon, str],
    record_answers: dict[str, dict[str, str]],
    request: pytest.FixtureRequest,
) -> None:
    fate = request.node.callspec.params["met"]
    for channel, identity in itertools.product(CHANNELS, IDENTITIES):
        answers = said(*met, channel, identity)
        where = f"{fate}/{channel}/{identity}"
        record_answers[where] = answers
        assert not (TRIES.keys() | set(ALLOWED)) - answers.keys(), where
        wrong = {word: answers[word] for word, walls in TRIES.items() if answers[word] not in walls}
        assert (where, wrong) == (where, {})
        shut = {word: answers[word] for word in ALLOWED if not answers[word].startswith("ok")}
        assert (where, shut) == (where, {})
