"""Make tars and OCI layouts with the standard library only, so that nothing under test is used."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def member(
    name: str,
    data: bytes | None = None,
    *,
    kind: bytes | None = None,
    link: str = "",
    **attributes: Any,
) -> tuple[tarfile.TarInfo, bytes]:
    """A tar member: a file with `data`, a directory where the name ends in `/`, or `kind`."""
    info = tarfile.TarInfo(name)
    if kind is not None:
        info.type = kind
    elif name.endswith("/"):
        info.type = tarfile.DIRTYPE
    info.mode = 0o755 if info.type == tarfile.DIRTYPE else 0o644
    info.linkname = link
    info.size = len(data or b"")
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, data or b""


def symlink(name: str, target: str, **attributes: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.SYMTYPE, link=target, **attributes)


def hardlink(name: str, target: str, **attributes: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.LNKTYPE, link=target, **attributes)


def tar_bytes(
    members: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT
) -> bytes:
    """The members as a tar of the given format."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class LayoutMaker:
    """Builds an OCI layout directory blob by blob; `index` is written by `finish`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blobs = directory / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        self.listed: list[dict[str, Any]] = []
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        (self.blobs / sha256(data).partition(":")[2]).write_bytes(data)
        return {"mediaType": media_type, "digest": sha256(data), "size": len(data)}

    def json(self, node: Any, media_type: str) -> dict[str, Any]:
        return self.blob(json.dumps(node).encode(), media_type)

    def image(
        self,
        layers: Sequence[tuple[bytes, bytes]],
        *,
        arch: str = "amd64",
        config: dict[str, Any] | None = None,
        diff_ids: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """A manifest's descriptor; a layer is the tar and the blob it is stored as."""
        config_blob = self.json(
            {
                "architecture": arch,
                "os": "linux",
                "config": config or {},
                "rootfs": {
                    "type": "layers",
                    "diff_ids": list(diff_ids or [sha256(tar) for tar, _ in layers]),
                },
            },
            OCI_CONFIG,
        )
        return self.json(
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": config_blob,
                "layers": [self.blob(stored, OCI_LAYER) for _, stored in layers],
            },
            OCI_MANIFEST,
        )

    def index(self, manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.json(
            {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": list(manifests)}, OCI_INDEX
        )

    def add(self, descriptor: dict[str, Any], tag: str | None = None) -> None:
        if tag is not None:
            descriptor = descriptor | {"annotations": {"org.opencontainers.image.ref.name": tag}}
        self.listed.append(descriptor)

    def finish(self) -> Path:
        (self.directory / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": self.listed})
        )
        return self.directory
