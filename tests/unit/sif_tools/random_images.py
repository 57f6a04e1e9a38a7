"""Generated images whose layers do to each other all that layers can: for comparing two ways of
putting them together. Made with the standard library only.

A model of the tree is kept, so that every whiteout names something and every hard link has a file
to link to; all else (a type that replaces another, a directory removed and made anew, attributes
changed, an opaque directory, links across layers) is left to chance.
"""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import Any

from tests.unit.sif_tools.image_factories import LayoutMaker, member, tar_bytes

KINDS = (b"file", b"file", b"file", b"dir", b"dir", b"symlink", b"fifo")
XATTR = "SCHILY.xattr.user.note"


class ImageMaker:
    """Layers on layers; `layers` holds the tars so far."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        # path -> "dir", "file" or "other"
        self.tree: dict[str, str] = {}
        self.layers: list[bytes] = []

    def layer(self, operations: int) -> bytes:
        members: dict[str, Any] = {}
        for _ in range(operations):
            self.chance.choice(
                [self._add, self._add, self._add, self._remove, self._link, self._chmod,
                 self._replace, self._opaque]
            )(members)  # fmt: skip
        tar = tar_bytes(members.values())
        self.layers.append(tar)
        return tar

    def copy(self, seed: int) -> ImageMaker:
        """Another image on the same layers."""
        made = ImageMaker(seed)
        made.tree, made.layers = dict(self.tree), list(self.layers)
        return made

    def _directories(self) -> list[str]:
        return ["", *(path for path, kind in self.tree.items() if kind == "dir")]

    def _attributes(self) -> dict[str, Any]:
        chance = self.chance
        attributes: dict[str, Any] = {
            "mode": chance.choice([0o644, 0o755, 0o600, 0o4755, 0o1777, 0o2750]),
            "uid": chance.choice([0, 0, 1000, 65_000]),
            "gid": chance.choice([0, 0, 100]),
            "mtime": chance.choice([0, 1, 1_500_000_000, 2_000_000_000]),
        }
        return attributes

    def _add(self, members: dict[str, Any]) -> None:
        parent = self.chance.choice(self._directories())
        name = self.chance.choice("abcdefgh") + self.chance.choice(["", "", "1", "\xe9", " x"])
        path = f"{parent}/{name}" if parent else name
        if path in members or path in self.tree:
            return
        self._put(path, self.chance.choice(KINDS), members)

    def _put(self, path: str, kind: bytes, members: dict[str, Any]) -> None:
        attributes = self._attributes()
        if kind == b"file":
            data = self.chance.randbytes(self.chance.choice([0, 1, 100, 5000, 140_000]))
            if self.chance.random() < 0.2:
                attributes["pax_headers"] = {XATTR: self.chance.choice(["one", "two"])}
            members[path] = member(path, data, **attributes)
            self.tree[path] = "file"
        elif kind == b"dir":
            if self.chance.random() < 0.2:
                attributes["pax_headers"] = {XATTR: self.chance.choice(["one", "two"])}
            members[path] = member(path + "/", **attributes)
            self.tree[path] = "dir"
        else:
            types = {b"symlink": tarfile.SYMTYPE, b"fifo": tarfile.FIFOTYPE}
            link = self.chance.choice(["a", "../b", "/etc/c"]) if kind == b"symlink" else ""
            members[path] = member(path, kind=types[kind], link=link, **attributes)
            self.tree[path] = "other"

    def _drop(self, path: str) -> None:
        for one in [one for one in self.tree if one == path or one.startswith(path + "/")]:
            del self.tree[one]

    def _touched(self, path: str, members: dict[str, Any]) -> bool:
        """Whether this layer has said anything at, below or through that path already."""
        hidden = {
            str(Path(one).parent / Path(one).name.removeprefix(".wh.")).removeprefix("./")
            for one in members
        }
        whole = {one.removesuffix("/.wh..wh..opq") for one in members}
        return any(
            one == path or one.startswith(path + "/") or path.startswith(one + "/")
            for one in {*hidden, *whole, *members}
        )

    def _remove(self, members: dict[str, Any]) -> None:
        candidates = [path for path in self.tree if not self._touched(path, members)]
        if candidates:
            path = self.chance.choice(candidates)
            parent, _, name = path.rpartition("/")
            marker = f"{parent}/.wh.{name}" if parent else f".wh.{name}"
            members[marker] = member(marker, b"")
            self._drop(path)
            if self.chance.random() < 0.4:  # and made anew at once
                self._put(path, self.chance.choice(KINDS), members)

    def _opaque(self, members: dict[str, Any]) -> None:
        candidates = [
            path
            for path, kind in self.tree.items()
            if kind == "dir" and not self._touched(path, members)
        ]
        if candidates and self.chance.random() < 0.5:
            path = self.chance.choice(candidates)
            for one in [one for one in self.tree if one.startswith(path + "/")]:
                self.tree.pop(one, None)
            members[f"{path}/.wh..wh..opq"] = member(f"{path}/.wh..wh..opq", b"")
            if self.chance.random() < 0.6:
                self._put(f"{path}/a", self.chance.choice(KINDS), members)

    def _link(self, members: dict[str, Any]) -> None:
        files = [path for path, kind in self.tree.items() if kind == "file"]
        if files:
            target = self.chance.choice(files)
            parent = self.chance.choice(self._directories())
            path = f"{parent}/link{self.chance.randrange(100)}".removeprefix("/")
            if path not in self.tree and path not in members:
                members[path] = member(path, kind=tarfile.LNKTYPE, link=target)
                self.tree[path] = "file"

    def _chmod(self, members: dict[str, Any]) -> None:
        """Only a directory's attributes can change without its content."""
        candidates = [
            path for path, kind in self.tree.items() if kind == "dir" and path not in members
        ]
        if candidates:
            path = self.chance.choice(candidates)
            members[path] = member(path + "/", **self._attributes())

    def _replace(self, members: dict[str, Any]) -> None:
        candidates = [path for path in self.tree if not self._touched(path, members)]
        if candidates:
            path = self.chance.choice(candidates)
            kind = self.chance.choice(KINDS)
            if kind == b"dir" and self.tree[path] == "dir":
                return
            self._drop(path)
            self._put(path, kind, members)


def layout_of(directory: Path, images: dict[str, list[bytes]], config: Any = None) -> Path:
    """A layout with an image for each tag; layers are plain tars."""
    maker = LayoutMaker(directory)
    for tag, layers in images.items():
        own = dict(config or {}) | {"Labels": {"tag": tag}}
        maker.add(maker.image([(tar, tar) for tar in layers], config=own), tag)
    return maker.finish()
