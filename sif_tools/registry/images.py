"""Manifests and blobs of one repository, from its mirrors or itself; implements `BlobStore`.

Layers are downloaded a few at a time, bottom first, each into a spool that is read while it
fills: memory stays bounded, and inflating the first layer does not wait for the last. Each is
verified by size and digest before its last byte is given out. A download that breaks goes on
where it broke if the server lets it (206 with the very range that was asked for); else it starts
over.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO, Final, TypeVar, cast

import httpx

from sif_tools.errors import (
    BadLayout,
    ConvertError,
    DigestMismatch,
    RegistryFailed,
    TooLarge,
)
from sif_tools.limits import Limits
from sif_tools.oci.descriptor import INDEX_TYPES, MANIFEST_TYPES, BlobDescriptor, is_digest
from sif_tools.oci.image import MAX_JSON_BYTES, check_digest, new_hash, read_json
from sif_tools.registry.spool import Spool
from sif_tools.registry.transport import Transport, describe

DOWNLOADS_AT_A_TIME: Final = 3
# Breaks without a byte in between before a server is given up; breaks in all.
_MAX_IDLE_BREAKS: Final = 5
_MAX_BREAKS: Final = 100
_ACCEPT: Final = {"Accept": ", ".join(sorted(MANIFEST_TYPES | INDEX_TYPES))}
_SCHEMA_1: Final = "application/vnd.docker.distribution.manifest.v1"
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

T = TypeVar("T")


class RegistryImages:
    """`transports` in the order in which to ask; close it before them."""

    def __init__(
        self, transports: Sequence[Transport], limits: Limits, stop: threading.Event
    ) -> None:
        self._transports = transports
        self._limits = limits
        self._stop = stop
        self._small: dict[str, bytes] = {}
        self._spools: dict[str, Spool] = {}
        self._pool = ThreadPoolExecutor(DOWNLOADS_AT_A_TIME, thread_name_prefix="sif-download")

    def close(self) -> None:
        """Stop downloading, and give the disk back."""
        self._stop.set()
        for spool in self._spools.values():
            spool.fail(ConvertError("the download was stopped"))
        self._pool.shutdown(cancel_futures=True)
        for spool in self._spools.values():
            spool.close()

    def manifest(self, tag_or_digest: str) -> BlobDescriptor:
        """The descriptor of what a tag or digest names now; its bytes are kept for `open`."""
        data, media_type, said = self._anywhere(
            lambda transport: _read_manifest(transport, tag_or_digest)
        )
        algorithm = tag_or_digest if is_digest(tag_or_digest) else "sha256"
        hashed = new_hash(algorithm)
        hashed.update(data)
        digest = f"{hashed.name}:{hashed.hexdigest()}"
        if is_digest(tag_or_digest) and digest != tag_or_digest:
            raise DigestMismatch(f"the manifest {tag_or_digest} has digest {digest}")
        if said.startswith(f"{hashed.name}:") and said != digest:
            raise DigestMismatch(f"the manifest has digest {digest}, the registry says {said}")
        node = read_json(data, "the manifest")
        stated = node.get("mediaType") or media_type
        if not isinstance(stated, str) or stated.startswith(_SCHEMA_1) or node.get("fsLayers"):
            raise BadLayout(
                "a manifest of Docker's schema 1, which proves too little",
                hint="push the image again with a current tool",
            )
        if "manifests" in node and "layers" not in node:
            stated = next(iter(INDEX_TYPES & {stated}), min(INDEX_TYPES))
        self._small[digest] = data
        return BlobDescriptor(stated, digest, len(data))

    @contextmanager
    def open(self, blob: BlobDescriptor) -> Iterator[BinaryIO]:
        """A blob: a layer once `download` knows it, else small and held in memory."""
        if blob.digest in self._spools:
            yield cast(BinaryIO, self._spools[blob.digest].reader())
            return
        if blob.digest not in self._small:
            if blob.size_bytes > MAX_JSON_BYTES:
                raise BadLayout(f"{blob.digest}: {blob.size_bytes} bytes of JSON, too many")
            is_manifest = blob.media_type in MANIFEST_TYPES | INDEX_TYPES
            path = f"{'manifests' if is_manifest else 'blobs'}/{blob.digest}"
            headers = {"Accept": f"{blob.media_type}, */*;q=0.1"} if is_manifest else {}
            self._small[blob.digest] = self._anywhere(
                lambda transport: _read_verified(transport, path, headers, blob)
            )
        yield io.BytesIO(self._small[blob.digest])

    def download(self, layers: Sequence[BlobDescriptor]) -> None:
        """Start to fetch layers, in this order; TooLarge where they are too much together."""
        wanted = {one.digest: one for one in layers}
        total = sum(one.size_bytes for one in wanted.values())
        if total > self._limits.download_bytes:
            raise TooLarge(f"{total} bytes of layers, more than {self._limits.download_bytes}")
        for digest, blob in wanted.items():
            self._spools[digest] = Spool(blob.size_bytes)
            self._pool.submit(self._fetch, blob, self._spools[digest])

    def _anywhere(self, ask: Callable[[Transport], T]) -> T:
        """What the first place that has it answers; the last one's error where none has."""
        for transport in self._transports[:-1]:
            try:
                return ask(transport)
            except ConvertError:
                continue
        return ask(self._transports[-1])

    # ── layers ──────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, blob: BlobDescriptor, spool: Spool) -> None:
        try:
            last = self._transports[-1]
            self._anywhere(
                lambda transport: _Download(
                    transport, blob, spool, self._stop, shown=transport is last
                ).run()
            )
            spool.finish()
        except ConvertError as error:
            spool.fail(error)
        except Exception as error:  # noqa: BLE001  a reader waits: it must hear of anything
            failure = RegistryFailed(f"{blob.digest}: {describe(error)}")
            failure.__cause__ = error
            spool.fail(failure)


class _Download:
    """One blob from one place, until it is whole and verified.

    `shown`: it may be read while it arrives. Not so from a mirror, after which another place may
    have other bytes.
    """

    def __init__(
        self,
        transport: Transport,
        blob: BlobDescriptor,
        spool: Spool,
        stop: threading.Event,
        *,
        shown: bool,
    ) -> None:
        self._shown = shown
        self._transport = transport
        self._blob = blob
        self._spool = spool
        self._stop = stop
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._hash = new_hash(self._blob.digest)

    def run(self) -> None:
        idle_breaks = breaks = 0
        deadline = self._transport.deadline()
        while True:
            before = self._at
            try:
                self._receive()
                if self._at == self._blob.size_bytes:
                    break
                problem = f"ends after {self._at} of {self._blob.size_bytes} bytes"
            except httpx.TransportError as error:
                problem = describe(error)
            breaks += 1
            idle_breaks = 0 if self._at > before else idle_breaks + 1
            if idle_breaks >= _MAX_IDLE_BREAKS or breaks >= _MAX_BREAKS:
                raise RegistryFailed(
                    f"{self._transport.host}: {self._blob.digest}: the download breaks: {problem}"
                )
            if self._at > before:
                deadline = self._transport.deadline()
            self._transport.pause(self._transport.delay(idle_breaks), deadline, problem)
        if self._hash.hexdigest() != self._blob.digest.partition(":")[2]:
            raise DigestMismatch(
                f"{self._transport.host}: the blob's bytes do not have its digest "
                f"{self._blob.digest}"
            )

    def _receive(self) -> None:
        """One request's worth of bytes; returns at its end, whether or not all has come."""
        size, asked = self._blob.size_bytes, self._at
        headers = {"Range": f"bytes={asked}-{size - 1}"} if asked else {}
        with self._transport.get(f"blobs/{self._blob.digest}", headers) as response:
            if asked and not _continues(response, asked, size):
                self._start_over()
                if response.status_code != 200:
                    return
            elif not asked and response.status_code != 200:
                raise RegistryFailed(f"{self._transport.host}: a part was sent, unasked")
            for data in response.iter_raw():
                if self._stop.is_set():
                    raise ConvertError("the download was stopped")
                if self._at + len(data) > size:
                    raise DigestMismatch(
                        f"{self._transport.host}: {self._blob.digest} is longer than the "
                        f"{size} bytes it has"
                    )
                self._hash.update(data)
                self._spool.write(data, self._at, shown=self._shown)
                self._at += len(data)


def _continues(response: httpx.Response, asked: int, size: int) -> bool:
    """Whether this is the rest that was asked for, and nothing else."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if response.status_code != 206 or found is None:
        return False
    start, end, total = found.groups()
    return (int(start), int(end)) == (asked, size - 1) and total in ("*", str(size))


def _read_manifest(transport: Transport, tag_or_digest: str) -> tuple[bytes, str, str]:
    """Bytes, media type and what the registry says the digest is."""
    data, headers = _read_small(transport, f"manifests/{tag_or_digest}", _ACCEPT, MAX_JSON_BYTES)
    media_type = headers.get("Content-Type", "").partition(";")[0].strip()
    return data, media_type, headers.get("Docker-Content-Digest", "")


def _read_verified(
    transport: Transport, path: str, headers: dict[str, str], blob: BlobDescriptor
) -> bytes:
    """Checked here already, so that a mirror that has something else is only passed over."""
    data, _ = _read_small(transport, path, headers, blob.size_bytes)
    check_digest(data, blob)
    return data


def _read_small(
    transport: Transport, path: str, headers: dict[str, str], limit_bytes: int
) -> tuple[bytes, httpx.Headers]:
    """A body that fits into memory, and its headers; one byte too many is kept as the proof."""
    for tries_left in range(_MAX_IDLE_BREAKS - 1, -1, -1):
        try:
            with transport.get(path, headers) as response:
                data = bytearray()
                for piece in response.iter_raw():
                    data += piece
                    if len(data) > limit_bytes:
                        break
                if len(data) > MAX_JSON_BYTES:
                    raise BadLayout(f"{path}: more than {MAX_JSON_BYTES} bytes of JSON")
                return bytes(data), response.headers
        except httpx.TransportError as error:
            problem = describe(error)
            if not tries_left:
                raise RegistryFailed(f"{transport.host}: {path}: {problem}") from error
            transport.pause(transport.delay(0), transport.deadline(), problem)
    raise AssertionError("the last try returns or raises")
