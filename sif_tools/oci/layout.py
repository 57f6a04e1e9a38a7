"""An OCI image layout on disk: `oci-layout`, `index.json`, `blobs/ALGORITHM/HEX`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from sif_tools.errors import BadLayout, BadSource
from sif_tools.oci.descriptor import REF_NAME, BlobDescriptor, parse_descriptors
from sif_tools.oci.image import MAX_JSON_BYTES, read_json

_VERSION: Final = "1.0.0"


class OciLayout:
    """Blobs of a layout directory; implements `BlobStore`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
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
                    f"{self.directory}: no image is tagged {tag!r}",
                    hint=f"there is: {', '.join(tags)[:500] or 'no tag at all'}",
                )
            return found
        if len(tags) > 1:
            raise BadSource(
                f"{self.directory}: several images, and no tag says which",
                hint=f"append one of: {', '.join(':' + one for one in tags)[:500]}",
            )
        return listed

    @contextmanager
    def open(self, blob: BlobDescriptor) -> Iterator[BinaryIO]:
        """A blob's file, its size compared; BadLayout where it is missing."""
        algorithm, _, value = blob.digest.partition(":")
        try:
            file = (self.directory / "blobs" / algorithm / value).open("rb", buffering=0)
        except OSError as error:
            raise BadLayout(f"blob {blob.digest}: {error.strerror}") from error
        with file:
            yield file

    def _read(self, name: str) -> bytes:
        try:
            with (self.directory / name).open("rb") as file:
                data = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise BadSource(
                f"{self.directory / name}: {error.strerror}", hint="is this an OCI layout?"
            ) from error
        if len(data) > MAX_JSON_BYTES:
            raise BadLayout(f"{name} is larger than {MAX_JSON_BYTES} bytes")
        return data


def split_reference(reference: str) -> tuple[Path, str | None]:
    """`DIR[:TAG]`. Either may have colons: the longest DIR that exists is the directory."""
    end = len(reference)
    while end > 0:
        if Path(reference[:end]).is_dir():
            return Path(reference[:end]), reference[end + 1 :] or None
        end = reference.rfind(":", 0, end)
    return Path(reference.partition(":")[0] or reference), None
