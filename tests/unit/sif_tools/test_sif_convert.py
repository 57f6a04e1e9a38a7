"""Whole conversions, looked at with tools that know nothing of this project."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import sif_tools
from sif_tools import errors
from sif_tools.cli import main
from tests.unit.sif_tools.image_factories import LayoutMaker, hardlink, member, symlink, tar_bytes

ODD = b"odd \xff\n\\'\"$(x)".decode("utf-8", "surrogateescape")
LONG = "/".join(["long" * 40] * 8)


@pytest.fixture(autouse=True)
def _needs_tool(tool: Callable[[str], str]) -> None:
    tool("tar2sqfs")
    tool("unsquashfs")


def capability() -> dict[str, str]:
    """cap_net_raw=ep as the kernel stores it (VFS_CAP_REVISION_2)."""
    raw = (0x02000001).to_bytes(4, "little") + (1 << 13).to_bytes(4, "little") + bytes(12)
    return {"SCHILY.xattr.security.capability": raw.decode("latin-1"), "SCHILY.xattr.user.k": "v"}


def layers() -> list[tuple[bytes, bytes]]:
    lower = [
        member("./", mode=0o755),
        member("bin/", mode=0o755, mtime=1_000_000_000),
        member("bin/tool", b"#!/bin/sh\n", mode=0o4755, uid=0, mtime=1_100_000_000),
        hardlink("bin/alias", "bin/tool"),
        member("bin/ping", b"p", pax_headers=capability()),
        member("etc/gone", b"1"),
        member("etc/kept", b"kept", uid=1000, gid=3_000_000_000),
        member("opaque/below", b"1"),
        symlink("lib", "usr/lib"),
        member("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        member("pipe", kind=tarfile.FIFOTYPE),
        member(ODD, b"odd"),
        member(LONG, b"long"),
        member("big", bytes(range(256)) * 4000),
    ]
    upper = [
        member("etc/.wh.gone", b""),
        member("opaque/.wh..wh..opq", b""),
        member("opaque/new", b"2"),
        member("bin/.wh.tool", b""),
        member("etc/new", b"new", mtime=-5),
    ]
    first, second = tar_bytes(lower), tar_bytes(upper)
    return [(first, gzip.compress(first)), (second, zstandard.compress(second))]


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    maker = LayoutMaker(tmp_path / "layout")
    config = {
        "Env": ["PATH=/opt/bin:/bin", 'Q=a "b" $c `d` \\e', "not a name=1", "EMPTY="],
        "Entrypoint": ["/bin/sh", "-c", "echo 'it is'"],
        "Cmd": ["x y"],
        "Labels": {"l": "1"},
        "User": "1000",
        "WorkingDir": "/w",
    }
    maker.add(maker.image(layers(), config=config), "t")
    return maker.finish()


def unsquash(sif: Path, out: Path) -> Path:
    primary = sif_tools.read_sif(sif).primary
    assert primary is not None
    part = out.with_suffix(".squashfs")
    part.write_bytes(sif.read_bytes()[primary.offset_bytes :][: primary.size_bytes])
    return part


def listing(part: Path) -> dict[str, list[str]]:
    """Path to the columns of `unsquashfs -lln`: mode, owner, size, date, time."""
    made = subprocess.run(
        ["unsquashfs", "-lln", "-d", "", part],
        check=True,
        capture_output=True,
        env=os.environ | {"TZ": "UTC", "LC_ALL": "C"},
    ).stdout.decode("utf-8", "surrogateescape")
    found = {}
    for line in made.replace(ODD, "ODD").splitlines():
        fields = line.split(None, 4 if line[0] not in "bc" else 5)
        if len(fields) >= 5 and line[0] in "-dlbcps":
            _time, _, name = fields[-1].partition(" ")
            found[name] = fields[:-1]
    return found


def cat(part: Path, name: str) -> bytes:
    return subprocess.run(
        ["unsquashfs", "-cat", part, name], check=True, capture_output=True
    ).stdout


def test_oci_to_sif_as_unsquashfs_sees_it(layout: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.sif"
    result = sif_tools.convert(
        f"oci:{layout}:t", target, sif_tools.ConvertOptions(architecture="amd64")
    )
    part = unsquash(target, tmp_path / "x")
    found = listing(part)
    assert found["/bin/alias"][:3] == ["-rwsr-xr-x", "0/0", "10"]
    assert "/bin/tool" not in found
    assert "/etc/gone" not in found
    assert found["/etc/kept"][1] == "1000/3000000000"
    assert found["/etc/new"][3] == "1970-01-01"
    assert found["/bin"][3] == "2001-09-09"
    assert "/opaque/below" not in found
    assert found["/opaque/new"][2] == "1"
    assert "/lib -> usr/lib" in found
    assert found["/null"][0] == "crw-rw-rw-"
    assert found["/pipe"][0].startswith("p")
    assert found["/ODD"][2] == "3"
    assert f"/{LONG}" in found
    assert cat(part, "big") == bytes(range(256)) * 4000
    assert found["/tmp"][0] == "drwxrwxrwt"
    assert {"/proc", "/sys", "/dev", "/run"} <= set(found)
    assert result.inodes == int(
        subprocess.run(["unsquashfs", "-s", part], capture_output=True, check=True, text=True)
        .stdout.split("Number of inodes ")[1]
        .split()[0]
    )


def test_xattrs_as_rdsquashfs_sees_them(
    layout: Path, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    target = tmp_path / "out.sif"
    sif_tools.convert(f"oci:{layout}:t", target, sif_tools.ConvertOptions(architecture="amd64"))
    part = unsquash(target, tmp_path / "x")
    made = subprocess.run(
        [tool("rdsquashfs"), "-x", "bin/ping", part], check=True, capture_output=True
    ).stdout
    assert b"user.k" in made
    assert b"security.capability=0x0100000200200000" + b"0" * 24 in made.replace(b"\n", b" ")


def test_what_apptainer_looks_for(layout: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.sif"
    result = sif_tools.convert(
        f"oci:{layout}:t", target, sif_tools.ConvertOptions(architecture="amd64")
    )
    sif = sif_tools.read_sif(target)
    assert sif.header.arch == "amd64"
    assert [one.type_name for one in sif.descriptors] == ["deffile", "json", "json", "partition"]
    assert all(one.group_id == 1 for one in sif.descriptors)
    config = sif_tools.image_config(sif, target)
    assert config.entrypoint == ("/bin/sh", "-c", "echo 'it is'")
    assert (config.user, config.working_dir, config.labels) == ("1000", "/w", {"l": "1"})
    labels = sif_tools.image_labels(sif, target)
    assert labels["sif-tools.source.manifest-digest"] == result.manifest_digest
    part = unsquash(target, tmp_path / "x")
    found = listing(part)
    for link, path in {
        "singularity": "runscript",
        "environment": "env/90-environment.sh",
        **{f".{name}": f"actions/{name}" for name in ("exec", "run", "shell", "test")},
    }.items():
        assert f"/{link} -> .singularity.d/{path}" in found
        assert found[f"/.singularity.d/{path}"][0] == "-rwxr-xr-x"
    for name in ("env/99-base.sh", "startscript", "actions/start"):
        assert found[f"/.singularity.d/{name}"][0] == "-rwxr-xr-x"
    assert json.loads(cat(part, ".singularity.d/labels.json")) == labels


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_the_environment_script_means_what_the_image_says(
    layout: Path, tmp_path: Path, tool: Callable[[str], str], shell: str
) -> None:
    target = tmp_path / "out.sif"
    sif_tools.convert(f"oci:{layout}:t", target, sif_tools.ConvertOptions(architecture="amd64"))
    script = tmp_path / "env.sh"
    part = unsquash(target, tmp_path / "x")
    script.write_bytes(cat(part, ".singularity.d/env/10-docker2singularity.sh"))
    ask = f'. {script}; printf "%s\\n" "$PATH" "$Q" "$EMPTY"'
    path = tool(shell)
    for given, expected in ({}, 'a "b" $c `d` \\e'), ({"Q": "mine"}, "mine"):
        told = subprocess.run([path, "-c", ask], env=given, capture_output=True, check=True)
        assert told.stdout.decode() == f"/opt/bin:/bin\n{expected}\n\n"
    run = tmp_path / "run.sh"
    run.write_bytes(cat(part, ".singularity.d/runscript"))
    told = subprocess.run([path, run], capture_output=True, check=True)
    assert told.stdout == b"it is\n"


def test_the_same_image_gives_the_same_bytes(layout: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(layout, moved)
    for name, options in (
        ("zstd", sif_tools.SquashfsOptions()),
        ("gzip", sif_tools.SquashfsOptions(compression=sif_tools.Compression.GZIP)),
    ):
        made = []
        for index, where in enumerate((layout, moved)):
            path = tmp_path / f"{name}{index}.sif"
            sif_tools.convert(
                f"oci:{where}:t",
                path,
                sif_tools.ConvertOptions(squashfs=options, architecture="amd64"),
            )
            made.append(path.read_bytes())
        assert made[0] == made[1]
        sif = sif_tools.read_sif(tmp_path / f"{name}0.sif")
        part = sif_tools.mountable_partition(sif, tmp_path / f"{name}0.sif", "x86_64")
        assert part.superblock.compression == name


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for top, folders, files in os.walk(os.fsencode(root)):
        for name in folders + files:
            path = os.path.join(top, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            key = os.path.relpath(path, os.fsencode(root)).decode("utf-8", "surrogateescape")
            owner = (status.st_uid, status.st_gid)
            found[key] = (status.st_mode, owner, status.st_rdev, status.st_nlink, content)
    return found


GENERATED = (".singularity.d", "singularity", "environment", ".exec", ".run", ".shell", ".test")


def test_the_same_tree_as_umoci_unpacks(tmp_path: Path, tool: Callable[[str], str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("umoci unpacks owners and devices only as root")
    maker = LayoutMaker(tmp_path / "layout")
    maker.add(maker.image([(tar, gzip.compress(tar)) for tar, _ in layers()]), "t")
    layout = maker.finish()
    bundle = tmp_path / "bundle"
    subprocess.run(
        [tool("umoci"), "unpack", "--image", f"{layout}:t", bundle], check=True, capture_output=True
    )
    target = tmp_path / "out.sif"
    sif_tools.convert(f"oci:{layout}:t", target, sif_tools.ConvertOptions(architecture="amd64"))
    out = tmp_path / "out"
    part = unsquash(target, tmp_path / "x")
    subprocess.run(["unsquashfs", "-d", out, part], check=True, capture_output=True)
    ours = {
        path: what
        for path, what in snapshot(out).items()
        if path.partition("/")[0] not in (*GENERATED, "proc", "sys", "dev", "run", "tmp")
    }
    theirs = snapshot(bundle / "rootfs")
    assert len(theirs) > 15
    assert ours == theirs


def test_a_layout_that_skopeo_wrote(
    layout: Path, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    copy = tmp_path / "copy"
    command = [tool("skopeo"), "--insecure-policy", "copy", "--dest-compress-format", "zstd"]
    subprocess.run(
        [*command, f"oci:{layout}:t", f"oci:{copy}:other"], check=True, capture_output=True
    )
    options = sif_tools.ConvertOptions(architecture="amd64")
    sif_tools.convert(f"oci:{layout}:t", tmp_path / "a.sif", options)
    sif_tools.convert(f"oci:{copy}:other", tmp_path / "b.sif", options)
    sizes = []
    for name in ("a", "b"):
        part = unsquash(tmp_path / f"{name}.sif", tmp_path / name)
        sizes.append(listing(part))
    del sizes[0]["/.singularity.d/labels.json"], sizes[1]["/.singularity.d/labels.json"]
    assert sizes[0] == sizes[1]


def test_rootfs_directory(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "file").write_bytes(b"1")
    (root / "etc" / ".wh.name").write_bytes(b"only a name")
    os.link(root / "etc" / "file", root / "hard")
    os.symlink("etc/file", root / "soft")
    os.mkfifo(root / "pipe")
    (root / "run").symlink_to("var/run")  # kept, though sandboxes would like a directory
    with (root / "sparse").open("wb") as file:
        file.seek(50_000_000)
        file.write(b"end")
    (root / "etc").chmod(0o2750)
    target = tmp_path / "out.sif"
    result = sif_tools.convert(f"rootfs:{root}", target)
    assert result.manifest_digest is None
    assert result.size_bytes < 1_000_000
    part = unsquash(target, tmp_path / "x")
    found = listing(part)
    assert found["/etc"][0] == "drwxr-s---"
    assert found["/hard"][2] == found["/etc/file"][2] == "1"
    assert "/run -> var/run" in found
    assert "/soft -> etc/file" in found
    assert cat(part, "etc/.wh.name") == b"only a name"
    assert cat(part, "sparse") == bytes(50_000_000) + b"end"
    out = tmp_path / "out"
    subprocess.run(["unsquashfs", "-d", out, part], check=True, capture_output=True)
    assert (out / "hard").stat().st_ino == (out / "etc" / "file").stat().st_ino


def test_an_images_own_files_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / ".singularity.d" / "env").mkdir(parents=True)
    (root / ".singularity.d" / "runscript").write_text("#!/bin/sh\necho mine\n")
    script = root / ".singularity.d" / "env" / "10-docker2singularity.sh"
    script.write_text("export MINE=1\n")
    (root / "environment").mkdir()
    (root / "environment" / "data").write_text("mine")
    target = tmp_path / "out.sif"
    sif_tools.convert(f"rootfs:{root}", target)
    part = unsquash(target, tmp_path / "x")
    assert cat(part, ".singularity.d/runscript") == b"#!/bin/sh\necho mine\n"
    assert cat(part, "environment/data") == b"mine"
    assert cat(part, ".singularity.d/env/10-docker2singularity.sh") == b"export MINE=1\n"


@pytest.mark.parametrize("what", ["fails", "stops reading", "lies"])
def test_a_tool_that_fails(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fake = tmp_path / "bin" / "tar2sqfs"
    fake.parent.mkdir()
    script = {
        "fails": "cat >/dev/null; echo it hurts >&2; exit 3",
        "stops reading": "exec <&-; echo it hurts >&2; exit 3",
        "lies": "cat >/dev/null; echo it hurts >&2; exit 0",
    }[what]
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(os.listdir(tmp_path))
    with pytest.raises(errors.SquashfsToolFailed) as caught:
        sif_tools.convert(
            f"oci:{layout}:t",
            tmp_path / "out.sif",
            sif_tools.ConvertOptions(architecture="amd64"),
        )
    if what != "lies":
        assert "it hurts" in caught.value.message
        assert "ended with 3" in caught.value.message
    assert set(os.listdir(tmp_path)) == before


def test_a_missing_tool_names_its_package(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.ToolMissing) as caught:
        sif_tools.convert(f"oci:{layout}:t", tmp_path / "out.sif")
    assert "squashfs-tools-ng" in str(caught.value.hint)


def test_a_failure_kills_the_tool_and_leaves_nothing(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer's blob changes between the passes: found while the tool is running."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    blobs = sorted((layout / "blobs" / "sha256").iterdir(), key=lambda one: one.stat().st_size)
    before = set(os.listdir(tmp_path))
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    others = children.read_text()  # of tests before this one: multiprocessing keeps a helper

    def damage(stage: sif_tools.Stage, done: int, total: int | None) -> None:
        if stage is sif_tools.Stage.PACK:
            data = bytearray(blobs[-1].read_bytes())
            data[4] ^= 1  # the time stamp in the gzip header: the stream stays readable
            blobs[-1].write_bytes(data)

    with pytest.raises(errors.DigestMismatch):
        sif_tools.convert(
            f"oci:{layout}:t",
            tmp_path / "out.sif",
            sif_tools.ConvertOptions(architecture="amd64"),
            damage,
        )
    assert set(os.listdir(tmp_path)) == before
    assert children.read_text() == others


def test_needs_no_root() -> None:
    """The same bytes made by a user of no privilege; a child gives up root, as it cannot return."""
    if os.geteuid() != 0:
        pytest.skip("not root: every other test here shows it")
    with tempfile.TemporaryDirectory(prefix="sif-tools-test-") as scratch:
        os.chmod(scratch, 0o777)
        maker = LayoutMaker(Path(scratch, "layout"))
        maker.add(maker.image(layers()), "t")
        options = sif_tools.ConvertOptions(architecture="amd64")
        source = f"oci:{maker.finish()}:t"
        sif_tools.convert(source, Path(scratch, "root.sif"), options)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                sif_tools.convert(source, Path(scratch, "user.sif"), options)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert Path(scratch, "user.sif").stat().st_uid == 65534
        assert Path(scratch, "user.sif").read_bytes() == Path(scratch, "root.sif").read_bytes()


def test_places_that_cannot_be_written(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.WriteFailed):
        sif_tools.convert(f"oci:{layout}:t", tmp_path / "no" / "out.sif")
    (tmp_path / "dangling.sif").symlink_to("nowhere")
    with pytest.raises(errors.DestinationExists):
        sif_tools.convert(f"oci:{layout}:t", tmp_path / "dangling.sif")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no"))
    with pytest.raises(errors.ConvertError) as caught:
        sif_tools.convert(
            f"oci:{layout}:t",
            tmp_path / "out.sif",
            sif_tools.ConvertOptions(architecture="amd64"),
        )
    assert "TMPDIR" in str(caught.value.hint)


def test_levels_are_checked_before_the_work(layout: Path, tmp_path: Path) -> None:
    options = sif_tools.ConvertOptions(squashfs=sif_tools.SquashfsOptions(level=99))
    with pytest.raises(errors.ConvertError):
        sif_tools.convert(f"oci:{layout}:t", tmp_path / "out.sif", options)


def test_progress_reaches_its_total(layout: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    sif_tools.convert(
        f"oci:{layout}:t",
        tmp_path / "out.sif",
        sif_tools.ConvertOptions(architecture="amd64"),
        lambda stage, done, total: told.append((stage.value, done, total)),
    )
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == [
        "resolve",
        "index",
        "pack",
        "publish",
    ]
    for stage in ("index", "pack", "publish"):
        done, total = [(done, total) for name, done, total in told if name == stage][-1]
        assert total
        assert done == total


# ── the command ─────────────────────────────────────────────────────────────────────────────────


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["sif-tools", *arguments])
    code: int | str | None = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return int(code or 0), said.out, said.err


def test_command_line(
    layout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = str(tmp_path / "out.sif")
    source = f"oci:{layout}:t"
    convert = ("convert", source, target, "--arch", "amd64")
    code, out, err = command(monkeypatch, capsys, *convert, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["path"] == target
    assert result["size_bytes"] == os.path.getsize(target)
    assert set(result["seconds"]) == {"resolve", "index", "pack", "publish"}
    assert "packing squashfs" in err

    code, out, err = command(monkeypatch, capsys, *convert)
    assert (code, out) == (1, "")
    assert err.startswith("error: destination-exists: ")
    assert "hint: --force" in err
    assert command(monkeypatch, capsys, *convert, "--force", "--compression", "gzip")[0] == 0

    code, out, _ = command(monkeypatch, capsys, "inspect", target, "--json")
    node = json.loads(out)
    assert (code, node["header"]["arch"], node["config"]["user"]) == (0, "amd64", "1000")
    code, out, _ = command(monkeypatch, capsys, "inspect", target)
    assert code == 0
    assert "entrypoint    /bin/sh -c" in out
    code, out, _ = command(monkeypatch, capsys, "list", target)
    assert code == 0
    assert len(out.splitlines()) == 5
    code, out, err = command(monkeypatch, capsys, "list", "/etc/passwd")
    assert (code, out) == (1, "")
    assert err.startswith("error: not-a-sif: ")
    assert command(monkeypatch, capsys, "convert", source, target, "--compression", "no")[0] == 2
