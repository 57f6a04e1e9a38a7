"""Files of the host in a sandbox, as a create asks for them and as they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from sandboxd.api.schemas.base import Answer, Body
from sandboxd.model import MOUNTS_MAX, MountSpec

SOURCE_BYTES_MAX: Final = 1024
TARGET_BYTES_MAX: Final = 500
"""All of a sandbox's fit HOST_TARGETS_MAX of ``init/protocol.h``."""
_KERNEL: Final = ("/proc", "/sys", "/dev")


def _normal(path: str, most: int) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or not parts or ".." in parts or "\0" in path:
        raise ValueError("must be an absolute path other than /, without '..' or a NUL byte")
    if len(path.encode()) > most:
        raise ValueError(f"has more than {most} bytes")
    return "/" + "/".join(parts)


def _source(path: str) -> str:
    return _normal(path, SOURCE_BYTES_MAX)


def _target(path: str) -> str:
    path = _normal(path, TARGET_BYTES_MAX)
    if any(_is_below(path, one) for one in _KERNEL):
        raise ValueError(f"must not be in {', '.join(_KERNEL)}")
    return path


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith(other + "/")


class MountBody(Body):
    """A directory or file of the node, below one of its ``mount_roots``."""

    source: Annotated[str, AfterValidator(_source)] = Field(examples=["/srv/datasets/imagenet"])
    """Absolute, on the node; over no symlink. What is mounted below it there is left out."""
    target: Annotated[str, AfterValidator(_target)] = Field(examples=["/data"])
    """Absolute, in the sandbox; made where it is missing. Not a symlink or beneath one, and not in
    /proc, /sys or /dev."""
    read_only: bool = True


Mounts = Annotated[list[MountBody], Field(max_length=MOUNTS_MAX)]


def mount_specs(mounts: Sequence[MountBody] | None) -> tuple[MountSpec, ...] | None:
    """Raises ValueError where one target holds another."""
    if mounts is None:
        return None
    targets = [one.target for one in mounts]
    for i, one in enumerate(targets):
        if any(_is_below(one, other) for j, other in enumerate(targets) if i != j):
            raise ValueError(f"mounts: {one!r} lies in the target of another mount")
    return tuple(MountSpec(one.source, one.target, one.read_only) for one in mounts)


class MountAnswer(Answer):
    source: str
    target: str
    read_only: bool
    ids: Literal["mapped", "unmapped"] | None
    """``mapped``: files belong to the same ids as on the node, and the sandbox's root may read them
    all. ``unmapped``, which every writable mount is: ids outside the sandbox's own range show as
    ``nobody``. Null where that was not noted before a daemon's end."""


def mount_answers(mounts: Sequence[MountSpec] | None) -> list[dict[str, Any]]:
    return [
        {
            "source": one.source,
            "target": one.target,
            "read_only": one.read_only,
            "ids": one.ids or None,
        }
        for one in mounts or ()
    ]
