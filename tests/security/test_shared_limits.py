"""What the kernel counts per user and up through every parent namespace: one sandbox takes all it
can get, and the node, the host's root and the running of commands in other sandboxes go on.

What the sandboxes of a node do share with each other, so that one can leave another without:

- inotify instances: fs.inotify.max_user_instances of the host, for the node as a whole;
- descriptors in flight, pipe pages and epoll watches: one count for each id of the shared range;
- POSIX message queues, pending signals and processes: the node's own RLIMIT_MSGQUEUE,
  RLIMIT_SIGPENDING and RLIMIT_NPROC where the host does not let it raise them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
from pathlib import Path

import pytest

from tests.e2e.host_processes import family_with
from tests.framework.daemon import Daemon
from tests.security.probing import Inside, alive, get, put

# mode: (limit of the try, least that must have been taken, why there was no more)
TAKEN = {
    "inflight": (200_000, 1000, {"ETOOMANYREFS", "EMFILE", "EAGAIN"}),
    "pipes": (200_000, 256, {"EPERM", "EMFILE", "ENFILE"}),
    "inotify": (4096, 32, {"EMFILE"}),
    "watches": (100_000, 1000, {"ENOSPC"}),
    "queues": (4096, 1, {"ENOSPC", "EMFILE"}),
    "signals": (200_000, 1000, {"EAGAIN", "enough"}),
    "timers": (200_000, 1000, {"EAGAIN", "enough"}),
    "locked": (1_000_000, 16, {"ENOMEM", "EAGAIN", "enough"}),
    "ptys": (4096, 32, {"ENOSPC"}),
    "epoll": (100_000, 1000, {"EMFILE", "ENOSPC"}),
    "files": (1_000_000, 1000, {"EMFILE"}),
    "shm": (4096, 16, {"ENOSPC"}),
    "semaphores": (1_000_000, 1000, {"ENOSPC"}),
    "messages": (100_000, 64, {"ENOSPC"}),
    "udp": (20_000, 16, {"ENOBUFS", "EMFILE"}),
    "threads": (100_000, 100, {"EAGAIN"}),
    "dev_shm": (4096, 16, {"ENOSPC"}),
    "dev": (4096, 64, {"ENOSPC"}),
}


def host_root_can_go_on() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    os.close(fd)
    read_end, write_end = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [read_end, write_end])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 4)
    for fd in (read_end, write_end, *fds):
        os.close(fd)
    master, slave = os.openpty()
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("mode", TAKEN)
def test_node_goes_on_when_a_sandbox_has_taken_all(
    mode: str, identity: str, daemon: Daemon, hostile: str
) -> None:
    limit, least, reasons = TAKEN[mode]
    attacker = Inside(daemon, hostile, identity)
    if mode == "dev" and identity != "root":
        assert attacker.hold(mode, limit) == (0, "EACCES")
        return
    taken, why = attacker.hold(mode, limit)
    assert taken >= least
    assert why in reasons, (taken, why)
    host_root_can_go_on()
    if mode != "threads":
        alive(daemon, hostile)
        assert put(daemon, hostile, "/work/file", b"x").is_success
        assert get(daemon, hostile, "/work/file").content == b"x"
    with daemon.sandbox("busybox") as other:
        alive(daemon, other)
        assert put(daemon, other, "/tmp/file", b"x").is_success
        answer = daemon.exec(other, "yes | head -c 3000000", max_output_bytes=10)
        assert answer["stdout_total_bytes"] == 3_000_000


@pytest.mark.parametrize("mode", ["inflight", "pipes", "inotify", "queues", "ptys", "signals"])
def test_control_own_limit_is_really_used_up(mode: str, daemon: Daemon, hostile: str) -> None:
    """The same user in the same sandbox gets next to nothing more."""
    attacker = Inside(daemon, hostile, "agent")
    limit, least, _ = TAKEN[mode]
    first, why = attacker.hold(mode, limit)
    if why in ("EMFILE", "enough") and mode != "inotify":
        return  # the process's own limit came first
    again, _ = attacker.hog(mode, limit)
    assert again < max(first // 2, least), (first, again)


def test_output_pipes_cannot_be_grown(daemon: Daemon, hostile: str) -> None:
    """They are made by PID 1's id, whose pipe pages are one count for the node."""
    attacker = Inside(daemon, hostile, "root")
    assert attacker.hold("stdout_pipe", 1) == (0, "EPERM")


def test_keys_are_refused_altogether(inside: Inside) -> None:
    """Keyrings are counted per kernel user, and shared by all of one."""
    for call in ("add_key", "request_key", "keyctl"):
        assert inside.ask(call) == "EPERM"
    assert inside.ask("read:/proc/keys") in ("EACCES", "EPERM")


def node_has_raised(daemon: Daemon, name: str) -> bool:
    """Whether the node could lift its own hard limit, which caps the sum over its sandboxes."""
    zygote, *_ = pids_of(daemon, "init zygote")
    lines = Path(f"/proc/{zygote}/limits").read_text().splitlines()
    return "unlimited" in next(line for line in lines if name in line)


@pytest.mark.parametrize("mode", ["queues", "ptys", "shm", "semaphores", "messages", "dev_shm"])
def test_limit_is_the_sandboxs_own(mode: str, daemon: Daemon, hostile: str) -> None:
    """Another sandbox gets as much as the first one did, while that holds on to it."""
    if mode == "queues" and not node_has_raised(daemon, "msgqueue"):
        pytest.xfail(
            "this host does not let the node raise RLIMIT_MSGQUEUE: its sandboxes share it"
        )
    limit, _, _ = TAKEN[mode]
    first, _ = Inside(daemon, hostile, "root").hold(mode, limit)
    with daemon.sandbox("busybox") as other:
        program = get(daemon, hostile, "/probes/hog").content
        put(daemon, other, "/probes/hog", program, mode="0755")
        assert Inside(daemon, other, "root").hog(mode, limit)[0] == first


# --- the ids that things are counted on, line by line of what is promised of them ---------------

NS_GET_OWNER_UID = 0xB704
"""_IO(NSIO, 0x4) of linux/nsfs.h."""
OWN_CAPS = {"inotify": "inotify_instances", "ptys": "ptys", "signals": "pending_signals"}


def pids_of(daemon: Daemon, words: str) -> list[int]:
    """Processes of the daemon whose command line has these words, the eldest first."""
    return family_with(daemon.refresh_family(), words)


def uids_of(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {int(uid) for uid in next(line for line in lines if line.startswith("Uid:")).split()[1:]}


def queued_signals(pid: int | str) -> int:
    """Of the user that a process is, as the kernel counts them: ``SigQ`` of proc(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigQ:")).split()[1].split("/")[0])


def owner_of(pid: int) -> int:
    """The host's uid that the user namespace of a process belongs to."""
    with open(f"/proc/{pid}/ns/user", "rb") as namespace:
        answer = ctypes.c_uint32()
        fcntl.ioctl(namespace, NS_GET_OWNER_UID, answer)
    return answer.value


def test_launcher_and_pid1_have_an_id_that_no_sandbox_has(daemon: Daemon, hostile: str) -> None:
    """And commands have ids that neither has: each counts for itself."""
    (launcher, *_) = pids_of(daemon, "sandboxd.launcher")
    (zygote, *pid1s) = pids_of(daemon, "init zygote")
    (node_id,) = uids_of(launcher)
    assert all(uids_of(pid) == {node_id} for pid in (zygote, *pid1s))
    assert pid1s
    inside, outside, count = daemon.exec(hostile, ["cat", "/proc/self/uid_map"])["stdout"].split()
    assert (inside, count) == ("0", "65536")
    del outside  # of the node's namespace, as it is seen from within
    maps = [line.split() for line in Path(f"/proc/{launcher}/uid_map").read_text().splitlines()]
    ((_, base, size),) = maps
    assert int(base) + 65_536 <= node_id < int(base) + int(size)


def test_the_nodes_namespace_belongs_to_an_id_of_its_own(daemon: Daemon) -> None:
    """What goes up from it is counted there: not on the host's root, nor on the API's account."""
    (launcher, *_) = pids_of(daemon, "sandboxd.launcher")
    owner = owner_of(launcher)
    base = int(Path(f"/proc/{launcher}/uid_map").read_text().split()[1])
    assert owner not in {0, *uids_of(daemon.api_pid), *range(base, base + 65_537)}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            assert owner not in uids_of(pid), f"process {pid} is counted on it too"


def test_what_a_sandbox_holds_is_counted_up_to_the_node_and_not_on_the_hosts_root(
    daemon: Daemon, hostile: str
) -> None:
    """The count that the kernel shows, queued signals: of the id that made the sandbox's namespace,
    which is the launcher's too, and of root's own. So the launcher must not need what is counted so
    (it watches by no inotify, and the signals it gets are such as need no room)."""
    (launcher, *_) = pids_of(daemon, "sandboxd.launcher")
    node, root = queued_signals(launcher), queued_signals("self")
    taken, _ = Inside(daemon, hostile, "agent").hold("signals", 2000)
    assert taken == 2000
    assert queued_signals(launcher) >= node + taken
    assert queued_signals("self") < root + taken // 2


@pytest.mark.parametrize("mode", OWN_CAPS)
def test_a_user_of_a_sandbox_gets_what_the_node_promises_and_no_more(
    mode: str, daemon: Daemon, hostile: str
) -> None:
    cap = daemon.http.get("/v1/node").json()["kernel_caps"][OWN_CAPS[mode]]
    taken, why = Inside(daemon, hostile, "agent").hold(mode, 200_000)
    assert why != "enough"
    if mode == "inotify":
        # The host's own count for all of the node may come before it.
        host = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
        assert min(cap, host) // 2 < taken <= cap
    else:
        assert taken == cap
