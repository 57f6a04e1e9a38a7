"""Where things lie in a store, and what they are called. Drawn in the package's docstring."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote

from sif_tools.errors import BadName, NotAStore

FORMAT: Final = 1
MARK: Final = "store.json"
# A name in its quoted form is a file name with a suffix: NAME_MAX is 255.
_MAX_QUOTED_BYTES: Final = 240


class Area(StrEnum):
    """The directories of a store."""

    OBJECTS = "objects"
    BUILDS = "builds"
    IMAGES = "images"
    NAMES = "names"
    CLAIMS = "claims"
    LEASES = "leases"
    TRASH = "trash"


SHARDED: Final = (Area.OBJECTS, Area.BUILDS, Area.IMAGES, Area.NAMES, Area.TRASH)


class Suffix(StrEnum):
    """What an object is."""

    SIF = ".sif"
    TREE = ".tree"


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one store; looks at nothing."""

    root: Path

    def object(self, digest: str, suffix: Suffix) -> Path:
        """`digest` is 64 hexadecimal digits."""
        return self.root / Area.OBJECTS / shard(digest) / (digest + suffix)

    def trashed(self, digest: str, suffix: Suffix) -> Path:
        return self.root / Area.TRASH / shard(digest) / (digest + suffix)

    def build(self, key: str) -> Path:
        return self.root / Area.BUILDS / shard(key) / f"{key}.json"

    def image(self, key: str) -> Path:
        return self.root / Area.IMAGES / shard(key) / f"{key}.json"

    def name(self, name: str) -> Path:
        """BadName for one that no file name can hold."""
        return self.root / Area.NAMES / shard(_name_digest(name)) / (quoted(name) + ".json")

    def claim(self, key: str) -> Path:
        return self.root / Area.CLAIMS / f"{key}.json"

    @property
    def leases(self) -> Path:
        return self.root / Area.LEASES


def open_store(root: str | os.PathLike[str]) -> Layout:
    """An existing store. NotAStore where there is none, or one of another version."""
    path = Path(root)
    try:
        node = json.loads((path / MARK).read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise NotAStore(
            f"{path / MARK}: {reason}", hint="`sif-tools convert --store` makes a store"
        ) from error
    version = node.get("version") if isinstance(node, dict) else None
    if version != FORMAT:
        raise NotAStore(f"{path} is a store of version {version!r}, only {FORMAT} is known")
    return Layout(path)


def is_store(root: str | os.PathLike[str]) -> bool:
    """Whether this looks like a store, of whatever version."""
    return (Path(root) / MARK).is_file()


def shard(digest: str) -> str:
    return f"{digest[:2]}/{digest[2:4]}"


def quoted(name: str) -> str:
    """A name as a file name: no slash, no dot in front, nothing that is not ASCII."""
    text = quote_from_bytes(name.encode("utf-8", "surrogateescape"), safe=":@+=,")
    if text.startswith("."):
        text = "%2E" + text[1:]
    if not text or len(text) > _MAX_QUOTED_BYTES or "\0" in name:
        raise BadName(f"{name[:80]!r} is empty or too long for an image's name")
    return text


def unquoted(file_name: str) -> str:
    return unquote(file_name.removesuffix(".json"))


def key_of(node: Any) -> str:
    """64 hexadecimal digits that stand for a JSON value."""
    text = json.dumps(node, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _name_digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
