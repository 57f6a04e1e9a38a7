"""The tar code of the C init, with sanitizers, against tar(1), tarfile and archives of malice."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandboxd.init import build, protocol
from sandboxd.init.protocol import ArchiveFlaw, FileFlag, FileOp, Step
from tests.unit.init.file_driver import HERE, PARTS, Driver

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners can only be set by root")

ITERATIONS = int(os.environ.get("SANDBOXD_TESTS_FUZZ_ITERATIONS", "20000")) // 20
SEED = os.environ.get("SANDBOXD_TESTS_FUZZ_SEED", "1")


@pytest.fixture
def driver(file_program, tmp_path) -> Driver:
    (tmp_path / "root").mkdir()
    return Driver(file_program, tmp_path / "root")


def make_tree(top: Path) -> None:
    (top / "a/b").mkdir(parents=True)
    (top / "a/empty").write_bytes(b"")
    (top / "a/b/large").write_bytes(os.urandom(300_001))
    (top / "a/b/small").write_bytes(b"small")
    (top / "a/b/small").chmod(0o4755)
    os.link(top / "a/b/small", top / "hard")
    (top / "to-nothing").symlink_to("/no/where")
    (top / ("n" * 200)).write_bytes(b"long")
    (top / "l").symlink_to("t" * 300)
    (top / "grüße").mkdir(mode=0o700)
    (top / "new\nline").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(top) + b"/no-utf8-\xff")).write_bytes(b"y")
    os.mkfifo(top / "fifo")
    os.chown(top / "a/empty", 1000, 1001)
    for name, when in (("a/b/small", 1), ("a/empty", 2**33 + 7), ("hard", 1)):
        os.utime(top / name, (when, when))
    os.utime(top / "a", (77, 77))


def picture(top: Path) -> dict[bytes, tuple[object, ...]]:
    """What is in a tree, as lstat(2) and read(2) have it."""
    found: dict[bytes, tuple[object, ...]] = {}
    for directory, names, files in os.walk(os.fsencode(top)):
        for name in names + files:
            path = os.path.join(directory, name)
            one = os.lstat(path)
            content: object = None
            if stat.S_ISREG(one.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(one.st_mode):
                content = os.readlink(path)
            found[os.path.relpath(path, os.fsencode(top))] = (
                one.st_mode, one.st_uid, one.st_gid, int(one.st_mtime), content,
                one.st_nlink if stat.S_ISREG(one.st_mode) else 0,
            )  # fmt: skip
    return found


def members_of(archive: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return opened.getmembers()


def made(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def flaw_of(done) -> ArchiveFlaw:
    assert done.step == Step.STEP_ARCHIVE, done
    return ArchiveFlaw(done.index)


def place_of(done) -> bytes:
    found = protocol.unpack_entry(done.report)
    assert found is not None
    return found[0].path


# --- as others have it -----------------------------------------------------------------------


def test_tar_1_unpacks_what_is_packed(driver, tmp_path):
    make_tree(driver.root)
    (tmp_path / "out").mkdir()
    archive = driver.pack()
    done = subprocess.run(
        ["tar", "--numeric-owner", "-xpC", tmp_path / "out"],
        input=archive,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert picture(tmp_path / "out") == picture(driver.root)


def test_tarfile_reads_what_is_packed(driver):
    make_tree(driver.root)
    members = {one.name: one for one in members_of(driver.pack())}
    assert members.keys() == {os.fsdecode(path) for path in picture(driver.root)}
    assert (members["hard"].islnk(), members["a/b/small"].islnk()) in ((True, False), (False, True))
    assert members["a/empty"].mtime == 2**33 + 7
    assert (members["a/empty"].uid, members["a/empty"].gid) == (1000, 1001)
    assert members["l"].linkname == "t" * 300
    assert len(driver.pack()) % 512 == 0
    assert driver.pack()[-1024:] == bytes(1024)


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "posix", "ustar", "v7"])
def test_what_tar_1_packs_is_unpacked(driver, tmp_path, form):
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    if form in ("v7", "ustar"):
        for name in ("n" * 200, "l", "a/empty"):
            (source / name).unlink()
    if form == "v7":
        (source / "fifo").unlink()
    if form != "pax":
        os.utime(source / "a", (77, 77))
    archive = subprocess.run(
        ["tar", f"--format={form}", "-C", source, "-c", "."], capture_output=True, check=True
    ).stdout
    done = driver.unpack(archive, "/t", flags=FileFlag.FILE_PARENTS | FileFlag.FILE_OWNERS)
    assert done.step == Step.STEP_NONE, done
    assert picture(driver.root / "t") == picture(source)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_what_tarfile_packs_is_unpacked(driver, form):
    archive = made(
        member("dir", type=tarfile.DIRTYPE, mode=0o750, mtime=5),
        member("dir/f", b"content", mode=0o640, mtime=6, uid=7, gid=8),
        member("implied/by/name", b"x"),
        form=form,
    )
    assert driver.unpack(archive, "/t").exited.size == 3
    top = driver.root / "t"
    assert (top / "dir/f").read_bytes() == b"content"
    assert stat.S_IMODE((top / "dir").stat().st_mode) == 0o750
    assert [int((top / name).stat().st_mtime) for name in ("dir", "dir/f")] == [5, 6]
    assert (top / "dir/f").stat().st_uid == 0
    assert stat.S_IMODE((top / "implied/by").stat().st_mode) == 0o755


def test_owners_are_the_archives_the_given_or_the_users(driver):
    archive = made(member("f", uid=7, gid=8), member("d", type=tarfile.DIRTYPE, uid=9, gid=10))
    driver.unpack(archive, "/a", flags=FileFlag.FILE_PARENTS | FileFlag.FILE_OWNERS)
    driver.unpack(archive, "/b", other="1000:1001")
    owners = [
        (one.st_uid, one.st_gid)
        for one in (os.lstat(driver.root / name) for name in ("a/f", "a/d", "b/f", "b/d"))
    ]
    assert owners == [(7, 8), (9, 10), (1000, 1001), (1000, 1001)]


def test_a_read_only_directory_is_filled_first(driver):
    # As in a Go module cache: the mode comes before the content.
    archive = made(
        member("d", type=tarfile.DIRTYPE, mode=0o555), member("d/e", type=tarfile.DIRTYPE, mode=0),
        member("d/e/f", b"x", mode=0o444),
    )  # fmt: skip
    assert driver.unpack(archive, "/t").step == Step.STEP_NONE
    modes = [
        stat.S_IMODE((driver.root / "t" / name).stat().st_mode) for name in ("d", "d/e", "d/e/f")
    ]
    assert modes == [0o555, 0, 0o444]


def test_fractions_of_a_second_in_pax_headers(driver):
    info, data = member("f", b"", mtime=1.25)
    info.pax_headers = {"mtime": "-1.25"}
    driver.unpack(made((info, data)), "/t")
    assert (driver.root / "t/f").stat().st_mtime_ns == -1_250_000_000


def test_what_is_there_is_replaced_but_directories_stay_as_they_are(driver):
    top = driver.root / "t"
    (top / "d").mkdir(parents=True)
    (top / "d").chmod(0o711)
    (driver.root / "elsewhere").write_bytes(b"untouched")
    (top / "file").write_bytes(b"old")
    (top / "link").symlink_to("../elsewhere")
    archive = made(
        member("d", type=tarfile.DIRTYPE, mode=0o700), member("file", b"new"),
        member("link", b"a file now"), member("again", b"1"), member("again", b"2"),
        member("sym", type=tarfile.SYMTYPE, linkname="file"),
        member("sym", type=tarfile.SYMTYPE, linkname="d"),
        member("hl", type=tarfile.LNKTYPE, linkname="./file"),
        member("hl", type=tarfile.LNKTYPE, linkname="file"),
    )  # fmt: skip
    assert driver.unpack(archive, "/t").step == Step.STEP_NONE
    assert stat.S_IMODE((top / "d").stat().st_mode) == 0o711
    assert (top / "file").read_bytes() == b"new"
    assert not (top / "link").is_symlink()
    assert (driver.root / "elsewhere").read_bytes() == b"untouched"
    assert (top / "again").read_bytes() == b"2"
    assert os.readlink(top / "sym") == "d"
    assert (top / "hl").stat().st_ino == (top / "file").stat().st_ino


def test_filters_of_both_directions(driver, tmp_path):
    for name in ("src/a.py", "src/sub/b.py", "src/c.txt", "node_modules/x/y.js", ".git/config"):
        (driver.root / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (driver.root / "p" / name).write_bytes(b"x")
    only = protocol.FileFilter(include=["*.py"])
    assert {one.name for one in members_of(driver.pack("/p", filter=only))} == {
        "src/a.py", "src/sub/b.py",
    }  # fmt: skip
    without = protocol.FileFilter(exclude=["node_modules", ".git"])
    names = {one.name for one in members_of(driver.pack("/p", filter=without))}
    assert names == {"src", "src/a.py", "src/sub", "src/sub/b.py", "src/c.txt"}
    part = protocol.FileFilter(include=["src"], exclude=["src/sub"])
    archive = driver.pack("/p")
    assert driver.unpack(archive, "/q", filter=part).exited.size == 3
    assert picture(driver.root / "q").keys() == {b"src", b"src/a.py", b"src/c.txt"}


def test_content_that_goes_to_neither_is_passed_over_whole(driver):
    archive = made(member("no", os.urandom(100_001)), member("yes", b"yes"))
    only = protocol.FileFilter(include=["yes"])
    assert driver.unpack(archive, "/t", filter=only).step == Step.STEP_NONE
    assert (driver.root / "t/yes").read_bytes() == b"yes"


def test_sizes_above_eight_gibibytes_are_said_in_pax(driver):
    size = (8 << 30) + 5
    with open(driver.root / "sparse", "wb") as file:
        file.truncate(size)
    payload = protocol.file_payload(
        FileOp.FILE_PACK, user="0", path="/", depth=9, length=1 << 40, entries=9
    )
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [driver.program, driver.root, str(writer), str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[writer],
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )
    os.close(writer)
    process.stdin.write(payload)
    process.stdin.close()
    with os.fdopen(reader, "rb") as pipe:
        head = pipe.read(2048)
    process.wait(30)
    with tarfile.open(fileobj=io.BytesIO(head), mode="r|") as archive:
        info = archive.next()
    assert (info.name, info.size) == ("sparse", size)


# --- of malice -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        ("../x", ArchiveFlaw.ARCHIVE_NAME),
        ("a/../../x", ArchiveFlaw.ARCHIVE_NAME),
        ("a/..", ArchiveFlaw.ARCHIVE_NAME),
        ("..", ArchiveFlaw.ARCHIVE_NAME),
        ("/x", ArchiveFlaw.ARCHIVE_NAME),
        ("//x", ArchiveFlaw.ARCHIVE_NAME),
        ("n" * 256, ArchiveFlaw.ARCHIVE_NAME),
        ("d/" * 70 + "x", ArchiveFlaw.ARCHIVE_NAME),
    ],
)
def test_names_that_lead_elsewhere(driver, name, flaw):
    before = os.listdir(driver.root.parent)
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        done = driver.unpack(made(member(name, b"x"), form=form), "/t", depth=64)
        assert flaw_of(done) == flaw
    assert os.listdir(driver.root.parent) == before
    assert os.listdir(driver.root) == ["t"]
    assert os.listdir(driver.root / "t") == []


@pytest.mark.parametrize("target", ["/outside", "../outside", "../../root/outside"])
@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "hardlink", "implied"])
def test_nothing_goes_through_a_symlink_of_the_archive(driver, target, kind):
    (driver.root / "outside").mkdir()
    child = {
        "file": member("l/x", b"x"),
        "directory": member("l/x", type=tarfile.DIRTYPE),
        "symlink": member("l/x", type=tarfile.SYMTYPE, linkname="y"),
        "hardlink": member("l/x", type=tarfile.LNKTYPE, linkname="l"),
        "implied": member("l/x/y/z", b"x"),
    }[kind]
    link = member("l", type=tarfile.SYMTYPE, linkname=target)
    done = driver.unpack(made(link, child), "/t")
    assert flaw_of(done) == ArchiveFlaw.ARCHIVE_LINK
    assert place_of(done).startswith(b"l/x")
    assert os.listdir(driver.root / "outside") == []


def test_nothing_goes_through_a_symlink_that_was_there(driver):
    (driver.root / "outside").mkdir()
    (driver.root / "t").mkdir()
    (driver.root / "t/l").symlink_to("/outside")
    assert flaw_of(driver.unpack(made(member("l/x", b"x")), "/t")) == ArchiveFlaw.ARCHIVE_LINK
    entry = member("l", type=tarfile.DIRTYPE)
    assert flaw_of(driver.unpack(made(entry), "/t")) in (
        ArchiveFlaw.ARCHIVE_LINK, ArchiveFlaw.ARCHIVE_IN_THE_WAY,
    )  # fmt: skip
    assert os.listdir(driver.root / "outside") == []
    # The target itself may be reached through one: the path is the caller's.
    (driver.root / "way").symlink_to("outside")
    assert driver.unpack(made(member("x", b"x")), "/way").step == Step.STEP_NONE
    assert os.listdir(driver.root / "outside") == ["x"]


@pytest.mark.parametrize("link", ["../secret", "/secret", "l/secret", "missing", "a/../secret", ""])
def test_hard_links_to_what_is_not_in_the_target(driver, link):
    (driver.root / "secret").write_bytes(b"s")
    archive = made(
        member("l", type=tarfile.SYMTYPE, linkname=".."),
        member("x", type=tarfile.LNKTYPE, linkname=link),
    )
    assert flaw_of(driver.unpack(archive, "/t")) == ArchiveFlaw.ARCHIVE_LINK
    assert (driver.root / "secret").stat().st_nlink == 1


def test_a_hard_link_to_a_symlink_is_to_itself_and_not_its_target(driver):
    (driver.root / "secret").write_bytes(b"s")
    archive = made(
        member("l", type=tarfile.SYMTYPE, linkname="../secret"),
        member("x", type=tarfile.LNKTYPE, linkname="l"), member("x", b"new"),
    )  # fmt: skip
    assert driver.unpack(archive, "/t").step == Step.STEP_NONE
    assert (driver.root / "secret").read_bytes() == b"s"


@pytest.mark.parametrize("kind", [b"3", b"4", b"S", b"V", b"M", b"D", b"N", b"Z", b"A"])
def test_types_that_are_refused(driver, kind):
    data = bytearray(made(member("x", b""), form=tarfile.USTAR_FORMAT))
    data[156:157] = kind
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * 32)
    done = driver.unpack(bytes(data), "/t")
    assert flaw_of(done) == ArchiveFlaw.ARCHIVE_TYPE
    assert place_of(done) == b"x"
    assert os.listdir(driver.root / "t") == []


def test_a_sparse_file_of_pax_is_refused(driver):
    info, data = member("x", b"abc")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 60)}
    assert flaw_of(driver.unpack(made((info, data)), "/t")) == ArchiveFlaw.ARCHIVE_EXTENSION


@pytest.mark.parametrize(
    "headers",
    [
        {"size": "x"}, {"size": "-1"}, {"size": "9" * 30}, {"path": "a\0b"}, {"mtime": "1.2.3"},
        {"uid": str(1 << 40)}, {"linkpath": ""}, {"path": "p" * 5000},
    ],
)  # fmt: skip
def test_pax_values_that_are_none(driver, headers):
    info, data = member("x", b"abc")
    raw = bytearray(made((info, data), form=tarfile.USTAR_FORMAT))
    pax = io.BytesIO()
    with tarfile.open(fileobj=pax, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        records = b""
        for key, value in headers.items():
            body = b" " + key.encode() + b"=" + value.encode() + b"\n"
            length = len(body)
            while length != len(body) + len(str(length)):
                length = len(body) + len(str(length))
            records += str(length).encode() + body
        header = tarfile.TarInfo("PaxHeader")
        header.type, header.size = tarfile.XHDTYPE, len(records)
        archive.addfile(header, io.BytesIO(records))
    size = 512 + (len(records) + 511) // 512 * 512
    done = driver.unpack(pax.getvalue()[:size] + bytes(raw), "/t")
    assert flaw_of(done) == ArchiveFlaw.ARCHIVE_EXTENSION
    assert os.listdir(driver.root / "t") == []


def test_attributes_that_nobody_asked_for_may_hold_anything(driver):
    info, data = member("x", b"abc")
    info.pax_headers = {"SCHILY.xattr.user.a": "v\0w=x\n", "comment": "path=/etc"}
    assert driver.unpack(made((info, data)), "/t").step == Step.STEP_NONE
    assert (driver.root / "t/x").read_bytes() == b"abc"


def test_every_cut_is_told(driver):
    archive = made(member("a", b"a" * 700), member("b" * 150, b"b"), form=tarfile.GNU_FORMAT)
    end = len(archive.rstrip(b"\0")) // 512 * 512 + 512
    for size in [0, 1, 511, 512, 513, 1100, 1535, 1536, 2048, *range(2048, end, 256)]:
        done = driver.unpack(archive[:size], f"/t{size}")
        assert flaw_of(done) == ArchiveFlaw.ARCHIVE_TRUNCATED, size
        left = os.listdir(driver.root / f"t{size}")
        assert left in ([], ["a"], ["a", "b" * 150], ["b" * 150, "a"]), left
    assert driver.unpack(archive[: end + 512], "/whole").step == Step.STEP_NONE


def test_a_wrong_checksum_and_what_is_no_archive(driver):
    archive = bytearray(made(member("a", b"a")))
    archive[0] = ord("b")
    assert flaw_of(driver.unpack(bytes(archive), "/t")) == ArchiveFlaw.ARCHIVE_HEADER
    for junk in (os.urandom(2048), b"\x1f\x8b" + bytes(2000), b"<html>" * 200):
        assert flaw_of(driver.unpack(junk, "/t")) == ArchiveFlaw.ARCHIVE_HEADER
    assert os.listdir(driver.root / "t") == []


def test_bounds(driver):
    many = made(*(member(f"f{n}") for n in range(11)))
    assert flaw_of(driver.unpack(many, "/t", entries=10)) == ArchiveFlaw.ARCHIVE_ENTRIES
    assert driver.unpack(many, "/t", entries=11).exited.size == 11
    large = made(member("a", bytes(600)), member("b", bytes(600)))
    assert flaw_of(driver.unpack(large, "/t", length=1000)) == ArchiveFlaw.ARCHIVE_SIZE
    claims = bytearray(made(member("huge", b""), form=tarfile.USTAR_FORMAT))
    claims[124:136] = b"\x80" + (1 << 62).to_bytes(11, "big")
    claims[148:156] = b"%06o\0 " % (sum(claims[:148]) + sum(claims[156:512]) + 8 * 32)
    assert flaw_of(driver.unpack(bytes(claims), "/t", length=1 << 40)) == ArchiveFlaw.ARCHIVE_SIZE
    for name in "abc":
        (driver.root / "p").mkdir(exist_ok=True)
        (driver.root / "p" / name).write_bytes(bytes(10))
    done = driver(FileOp.FILE_PACK, "/p", entries=2)
    assert (done.step, done.index) == (Step.STEP_FILE_BOUND, 0)
    done = driver(FileOp.FILE_PACK, "/p", length=25)
    assert (done.step, done.index) == (Step.STEP_FILE_BOUND, 1)


def test_a_directory_is_not_replaced_by_a_file_nor_the_other_way_round(driver):
    (driver.root / "t/d/e").mkdir(parents=True)
    (driver.root / "t/f").write_bytes(b"old")
    for one in (
        member("d", b"x"), member("d", type=tarfile.SYMTYPE, linkname="f"),
        member("f", type=tarfile.DIRTYPE), member("f/below", b"x"),
    ):  # fmt: skip
        done = driver.unpack(made(one), "/t")
        assert flaw_of(done) == ArchiveFlaw.ARCHIVE_IN_THE_WAY, one[0].name
    assert (driver.root / "t/f").read_bytes() == b"old"


def test_no_archive_breaks_it(driver, tmp_path):
    for name in PARTS:
        assert (build.SOURCE_DIR / f"{name}.c").exists()
    fuzzer = build.build(
        tmp_path / "fuzz_untar",
        sanitize=True,
        c_files=[HERE / "fuzz_untar.c", *(build.SOURCE_DIR / f"{name}.c" for name in PARTS)],
    )
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    (source / "a/b/large").write_bytes(b"x" * 3000)
    archives = [tmp_path / "own.tar"]
    archives[0].write_bytes(Driver(driver.program, source).pack())
    for form in ("gnu", "pax", "ustar"):
        archives.append(tmp_path / f"{form}.tar")
        subprocess.run(
            ["tar", f"--format={form}", "-C", source, "-cf", archives[-1], "."],
            capture_output=True,
            check=False,
        )
    place = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path, f"untar-{os.getpid()}")
    (place / "target").mkdir(parents=True)
    try:
        done = subprocess.run(
            [fuzzer, SEED, str(ITERATIONS), place, *archives],
            check=False,
            capture_output=True,
            text=True,
            env={"ASAN_OPTIONS": "detect_leaks=0"},
        )
        assert done.returncode == 0, done.stderr
        assert 0.02 < int(done.stdout) / ITERATIONS < 0.98, done.stdout
        assert os.listdir(place) == ["target"]
    finally:
        shutil.rmtree(place)
