"""``security.*`` attributes are the kernel's and its administrator's, on any file.

Linux 6.1 with the LSM bpf lets anybody set them; on a tmpfs they are memory of the host's there,
without a bound and charged to nobody.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.framework.daemon import Daemon
from tests.security.probing import Host, Inside, alive, install

PLACES = ("/dev/shm", "/tmp")
"""A tmpfs on each kernel, and the sandbox's root."""


def file_in(place: str, inside: Inside) -> str:
    path = f"{place}/attributes-of-{inside.identity}"
    inside.shell(f": > {path}")
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["x", "ima", "capabilit", "capability.x"])
def test_security_attribute_is_refused(place: str, name: str, inside: Inside) -> None:
    assert inside.ask(f"setxattr:{file_in(place, inside)},security.{name}") == "EPERM"


def test_control_security_attributes_can_be_set_on_the_host(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert host.ask(f"setxattr:{file},security.x").startswith("ok")


def test_control_attributes_of_ones_own_can_be_set(inside: Inside) -> None:
    assert inside.ask(f"setxattr:{file_in('/tmp', inside)},user.x").startswith("ok")


@pytest.mark.parametrize("place", PLACES)
def test_control_root_gives_a_program_its_capabilities(place: str, as_root: Inside) -> None:
    """As setcap(8) does, and tar and dpkg."""
    assert as_root.ask(f"file_capability:{file_in(place, as_root)}").startswith("ok")


ENOUGH_KIB = 128 << 10
INODES_KIB = 65_536
"""A kernel with attributes on tmpfs takes them out of the inodes, each for one KiB; /dev/shm has so
many."""


@pytest.mark.parametrize("mode", ["user_attributes", "security_attributes", "labels"])
def test_attributes_on_a_tmpfs_are_bounded(
    mode: str, identity: str, daemon: Daemon, programs: dict[str, Path]
) -> None:
    """``labels``: security.selinux, which a kernel may let anybody set while SELinux is off."""
    with daemon.sandbox("busybox", limits={"memory_mb": 256}) as name:
        install(daemon, name, programs)
        taken, why = Inside(daemon, name, identity).hog(mode, ENOUGH_KIB)
        assert taken <= INODES_KIB
        assert why in ("ENOSPC", "EPERM", "EOPNOTSUPP")
        alive(daemon, name)
