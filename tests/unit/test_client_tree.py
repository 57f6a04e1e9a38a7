"""Directories as tar streams on the client's side, compared with what tar(1) makes of them."""

import io
import os
import subprocess
import tarfile

import pytest

from sandboxd.client import local_tree


def packed(directory):
    return b"".join(local_tree.pack(directory))


def unpacked(data, target, size=1000):
    pieces = iter([data[at : at + size] for at in range(0, len(data), size)])
    return local_tree.unpack(local_tree.PieceFile(pieces), target)


def tar_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, more in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            data = more.pop("data", b"")
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "a/b/empty").mkdir(parents=True)
    (root / "a/file").write_bytes(os.urandom(700_001))
    (root / "a/b" / ("long" * 60)).write_text("x")
    (root / os.fsdecode(b"\xff\xfe")).write_text("no text")
    (root / "link").symlink_to("a/file")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o750)
    os.mkfifo(root / "pipe")
    return root


def test_tar_reads_what_is_packed(tree, tmp_path):
    (tmp_path / "out").mkdir()
    command = ["tar", "-x", "-C", tmp_path / "out"]
    subprocess.run(command, input=packed(tree), check=True)
    (tree / "pipe").unlink()
    (tmp_path / "out/pipe").unlink()
    subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / "out"], check=True)
    assert (tmp_path / "out/run").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("kind", ["gnu", "pax", "ustar"])
def test_what_tar_packs_is_read(tree, tmp_path, kind):
    if kind == "ustar":
        (tree / "a/b" / ("long" * 60)).unlink()
    (tree / "pipe").unlink()
    done = subprocess.run(
        ["tar", "-c", "-C", tree, f"--format={kind}", "."], stdout=subprocess.PIPE, check=True
    )
    found = unpacked(done.stdout, tmp_path / "out")
    subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / "out"], check=True)
    assert found.skipped == []


def test_there_and_back_at_any_size_of_pieces(tree, tmp_path):
    (tree / "pipe").unlink()
    data = packed(tree)
    for number, size in enumerate((511, 4096, 1 << 20)):
        found = unpacked(data, tmp_path / str(number), size)
        assert found.members == sum(1 for _ in tree.rglob("*"))
        subprocess.run(["diff", "-r", "--no-dereference", tree, tmp_path / str(number)], check=True)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_names_that_lead_out_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"leads out|absolute"):
        unpacked(tar_of((name, tarfile.REGTYPE, {"data": b"x"})), tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_links_that_lead_out_are_left_out(tmp_path):
    data = tar_of(
        ("d", tarfile.DIRTYPE, {"mode": 0o755}),
        ("d/good", tarfile.SYMTYPE, {"linkname": "../x"}),
        ("d/out", tarfile.SYMTYPE, {"linkname": "../../x"}),
        ("abs", tarfile.SYMTYPE, {"linkname": "/etc/passwd"}),
        ("null", tarfile.CHRTYPE, {}),
    )
    found = unpacked(data, tmp_path / "out")
    assert found.skipped == ["d/out", "abs", "null"]
    assert os.readlink(tmp_path / "out/d/good") == "../x"


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/planted").symlink_to(tmp_path / "victim")
    for data in (
        tar_of(("planted/x", tarfile.REGTYPE, {"data": b"x"})),
        tar_of(("d", tarfile.SYMTYPE, {"linkname": "e"}), ("d/x", tarfile.REGTYPE, {"data": b"x"})),
        tar_of(("h", tarfile.LNKTYPE, {"linkname": "planted/secret"})),
    ):
        with pytest.raises(OSError):
            unpacked(data, tmp_path / "out")
    assert os.listdir(tmp_path / "victim") == []
    # A file replaces a link, and not what it leads to.
    (tmp_path / "victim/file").write_text("old")
    (tmp_path / "out/file").symlink_to(tmp_path / "victim/file")
    unpacked(tar_of(("file", tarfile.REGTYPE, {"data": b"new"})), tmp_path / "out")
    assert (tmp_path / "victim/file").read_text() == "old"
    assert (tmp_path / "out/file").read_text() == "new"


def test_no_set_id_bits_and_readable_directories(tmp_path):
    data = tar_of(
        ("d", tarfile.DIRTYPE, {"mode": 0o0}),
        ("d/s", tarfile.REGTYPE, {"mode": 0o6755, "data": b""}),
    )
    unpacked(data, tmp_path / "out")
    assert (tmp_path / "out/d/s").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "out/d").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cut", [100, 600, 1500])
def test_a_tar_that_is_cut(tmp_path, cut):
    data = tar_of(("a", tarfile.REGTYPE, {"data": b"x" * 3000}))
    with pytest.raises(ValueError, match="no whole tar"):
        unpacked(data[:cut], tmp_path / "out")
