"""Devices: those every program needs, and no others, by no way of making or bringing one."""

from __future__ import annotations

import pytest

from tests.security.probing import Host, Inside

ALLOWED = {"null", "zero", "full", "random", "urandom", "tty"}
OTHERS = {"fd", "stdin", "stdout", "stderr", "ptmx", "pts", "shm", "mqueue"}


def test_dev_holds_the_allowed_nodes_only(inside: Inside) -> None:
    assert set(inside.shell("ls /dev").split()) == ALLOWED | OTHERS


def test_no_device_node_lies_anywhere_else(as_root: Inside) -> None:
    found = as_root.shell("find / -xdev \\( -type b -o -type c \\); find /dev -type b -o -type c")
    nodes = {line.removeprefix("/dev/") for line in found.split()}
    assert nodes - {"pts/ptmx"} == ALLOWED


@pytest.mark.parametrize("name", sorted(ALLOWED - {"tty"}))
def test_control_allowed_device_opens(name: str, inside: Inside) -> None:
    assert inside.ask(f"open_rw:/dev/{name}").startswith("ok")


def test_terminal_device_is_nobodys_terminal(inside: Inside) -> None:
    assert inside.ask("open_rw:/dev/tty") == "ENXIO"


@pytest.mark.parametrize(
    "name",
    [
        *("mem", "kmem", "port", "kmsg", "fuse", "kvm", "loop0", "loop-control", "sda", "vda"),
        *("nvme0n1", "net/tun", "mapper/control", "vhost-net", "vsock", "userfaultfd", "console"),
        *("tty0", "ttyS0", "hpet", "cpu/0/msr", "snapshot", "uinput", "btrfs-control", "autofs"),
        *("nvidia0", "nvidiactl", "dri/card0", "infiniband/uverbs0"),
    ],
)
def test_device_is_not_there(name: str, inside: Inside) -> None:
    assert inside.ask(f"open_r:/dev/{name}") in ("ENOENT", "ENOTDIR")


@pytest.mark.parametrize(
    "node",
    [
        *("c:1,1", "c:1,2", "c:1,3", "c:1,11", "c:5,1", "c:10,229", "c:10,200", "c:10,237"),
        *("b:7,0", "b:8,0"),
    ],
)
def test_device_node_cannot_be_made(node: str, inside: Inside) -> None:
    kind, numbers = node.split(":")
    for directory in ("/tmp", "/dev", "/dev/shm", "/work"):
        answer = inside.ask(f"mknod_{kind}:{numbers},{directory}/node")
        assert answer == "EPERM" or (answer == "EACCES" and inside.identity != "root")


def test_control_fifos_can_be_made(inside: Inside) -> None:
    assert inside.ask("mknod_p:0,0,/tmp/fifo").startswith("ok")


def test_control_device_nodes_can_be_made_on_the_host(host: Host) -> None:
    assert host.ask("mknod_c:1,3,/tmp/sandboxd-test-node").startswith("ok")


@pytest.mark.parametrize("what", ["chmod", "chown", "unlink", "rename", "truncate"])
def test_shared_device_inode_cannot_be_changed(what: str, inside: Inside) -> None:
    """The nodes are the host's own."""
    answer = inside.ask(f"{what}:/dev/null")
    assert answer in {"EPERM", "EACCES", "EBUSY", "EINVAL", "EROFS"}


@pytest.mark.parametrize("name", ["user.x", "trusted.x", "security.x", "system.posix_acl_access"])
def test_shared_device_inode_takes_no_attributes(name: str, inside: Inside) -> None:
    """Not even those that Linux 6.1 lets anybody set: they would be memory of the host's."""
    for device in sorted(ALLOWED):
        assert inside.ask(f"setxattr:/dev/{device},{name}") == "EROFS"


def test_terminals_are_the_sandboxs_own(inside: Inside) -> None:
    """A new instance of devpts: the host's terminals are not in it."""
    assert set(inside.shell("ls /dev/pts").split()) == {"ptmx"}
    assert inside.ask("tty_ioctl:5413") == "EFAULT"
