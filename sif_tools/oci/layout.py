"""An OCI image layout: `oci-layout`, `index.json`, `blobs/ALGORITHM/HEX`, in a directory or tar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from sif_tools.errors import BadLayout, BadSource
from sif_tools.oci.descriptor import REF_NAME, BlobDescriptor, parse_descriptors
from sif_tools.oci.image import MAX_JSON_BYTES, read_json

_VERSION: Final = "1.0.0"


class LayoutFiles(Protocol):
    """Files by name. `open` raises OSError where there is none, or BadLayout."""

    @property
    def name(self) -> str:
        """How an error names the whole."""

    def open(self, name: str) -> AbstractContextManager[BinaryIO]: ...


class DirectoryFiles:
    """Implements `LayoutFiles` with a directory."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._directory = directory

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with (self._directory / name).open("rb", buffering=0) as file:
            yield file


class OciLayout:
    """Blobs of a layout; implements `BlobStore`."""

    def __init__(self, files: LayoutFiles) -> None:
        self._files = files
        version = read_json(self._read("oci-layout"), "oci-layout").get("imageLayoutVersion")
        if version != _VERSION:
            raise BadLayout(f"layout version {str(version)[:32]!r}, only {_VERSION} is known")

    def images(self, tag: str | None) -> list[BlobDescriptor]:
        """What `index.json` lists under a tag; without one, all of it."""
        node = read_json(self._read("index.json"), "index.json")
        listed = parse_descriptors(node.get("manifests"), "manifests")
        tags = sorted({one.annotations[REF_NAME] for one in listed if REF_NAME in one.annotations})
        if tag is not None:
            found = [one for one in listed if one.annotations.get(REF_NAME) == tag]
            if not found:
                raise BadSource(
                    f"{self._files.name}: no image is tagged {tag!r}",
                    hint=f"there is: {', '.join(tags)[:500] or 'no tag at all'}",
                )
            return found
        if len(tags) > 1:
            raise BadSource(
                f"{self._files.name}: several images, and no tag says which",
                hint=f"append one of: {', '.join(':' + one for one in tags)[:500]}",
            )
        return listed

    @contextmanager
    def open(self, blob: BlobDescriptor) -> Iterator[BinaryIO]:
        """A blob's file; BadLayout where it is missing."""
        algorithm, _, value = blob.digest.partition(":")
        try:
            opened = self._files.open(f"blobs/{algorithm}/{value}")
            file = opened.__enter__()
        except OSError as error:
            raise BadLayout(f"blob {blob.digest}: {error.strerror}") from error
        try:
            yield file
        finally:
            opened.__exit__(None, None, None)

    def _read(self, name: str) -> bytes:
        try:
            with self._files.open(name) as file:
                data = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise BadSource(
                f"{os.path.join(self._files.name, name)}: {error.strerror}",
                hint="is this an OCI layout?",
            ) from error
        if len(data) > MAX_JSON_BYTES:
            raise BadLayout(f"{name} is larger than {MAX_JSON_BYTES} bytes")
        return data


def split_reference(reference: str) -> tuple[Path, str | None]:
    """`PATH[:TAG]`. Either may have colons: the longest PATH that exists is the path."""
    end = len(reference)
    while end > 0:
        if Path(reference[:end]).exists():
            return Path(reference[:end]), reference[end + 1 :] or None
        end = reference.rfind(":", 0, end)
    return Path(reference.partition(":")[0] or reference), None
