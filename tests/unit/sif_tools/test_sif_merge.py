"""The merge rules, one by one and against a naive model that unpacks and applies."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sif_tools.errors import BadEntry, ConvertError
from sif_tools.merge.merger import Pass, Progress, merge
from sif_tools.tarstream.entry import EntryStream
from sif_tools.tarstream.reader import TarReader
from sif_tools.tarstream.writer import TarWriter
from tests.unit.sif_tools.image_factories import hardlink, member, symlink, tar_bytes

Members = Sequence[tuple[tarfile.TarInfo, bytes]]


class TarLayer:
    has_whiteouts = True

    def __init__(self, name: str, members: Members) -> None:
        self.name = name
        self._data = tar_bytes(members)

    @contextmanager
    def open(self, which: Pass, progress: Progress | None = None) -> Iterator[EntryStream]:
        yield TarReader(iter([self._data]))


def merged_tar(*layers: Members) -> tuple[bytes, int]:
    read_end, write_end = os.pipe()
    chunks: list[bytes] = []

    def drain() -> None:
        with open(read_end, "rb") as file:
            chunks.append(file.read())

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        numbered = [TarLayer(f"layer {number}", one) for number, one in enumerate(layers, start=1)]
        inodes = merge(numbered, TarWriter(write_end))
    finally:
        os.close(write_end)
        thread.join()
    return b"".join(chunks), inodes


def merged(*layers: Members) -> dict[str, str]:
    """Path to a word about what is there: `dir`, `-> target`, `= first name` or the content."""
    data, inodes = merged_tar(*layers)
    found: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        links = 0
        for info in tar:
            path = info.name.strip("/")
            path = "" if path == "." else path
            assert path not in found, "the same path twice"
            parent = path.rpartition("/")[0]
            assert not path or found.get(parent) == "dir", "a parent must come before"
            if info.isdir():
                found[path] = "dir"
            elif info.issym():
                found[path] = f"-> {info.linkname}"
            elif info.islnk():
                assert info.linkname in found, "a hard link must come after its target"
                found[path] = f"= {info.linkname}"
                links += 1
            elif info.isfile():
                file = tar.extractfile(info)
                assert file is not None
                found[path] = file.read().decode()
            else:
                found[path] = info.type.decode()
        assert inodes == len(found) - links
    assert found.pop("") == "dir"
    return found


def infos(*layers: Members) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(merged_tar(*layers)[0])) as tar:
        return {info.name: info for info in tar}


# ── the rules ───────────────────────────────────────────────────────────────────────────────────


def test_upper_wins_and_attributes_follow() -> None:
    lower = [member("d/", mode=0o700, uid=5), member("d/f", b"old"), member("g", b"kept")]
    upper = [member("d/", mode=0o1777, gid=6), member("d/f", b"new", mode=0o4755)]
    assert merged(lower, upper) == {"d": "dir", "d/f": "new", "g": "kept"}
    found = infos(lower, upper)
    assert (found["d"].mode, found["d"].uid, found["d"].gid) == (0o1777, 0, 6)
    assert found["d/f"].mode == 0o4755


def test_whiteout_hides_lower_layers_only() -> None:
    lower = [member("a", b"1"), member("b", b"1"), member("d/x", b"1")]
    for upper in (
        [member(".wh.a", b""), member("a", b"2"), member(".wh.d", b"")],
        [member("a", b"2"), member(".wh.a", b""), member(".wh.d", b"")],
    ):
        assert merged(lower, upper) == {"a": "2", "b": "1"}


def test_whiteout_of_a_directory_that_is_made_again() -> None:
    lower = [member("d/", mode=0o700), member("d/old", b"1"), member("d/sub/old", b"1")]
    for upper in (
        [member(".wh.d", b""), member("d/sub/new", b"2")],
        [member("d/sub/new", b"2"), member(".wh.d", b"")],
    ):
        assert merged(lower, upper) == {"d": "dir", "d/sub": "dir", "d/sub/new": "2"}
        assert infos(lower, upper)["d"].mode == 0o755  # the attributes were hidden as well


@pytest.mark.parametrize("position", [0, 1, 2])
def test_opaque_hides_all_lower_content_wherever_it_stands(position: int) -> None:
    lower = [
        member("d/", mode=0o711),
        member("d/a", b"1"),
        member("d/s/b", b"1"),
        member("e", b"1"),
    ]
    upper = [member("d/a", b"2"), member("d/new", b"2")]
    upper.insert(position, member("d/.wh..wh..opq", b""))
    assert merged(lower, upper) == {"d": "dir", "d/a": "2", "d/new": "2", "e": "1"}
    assert infos(lower, upper)["d"].mode == 0o711


def test_opaque_root() -> None:
    assert merged([member("a", b"1")], [member(".wh..wh..opq", b""), member("b", b"2")]) == {
        "b": "2"
    }


def test_whiteouts_of_nothing_are_no_matter() -> None:
    layer = [member(".wh.x", b""), member("no/.wh.y", b""), member("no/.wh..wh..opq", b"")]
    assert merged([member("f", b"1")], [*layer, member("f/.wh.z", b"")]) == {"f": "1"}


@pytest.mark.parametrize(
    "name", [".wh.", "d/.wh.", ".wh..", "d/.wh...", "../a", "a/../b", "a/..", ".wh.d/x", "n" * 256]
)
def test_names_that_no_image_may_have(name: str) -> None:
    with pytest.raises(BadEntry) as caught:
        merged([member("fine", b"")], [member(name, b"")])
    assert caught.value.layer == "layer 2"
    assert caught.value.entry == name.encode()
    assert "layer 2" in caught.value.message


@pytest.mark.parametrize("name", [".", "/", "./"])
def test_a_root_that_is_no_directory(name: str) -> None:
    with pytest.raises(BadEntry):
        merged([symlink(name, "elsewhere")])


def test_spellings_of_one_path() -> None:
    layers = [[member("./d/f", b"1")], [member("/d/f", b"2")], [member("d//./f", b"3")]]
    assert merged(*layers) == {"d": "dir", "d/f": "3"}
    assert merged([member("f", b"1"), hardlink("g", "/f"), hardlink("h", "./f")]) == {
        "f": "1",
        "g": "= f",
        "h": "= f",
    }


def test_types_replace_each_other() -> None:
    tree = [member("a/b", b"1"), member("a/c/d", b"1")]
    assert merged(tree, [symlink("a", "x")]) == {"a": "-> x"}
    assert merged([symlink("a", "x")], tree) == {"a": "dir", "a/b": "1", "a/c": "dir", "a/c/d": "1"}
    assert merged([member("a", b"1")], [member("a/", uid=7)]) == {"a": "dir"}


def test_an_entry_below_a_non_directory_makes_it_one() -> None:
    assert merged(
        [symlink("lib", "usr/lib"), member("usr/lib/a", b"1")], [member("lib/b", b"2")]
    ) == {
        "lib": "dir",
        "lib/b": "2",
        "usr": "dir",
        "usr/lib": "dir",
        "usr/lib/a": "1",
    }


def test_duplicates_in_a_layer_the_last_wins() -> None:
    assert merged(
        [member("a", b"1"), member("a", b"2"), member("d/x", b"1"), member("d", b"3")]
    ) == {
        "a": "2",
        "d": "3",
    }


def test_hard_links_outlive_their_target() -> None:
    lower = [member("a", b"content", mode=0o4711, uid=9), hardlink("b", "a"), hardlink("c", "a")]
    lower[0][0].pax_headers = {"SCHILY.xattr.user.x": "1"}
    assert merged(lower, [member(".wh.a", b"")]) == {"b": "content", "c": "= b"}
    found = infos(lower, [member(".wh.a", b"")])["b"]
    assert (found.mode, found.uid, found.pax_headers) == (
        0o4711,
        9,
        {"SCHILY.xattr.user.x": "1"},
    )
    assert merged(lower, [member("a", b"new")]) == {"a": "new", "b": "content", "c": "= b"}
    assert merged(lower, [member(".wh.a", b""), member(".wh.c", b"")]) == {"b": "content"}
    assert merged(lower, [member(f".wh.{name}", b"") for name in "abc"]) == {}


def test_hard_links_across_layers() -> None:
    base = [member("a", b"1")]
    assert merged(base, [hardlink("b", "a")]) == {"a": "1", "b": "= a"}
    assert merged(base, [hardlink("b", "a")], [member(".wh.a", b"")]) == {"b": "1"}
    # The name belongs to the second layer, so its own whiteout does not hide it.
    assert merged(base, [hardlink("b", "a"), member(".wh.b", b"")]) == {"a": "1", "b": "= a"}
    assert merged(base, [hardlink("b", "a")], [hardlink("c", "b")], [member("a", b"2")]) == {
        "a": "2",
        "b": "1",
        "c": "= b",
    }
    assert merged(base, [hardlink("a", "a")]) == {"a": "1"}


def test_hard_links_to_symlinks_and_devices() -> None:
    layer = [
        symlink("s", "t"),
        hardlink("s2", "s"),
        member("n", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        hardlink("n2", "n"),
    ]
    assert merged(layer) == {"n": "3", "n2": "= n", "s": "-> t", "s2": "= s"}


@pytest.mark.parametrize("target", ["nothing", "d", "../a", "a"])
def test_hard_links_to_what_is_not_there(target: str) -> None:
    layers = ([member("a", b""), member("d/")], [member(".wh.a", b""), hardlink("l", target)])
    with pytest.raises(BadEntry) as caught:
        merged(*layers)
    assert caught.value.layer == "layer 2"


def test_the_same_layer_twice() -> None:
    layer = [member("a", b"1"), hardlink("b", "a")]
    assert merged(layer, [member(".wh.b", b"")], layer) == {"a": "1", "b": "= a"}


def test_what_tools_leave_behind_is_dropped() -> None:
    layer = [
        member("stargz.index.json", b"{}"),
        member(".prefetch.landmark", b"x"),
        member(".wh..wh.plnk/", b""),
        member(".wh..wh.plnk/12.34", b"x"),
        member("d/stargz.index.json", b"mine"),
    ]
    assert merged(layer) == {"d": "dir", "d/stargz.index.json": "mine"}


def test_order_of_layers_only_not_of_whiteouts_decides_bytes() -> None:
    layers = ([member("b", b"1"), member("a", b"2")], [member("c", b"3")])
    assert merged_tar(*layers) == merged_tar(*layers)


def test_a_deep_tree_needs_no_recursion() -> None:
    deep = "/".join(["d"] * 2000)
    assert merged([member(deep, b"x")], [member(".wh.d", b"")]) == {}
    assert len(merged([member(deep, b"x")])) == 2000


def test_cost_follows_entries_not_their_product() -> None:
    """Each whiteout, opaque mark and entry is paid once; quadratic work would take minutes here."""
    many = [member(f"d/e/{index}", b"") for index in range(20_000)]
    whiteouts = [member(f"d/e/.wh.{index}", b"") for index in range(20_000)]
    opaques = [member("d/e/.wh..wh..opq", b""), member("d/.wh..wh..opq", b"")] * 2_000
    assert merged(many, whiteouts) == {"d": "dir", "d/e": "dir"}
    assert len(merged(many, [*many, *opaques])) == 20_002


# ── against a model ─────────────────────────────────────────────────────────────────────────────


class Refused(Exception):
    """The model cannot apply this layer either."""


@dataclass(eq=False)
class Node:
    """An inode of the model; identity is what hard links share."""

    kind: str
    content: str = ""
    mode: int = 0o755
    children: dict[str, Node] = field(default_factory=dict)


class Model:
    """Unpacks layer after layer into a tree, plainly: whiteouts first, then entries."""

    def __init__(self) -> None:
        self.root = Node("dir")

    def walk(self, path: str, make: bool = False) -> Node | None:
        node = self.root
        for part in filter(None, path.split("/")):
            child = node.children.get(part) if node.kind == "dir" else None
            if make and (child is None or child.kind != "dir"):
                child = node.children[part] = Node("dir")
            if child is None:
                return None
            node = child
        return node

    def apply(self, layer: list[tuple[str, str, str]]) -> None:
        for what, path, _ in layer:
            if what == "opaque":
                node = self.walk(path)
                if node is not None and node.kind == "dir":
                    node.children.clear()
            elif what == "whiteout":
                node = self.walk(path.rpartition("/")[0])
                if node is not None:
                    node.children.pop(path.rpartition("/")[2], None)
        for number, (what, path, text) in enumerate(layer):
            parent_path, _, name = path.rpartition("/")
            if what in ("opaque", "whiteout"):
                continue
            target = self.walk(text) if what == "link" else None
            if what == "link" and (target is None or target.kind == "dir"):
                raise Refused
            parent = self.walk(parent_path, make=True)
            assert parent is not None
            if what == "dir":
                if name not in parent.children or parent.children[name].kind != "dir":
                    parent.children[name] = Node("dir")
                parent.children[name].mode = 0o700 + number % 8
            elif target is not None:
                parent.children[name] = target
            else:
                parent.children[name] = Node(what, text)

    def listing(self) -> tuple[dict[str, str], dict[str, int]]:
        found: dict[str, str] = {}
        modes: dict[str, int] = {}
        names: dict[int, list[str]] = {}
        todo = [("", self.root)]
        while todo:
            path, node = todo.pop()
            for name, child in node.children.items():
                below = f"{path}/{name}".strip("/")
                if child.kind == "dir":
                    found[below] = "dir"
                    modes[below] = child.mode
                    todo.append((below, child))
                else:
                    found[below] = child.content if child.kind == "file" else f"-> {child.content}"
                    names.setdefault(id(child), []).append(below)
        for paths in names.values():
            first, *others = sorted(paths)
            for other in others:
                found[other] = f"= {first}"
        return found, modes


def to_members(layer: list[tuple[str, str, str]]) -> Members:
    made = []
    for number, (what, path, text) in enumerate(layer):
        parent, _, name = path.rpartition("/")
        prefix = f"{parent}/" if parent else ""
        match what:
            case "whiteout":
                made.append(member(f"{prefix}.wh.{name}", b""))
            case "opaque":
                made.append(member(f"{path}/.wh..wh..opq", b""))
            case "dir":
                made.append(member(f"{path}/", mode=0o700 + number % 8))
            case "file":
                made.append(member(path, text.encode()))
            case "symlink":
                made.append(symlink(path, text))
            case "link":
                made.append(hardlink(path, text))
    return made


paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)
operations = st.tuples(
    st.sampled_from(["file", "file", "dir", "symlink", "link", "link", "whiteout", "opaque"]),
    paths,
    paths,
)
layer_lists = st.lists(st.lists(operations, max_size=12), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(layer_lists)
def test_merge_equals_the_naive_model(layers: list[list[tuple[str, str, str]]]) -> None:
    model = Model()
    for number, layer in enumerate(layers):
        # A link's target that its own layer whites out is there or not as the order says; only
        # with whiteouts first do all unpackers agree.
        if any(what == "link" for what, _, _ in layer):
            layer.sort(key=lambda item: item[0] not in ("whiteout", "opaque"))
        for index, (what, path, text) in enumerate(layer):
            if what == "file":
                layer[index] = (what, path, f"{number}.{index}")
            # Making the parents of a link may remove the target itself; tools differ there.
            assume(what != "link" or not path.startswith(f"{text}/"))
    try:
        for layer in layers:
            model.apply(layer)
    except Refused:
        with pytest.raises(ConvertError):
            merged(*map(to_members, layers))
        return
    expected, modes = model.listing()
    made = [to_members(layer) for layer in layers]
    assert merged(*made) == expected
    found = infos(*made)
    assert {path: found[path].mode for path in modes} == modes
