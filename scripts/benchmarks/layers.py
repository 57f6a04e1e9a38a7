"""Three more layers on a one-layer OCI image, as a task image has them above its base.

    environment   packages installed: a copy of the base's Python modules and their byte code
    checkout      a repository: source files, and packed objects that do not compress
    task          what a task changes: files replaced, removed, a directory made anew

For: benches. Every layer is gzip, the base too, as registries serve them. Made from the base's own
files and a fixed seed, so the same base gives the same image.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What docker and buildkit use by default.
GZIP_LEVEL = 6
OBJECT_BYTES = 24 << 20
FILES_REPLACED = 400
SEED = 3

Member = tuple[tarfile.TarInfo, bytes]


def grow(base: Path, layout: Path) -> None:
    """Make `layout` from the layout `base`, whose image has one layer."""
    index = json.loads((base / "index.json").read_text())
    manifest = read_json(base, index["manifests"][0]["digest"])
    config = read_json(base, manifest["config"]["digest"])
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    base_tar = blob(base, manifest["layers"][0]["digest"])
    manifest["layers"], diff_ids = [], []

    def add(tar: Path) -> None:
        diff_ids.append(f"sha256:{file_digest(tar)}")
        stored = tar.with_suffix(".gz")
        with (
            tar.open("rb") as source,
            stored.open("wb") as target,
            gzip.GzipFile("", "wb", GZIP_LEVEL, target, mtime=0) as packed,
        ):
            shutil.copyfileobj(source, packed, 1 << 20)
        digest, size = file_digest(stored), stored.stat().st_size
        stored.rename(blobs / digest)
        media_type = "application/vnd.oci.image.layer.v1.tar+gzip"
        manifest["layers"].append(
            {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}
        )

    scratch = layout / "scratch"
    scratch.mkdir()
    with tarfile.open(base_tar) as tar:
        members = [(one, content(tar, one)) for one in tar if one.isreg() or one.isdir()]
    plain = scratch / "base.tar"
    shutil.copyfile(base_tar, plain)
    add(plain)
    layers = (environment(members), checkout(members), task(members))
    for number, layer in enumerate(layers):
        path = scratch / f"{number}.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            for info, data in layer:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        add(path)
    shutil.rmtree(scratch)
    config["rootfs"]["diff_ids"] = diff_ids
    manifest["config"] |= put_json(blobs, config)
    entry = index["manifests"][0]
    entry |= put_json(blobs, manifest)
    entry["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (layout / "index.json").write_text(json.dumps(index))
    shutil.copyfile(base / "oci-layout", layout / "oci-layout")


def environment(members: list[Member]) -> Iterator[Member]:
    """Every Python module of the base once more, elsewhere."""
    yield directory("opt/env")
    for info, data in members:
        name = info.name.removeprefix("./")
        if info.isreg() and "python3" in name and name.startswith("usr/lib/"):
            yield file(f"opt/env/{name.removeprefix('usr/lib/')}", data + b"# installed\n")


def checkout(members: list[Member]) -> Iterator[Member]:
    """A few thousand text files, and one pack that no compressor makes smaller."""
    yield directory("work/repository")
    texts = [one for one in members if one[0].isreg() and one[0].name.endswith((".py", ".pm"))]
    for number, (info, data) in enumerate(texts[:3000]):
        name = info.name.rpartition("/")[2]
        yield file(f"work/repository/src/{number % 50}/{number}-{name}", data)
    pack = random.Random(SEED).randbytes(OBJECT_BYTES)
    yield file("work/repository/.git/objects/pack/pack-1.pack", pack)


def task(members: list[Member]) -> Iterator[Member]:
    """Changes of all kinds to what is below."""
    files = [one for one in members if one[0].isreg() and one[0].name.startswith("./usr/share/")]
    for info, data in files[:FILES_REPLACED]:
        yield file(info.name.removeprefix("./"), data + b"changed\n")
    for info, _ in files[FILES_REPLACED : 2 * FILES_REPLACED]:
        parent, _, name = info.name.removeprefix("./").rpartition("/")
        yield file(f"{parent}/.wh.{name}", b"")
    yield directory("work/repository/src/0")
    yield file("work/repository/src/0/.wh..wh..opq", b"")
    yield file("work/repository/src/0/test_task.py", b"def test(): ...\n")


def directory(name: str) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info, b""


def file(name: str, data: bytes) -> Member:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    return info, data


def content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    source = tar.extractfile(info) if info.isreg() else None
    return source.read() if source is not None else b""


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / Path(*digest.split(":"))


def read_json(layout: Path, digest: str) -> dict[str, Any]:
    node: dict[str, Any] = json.loads(blob(layout, digest).read_bytes())
    return node


def put_json(blobs: Path, node: Any) -> dict[str, Any]:
    """Store it; returns the part of a descriptor that names it."""
    data = json.dumps(node, sort_keys=True).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def file_digest(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
