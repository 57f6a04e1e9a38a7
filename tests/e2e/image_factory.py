"""Images that the e2e tests need beyond `busybox`: made of it, in seconds, cached like it.

For: an image's own configuration (environment, user, working directory) and files large enough that
they cannot all be in the page cache before a test reads them.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.framework import images

CONFIGURED = {
    "Env": ["PATH=/opt/tools:/bin", "FROM_IMAGE=image", "OVERRIDDEN=image", "WITH_EQUALS=a=b=c"],
    "User": "agent",
    "WorkingDir": "/work/made/by/the/daemon",
}
BULK_FILES = 4
BULK_BYTES = 4 * 1024 * 1024


def configured_image() -> Path:
    """Busybox under the OCI configuration `CONFIGURED`."""
    return _cached("configured", CONFIGURED, [])


def bulky_image() -> Path:
    """Busybox with `/bulk/0` … of `BULK_BYTES` each that do not compress."""
    noise = random.Random(20_240_229)
    files = [(f"bulk/{n}", noise.randbytes(BULK_BYTES)) for n in range(BULK_FILES)]
    return _cached("bulky", {}, files)


def _cached(name: str, config: dict[str, Any], files: list[tuple[str, bytes]]) -> Path:
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("no busybox (package busybox-static)")
    sources = (Path(program), Path(__file__), Path(images.__file__))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = images.cache_dir() / f"{name}-{key}.sif"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="sandboxd-test-image-") as scratch:
            layout = Path(scratch, "oci")
            _write_layout(layout, _layer(Path(program), files), config)
            images.convert(f"oci:{layout}", target)
    return target


def _layer(program: Path, files: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry, data in _entries(program, files):
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _entries(
    program: Path, files: list[tuple[str, bytes]]
) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    def entry(name: str, kind: bytes, mode: int, owner: int = 0, **more: Any) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.uid, info.gid = kind, mode, owner, owner
        for key, value in more.items():
            setattr(info, key, value)
        return info

    for name in ("bin", "bulk", "etc", "proc", "sys", "dev", "root", "home", "usr"):
        yield entry(name, tarfile.DIRTYPE, 0o755), b""
    yield entry("tmp", tarfile.DIRTYPE, 0o1777), b""
    yield entry("home/agent", tarfile.DIRTYPE, 0o755, 1000), b""
    yield entry("work", tarfile.DIRTYPE, 0o755, 1000), b""
    texts = [("etc/passwd", images.PASSWD.encode()), ("etc/group", images.GROUP.encode())]
    for name, data in [*texts, *files]:
        yield entry(name, tarfile.REGTYPE, 0o644, size=len(data)), data
    binary = program.read_bytes()
    yield entry("bin/busybox", tarfile.REGTYPE, 0o755, size=len(binary)), binary
    for applet in ("sh", "cat", "echo", "env", "id", "ls", "pwd", "sleep", "stat", "true", "wc"):
        yield entry(f"bin/{applet}", tarfile.SYMTYPE, 0o777, linkname="busybox"), b""


def _write_layout(layout: Path, layer: bytes, config: dict[str, Any]) -> None:
    """OCI image-spec 1.0, image-layout.md: one uncompressed layer."""
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(kind: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        media_type = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    layer_entry = put("layer.v1.tar", layer)
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer_entry["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put("config.v1+json", json.dumps(image).encode()),
        "layers": [layer_entry],
    }
    index = {
        "schemaVersion": 2,
        "manifests": [put("manifest.v1+json", json.dumps(manifest).encode())],
    }
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    (layout / "index.json").write_text(json.dumps(index))


def python_image() -> Path:
    """Busybox and this machine's Python with its standard library and `websockets`: for programs
    that a busybox cannot be."""
    interpreter = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}").resolve()
    if not interpreter.exists():
        pytest.skip(f"no {interpreter}")
    sources = (Path(__file__), Path(images.__file__), interpreter)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(websockets.__version__.encode())
    target = images.cache_dir() / f"python-{digest.hexdigest()[:16]}.sif"
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix="sandboxd-test-image-") as scratch:
            rootfs = Path(scratch, "rootfs")
            program = shutil.which("busybox")
            assert program is not None
            images.make_busybox_rootfs(Path(program), rootfs)
            _add_python(rootfs, interpreter)
            images.convert(f"rootfs:{rootfs}", target)
    return target


def _add_python(rootfs: Path, interpreter: Path) -> None:
    shutil.copy2(interpreter, rootfs / "usr/bin/python3")
    standard = Path(sysconfig.get_path("stdlib"))
    wanted = [f"lib-dynload/{name}.*.so" for name in ("_ssl", "_hashlib")]
    for binary in (interpreter, *(one for name in wanted for one in standard.glob(name))):
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True)
        for word in listed.stdout.split():
            if word.startswith("/"):
                library = rootfs / word[1:]
                library.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, library)
    left_out = shutil.ignore_patterns("__pycache__", "test", "ensurepip", "lib2to3", "config-*")
    there = rootfs / standard.relative_to("/")
    shutil.copytree(standard, there, ignore=left_out, symlinks=True)
    package = Path(websockets.__file__).parent
    shutil.copytree(package, there / "websockets", ignore=shutil.ignore_patterns("__pycache__"))
