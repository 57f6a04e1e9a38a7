"""From the clone to a root: what PID 1 is told, and what it refuses, step by step."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from sandboxd.init import protocol as wire
from sandboxd.init.protocol import MsgType
from sandboxd.linux import cgroup
from tests.kernel.init.harness import Refused, setup_payload

pytestmark = pytest.mark.needs("root", "namespaces", "overlay", "cgroup-kill", "busybox")


def test_clone_setup_root_and_a_command(node):
    with node.cloned() as sandbox:
        sandbox.set_up()
        sandbox.take_root("base")
        assert sandbox.launcher.sh("hostname; pwd; echo $$") == "box\n/\n3\n"


def test_a_clone_with_the_wrong_fds_is_refused(node):
    for count in (0, 1, 3):
        fds = [os.open("/", os.O_PATH) for _ in range(count)]
        message, got = node.zygote.expect(
            node.zygote.send(MsgType.Z_CLONE, fds=fds), MsgType.Z_CLONED
        )
        wire.close_fds(fds)
        assert got == []
        assert wire.unpack_cloned(message.payload) == (0, errno.EBADMSG)


def test_a_clone_into_what_is_no_cgroup_fails_and_leaves_nothing(node):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    directory = os.open("/", os.O_RDONLY)
    with ours, theirs:
        number = node.zygote.send(MsgType.Z_CLONE, fds=[theirs.fileno(), directory])
        message, got = node.zygote.expect(number, MsgType.Z_CLONED)
    os.close(directory)
    assert got == []
    assert wire.unpack_cloned(message.payload) == (0, errno.EBADF)


def test_a_zygote_drops_what_it_does_not_know(node):
    fd = os.open("/", os.O_PATH)
    before = len(os.listdir(f"/proc/{node.pid}/fd"))
    node.zygote.send(MsgType.M_EXEC, b"x", [fd])
    wire.send(node.zygote.sock, b"short", [fd])
    os.close(fd)
    # Answered as a clone that was cut off, by the id of nobody.
    message, _ = node.zygote.expect(0, MsgType.Z_CLONED)
    assert wire.unpack_cloned(message.payload) == (0, errno.EBADMSG)
    assert len(os.listdir(f"/proc/{node.pid}/fd")) == before


def test_pid1_dies_with_its_socket_before_it_was_told_anything(node):
    with node.cloned() as sandbox:
        sandbox.launcher.close()
        sandbox.wait_death()


def test_nothing_runs_before_there_is_a_root(node):
    with node.cloned() as sandbox:
        for stage in ("cloned", "set up"):
            number = sandbox.launcher.exec(["/bin/true"])
            with pytest.raises(Refused, match=r"message\[0\]"):
                sandbox.launcher.started(number)
            if stage == "cloned":
                sandbox.set_up()


def test_v1_cgroups_are_entered_without_holding_up_the_machine(sandbox):
    """By ``tasks``: a write to ``cgroup.procs`` takes an RCU grace period, and with it all who fork
    or make a cgroup."""
    if not sandbox.cgroups.v1:
        pytest.skip("no cgroup v1 here")
    fds = sandbox.cgroups.open_for_pid1()
    try:
        assert [Path(os.readlink(f"/proc/self/fd/{fd}")).name for fd in fds[1:]] == ["tasks"] * (
            len(sandbox.cgroups.v1)
        )
    finally:
        wire.close_fds(fds)


def test_a_root_before_the_setup_is_refused(node):
    with node.cloned() as sandbox, pytest.raises(Refused, match=r"message\[3\]"):
        sandbox.take_root("base")


def test_a_second_setup_is_refused(sandbox):
    with pytest.raises(Refused, match=r"message\[2\]"):
        sandbox.set_up()
    assert sandbox.launcher.sh("echo alive") == "alive\n"


@pytest.mark.parametrize(
    ("payload", "fds", "step"),
    [
        (b"", 1, r"message\[0\]"),
        (setup_payload(0)[:31], 1, r"message\[0\]"),
        (setup_payload(0), 0, r"message\[1\]"),
        (setup_payload(2), 1, r"message\[1\]"),
        (setup_payload(9), 10, r"message\[1\]"),
        (setup_payload(1), 2, r"cgroup\[0\]"),  # a directory is no file of tasks
        (setup_payload(0)[:32], 1, r"message\[0\]"),  # no host name
        (setup_payload(0)[:-1], 1, r"message"),  # the last string is not ended
        (setup_payload(0, hostname="h" * 65), 1, r"hostname\[0\]"),
        (setup_payload(0, sysctls=[("user/no_such", "1")]), 1, r"sysctl\[0\]: 2"),
        (
            setup_payload(0, sysctls=[("?user/no_such", "1")], masks=["x" * 600]),
            1,
            r"mask\[0\]: 36",
        ),
        (setup_payload(0, readonly=["proc/" + "x" * 600]), 1, r"readonly"),
        (setup_payload(0, dev_inodes=3), 1, r"dev-node"),
        (setup_payload(0, shm_mb=1 << 31, shm_inodes=0, pty_max=1 << 31), 1, r"dev-pts\[0\]"),
    ],
)
def test_a_setup_that_cannot_be_done_is_refused_by_its_step(node, payload, fds, step):
    with node.cloned() as sandbox:
        directories = [cgroup.open_directory(sandbox.cgroups.v2)]
        directories += [os.dup(directories[0]) for _ in range(max(1, fds) - 1)]
        with pytest.raises(Refused, match=step):
            sandbox.launcher.call(MsgType.M_SETUP, payload, directories[:fds])
        wire.close_fds(directories)
        # And it goes on listening.
        sandbox.launcher.call(MsgType.M_PING)


@pytest.mark.parametrize(
    ("entries", "index", "number"),
    [
        ({"proc": "-> tmp", "tmp/a": "", "sys": None, "dev": None}, 0, errno.ENOTDIR),
        ({"proc": None, "sys": "a file", "dev": None}, 1, errno.ENOTDIR),
        ({"proc": None, "sys": None, "dev": "-> /proc"}, 2, errno.ENOTDIR),
        ({"proc": None, "sys": None, "dev": "-> nowhere"}, 2, errno.ENOTDIR),
    ],
)
def test_an_image_whose_kernel_directories_are_something_else_is_refused(
    node, request, entries, index, number
):
    lower = f"bad-{node.pid}-{abs(hash(request.node.name))}"
    node.namespaces.ask("lower", name=lower, entries=entries)
    with node.cloned() as sandbox:
        sandbox.set_up()
        before = fds_of(sandbox)
        with pytest.raises(Refused) as refused:
            sandbox.take_root(lower)
        assert (refused.value.step, refused.value.index) == ("root-target", index)
        assert refused.value.errno == number
        assert fds_of(sandbox) == before
        # A root that is right is still taken.
        sandbox.take_root("base")
        assert sandbox.launcher.sh("echo alive") == "alive\n"


def fds_of(sandbox) -> list[str]:
    """What PID 1 has open when it has done with every message before."""
    sandbox.launcher.call(MsgType.M_PING)
    return sorted(os.readlink(entry.path) for entry in os.scandir(f"/proc/{sandbox.pid}/fd"))


def test_kernel_directories_that_an_image_lacks_are_made(node):
    lower = f"bare-{node.pid}"
    node.namespaces.ask("lower", name=lower, entries={"etc": None})
    with node.cloned() as sandbox:
        sandbox.set_up()
        sandbox.take_root(lower)
        for path in ("proc/1/status", "sys/kernel", "dev/null"):
            assert Path(f"/proc/{sandbox.pid}/root/{path}").exists()


def test_a_root_is_swapped_for_another(sandbox):
    client = sandbox.attach()
    client.sh("echo mine > /tmp/mine; echo shm > /dev/shm/kept")
    before = fds_of(sandbox)
    sandbox.take_root("base")
    assert client.sh("ls /tmp; cat /dev/shm/kept; cat /proc/mounts | grep -c ' / '") == "shm\n1\n"
    assert fds_of(sandbox) == before


def test_a_host_name_may_come_with_the_root(sandbox):
    sandbox.take_root("base", payload=b"other\0")
    assert sandbox.launcher.sh("hostname") == "other\n"
    with pytest.raises(Refused, match=r"hostname\[1\]"):
        sandbox.take_root("base", payload=b"h" * 65 + b"\0")
    assert sandbox.launcher.sh("hostname") == "other\n"


def test_only_the_launcher_sets_up_swaps_and_attaches(sandbox):
    client = sandbox.attach()
    fd = os.open("/", os.O_PATH)
    for kind in (MsgType.M_SETUP, MsgType.M_ROOT, MsgType.M_ATTACH, 99, MsgType.R_EXIT):
        with pytest.raises(Refused, match=r"message\[4\]"):
            client.expect(client.send(kind, fds=[fd]), MsgType.R_DONE)
    os.close(fd)
    client.call(MsgType.M_PING)


def test_eight_control_sockets_and_no_more(sandbox):
    clients = [sandbox.attach() for _ in range(wire.CLIENTS_MAX - 1)]
    with pytest.raises(Refused) as refused:
        sandbox.attach()
    assert refused.value.errno == errno.EMFILE
    clients[3].close()
    # Its place is free once PID 1 has seen the end.
    for _ in range(1000):
        try:
            new = sandbox.attach()
            break
        except Refused:
            continue
    assert new.sh("echo new") == "new\n"
    for client in (*clients[:3], *clients[4:]):
        client.call(MsgType.M_PING)


def test_attach_takes_one_socket(sandbox):
    for count in (0, 2):
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
        with pytest.raises(Refused):
            sandbox.launcher.call(MsgType.M_ATTACH, fds=fds)
        wire.close_fds(fds)
    file = os.open("/proc/self/exe", os.O_RDONLY)  # what cannot be polled
    with pytest.raises(Refused) as refused:
        sandbox.launcher.call(MsgType.M_ATTACH, fds=[file])
    os.close(file)
    assert refused.value.errno == errno.EPERM


def test_messages_that_are_cut_off_are_refused_and_leave_no_fd(sandbox):
    client = sandbox.attach()
    before = fds_of(sandbox)
    fd = os.open("/", os.O_PATH)
    head = wire.MSG.pack(MsgType.M_PING, 7, 5, 0)
    wire.send(client.sock, head + b"four", [fd])  # says five
    with pytest.raises(Refused, match=r"message\[5\]"):
        client.expect(7, MsgType.R_DONE)
    wire.send(client.sock, wire.MSG.pack(MsgType.M_PING, 8, 65537, 0) + b"x" * 65537, [fd])
    with pytest.raises(Refused, match=r"message\[5\]"):
        client.expect(8, MsgType.R_DONE)
    wire.send(client.sock, b"short", [fd])
    with pytest.raises(Refused, match=r"message\[5\]"):
        client.expect(0, MsgType.R_DONE)
    wire.send(client.sock, wire.pack(MsgType.M_PING, 9), [fd] * 17)  # one more than fits
    with pytest.raises(Refused, match=r"message\[5\]"):
        client.expect(9, MsgType.R_DONE)
    wire.send(client.sock, wire.pack(MsgType.M_PING, 10), [fd] * 16)
    client.expect(10, MsgType.R_DONE)
    # The largest there is: answered, whatever it says.
    wire.send(client.sock, wire.MSG.pack(MsgType.M_PING, 11, 65536, 0) + b"x" * 65536, [fd])
    client.expect(11, MsgType.R_DONE)
    os.close(fd)
    assert fds_of(sandbox) == before


def test_an_empty_datagram_ends_its_socket_and_leaves_no_fd(sandbox):
    before = fds_of(sandbox)
    client = sandbox.attach()
    fd = os.open("/", os.O_PATH)
    wire.send(client.sock, b"", [fd] * 4)
    os.close(fd)
    with pytest.raises(ConnectionResetError):
        client.receive()
    sandbox.launcher.call(MsgType.M_PING)
    assert fds_of(sandbox) == before


def test_pid1_keeps_nothing_of_the_zygotes(node):
    with node.cloned() as sandbox:
        with pytest.raises(Refused):
            sandbox.launcher.call(MsgType.M_ROOT)
        links = {e.name: os.readlink(e.path) for e in os.scandir(f"/proc/{sandbox.pid}/fd")}
        assert [links[n] for n in "012"] == ["/dev/null"] * 3
        assert links["3"].startswith("socket:")
        assert sorted(links) == ["0", "1", "2", "3", "4", "5"]  # epoll and signalfd


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_of_the_sandboxs_network_namespace(sandbox, family):
    """Positive control: the same address, from a socket of this namespace, reaches us."""
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        listener.listen()
        address = listener.getsockname()
        client = sandbox.attach()
        asked = client.send(MsgType.M_SOCKET, wire.socket_payload(family))
        _, fds = client.expect(asked, MsgType.R_DONE)
        with socket.socket(fileno=fds[0]) as made:
            assert (made.family, made.type) == (family, socket.SOCK_STREAM)
            assert not os.get_blocking(made.fileno())
            made.setblocking(True)
            with pytest.raises(ConnectionRefusedError):
                made.connect(address)
        with socket.create_connection(address[:2]):
            pass


@pytest.mark.parametrize(
    "payload",
    [b"", b"x" * 5, wire.socket_payload(socket.AF_UNIX), wire.socket_payload(socket.AF_NETLINK)],
)
def test_other_sockets_are_not_made(sandbox, payload):
    client = sandbox.attach()
    with pytest.raises(Refused, match="socket"):
        client.call(MsgType.M_SOCKET, payload)
    client.call(MsgType.M_PING)
