"""One image, resolved: its manifest's digest, its config and its layers, all checked.

Knows blobs only through `BlobStore`, so a layout directory and a registry resolve alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol

from sif_tools.errors import (
    BadImageConfig,
    BadLayout,
    DigestMismatch,
    NoMatchingPlatform,
)
from sif_tools.image_config import ImageConfig, parse_image_config
from sif_tools.oci.descriptor import (
    BlobDescriptor,
    choose_platform,
    is_digest,
    parse_descriptor,
    parse_descriptors,
)

MAX_JSON_BYTES: Final = 8 << 20
# The depth that any builder makes is two.
_MAX_INDEX_DEPTH: Final = 8


class BlobStore(Protocol):
    """Where blobs are read from; `open` need not verify anything."""

    def open(self, blob: BlobDescriptor) -> AbstractContextManager[BinaryIO]: ...


@dataclass(frozen=True, slots=True)
class LayerBlob:
    """A layer as stored, and the digest of the tar inside it.

    Without `blob_is_named` the blob's digest is only a name for it, which the bytes need not have.
    """

    blob: BlobDescriptor
    diff_id: str
    blob_is_named: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    manifest_digest: str
    architecture: str
    config: ImageConfig
    layers: tuple[LayerBlob, ...]


def resolve_image(
    store: BlobStore, candidates: list[BlobDescriptor], architecture: str, variant: str = ""
) -> Image:
    """Follow descriptors (of images and of nested indexes) to the image for one platform."""
    mismatch: NoMatchingPlatform | None = None
    for manifest in _manifests(store, candidates, architecture, variant, _MAX_INDEX_DEPTH):
        try:
            return _image(store, manifest, architecture)
        except NoMatchingPlatform as error:
            mismatch = mismatch or error
    raise mismatch or NoMatchingPlatform(f"no image for linux/{architecture}")


def _manifests(
    store: BlobStore,
    candidates: list[BlobDescriptor],
    architecture: str,
    variant: str,
    depth: int,
) -> Iterator[BlobDescriptor]:
    if depth == 0:
        raise BadLayout("indexes are nested without end")
    for one in choose_platform(candidates, architecture, variant):
        if not one.is_index:
            yield one
            continue
        nested = parse_descriptors(_json_object(store, one).get("manifests"), "manifests")
        try:
            yield from _manifests(store, nested, architecture, variant, depth - 1)
        except NoMatchingPlatform:
            # Another nested index may have it; with no other, the caller says what is missing.
            if len(candidates) == 1:
                raise


def _image(store: BlobStore, manifest: BlobDescriptor, architecture: str) -> Image:
    node = _json_object(store, manifest)
    config_blob = parse_descriptor(node.get("config"))
    layers = parse_descriptors(node.get("layers"), "layers")
    config = parse_config(_json_object(store, config_blob), config_blob.digest, architecture)
    if len(config.diff_ids) != len(layers):
        raise BadLayout(f"{len(layers)} layers with {len(config.diff_ids)} diff_ids")
    return Image(
        manifest_digest=manifest.digest,
        architecture=architecture,
        config=config.inner,
        layers=tuple(
            LayerBlob(blob, diff_id) for blob, diff_id in zip(layers, config.diff_ids, strict=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class Config:
    """What is needed of an image's config: how to run it, and the digests of its layers' tars."""

    inner: ImageConfig
    diff_ids: tuple[str, ...]


def parse_config(node: dict[str, Any], name: str, architecture: str) -> Config:
    """The config object of an image; NoMatchingPlatform for one of another architecture."""
    if node.get("os", "linux") != "linux" or node.get("architecture") != architecture:
        raise NoMatchingPlatform(
            f"the image is made for {node.get('os')}/{node.get('architecture')}, "
            f"not for linux/{architecture}",
            hint="choose its architecture with --arch",
        )
    rootfs = node.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or not all(is_digest(one) for one in diff_ids):
        raise BadLayout(f"config {name} has no list of diff_ids")
    try:
        return Config(parse_image_config(node.get("config")), tuple(diff_ids))
    except BadImageConfig as error:
        raise BadLayout(f"config {name}: {error.message}") from error


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object; BadLayout for anything else."""
    try:
        node = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadLayout(f"{what} is not JSON: {error}") from error
    if not isinstance(node, dict):
        raise BadLayout(f"{what} is not a JSON object")
    return node


def _json_object(store: BlobStore, blob: BlobDescriptor) -> dict[str, Any]:
    if blob.size_bytes > MAX_JSON_BYTES:
        raise BadLayout(f"{blob.digest}: {blob.size_bytes} bytes of JSON, too many")
    with store.open(blob) as file:
        data = file.read(blob.size_bytes + 1)
    check_digest(data, blob)
    return read_json(data, blob.digest)


def check_digest(data: bytes, blob: BlobDescriptor) -> None:
    """DigestMismatch unless these are the bytes that the descriptor names."""
    if len(data) != blob.size_bytes:
        raise DigestMismatch(f"{blob.digest}: its size is not the {blob.size_bytes} bytes it has")
    actual = new_hash(blob.digest)
    actual.update(data)
    if actual.hexdigest() != blob.digest.partition(":")[2]:
        raise DigestMismatch(f"{blob.digest}: its bytes have another digest")


def new_hash(digest: str) -> hashlib._Hash:
    """The hash that a checked digest string is made with."""
    return hashlib.new(digest.partition(":")[0], usedforsecurity=True)
