"""Packs one tar file as an image in an OCI layout directory.

For: images made by our scripts. Not for: reading layouts or several layers (`sif_tools`).

    layout/oci-layout                   the version of this format
    layout/index.json                   -> manifest, named `latest`
    layout/blobs/sha256/<manifest>      -> config, layer
    layout/blobs/sha256/<config>        environment, command, digest of the layer
    layout/blobs/sha256/<layer>         the tar itself, uncompressed

Formats: OCI image-spec 1.0, image-layout.md, manifest.md, config.md.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # in Go's spelling, which OCI uses


def pack(
    tar: Path,
    layout: Path,
    config: dict[str, Any],
    annotations: dict[str, str],
    tag: str = "latest",
) -> None:
    """Make `layout` with the file `tar` (moved there) as the only layer.

    `config` is the inner object of the image's configuration (Env, Cmd, WorkingDir …).
    """
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    with tar.open("rb") as file:
        layer = hashlib.file_digest(file, "sha256").hexdigest()
    size = tar.stat().st_size
    tar.rename(blobs / layer)

    def put(content: dict[str, Any]) -> tuple[str, int]:
        data = json.dumps(content, sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return f"sha256:{digest}", len(data)

    def descriptor(media_type: str, digest: str, size: int) -> dict[str, Any]:
        return {
            "mediaType": f"application/vnd.oci.image.{media_type}",
            "digest": digest,
            "size": size,
        }

    machine = MACHINES.get(platform.machine(), platform.machine())
    # Uncompressed, so the layer's digest is also its diff_id.
    image = {
        "architecture": machine,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("config.v1+json", *put(image)),
        "layers": [descriptor("layer.v1.tar", f"sha256:{layer}", size)],
    }
    entry = descriptor("manifest.v1+json", *put(manifest))
    entry["platform"] = {"architecture": machine, "os": "linux"}
    entry["annotations"] = {"org.opencontainers.image.ref.name": tag, **annotations}
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    (layout / "index.json").write_text(
        json.dumps({"schemaVersion": 2, "manifests": [entry]}, sort_keys=True)
    )
