"""What is known of an image once its files were looked at, and looking at one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import sif_tools
from sandboxd.errors import ImageInvalid, ImageUnavailable
from sandboxd.model import ImageConfig


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """A SIF whose file system this node may mount, and those it is laid over."""

    name: str
    key: str
    """Names the very file, not only its name: another file of that name has another key."""
    sif_offset: int
    size_bytes: int
    config: ImageConfig
    path: str = ""
    """Where it was opened; empty for ``IMAGES_DIR/NAME.sif``."""
    digest: str = ""
    """By which a store has it; empty outside of one."""
    below: tuple[CheckedImage, ...] = ()
    """What it is laid over, base first."""


@dataclass(frozen=True, slots=True)
class KnownImage:
    """A file in the store, unchecked."""

    name: str
    size_bytes: int | None
    """None where only opening more files would tell."""
    modified_at: float


def file_key(status: os.stat_result) -> str:
    identity = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def inspect(fd: int, name: str, key: str, size_bytes: int) -> CheckedImage:
    """Check an image that is one file. Raises ImageInvalid, ImageUnavailable."""
    with refusals(name):
        sif = sif_tools.read_sif(fd)
        partition = sif_tools.mountable_partition(sif, fd)
        config = sif_tools.image_config(sif, fd)
    return CheckedImage(
        name=name,
        key=key,
        sif_offset=partition.offset_bytes,
        size_bytes=size_bytes,
        config=usable_config(config),
    )


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """What is wrong with an image's files, in the daemon's words."""
    try:
        yield
    except sif_tools.Unreadable as error:
        raise ImageUnavailable(f"image {name!r} cannot be read: {error.message}") from error
    except sif_tools.SifError as error:
        raise ImageInvalid(
            f"image {name!r}: {error.message}", hint=error.hint, sif_code=error.code
        ) from error


def usable_config(config: sif_tools.ImageConfig) -> ImageConfig:
    """An image's config as the daemon has it."""
    return _usable(
        ImageConfig(
            env=config.env,
            workdir=config.working_dir or "/",
            user=config.user or "0",
            labels=config.labels,
        )
    )


def _usable(config: ImageConfig) -> ImageConfig:
    """Without what no program could be started with: entries that are no ``NAME=value``."""
    env = tuple(entry for entry in config.env if "=" in entry[1:] and "\0" not in entry)
    workdir = config.workdir if config.workdir.startswith("/") else "/" + config.workdir
    return replace(config, env=env, workdir=workdir)
