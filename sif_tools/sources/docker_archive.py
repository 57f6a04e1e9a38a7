"""`docker-archive:FILE[:NAME:TAG]`: what `docker save` writes.

    manifest.json   [{"Config": NAME, "RepoTags": ["name:tag", ...], "Layers": [NAME, ...]}, ...]
    NAME            the config and the layers' tars; a layer may be a symlink to another's

Since Docker 25 the archive is an OCI layout as well, and then read as one: that gives the manifest
digest. 25.0.0 wrote the layout's manifests without their layers; those, and all that a layout
cannot answer, are read the old way, where only the diff_ids prove the layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, Final

from sif_tools.archive import ArchiveFiles
from sif_tools.errors import BadLayout, BadSource
from sif_tools.oci.descriptor import BlobDescriptor
from sif_tools.oci.image import MAX_JSON_BYTES, Image, LayerBlob, parse_config, read_json
from sif_tools.oci.layer import OciLayer
from sif_tools.oci.layout import split_reference
from sif_tools.registry.reference import parse_reference
from sif_tools.sources.oci_layout import layout_source
from sif_tools.sources.source import Request, Source

_MANIFEST: Final = "manifest.json"


def open_docker_archive(request: Request, resources: ExitStack) -> Source:
    """Implements `Backend`."""
    path, tag = split_reference(request.reference)
    files = ArchiveFiles(path, request.options.limits, resources)
    if _MANIFEST not in files:
        raise BadSource(f"{path}: no {_MANIFEST} in it", hint="is this a `docker save` archive?")
    item = _choose(files, tag)
    if "oci-layout" in files and tag is None:
        try:
            source = layout_source(files, None, request, resources)
        except (BadLayout, BadSource):
            pass
        else:
            # Equal numbers: 25.0.0's manifests have no layers at all.
            if len(source.layers) == len(_names(item, "Layers")):
                return source
    return _classic(files, item, request, resources)


def _classic(
    files: ArchiveFiles, item: dict[str, Any], request: Request, resources: ExitStack
) -> Source:
    name = item.get("Config")
    if not isinstance(name, str):
        raise BadLayout(f"{_MANIFEST} names no config")
    config = parse_config(read_json(_read(files, name), name), name, request.architecture)
    names = _names(item, "Layers")
    if len(names) != len(config.diff_ids):
        raise BadLayout(f"{len(names)} layers with {len(config.diff_ids)} diff_ids")
    by_digest = dict(zip(config.diff_ids, names, strict=True))
    blobs = tuple(
        LayerBlob(BlobDescriptor("", diff_id, _size(files, name)), diff_id, blob_is_named=False)
        for diff_id, name in zip(config.diff_ids, names, strict=True)
    )
    image = Image("", request.architecture, config.inner, blobs)
    store = _Layers(files, by_digest)
    return Source(
        "docker-archive",
        [
            OciLayer(store, blob, number, request.options.limits)
            for number, blob in enumerate(image.layers, start=1)
        ],
        config.inner,
        request.architecture,
        None,
        resources=resources,
    )


class _Layers:
    """Layers by their diff_id; implements `BlobStore`."""

    def __init__(self, files: ArchiveFiles, by_digest: dict[str, str]) -> None:
        self._files = files
        self._by_digest = by_digest

    @contextmanager
    def open(self, blob: BlobDescriptor) -> Iterator[BinaryIO]:
        with self._files.open(self._by_digest[blob.digest]) as file:
            yield file


def _choose(files: ArchiveFiles, tag: str | None) -> dict[str, Any]:
    try:
        listed = json.loads(_read(files, _MANIFEST))
    except (ValueError, RecursionError) as error:
        raise BadLayout(f"{_MANIFEST} is not JSON: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BadLayout(f"{_MANIFEST} is not a list of images")
    tags = [name for one in listed for name in _names(one, "RepoTags")]
    if tag is not None:
        wanted = _full(tag)
        listed = [one for one in listed if wanted in map(_full, _names(one, "RepoTags"))]
    if len(listed) != 1:
        what = f"no image is tagged {tag!r}" if tag else f"{len(listed)} images, name one"
        raise BadSource(
            f"{files.name}: {what}", hint=f"there is: {', '.join(tags)[:500] or 'no tag at all'}"
        )
    chosen: dict[str, Any] = listed[0]
    return chosen


def _full(tag: str) -> str:
    """With the host and the tag that Docker leaves out; others write them."""
    try:
        return str(parse_reference(tag))
    except BadSource:
        return tag


def _names(item: dict[str, Any], key: str) -> list[str]:
    node = item.get(key) or []
    if not isinstance(node, list) or not all(isinstance(one, str) for one in node):
        raise BadLayout(f"{key} in {_MANIFEST} is not a list of names")
    return node


def _size(files: ArchiveFiles, name: str) -> int:
    try:
        return files.size_bytes(name)
    except OSError as error:
        raise BadLayout(f"layer {name!r}: {error.strerror}") from error


def _read(files: ArchiveFiles, name: str) -> bytes:
    try:
        with files.open(name) as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise BadLayout(f"{name!r}: {error.strerror}") from error
    if len(data) > MAX_JSON_BYTES:
        raise BadLayout(f"{name!r} is larger than {MAX_JSON_BYTES} bytes")
    return data
