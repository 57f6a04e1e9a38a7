"""A delta SIF of a snapshot: what a node that has the same image lays over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import sif_tools
from sandboxd.errors import DiffUnspeakable, ExportFailed
from sandboxd.images.checked import CheckedImage
from sandboxd.images.store import ImageStore
from sif_tools.errors import BadEntry, BadLayer
from sif_tools.store.layer_delta import delta_of_layer

_READ_BYTES = 1 << 20


def delta_sif(store: ImageStore, image: CheckedImage, tar_fd: int) -> int:
    """Blocking: the descriptor of a finished file without a name. Reads the layer's tar from
    ``tar_fd`` and closes it. Raises DiffUnspeakable, ExportFailed,
    ImageUnavailable."""
    with ExitStack() as stack:
        tar = stack.enter_context(os.fdopen(tar_fd, "rb", buffering=0))
        fds = []
        for part in (*image.below, image):
            fds.append(store.open_now(part))
            stack.callback(os.close, fds[-1])
        digests = [part.digest for part in (*image.below, image)] if image.digest else []

        def chunks() -> Iterator[bytes]:
            while data := tar.read(_READ_BYTES):
                yield data

        try:
            file = stack.enter_context(delta_of_layer(chunks(), fds, digests=digests))
            return os.dup(file.fd)
        except (BadEntry, BadLayer) as error:
            # Of what a sandbox has made, and so never the node's fault.
            raise DiffUnspeakable(f"a SIF cannot hold it: {error.message}") from error
        except sif_tools.SifError as error:
            raise ExportFailed(
                f"no SIF could be made: {error.message}", hint=error.hint, sif_code=error.code
            ) from error
