"""The tar reader against archives that GNU tar and the standard library wrote, and back again."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sif_tools.errors import BadEntry, BadLayer, ConvertError
from sif_tools.tarstream.entry import Entry, Kind, is_kept_xattr
from sif_tools.tarstream.reader import TarReader
from sif_tools.tarstream.writer import TarWriter
from tests.unit.sif_tools.image_factories import hardlink, member, symlink, tar_bytes

ODD = b"odd \xff\xfe\n\t\\'\"$`;*?[\x7f"


def chunked(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def read(data: bytes, chunk: int = 4096) -> list[tuple[Entry, bytes]]:
    reader = TarReader(chunked(data, chunk))
    return [(entry, b"".join(reader.data())) for entry in reader]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of every kind that needs no privilege, with names of every kind."""
    root = tmp_path / "tree"
    root.mkdir()
    (root / "plain").write_bytes(b"content")
    (root / "empty").touch()
    os.link(root / "plain", root / "second-name")
    os.symlink("plain", root / "symlink")
    os.symlink("t" * 300, root / "long-symlink")
    os.mkfifo(root / "fifo")
    deep = root / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    (deep / ("f" * 200)).write_bytes(b"deep")
    with open(os.fsencode(root) + b"/" + ODD, "wb") as file:
        file.write(b"odd")
    (root / "setuid").write_bytes(b"")
    (root / "setuid").chmod(0o4755)
    os.utime(root / "plain", (1, 1234567890))
    os.utime(root / "empty", (1, -5))
    return root


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "posix"])
@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_gnu_tar_formats(tree: Path, tool: Callable[[str], str], form: str, chunk: int) -> None:
    made = subprocess.run(
        [tool("tar"), f"--format={form}", "--sort=name", "-C", tree, "-c", "."],
        check=True,
        capture_output=True,
    ).stdout
    found = {os.path.normpath(entry.path): (entry, data) for entry, data in read(made, chunk)}
    on_disk = {b"."} | {
        os.path.relpath(os.path.join(top, name), os.fsencode(tree))
        for top, folders, files in os.walk(os.fsencode(tree))
        for name in folders + files
    }
    assert set(found) == on_disk
    for path, (entry, data) in found.items():
        status = os.lstat(os.path.join(os.fsencode(tree), path))
        assert (entry.uid, entry.gid) == (status.st_uid, status.st_gid)
        assert entry.mtime_s == max(int(status.st_mtime), 0)
        if entry.kind is Kind.FILE:
            assert data == (Path(os.fsdecode(tree)) / os.fsdecode(path)).read_bytes()
            assert entry.mode == status.st_mode & 0o7777
    assert found[b"symlink"][0].link_target == b"plain"
    assert found[b"long-symlink"][0].link_target == b"t" * 300
    assert found[b"fifo"][0].kind is Kind.FIFO
    assert found[b"second-name"][0].kind is Kind.HARDLINK
    assert found[b"second-name"][0].link_target == b"./plain"


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=pax", "--sparse-version=0.0"],
        ["--format=pax", "--sparse-version=0.1"],
        ["--format=pax", "--sparse-version=1.0"],
    ],
)
def test_sparse_files(tmp_path: Path, tool: Callable[[str], str], options: list[str]) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        for index in range(40):  # more segments than a header holds
            file.seek(index * 100_000 + 4096)
            file.write(bytes([index + 1]) * (index * 37 + 1))
        file.truncate(10_000_000)
    (tmp_path / "after").write_bytes(b"after")
    made = subprocess.run(
        [tool("tar"), *options, "-S", "-C", tmp_path, "-c", "sparse", "after"],
        check=True,
        capture_output=True,
    ).stdout
    assert len(made) < 1_000_000  # it is stored sparse
    (first, data), (second, after) = read(made, 10_000)
    assert first.path == b"sparse"
    assert first.size_bytes == 10_000_000
    assert data == path.read_bytes()
    assert (second.path, after) == (b"after", b"after")


def test_numbers_beyond_octal_and_times_between_seconds() -> None:
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        info, _ = member("a", uid=3_000_000_000, gid=4_294_967_294, mtime=12)
        ((entry, _),) = read(tar_bytes([(info, b"")], form))
        assert (entry.uid, entry.gid, entry.mtime_s) == (3_000_000_000, 4_294_967_294, 12)
    info, _ = member("a", mtime=99.75)
    ((entry, _),) = read(tar_bytes([(info, b"")]))
    assert entry.mtime_s == 99
    info, _ = member("a", mtime=-99.75)
    ((entry, _),) = read(tar_bytes([(info, b"")]))
    assert entry.mtime_s == 0


def test_devices_and_unsaid_ends() -> None:
    made = tar_bytes(
        [
            member("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
            member("disk", kind=tarfile.BLKTYPE, devmajor=259, devminor=70_000),
        ]
    )
    for data in (made, made.rstrip(b"\0") + bytes(-len(made.rstrip(b"\0")) % 512)):
        (null, _), (disk, _) = read(data)
        assert (null.kind, null.major, null.minor) == (Kind.CHAR_DEVICE, 1, 3)
        assert (disk.kind, disk.major, disk.minor) == (Kind.BLOCK_DEVICE, 259, 70_000)


def test_xattrs_are_binary_and_filtered() -> None:
    capability = b"\x01\x00\x00\x02\x00\x20\x00\x00" + bytes(12)
    info, _ = member("a", b"x")
    info.pax_headers = {
        "SCHILY.xattr.security.capability": capability.decode("latin-1"),
        "SCHILY.xattr.user.a=b": "1\n2",
        "SCHILY.xattr.user.overlay.opaque": "y",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.security.selinux": "label",
        "LIBARCHIVE.xattr.user.lib%20x": "aGVsbG8",
    }
    ((entry, _),) = read(tar_bytes([(info, b"x")]))
    # A record's key ends at its first "=", so the second attribute is `user.a`.
    assert entry.xattrs == {
        b"security.capability": capability,
        b"user.a": b"b=1\n2",
        b"user.lib x": b"hello",
    }


def test_only_files_and_directories_keep_xattrs() -> None:
    """The kernel has user. attributes on nothing else, so no unpacker could set them."""
    attributes = {"SCHILY.xattr.user.k": "v"}
    made = [
        member("d/", pax_headers=attributes),
        symlink("s", "d", pax_headers=attributes),
        member("p", kind=tarfile.FIFOTYPE, pax_headers=attributes),
    ]
    assert [dict(entry.xattrs) for entry, _ in read(tar_bytes(made))] == [{b"user.k": b"v"}, {}, {}]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (b"user.mime", True),
        (b"security.capability", True),
        (b"user.overlay.opaque", False),
        (b"user.overlay.overlay.opaque", False),
        (b"trusted.x", False),
        (b"security.ima", False),
        (b"system.posix_acl_access", False),
    ],
)
def test_which_xattrs_an_image_may_have(name: bytes, kept: bool) -> None:
    assert is_kept_xattr(name) is kept


def test_truncation_anywhere_is_an_error() -> None:
    info, data = member("n" * 150, b"d" * 1000)
    made = tar_bytes([(info, data)]).rstrip(b"\0")
    for end in range(1, len(made), 97):
        if end % 512 == 0 and end <= 512:
            continue
        with pytest.raises(BadLayer):
            read(made[:end])


@pytest.mark.parametrize("kind", [b"M", b"D", b"N", b"A", b"\xff"])
def test_types_that_no_image_has(kind: bytes) -> None:
    with pytest.raises(BadEntry) as caught:
        read(tar_bytes([member("strange", kind=kind)]))
    assert caught.value.entry == b"strange"


def test_global_headers_apply_and_cannot_pile_up() -> None:
    made = tar_bytes([member("a", b"1")])
    info, _ = member("ignored")
    global_header = info.create_pax_global_header({"gid": "77", "comment": "x"})
    ((entry, data),) = read(global_header + made)
    assert (entry.gid, data) == (77, b"1")
    many = b"".join(
        info.create_pax_global_header({f"k{part}.{index}": "x" for index in range(500)})
        for part in range(3)
    )
    with pytest.raises(BadLayer):
        read(many + made)


def test_a_wrong_checksum_and_text_are_no_tar() -> None:
    made = bytearray(tar_bytes([member("a", b"x")]))
    made[0] ^= 1
    with pytest.raises(BadLayer):
        read(bytes(made))
    with pytest.raises(BadLayer):
        read(b"#!/bin/sh\n" * 1000)


def test_mutated_tars_raise_nothing_but_named_errors() -> None:
    info, data = member("n" * 150, b"d" * 700, uid=3_000_000)
    info.pax_headers = {"SCHILY.xattr.user.x": "1"}
    base = tar_bytes([(info, data), symlink("s", "t" * 120), hardlink("h", "n" * 150)])
    gnu = tar_bytes([member("n" * 150, b"x"), symlink("s", "t" * 120)], tarfile.GNU_FORMAT)
    for seed in range(3000):
        dice = random.Random(seed)
        changed = bytearray(dice.choice((base, gnu)))
        for _ in range(dice.randint(1, 4)):
            changed[dice.randrange(len(changed))] = dice.choice((0, 0x30, 0x80, 0xFF, 0x20))
        if dice.random() < 0.7:  # let the change get past the checksum
            for at in range(0, len(changed) - 511, 512):
                block = changed[at : at + 512]
                if block[257:262] == b"ustar":
                    block[148:156] = b" " * 8
                    changed[at + 148 : at + 156] = b"%06o\0 " % sum(block)
        try:
            total = sum(len(data) for _, data in read(bytes(changed)))
        except ConvertError:
            continue
        assert total < 1 << 20


def test_the_writer_is_read_by_gnu_tar(tmp_path: Path, tool: Callable[[str], str]) -> None:
    path = tmp_path / "out.tar"
    with path.open("wb") as file:
        writer = TarWriter(file.fileno())
        writer.add(b"", Entry(b"", Kind.DIRECTORY, mode=0o755))
        writer.add(ODD, Entry(ODD, Kind.FILE, mode=0o4711, size_bytes=3), [b"o", b"dd"])
        deep = b"/".join([b"d" * 90] * 4)
        writer.add(deep, Entry(deep, Kind.FILE, size_bytes=200_000), [b"x" * 200_000])
        writer.add(b"link", Entry(b"link", Kind.HARDLINK, link_target=deep))
        writer.add(b"sym", Entry(b"sym", Kind.SYMLINK, link_target=b"s" * 200, mode=0o777))
        writer.add(
            b"null",
            Entry(
                b"null", Kind.CHAR_DEVICE, major=1, minor=3, uid=4_000_000, mtime_s=1_600_000_000
            ),
        )
        writer.close()
    listed = subprocess.run(
        [tool("tar"), "--numeric-owner", "--quoting-style=literal", "--utc", "-tvf", path],
        check=True,
        capture_output=True,
    )
    assert listed.stderr == b""
    assert b"-rws--x--x 0/0               3" in listed.stdout
    assert b"crw" in listed.stdout
    assert b"4000000/0" in listed.stdout
    assert b"1,3 2020-09-13 12:26 null" in listed.stdout
    assert b"link link to " + deep in listed.stdout
    assert b"sym -> " + b"s" * 200 in listed.stdout
    with tarfile.open(path, errors="surrogateescape") as tar:
        file = tar.extractfile(os.fsdecode(deep))
        assert file is not None
        assert file.read() == b"x" * 200_000


def test_content_of_another_size_is_refused() -> None:
    with open(os.devnull, "wb") as file:
        for content in ([b"ab"], [b"abcd"], []):
            writer = TarWriter(file.fileno())
            with pytest.raises(BadEntry):
                writer.add(b"a", Entry(b"a", Kind.FILE, size_bytes=3), content)


def test_every_record_length_is_right() -> None:
    """A PAX record counts its own digits: lengths around 10, 100 and 1000 are where this breaks."""
    for length in [*range(60, 130), *range(950, 1050)]:
        read_end, write_end = os.pipe()
        writer = TarWriter(write_end)
        writer.add(b"a", Entry(b"a", Kind.FILE, xattrs={b"user.x": b"v" * length}))
        writer.close()
        os.close(write_end)
        with open(read_end, "rb") as file:
            data = file.read()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            (info,) = tar.getmembers()
            assert info.pax_headers["SCHILY.xattr.user.x"] == "v" * length
