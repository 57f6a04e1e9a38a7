"""Archives and SIFs as sources: the same image, whichever way it comes."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import sif_tools
from sif_tools import errors
from sif_tools.limits import Limits
from sif_tools.merge.merger import Merger
from sif_tools.sources.open import open_source
from sif_tools.sources.source import SourceOptions
from sif_tools.tarstream.entry import Entry
from sif_tools.tarstream.reader import TarReader
from sif_tools.tarstream.writer import TarWriter
from tests.unit.sif_tools.image_factories import (
    LayoutMaker,
    hardlink,
    member,
    sha256,
    symlink,
    tar_bytes,
)

ODD = b"odd \xff\n\\'\"$(x)".decode("utf-8", "surrogateescape")
LOWER = tar_bytes([member("etc/"), member("etc/one", b"1" * 50_000), member("etc/gone", b"x")])
UPPER = tar_bytes([member("etc/two", b"2"), member("etc/.wh.gone", b"")])


def layout(tmp_path: Path) -> Path:
    maker = LayoutMaker(tmp_path / "layout")
    layers = [(one, gzip.compress(one)) for one in (LOWER, UPPER)]
    maker.add(maker.image(layers, config={"Env": ["A=b"], "User": "1:2"}), "x:1")
    return maker.finish()


def pack(archive: Path, members: dict[str, bytes | str]) -> Path:
    """A tar of files (bytes) and symlinks (str)."""
    with tarfile.open(archive, "w") as tar:
        for name, content in members.items():
            if isinstance(content, str):
                tar.addfile(symlink(name, content)[0])
            else:
                tar.addfile(member(name, content)[0], io.BytesIO(content))
    return archive


def config(*tars: bytes) -> bytes:
    node = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"User": "old"},
        "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in tars]},
    }
    return json.dumps(node).encode()


def old_archive(tmp_path: Path, **more: bytes | str) -> Path:
    """As Docker before 25 wrote it: the second layer's tar is a link to the first's."""
    manifest = [
        {
            "Config": "c.json",
            "RepoTags": ["a/b:1", "h.example:5000/c:2"],
            "Layers": ["1/layer.tar", "2/layer.tar", "3/layer.tar"],
        }
    ]
    return pack(
        tmp_path / "docker.tar",
        {
            "1/layer.tar": LOWER,
            "2/layer.tar": UPPER,
            "3/layer.tar": "../2/layer.tar",
            "c.json": config(LOWER, UPPER, UPPER),
            "manifest.json": json.dumps(manifest).encode(),
            **more,
        },
    )


def names_of(reference: str, options: SourceOptions | None = None) -> set[bytes]:
    with open_source(reference, "amd64", options) as source:
        merger = Merger()
        for layer in source.layers:
            merger.index(layer)
        found = {path for path, _ in merger.tree.directories()}
        for path, node in list(merger.tree.directories()):
            found |= {path + b"/" + name for name in node.children}
        return found


def contents_of(squashfs: Path) -> list[tuple[Entry, bytes]]:
    made = subprocess.run(["sqfs2tar", "-r", ".", squashfs], capture_output=True, check=True)
    reader = TarReader(iter([made.stdout]))
    return [(entry, b"".join(map(bytes, reader.data()))) for entry in reader]


def squashfs_of(sif: Path) -> bytes:
    parsed = sif_tools.read_sif(sif)
    primary = sif_tools.primary_partition(parsed)
    return sif_tools.read_object(sif, primary, limit_bytes=1 << 30)


@pytest.mark.parametrize("packed", ["skopeo", "tar", "gzip"])
def test_oci_archive(tool: Callable[[str], str], tmp_path: Path, packed: str) -> None:
    where, archive = layout(tmp_path), tmp_path / "o.tar"
    if packed == "skopeo":
        policy = tmp_path / "policy.json"
        policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        command = [tool("skopeo"), "--policy", policy, "copy", "--quiet"]
        subprocess.run([*command, f"oci:{where}:x:1", f"oci-archive:{archive}:x:1"], check=True)
    else:
        flags = "-czf" if packed == "gzip" else "-cf"
        subprocess.run(["tar", "-C", where, flags, archive, "."], check=True)
    with open_source(f"oci:{where}", "amd64") as expected:
        for reference in (f"oci-archive:{archive}", f"oci-archive:{archive}:x:1"):
            with open_source(reference, "amd64") as source:
                assert source.manifest_digest == expected.manifest_digest
                assert source.config == expected.config
            assert names_of(reference) == names_of(f"oci:{where}")
    with pytest.raises(errors.BadSource):
        open_source(f"oci-archive:{archive}:none", "amd64")


def test_docker_archive_as_skopeo_writes_it(tool: Callable[[str], str], tmp_path: Path) -> None:
    tool("tar2sqfs")
    where, archive = layout(tmp_path), tmp_path / "d.tar"
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    command = [tool("skopeo"), "--policy", policy, "copy", "--quiet"]
    subprocess.run([*command, f"oci:{where}:x:1", f"docker-archive:{archive}:n:1"], check=True)
    options = sif_tools.ConvertOptions(architecture="amd64")
    one = sif_tools.convert(f"docker-archive:{archive}", tmp_path / "1.sif", options)
    two = sif_tools.convert(f"oci:{where}", tmp_path / "2.sif", options)
    assert one.inodes == two.inodes
    with open_source(f"docker-archive:{archive}:n:1", "amd64") as source:
        assert source.config.user == "1:2"
        assert source.manifest_digest is None


def test_old_docker_archive(tmp_path: Path) -> None:
    archive = old_archive(tmp_path)
    expected = {b"", b"etc", b"/etc", b"etc/one", b"etc/two"}
    assert names_of(f"docker-archive:{archive}") == expected
    assert names_of(f"docker-archive:{archive}:h.example:5000/c:2") == expected
    with pytest.raises(errors.BadSource) as caught:
        open_source(f"docker-archive:{archive}:a/b", "amd64")
    assert "a/b:1" in str(caught.value.hint)


@pytest.mark.parametrize("has_layers", [True, False])
def test_docker_archive_that_is_a_layout(tmp_path: Path, has_layers: bool) -> None:
    where = layout(tmp_path)
    index = json.loads((where / "index.json").read_text())
    blob = {name.name: name.read_bytes() for name in (where / "blobs/sha256").iterdir()}
    manifest = json.loads(blob[index["manifests"][0]["digest"].partition(":")[2]])
    layers = [f"blobs/sha256/{one['digest'].partition(':')[2]}" for one in manifest["layers"]]
    name = f"blobs/sha256/{manifest['config']['digest'].partition(':')[2]}"
    if not has_layers:
        # What Docker 25.0.0 wrote.
        maker = LayoutMaker(tmp_path / "broken")
        config = maker.json(json.loads(blob[name.rpartition("/")[2]]), "c")
        del manifest["layers"]
        maker.add(maker.json(manifest | {"config": config}, manifest["mediaType"]))
        index = {"schemaVersion": 2, "manifests": maker.listed}
        blob |= {one.name: one.read_bytes() for one in maker.blobs.iterdir()}
        name = f"blobs/sha256/{config['digest'].partition(':')[2]}"
    item = {"Config": name, "RepoTags": ["x:1"], "Layers": layers}
    archive = pack(
        tmp_path / "d.tar",
        {
            **{f"blobs/sha256/{key}": data for key, data in blob.items()},
            "oci-layout": (where / "oci-layout").read_bytes(),
            "index.json": json.dumps(index).encode(),
            "manifest.json": json.dumps([item]).encode(),
        },
    )
    with open_source(f"docker-archive:{archive}", "amd64") as source:
        assert (source.manifest_digest is not None) == has_layers
        assert source.config.user == "1:2"
    assert b"etc/two" in names_of(f"docker-archive:{archive}")


def test_a_layer_of_an_old_archive_is_verified_in_both_passes(tmp_path: Path) -> None:
    archive = old_archive(tmp_path)
    data = archive.read_bytes()
    archive.write_bytes(data.replace(b"1" * 512, b"2" * 512, 1))
    with pytest.raises(errors.DigestMismatch):
        names_of(f"docker-archive:{archive}")
    archive.write_bytes(data)
    with open_source(f"docker-archive:{archive}", "amd64") as source:
        merger = Merger()
        for layer in source.layers:
            merger.index(layer)
        archive.write_bytes(data.replace(b"1" * 512, b"2" * 512, 1))
        with Path("/dev/null").open("wb") as sink, pytest.raises(errors.DigestMismatch):
            merger.emit(TarWriter(sink.fileno()))


@pytest.mark.parametrize(
    "manifest",
    [
        b"{}",
        b"nonsense",
        b"[]",
        b"[1]",
        b'[{"Config": "none.json", "Layers": []}]',
        b'[{"Config": 1, "Layers": []}]',
        b'[{"Config": "c.json", "Layers": ["none", "none", "none"]}]',
        b'[{"Config": "c.json", "Layers": ["loop", "loop", "loop"]}]',
        b'[{"Config": "c.json", "Layers": ["1/layer.tar"]}]',
        b'[{"Config": "c.json", "Layers": "1/layer.tar"}]',
        b"[" * 100_000,
    ],
)
def test_broken_docker_archives(tmp_path: Path, manifest: bytes) -> None:
    archive = old_archive(tmp_path, **{"manifest.json": manifest, "loop": "loop"})
    with pytest.raises((errors.BadLayout, errors.BadSource)):
        open_source(f"docker-archive:{archive}", "amd64")


def test_archives_that_are_none(tmp_path: Path) -> None:
    for scheme in ("oci-archive", "docker-archive"):
        with pytest.raises(errors.ConvertError):
            open_source(f"{scheme}:{tmp_path / 'none'}", "amd64")
        with pytest.raises(errors.ConvertError):
            open_source(f"{scheme}:{tmp_path}", "amd64")
        for data in (b"", b"text" * 1000, tar_bytes([member("a", b"")]), gzip.compress(b"x")):
            (tmp_path / "file").write_bytes(data)
            with pytest.raises(errors.ConvertError):
                open_source(f"{scheme}:{tmp_path / 'file'}", "amd64")


def test_an_archive_that_inflates_without_end(tmp_path: Path) -> None:
    archive = tmp_path / "bomb.tar.gz"
    archive.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(errors.TooLarge):
        open_source(
            f"oci-archive:{archive}", "amd64", SourceOptions(limits=Limits(layer_bytes=1_000_000))
        )


def test_a_sif_packed_anew_is_the_same(tool: Callable[[str], str], tmp_path: Path) -> None:
    tool("tar2sqfs")
    tool("sqfs2tar")
    capability = (0x02000001).to_bytes(4, "little") + (1 << 13).to_bytes(4, "little") + bytes(12)
    tree = tar_bytes(
        [
            member("./", mode=0o751, uid=7, mtime=123),
            member("a", b"1", uid=3_000_000_000, gid=3_000_000_001, mode=0o6755, mtime=4 * 10**9),
            hardlink("b", "a"),
            member(ODD, b"odd"),
            member("/".join(["long" * 40] * 8), b"long"),
            symlink("link", "t" * 300),
            member("null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
            hardlink("dir/null", "null"),
            member("disk", kind=tarfile.BLKTYPE, devmajor=259, devminor=70_000),
            member("pipe", kind=tarfile.FIFOTYPE),
            member("zero", bytes(3 << 20)),
            member(
                "ping",
                b"x",
                pax_headers={
                    "SCHILY.xattr.security.capability": capability.decode("latin-1"),
                    "SCHILY.xattr.user.empty": "",
                },
            ),
        ]
    )
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([(tree, tree)], config={"User": "someone", "Env": ["A=b"]}))
    options = sif_tools.ConvertOptions(architecture="amd64")
    first = sif_tools.convert(f"oci:{maker.finish()}", tmp_path / "1.sif", options)
    gzipped = sif_tools.ConvertOptions(
        architecture="amd64", squashfs=sif_tools.SquashfsOptions(sif_tools.Compression.GZIP)
    )
    second = sif_tools.convert(f"sif:{first.path}", tmp_path / "2.sif", gzipped)
    assert second.inodes == first.inodes
    found = []
    for sif in (first.path, second.path):
        (tmp_path / "s").write_bytes(squashfs_of(sif))
        trees = {entry.path: (entry, data) for entry, data in contents_of(tmp_path / "s")}
        # Made anew: it names the source.
        del trees[b"./.singularity.d/labels.json"]
        found.append(trees)
    assert found[0] == found[1]
    with sif_tools.sources.open.open_source(f"sif:{second.path}", "amd64") as source:
        assert source.config.user == "someone"


def test_sifs_that_cannot_be_packed_anew(tmp_path: Path, vectors: Path) -> None:
    images = vectors / "apptainer+sif/test/images"
    with pytest.raises(errors.NoPrimaryPartition):
        open_source(f"sif:{images / 'empty.sif'}", "amd64")
    with pytest.raises(errors.NotASif):
        (tmp_path / "x").write_text("text")
        open_source(f"sif:{tmp_path / 'x'}", "amd64")
    busybox = vectors / "apptainer+apptainer/e2e/testdata/busybox_arm64.sif"
    with pytest.raises(errors.NoMatchingPlatform):
        open_source(f"sif:{busybox}", "amd64")


def test_a_real_sif(tool: Callable[[str], str], tmp_path: Path, vectors: Path) -> None:
    tool("tar2sqfs")
    unsquashfs = tool("unsquashfs")
    busybox = vectors / "apptainer+apptainer/e2e/testdata/busybox_amd64.sif"
    options = sif_tools.ConvertOptions(architecture="amd64")
    made = sif_tools.convert(f"sif:{busybox}", tmp_path / "b.sif", options)
    listed = []
    for sif in (busybox, made.path):
        (tmp_path / "s").write_bytes(squashfs_of(sif))
        done = subprocess.run(
            [unsquashfs, "-lls", tmp_path / "s"], capture_output=True, check=True, text=True
        )
        listed.append({line for line in done.stdout.splitlines() if "/bin/" in line})
    assert listed[0] == listed[1]
    assert len(listed[0]) > 300


def test_a_damaged_squashfs_is_an_error(tool: Callable[[str], str], tmp_path: Path) -> None:
    tool("tar2sqfs")
    maker = LayoutMaker(tmp_path / "o")
    tree = tar_bytes([member(f"f{number}", b"x" * 100) for number in range(2000)])
    maker.add(maker.image([(tree, tree)]))
    options = sif_tools.ConvertOptions(architecture="amd64", force=True)
    made = sif_tools.convert(f"oci:{maker.finish()}", tmp_path / "1.sif", options)
    primary = sif_tools.primary_partition(sif_tools.read_sif(made.path))
    data = bytearray(made.path.read_bytes())
    start = primary.offset_bytes + 200
    data[start : start + 2000] = b"\xff" * 2000
    (tmp_path / "bad.sif").write_bytes(data)
    with pytest.raises(errors.SifError):
        sif_tools.convert(f"sif:{tmp_path / 'bad.sif'}", tmp_path / "2.sif", options)
