"""OCI layouts: what is chosen, what is verified, and what is refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sif_tools import errors
from sif_tools.merge.merger import Merger
from sif_tools.oci.descriptor import parse_descriptor
from sif_tools.sources.open import open_source
from tests.unit.sif_tools.image_factories import LayoutMaker, member, sha256, tar_bytes

TAR = tar_bytes([member("a", b"1")])
LAYER = (TAR, gzip.compress(TAR))


def platform(arch: str, variant: str | None = None, os: str = "linux") -> dict[str, Any]:
    node = {"os": os, "architecture": arch}
    if variant:
        node["variant"] = variant
    return {"platform": node}


def index_everything(reference: str, arch: str = "amd64") -> None:
    merger = Merger()
    for layer in open_source(reference, arch).layers:
        merger.index(layer)


def test_by_tag(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "a:b")  # a colon in the name is no tag
    one = maker.image([LAYER], config={"User": "one"})
    two = maker.image([LAYER], config={"User": "two"})
    maker.add(one, "1")
    maker.add(two, "2")
    where = maker.finish()
    assert open_source(f"oci:{where}:1", "amd64").manifest_digest == one["digest"]
    assert open_source(f"oci:{where}:2", "amd64").config.user == "two"
    with pytest.raises(errors.BadSource) as caught:
        open_source(f"oci:{where}:3", "amd64")
    assert "1, 2" in str(caught.value.hint)
    with pytest.raises(errors.BadSource) as caught:
        open_source(f"oci:{where}", "amd64")
    assert ":1, :2" in str(caught.value.hint)


def test_tags_as_other_tools_write_them(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    one = maker.image([LAYER])
    maker.add(one, "registry.example/library/name:1.2")
    where = maker.finish()
    found = open_source(f"oci:{where}:registry.example/library/name:1.2", "amd64")
    assert found.manifest_digest == one["digest"]
    assert open_source(f"oci:{where}", "amd64").manifest_digest == one["digest"]


def test_a_platform_out_of_nested_indexes(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    images = {arch: maker.image([LAYER], arch=arch) for arch in ("amd64", "arm64", "arm")}
    attestation = maker.image([], arch="unknown") | platform("unknown", os="unknown")
    inner = maker.index(
        [
            attestation,
            images["arm64"] | platform("arm64", "v8"),
            images["amd64"] | platform("amd64"),
        ]
    )
    other = maker.index([images["arm"] | platform("arm", "v6")])
    maker.add(maker.index([other, inner]), "x")
    where = maker.finish()
    for arch in ("amd64", "arm64", "arm", "arm/v6"):
        source = open_source(f"oci:{where}:x", arch)
        assert source.manifest_digest == images[arch.partition("/")[0]]["digest"]
    for arch in ("riscv64", "arm/v7"):
        with pytest.raises(errors.NoMatchingPlatform):
            open_source(f"oci:{where}:x", arch)


def test_the_config_decides_where_the_index_does_not_say(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([LAYER], arch="arm64"))
    where = maker.finish()
    assert open_source(f"oci:{where}", "arm64").architecture == "arm64"
    with pytest.raises(errors.NoMatchingPlatform) as caught:
        open_source(f"oci:{where}", "amd64")
    assert "arm64" in caught.value.message


def test_an_index_that_contains_itself_ends(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    nested = maker.index([])
    for _ in range(20):
        nested = maker.index([nested])
    maker.add(nested)
    with pytest.raises(errors.BadLayout):
        open_source(f"oci:{maker.finish()}", "amd64")


def test_config_is_kept(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    config = {
        "Env": ["PATH=/bin", "A=b"],
        "Cmd": ["c"],
        "Entrypoint": ["e"],
        "WorkingDir": "/w",
        "User": "1:2",
        "Labels": {"k": "v"},
    }
    maker.add(maker.image([LAYER], config=config))
    found = open_source(f"oci:{maker.finish()}", "amd64").config
    assert (found.env, found.cmd, found.entrypoint) == (("PATH=/bin", "A=b"), ("c",), ("e",))
    assert (found.working_dir, found.user, found.labels) == ("/w", "1:2", {"k": "v"})


def test_digests_are_verified(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    descriptor = maker.image([LAYER])
    maker.add(descriptor)
    where = maker.finish()
    index_everything(f"oci:{where}")
    manifest = maker.blobs / descriptor["digest"].partition(":")[2]
    original = manifest.read_bytes()
    manifest.write_bytes(original.replace(b"2", b"3", 1))
    with pytest.raises(errors.DigestMismatch):
        open_source(f"oci:{where}", "amd64")
    manifest.write_bytes(original + b" ")
    with pytest.raises(errors.DigestMismatch):
        open_source(f"oci:{where}", "amd64")
    manifest.unlink()
    with pytest.raises(errors.BadLayout):
        open_source(f"oci:{where}", "amd64")


@pytest.mark.parametrize("damage", ["flip", "cut", "append", "other"])
def test_a_damaged_layer_is_a_digest_mismatch_and_named(tmp_path: Path, damage: str) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([LAYER, LAYER]))
    blob = maker.blobs / sha256(LAYER[1]).partition(":")[2]
    data = bytearray(LAYER[1])
    if damage == "flip":
        data[len(data) // 2] ^= 0xFF
    elif damage == "cut":
        del data[-5:]
    elif damage == "append":
        data += bytes(3)
    else:
        data = bytearray(gzip.compress(tar_bytes([member("a", b"2")])))
    blob.write_bytes(data)
    with pytest.raises(errors.DigestMismatch) as caught:
        index_everything(f"oci:{maker.finish()}")
    assert caught.value.layer is not None
    assert caught.value.layer.startswith("layer 1 (sha256:")


def test_a_wrong_diff_id(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([LAYER], diff_ids=[sha256(b"")]))
    with pytest.raises(errors.DigestMismatch):
        index_everything(f"oci:{maker.finish()}")


def test_a_layer_that_is_no_tar_is_not_blamed_on_its_digest(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([(b"text" * 1000, b"text" * 1000)]))
    with pytest.raises(errors.BadLayer):
        index_everything(f"oci:{maker.finish()}")


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:" + "../" * 21 + "a",
        "sha256:" + "A" * 64,
        "md5:" + "0" * 32,
        "sha256:" + "0" * 64 + "\n",
        "sha256:",
        7,
        None,
    ],
)
def test_digests_become_file_names_only_if_they_are_digests(digest: Any) -> None:
    with pytest.raises(errors.BadLayout):
        parse_descriptor({"digest": digest, "size": 1})


@pytest.mark.parametrize("size", [-1, "1", None, True, 1.5])
def test_sizes_are_sizes(size: Any) -> None:
    with pytest.raises(errors.BadLayout):
        parse_descriptor({"digest": sha256(b""), "size": size})


@pytest.mark.parametrize(
    "change",
    [
        {"oci-layout": "{}"},
        {"oci-layout": "nonsense"},
        {"index.json": "[]"},
        {"index.json": '{"manifests": 1}'},
        {"index.json": '{"manifests": [1]}'},
        {"index.json": "[" * 100_000},
        {"index.json": '{"manifests": []}'},
    ],
)
def test_broken_layouts(tmp_path: Path, change: dict[str, str]) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([LAYER]))
    where = maker.finish()
    for name, text in change.items():
        (where / name).write_text(text)
    with pytest.raises((errors.BadLayout, errors.NoMatchingPlatform)):
        open_source(f"oci:{where}", "amd64")


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "amd64", "os": "linux"},
        {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": []}},
        {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": ["x"]}},
        {"architecture": "amd64", "os": "windows", "rootfs": {"diff_ids": [sha256(TAR)]}},
        {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"diff_ids": [sha256(TAR)]},
            "config": {"Env": 1},
        },
    ],
)
def test_broken_configs(tmp_path: Path, config: dict[str, Any]) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(
        maker.json(
            {"config": maker.json(config, "c"), "layers": [maker.blob(LAYER[1], "l")]},
            "application/vnd.oci.image.manifest.v1+json",
        )
    )
    with pytest.raises((errors.BadLayout, errors.NoMatchingPlatform)):
        open_source(f"oci:{maker.finish()}", "amd64")


@pytest.mark.parametrize(
    "reference", ["", "x", "oci:", "rootfs:", "oci:{}/none", "rootfs:{}/none", "foo:bar"]
)
def test_sources_that_are_none(tmp_path: Path, reference: str) -> None:
    with pytest.raises(errors.BadSource):
        open_source(reference.format(tmp_path), "amd64")


def test_an_architecture_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(errors.BadSource) as caught:
        open_source(f"rootfs:{tmp_path}", "pdp11")
    assert "amd64" in str(caught.value.hint)


def test_media_types_are_not_trusted(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "o")
    maker.add(maker.image([(TAR, TAR)]))  # stored plain, labelled gzip
    index_everything(f"oci:{maker.finish()}")
    assert json.loads((tmp_path / "o" / "index.json").read_text())
