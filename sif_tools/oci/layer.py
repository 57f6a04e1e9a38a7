"""A layer blob as a `Layer` to merge: read, decompressed, verified, parsed.

Each pass reads the blob once. The first proves the tar inside (its diff_id), the second the blob
itself (digest and size): together both, at the cost of one hash a pass, and what the second
delivers is what the first has indexed, as both digests come from one verified manifest. Where no
manifest names the blob, both passes prove the tar.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from sif_tools.compression import decompressed
from sif_tools.errors import BadLayer, ConvertError, DigestMismatch
from sif_tools.limits import DEFAULT_LIMITS, Limits
from sif_tools.merge.merger import Pass, Progress
from sif_tools.oci.image import BlobStore, LayerBlob, new_hash
from sif_tools.prefetch import Prefetch
from sif_tools.tarstream.entry import EntryStream
from sif_tools.tarstream.reader import TarReader


class OciLayer:
    """Implements `Layer`; `number` counts from 1, bottom first, as a person would."""

    has_whiteouts = True

    def __init__(
        self, store: BlobStore, layer: LayerBlob, number: int, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._store = store
        self._layer = layer
        self._limits = limits
        self.name = f"layer {number} ({layer.blob.digest[:19]}…)"

    @property
    def size_bytes(self) -> int:
        return self._layer.blob.size_bytes

    @property
    def diff_id(self) -> str:
        """Names the layer's content, however it is compressed; verified by the first pass."""
        return self._layer.diff_id

    @contextmanager
    def open(self, which: Pass, progress: Progress | None = None) -> Iterator[EntryStream]:
        """One pass; ends with the pass's digest compared. See the module's docstring."""
        blob = self._layer.blob
        with self._store.open(blob) as file:
            proves_blob = which is Pass.EMIT and self._layer.blob_is_named
            source = _BlobReader(file, blob.digest if proves_blob else None, progress)
            digest = _StreamDigest(None if proves_blob else self._layer.diff_id)
            try:
                with Prefetch(self._bounded(decompressed(source.read), source)) as chunks:
                    reader = TarReader(digest.over(chunks))
                    yield reader
                    reader.drain()
            except BadLayer as error:
                # Damage shows as a broken stream first; the digest tells whose fault it is.
                self._check_blob()
                raise error from None
            source.drain()
            if source.read_bytes != blob.size_bytes:
                raise DigestMismatch(
                    f"the blob has {source.read_bytes} bytes, its descriptor says {blob.size_bytes}"
                )
            source.check()
            digest.check()

    def _bounded(self, chunks: Iterator[bytes], source: _BlobReader) -> Iterator[bytes]:
        inflated_bytes = 0
        for chunk in chunks:
            inflated_bytes += len(chunk)
            self._limits.check_inflated(inflated_bytes, source.read_bytes)
            yield chunk

    def _check_blob(self) -> None:
        if not self._layer.blob_is_named:
            return
        with self._store.open(self._layer.blob) as file:
            source = _BlobReader(file, self._layer.blob.digest, None)
            source.drain()
            source.check()


class _BlobReader:
    """Counts and, where asked, hashes what is read of a blob."""

    def __init__(self, file: BinaryIO, digest: str | None, progress: Progress | None) -> None:
        self._file = file
        self._digest = digest
        self._hash = None if digest is None else new_hash(digest)
        self._progress = progress
        self.read_bytes = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise ConvertError(f"reading the blob: {error.strerror}") from error
        if self._hash is not None:
            self._hash.update(data)
        self.read_bytes += len(data)
        if self._progress is not None:
            self._progress(self.read_bytes)
        return data

    def drain(self) -> None:
        while self.read(1 << 20):
            pass

    def check(self) -> None:
        if self._hash is not None and f"{self._hash.name}:{self._hash.hexdigest()}" != self._digest:
            raise DigestMismatch(f"the blob's bytes do not have its digest {self._digest}")


class _StreamDigest:
    """Hashes a decompressed stream on its way, where there is a digest to compare."""

    def __init__(self, diff_id: str | None) -> None:
        self._diff_id = diff_id
        self._hash = None if diff_id is None else new_hash(diff_id)

    def over(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        if self._hash is None:
            yield from chunks
            return
        for chunk in chunks:
            self._hash.update(chunk)
            yield chunk

    def check(self) -> None:
        if self._hash is not None:
            actual = f"{self._hash.name}:{self._hash.hexdigest()}"
            if actual != self._diff_id:
                raise DigestMismatch(
                    f"its tar has digest {actual}, the config says {self._diff_id}"
                )
