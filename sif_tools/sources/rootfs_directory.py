"""`rootfs:DIR`: a root file system as it lies on disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from sif_tools.image_config import DEFAULT_IMAGE_CONFIG
from sif_tools.rootfs import DirectoryLayer
from sif_tools.sources.source import Request, Source


def open_rootfs(request: Request, resources: ExitStack) -> Source:
    """Implements `Backend`."""
    layer = DirectoryLayer(Path(request.reference))
    return Source(
        "rootfs",
        [layer],
        DEFAULT_IMAGE_CONFIG,
        request.architecture,
        None,
        has_config=False,
        resources=resources,
    )
