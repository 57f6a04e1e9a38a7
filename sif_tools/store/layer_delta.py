"""A delta of an OCI layer's tar: what makes of the SIFs below it what the layer makes of them.

For a layer that names nothing it does not change and hides nothing that is not there, as a node
writes of a snapshot: then it can be taken as it comes, in one pass, without the trees below. What
the image says of itself is taken from the uppermost of the SIFs below. Of attributes, what squashfs
can hold and an image may have (``tarstream.entry``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sif_tools.errors import BadEntry
from sif_tools.format import PartType
from sif_tools.image_objects import squashfs_object
from sif_tools.limits import DEFAULT_LIMITS
from sif_tools.merge import names
from sif_tools.merge.delta import WHITEOUT
from sif_tools.merge.merger import IMPLICIT_DIRECTORY
from sif_tools.merge.names import Marker
from sif_tools.partition import overlay_partition, squashfs_partition
from sif_tools.reader import opened, read_sif
from sif_tools.squashfs import SquashfsOptions, squashfs_from_tar
from sif_tools.store.build import DELTA_DESCRIPTORS, LocalFile, written_sif
from sif_tools.store.delta_object import delta_object
from sif_tools.store.flatten import objects_of_image
from sif_tools.tarstream.entry import Kind
from sif_tools.tarstream.reader import TarReader
from sif_tools.tarstream.writer import TarWriter
from sif_tools.writer import FileContent


@contextmanager
def delta_of_layer(
    chunks: Iterator[bytes],
    below: Sequence[Path | int],
    options: SquashfsOptions | None = None,
    digests: Sequence[str] = (),
) -> Iterator[LocalFile]:
    """The delta's SIF. ``below``: SIFs, base first; ``digests``: theirs, where they are known
    (hexadecimal SHA-256). Raises SifError."""
    with ExitStack() as stack:
        fds = [stack.enter_context(opened(one)) for one in below]
        top = read_sif(fds[-1])
        find = overlay_partition if len(fds) > 1 else squashfs_partition
        arch = find(top, fds[-1]).arch
        reader = TarReader(chunks)

        def write(writer: TarWriter) -> int:
            inodes = _translate(reader, writer)
            reader.drain()
            return inodes

        image, size = stack.enter_context(squashfs_from_tar(write, options or SquashfsOptions()))
        named = list(digests) or [_digest(fd) for fd in fds]
        objects = [
            *objects_of_image(top, fds[-1]),
            delta_object(below=[f"sha256:{one}" for one in named]),
            squashfs_object(FileContent(image.fileno(), 0, size), PartType.OVERLAY, arch),
        ]
        yield stack.enter_context(written_sif(objects, DELTA_DESCRIPTORS))


def _translate(reader: TarReader, writer: TarWriter) -> int:
    """Write the layer as OverlayFS has it; returns the number of inodes."""
    content_bytes = inodes = 0
    hidden: list[bytes] = []
    there: set[bytes] = set()
    for ordinal, entry in enumerate(reader):
        content_bytes += entry.size_bytes
        DEFAULT_LIMITS.check_content(ordinal, content_bytes)
        path = names.normalise(entry.path)
        what, about = names.marker(path)
        if what is Marker.WHITEOUT:
            hidden.append(about)
            continue
        if what is not Marker.NONE:
            raise BadEntry("a mark that a layer of changes does not have", entry=entry.path)
        if path in there:
            raise BadEntry("twice in one layer", entry=entry.path)
        if not there and path:
            writer.add(b"", IMPLICIT_DIRECTORY)
            there.add(b"")
            inodes += 1
        if entry.kind is Kind.HARDLINK:
            entry.link_target = names.normalise(entry.link_target)
            if entry.link_target not in there:
                raise BadEntry("a hard link to what is not in the layer", entry=entry.path)
        else:
            inodes += 1
        there.add(path)
        writer.add(path, entry, reader.data())
    if not there:
        writer.add(b"", IMPLICIT_DIRECTORY)
        inodes += 1
    for path in hidden:
        if path not in there:
            writer.add(path, WHITEOUT)
            inodes += 1
    return inodes


def _digest(fd: int) -> str:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
