"""Mounts: nothing can be mounted, unmounted, moved aside or walked around."""

from __future__ import annotations

import pytest

from sandboxd.rootfs import skeleton
from tests.security.probing import Host, Inside

MASKS = ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"]


@pytest.mark.parametrize("path", [*MASKS, *(f"/{name}" for name in skeleton.READONLY)])
def test_mask_cannot_be_unmounted(path: str, inside: Inside) -> None:
    assert inside.ask(f"umount:{path}") == "EPERM"


@pytest.mark.parametrize("path", ["/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/null"])
def test_mount_cannot_be_unmounted(path: str, inside: Inside) -> None:
    assert inside.ask(f"umount:{path}") == "EPERM"


@pytest.mark.parametrize("path", ["/", "/sys", "/proc/sys", "/proc/sysrq-trigger", "/dev"])
def test_mount_cannot_be_remounted(path: str, inside: Inside) -> None:
    assert inside.ask(f"remount:{path}") == "EPERM"


@pytest.mark.parametrize("what", ["mount_proc:/tmp", "mount_tmpfs:/tmp", "bind:/", "bind:/proc"])
def test_nothing_can_be_mounted(what: str, inside: Inside) -> None:
    assert inside.ask(what) == "EPERM"


def test_propagation_cannot_be_changed(inside: Inside) -> None:
    assert inside.ask("shared:/") == "EPERM"


def test_mounts_do_not_propagate(as_root: Inside) -> None:
    """No mount is shared with, or a slave of, one outside (proc_pid_mountinfo(5))."""
    optional = [
        line.split(" - ")[0].split()[6:]
        for line in as_root.shell("cat /proc/self/mountinfo").splitlines()
    ]
    assert optional
    assert not any(optional)


@pytest.mark.parametrize("path", ["/proc", "/sys", "/dev", "/dev/shm", "/dev/pts", "/proc/sys"])
def test_mountpoint_cannot_be_moved_aside(path: str, inside: Inside) -> None:
    """Renamed or removed, it would make room for what PID 1 or the next command trusts."""
    refused = {"EBUSY", "EACCES", "EPERM", "EROFS", "EXDEV", "ENOENT"}  # no such name to move to
    assert inside.ask(f"rename:{path}") in refused
    assert inside.ask(f"rmdir:{path}") in refused


def test_chroot_is_no_way_out(inside: Inside) -> None:
    """Walking up from a directory held from before a chroot ends in the sandbox's own root."""
    answer = inside.ask("chroot_walk:/tmp/below")
    assert answer == "ok 0" if inside.identity == "root" else answer in {"EPERM", "EACCES"}


def test_control_chroot_can_be_left_where_the_root_is_elsewhere(as_root: Inside) -> None:
    """The same walk, begun in a chroot, does leave that one: the try itself works."""
    script = "mkdir -p /tmp/jail/tmp /tmp/jail/probes; cp /probes/probe /tmp/jail/probes/"
    answer = as_root.shell(f"{script}; chroot /tmp/jail /probes/probe chroot_walk:/tmp/below")
    assert answer.split()[-2:] == ["ok", "1"]
    as_root.shell("rm -r /tmp/jail")


@pytest.mark.parametrize("namespace", ["mnt", "pid", "net", "user", "ipc", "uts", "cgroup"])
def test_namespace_of_pid1_cannot_be_entered(namespace: str, inside: Inside) -> None:
    assert inside.ask(f"setns_file:/proc/1/ns/{namespace}") == "EACCES"


@pytest.mark.parametrize("namespace", ["mnt", "pid", "net", "user"])
def test_own_namespace_cannot_be_entered_anew(namespace: str, inside: Inside) -> None:
    assert inside.ask(f"setns_file:/proc/self/ns/{namespace}") == "EPERM"


def test_control_namespace_can_be_entered_on_the_host(host: Host) -> None:
    assert host.ask("setns_file:/proc/self/ns/uts").startswith("ok")


@pytest.mark.parametrize(
    "name", ["user.overlay.opaque", "user.overlay.redirect", "user.overlay.whiteout"]
)
def test_overlay_attribute_of_the_sandboxs_making_is_not_believed(
    name: str, as_root: Inside
) -> None:
    """With `userxattr` overlayfs keeps its own marks in attributes that root could set. It escapes
    them: what is set comes back to the sandbox and never reaches the layer."""
    script = f"""
        mkdir -p /tmp/ov/dir; touch /tmp/ov/dir/file
        /probes/probe setxattr:/tmp/ov/dir,{name} setxattr:/etc,{name}
        ls /tmp/ov/dir; ls /etc | head -1; rm -r /tmp/ov
    """
    told = as_root.shell(script)
    assert "file\n" in told
    assert "group\n" in told


@pytest.mark.parametrize("name", ["trusted.overlay.opaque", "trusted.overlay.redirect"])
def test_trusted_attribute_cannot_be_set(name: str, inside: Inside) -> None:
    assert inside.ask(f"setxattr:/tmp,{name}") == "EPERM"


def test_whiteout_cannot_be_made(inside: Inside) -> None:
    """A character device 0:0 in an upper layer hides a file of the image (overlayfs)."""
    assert inside.ask("mknod_c:0,0,/tmp/whiteout") == "EPERM"
