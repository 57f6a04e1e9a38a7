"""What a reader of a store sees, looked at without the code that wrote it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def assert_readers_see_whole_files(store: Path) -> None:
    """Every published object has the digest it is named by; every record names what is there."""
    for path in (store / "objects").rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem, path
    for area in ("builds", "images", "names"):
        for path in (store / area).rglob("*.json"):
            if path.name.startswith("."):
                continue
            node = json.loads(path.read_bytes())
            for sif in node.get("sifs", []) + [node[key] for key in ("sif",) if key in node]:
                assert object_path(store, sif["digest"]).stat().st_size == sif["size_bytes"]
            if area == "names":
                key = node["image"]
                assert (store / "images" / key[:2] / key[2:4] / f"{key}.json").exists()


def object_path(store: Path, digest: str) -> Path:
    return store / "objects" / digest[:2] / digest[2:4] / f"{digest}.sif"


def leftovers(store: Path) -> list[Path]:
    """Temporary files and claims."""
    return [
        path
        for path in store.rglob("*")
        if path.is_file() and (path.name.endswith(".tmp") or path.parent.name == "claims")
    ]


def files(store: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in store.rglob("*")
        if path.is_file()
    }
