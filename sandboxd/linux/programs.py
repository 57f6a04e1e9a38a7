"""Programs of other packages: where they are, and which Debian package brings each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

PACKAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "squashfuse_ll": "squashfuse",
        "tar2sqfs": "squashfs-tools-ng",
        "mksquashfs": "squashfs-tools",
        "nft": "nftables",
        "newuidmap": "uidmap",
        "newgidmap": "uidmap",
        "fusermount3": "fuse3",
        "mkfs.ext4": "e2fsprogs",
    }
)

# Not in the PATH of every account or service manager, and here they count.
_SYSTEM_DIRS: Final = (
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/usr/local/bin",
    "/usr/bin",
    "/bin",
)

# Apptainer ships a newer, multithreaded squashfuse_ll of its own.
_LIBEXEC_DIRS: Final = (
    "/usr/libexec/apptainer/bin",
    "/usr/lib/x86_64-linux-gnu/apptainer/bin",
    "/usr/local/libexec/apptainer/bin",
    "/opt/apptainer/libexec/apptainer/bin",
)


def find_program(name: str) -> Path | None:
    """Where ``name`` is: in PATH, else in a system directory, else in Apptainer's libexec."""
    places = [os.environ.get("PATH", ""), *_SYSTEM_DIRS, *_LIBEXEC_DIRS]
    found = shutil.which(name, path=os.pathsep.join(places))
    return None if found is None else Path(found)


def remedy(name: str) -> str:
    """How an operator gets ``name``."""
    return f"apt-get install {PACKAGES.get(name, name)}"
