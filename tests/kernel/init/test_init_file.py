"""File operations: as whom, on what, and what is left when one breaks off."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from sandboxd.init import protocol as wire
from sandboxd.init.protocol import FileFlag, FileOp, MsgType
from tests.kernel.init.harness import wait_until

pytestmark = pytest.mark.needs("root", "namespaces", "overlay", "cgroup-kill", "busybox")


def outcome(exited) -> tuple[str, int]:
    assert os.WIFEXITED(exited.status), exited
    return wire.step_slug(exited.failure.step), exited.failure.err


def write(client, path, data, **request):
    exited, _ = client.file(FileOp.FILE_WRITE, path, data, **request)
    return exited


def read(client, path, **request) -> bytes:
    exited, data = client.file(FileOp.FILE_READ, path, **request)
    assert outcome(exited) == ("none", 0)
    return data


def test_write_read_and_stat(client):
    data = os.urandom(300_000)
    exited = write(client, "/tmp/f", data)
    assert outcome(exited) == ("none", 0)
    assert (exited.mode, exited.uid, exited.gid, exited.size) == (0o644, 0, 0, len(data))
    assert read(client, "/tmp/f") == data
    assert read(client, "/tmp/f", offset=5, length=10) == data[5:15]
    assert read(client, "/tmp/f", offset=len(data) + 9) == b""
    exited, _ = client.file(FileOp.FILE_STAT, "/tmp/f")
    assert (exited.size, exited.mode) == (len(data), 0o644)
    seconds, _, fraction = client.sh("stat -c %y /tmp/f").partition(".")
    assert seconds
    assert exited.mtime_ns % 1_000_000_000 == int(fraction[:9])
    assert client.sh("ls -A /tmp") == "f\n"


def test_an_empty_file(client):
    assert outcome(write(client, "/tmp/empty", b"")) == ("none", 0)
    assert read(client, "/tmp/empty") == b""


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/1/stat", "/proc/version"])
def test_files_of_proc_can_be_read(client, path):
    assert read(client, path)


def test_a_new_file_belongs_to_the_user(client):
    exited = write(client, "/home/agent/f", b"x", user="agent")
    assert (exited.uid, exited.gid, exited.mode) == (1000, 1000, 0o644)
    exited = write(client, "/home/agent/a/b/f", b"x", user="agent", flags=FileFlag.FILE_PARENTS)
    assert outcome(exited) == ("none", 0)
    assert client.sh("stat -c '%u:%g %a' /home/agent/a /home/agent/a/b") == "1000:1000 755\n" * 2


def test_a_replaced_file_keeps_mode_and_where_possible_owner(client):
    client.sh("echo old > /tmp/f; chown 1000:29 /tmp/f; chmod 4751 /tmp/f")
    exited = write(client, "/tmp/f", b"new")
    assert (exited.uid, exited.gid, exited.mode) == (1000, 29, 0o4751)
    client.sh("mkdir -m 777 /tmp/open; echo old > /tmp/open/f; chmod 666 /tmp/open/f")
    exited = write(client, "/tmp/open/f", b"new", user="agent")
    assert (outcome(exited), exited.uid, exited.mode) == (("none", 0), 1000, 0o666)


def test_a_mode_that_is_given(client):
    exited = write(client, "/tmp/f", b"x", flags=FileFlag.FILE_MODE, mode=0o100_6755)
    assert exited.mode == 0o6755
    # Of a file of one's own in a group that is not: the kernel takes setgid away.
    exited = write(client, "/tmp/g", b"x", user="1000:29", flags=FileFlag.FILE_MODE, mode=0o4711)
    assert (exited.uid, exited.gid, exited.mode) == (1000, 29, 0o4711)
    assert client.sh("/tmp/g; echo $?", user="0").strip() in ("126", "127")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/nowhere/f", ("file-open", errno.ENOENT)),
        ("/etc/passwd/f", ("file-open", errno.ENOTDIR)),
        ("/dir", ("file-type", errno.EISDIR)),
        ("/dir/", ("file-open", errno.EISDIR)),
        ("/dir/.", ("file-open", errno.EISDIR)),
        ("/dir/inner/..", ("file-open", errno.EISDIR)),
        ("/", ("file-open", errno.EISDIR)),
        ("//", ("file-open", errno.EISDIR)),
        ("relative", ("file-open", errno.EINVAL)),
        ("", ("file-open", errno.EINVAL)),
        ("/tmp/" + "n" * 256, ("file-open", errno.ENAMETOOLONG)),
        ("/" + "n/" * 2100, ("file-open", errno.ENAMETOOLONG)),
        ("/dev/null", ("file-type", errno.EINVAL)),
        ("/proc/self/exe", ("file-open", errno.ENOENT)),
        ("/proc/sys/kernel/hostname", ("file-open", errno.EACCES)),
        ("/proc/1/root/tmp/f", ("file-open", errno.EACCES)),
        ("/proc/self/root/tmp/f", ("file-open", errno.ELOOP)),
        ("/proc/self/fd/0", ("file-open", errno.ELOOP)),
    ],
)
def test_what_cannot_be_written(client, path, expected):
    found = outcome(write(client, path, b"x"))
    if path == "/proc/self/exe":
        # Its link names the init's place on the host, where this root has nothing.
        assert found[0] == "file-open"
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("path", "user", "expected"),
    [
        ("/nowhere", "0", ("file-open", errno.ENOENT)),
        ("/dir", "0", ("file-type", errno.EISDIR)),
        ("/dev/zero", "0", ("file-type", errno.EINVAL)),
        ("/tmp/fifo", "0", ("file-type", errno.EINVAL)),
        ("/tmp/closed", "agent", ("file-open", errno.EACCES)),
        ("/proc/1/mem", "0", ("file-open", errno.EACCES)),
        ("/proc/1/environ", "0", ("file-open", errno.EACCES)),
        ("/proc/self/mem", "0", ("file-open", errno.EACCES)),
        ("/proc/self/exe", "0", ("file-open", errno.ELOOP)),
        ("/proc/1/root/etc/passwd", "0", ("file-open", errno.EACCES)),
        ("/proc/self/cwd/etc/passwd", "0", ("file-open", errno.ELOOP)),
        ("/tmp/loop", "0", ("file-open", errno.ELOOP)),
        ("/etc/passwd", "nobodyknows", ("user", errno.ENOENT)),
    ],
)
def test_what_cannot_be_read(client, path, user, expected):
    client.sh("mkfifo /tmp/fifo; ln -s loop /tmp/loop; echo x > /tmp/closed; chmod 600 /tmp/closed")
    exited, data = client.file(FileOp.FILE_READ, path, user=user, length=100)
    assert data == b""
    assert outcome(exited) == expected


def test_descriptors_of_pid1_are_no_files(client):
    for number in range(20):
        exited, data = client.file(FileOp.FILE_READ, f"/proc/self/fd/{number}", length=10)
        assert (data, outcome(exited)[0]) == (b"", "file-open")


def test_links_are_followed_inside_the_root(client):
    client.sh("""
        ln -s ../../../../../../../../dir/file /tmp/up; ln -s /dir/new /tmp/absolute
        ln -s a /tmp/b; ln -s b /tmp/c; ln -s d/ /tmp/slash
        ln -s loop2 /tmp/loop; ln -s loop /tmp/loop2
    """)
    assert outcome(write(client, "/tmp/up", b"1")) == ("none", 0)
    assert outcome(write(client, "/tmp/absolute", b"2")) == ("none", 0)
    assert outcome(write(client, "/tmp/c", b"3")) == ("none", 0)
    assert client.sh("cat /dir/file /dir/new /tmp/a; readlink /tmp/c") == "123b\n"
    assert outcome(write(client, "/tmp/loop", b"x")) == ("file-open", errno.ELOOP)
    assert outcome(write(client, "/tmp/slash", b"x")) == ("file-open", errno.EISDIR)
    flags = FileFlag.FILE_PARENTS
    assert outcome(write(client, "/tmp/deep//./er/../er/f", b"4", flags=flags)) == ("none", 0)
    assert client.sh("cat /tmp/deep/er/f") == "4"


def test_what_the_user_may_not_write_is_not_replaced(client):
    client.sh("mkdir -m 777 /tmp/open; echo old > /tmp/open/f; chmod 644 /tmp/open/f")
    assert outcome(write(client, "/tmp/open/f", b"x", user="agent")) == ("file-open", errno.EACCES)
    assert outcome(write(client, "/etc/new", b"x", user="agent")) == ("file-open", errno.EACCES)
    # In a sticky directory, as /tmp is, others' files stay.
    client.sh("echo old > /tmp/f; chmod 666 /tmp/f")
    assert outcome(write(client, "/tmp/f", b"x", user="agent")) == ("file-rename", errno.EPERM)
    assert client.sh("cat /tmp/open/f /tmp/f; ls -A /tmp /tmp/open") == (
        "old\nold\n/tmp:\nf\nopen\n\n/tmp/open:\nf\n"
    )


@pytest.mark.parametrize(
    ("said", "sent", "expected"),
    [(10, 9, errno.EPIPE), (10, 11, errno.EFBIG), (0, 1, errno.EFBIG), (10, 1 << 22, errno.EFBIG)],
)
def test_a_stream_of_the_wrong_length_is_discarded(client, said, sent, expected):
    client.sh("echo old > /tmp/f")
    exited = write(client, "/tmp/f", b"x" * sent, length=said)
    assert outcome(exited) == ("file-length", expected)
    assert client.sh("cat /tmp/f; ls -A /tmp") == "old\nf\n"


def test_a_full_disk_is_told_and_leaves_nothing(node):
    with node.sandbox(size_mb=1) as sandbox:
        client = sandbox.launcher
        exited = write(client, "/tmp/f", bytes(2 << 20))
        assert outcome(exited) == ("file-write", errno.ENOSPC)
        assert client.sh("ls -A /tmp") == ""
        assert outcome(write(client, "/tmp/f", bytes(1 << 19))) == ("none", 0)


def test_a_write_that_is_killed_leaves_nothing(sandbox, client):
    read_fd, write_fd = os.pipe()
    payload = wire.file_payload(FileOp.FILE_WRITE, user="0", path="/tmp/f", length=1 << 20)
    number = client.send(MsgType.M_FILE, payload, [read_fd])
    os.close(read_fd)
    os.write(write_fd, b"x" * 60_000)
    pid_file = Path(f"{sandbox.cgroups.v2}/e1/cgroup.procs")
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
    wait_until(lambda: int(client.sh("df -k / | tail -n 1").split()[2]) > 50)
    exited = client.kill_tree(number)
    assert exited is not None
    assert exited.status == signal.SIGKILL
    assert client.sh("ls -A /tmp") == ""
    os.close(write_fd)


def test_a_reader_that_goes_ends_the_read(client):
    write(client, "/tmp/f", bytes(1 << 20))
    read_fd, write_fd = os.pipe()
    payload = wire.file_payload(FileOp.FILE_READ, user="0", path="/tmp/f", length=1 << 20)
    number = client.send(MsgType.M_FILE, payload, [write_fd])
    os.close(write_fd)
    assert os.read(read_fd, 1) == b"\0"
    os.close(read_fd)
    assert outcome(client.exited(number)) == ("data-pipe", errno.EPIPE)


NO_OPERATION = wire.file_payload(99, user="0", path="/f")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "fds", "expected"),
    [
        (b"", 1, errno.EBADMSG),
        (wire.file_payload(FileOp.FILE_READ, user="0", path="/f")[:-1], 1, errno.EBADMSG),
        (wire.file_payload(FileOp.FILE_READ, user="0", path="/f"), 0, errno.EBADMSG),
        (wire.file_payload(FileOp.FILE_READ, user="0", path="/f"), 2, errno.EBADMSG),
        (wire.file_payload(FileOp.FILE_READ, user="0", path="/f") + b"\0", 1, errno.EBADMSG),
        (NO_OPERATION, 1, errno.EBADMSG),
    ],
)
def test_an_operation_that_is_no_message(client, payload, fds, expected):
    given = [os.open("/dev/null", os.O_RDWR) for _ in range(fds)]
    exited = client.exited(client.send(MsgType.M_FILE, payload, given))
    wire.close_fds(given)
    assert outcome(exited) == ("message", expected)
