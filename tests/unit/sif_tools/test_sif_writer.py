"""The writer against files that the reference implementation wrote, byte for byte."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import sif_tools
from sif_tools import errors
from sif_tools.format import DataType, FsType, PartType


def reference(vectors: Path, name: str) -> bytes:
    return (vectors / "apptainer+sif" / "test" / "images" / f"{name}.sif").read_bytes()


def groups(vectors: Path) -> list[sif_tools.DataObject]:
    """The objects of the reference's own test corpus: see its `gen_sifs.go`."""
    squashfs = (vectors / "apptainer+sif" / "test" / "input" / "root.squashfs").read_bytes()
    return [
        sif_tools.partition_object(
            b"\xfa\xce\xfe\xed", fs_type=FsType.RAW, part_type=PartType.SYSTEM, arch="386"
        ),
        sif_tools.partition_object(
            squashfs, fs_type=FsType.SQUASHFS, part_type=PartType.PRIMARY_SYSTEM, arch="386"
        ),
    ]


def write(path: Path, objects: list[sif_tools.DataObject]) -> bytes:
    size = sif_tools.write_sif(path, objects, launch_script=b"")
    data = path.read_bytes()
    assert size == len(data)
    return data


def test_empty(vectors: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "a.sif", []) == reference(vectors, "empty")


def test_one_group(vectors: Path, tmp_path: Path) -> None:
    assert write(tmp_path / "a.sif", groups(vectors)) == reference(vectors, "one-group")


def test_two_groups(vectors: Path, tmp_path: Path) -> None:
    expected = reference(vectors, "two-groups")
    third = sif_tools.partition_object(
        expected[40960:],
        fs_type=FsType.EXT3,
        part_type=PartType.SYSTEM,
        arch="amd64",
        group_id=2,
    )
    assert write(tmp_path / "a.sif", [*groups(vectors), third]) == expected


def test_json_object(vectors: Path, tmp_path: Path) -> None:
    item = sif_tools.DataObject(DataType.JSON, b"{}", name="data.json")
    expected = reference(vectors, "one-object-generic-json")
    assert write(tmp_path / "a.sif", [item]) == expected


def test_content_from_a_file_is_the_same_as_from_memory(vectors: Path, tmp_path: Path) -> None:
    raw, primary = groups(vectors)
    assert isinstance(primary.content, bytes)
    (tmp_path / "body").write_bytes(b"skipped" + primary.content)
    with (tmp_path / "body").open("rb") as file:
        content = sif_tools.FileContent(file.fileno(), 7, len(primary.content))
        streamed = sif_tools.partition_object(
            content, fs_type=FsType.SQUASHFS, part_type=PartType.PRIMARY_SYSTEM, arch="386"
        )
        assert write(tmp_path / "a.sif", [raw, streamed]) == reference(vectors, "one-group")


def test_published_read_only_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a.sif"
    sif_tools.write_sif(path, [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert os.listdir(tmp_path) == ["a.sif"]
    assert path.stat().st_nlink == 1


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a.sif"
    path.write_bytes(b"mine")
    with pytest.raises(errors.DestinationExists):
        sif_tools.write_sif(path, [])
    assert path.read_bytes() == b"mine"
    sif_tools.write_sif(path, [], force=True)
    assert sif_tools.read_sif(path).descriptors == ()
    assert os.listdir(tmp_path) == ["a.sif"]


def test_failures_are_named_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(errors.WriteFailed):
        sif_tools.write_sif(tmp_path / "no" / "a.sif", [])
    with pytest.raises(errors.BadObject):
        item = sif_tools.DataObject(DataType.GENERIC, b"", name="n" * 128)
        sif_tools.write_sif(tmp_path / "a.sif", [item])
    (tmp_path / "short").write_bytes(b"x")
    with (tmp_path / "short").open("rb") as file, pytest.raises(errors.BadObject):
        content = sif_tools.FileContent(file.fileno(), 0, 10)
        sif_tools.write_sif(tmp_path / "a.sif", [sif_tools.DataObject(DataType.GENERIC, content)])
    assert os.listdir(tmp_path) == ["short"]


def test_more_objects_than_the_default_table(tmp_path: Path) -> None:
    items = [
        sif_tools.DataObject(DataType.GENERIC, bytes([index]), name=f"n{index}")
        for index in range(60)
    ]
    sif_tools.write_sif(tmp_path / "a.sif", items)
    sif = sif_tools.read_sif(tmp_path / "a.sif")
    assert sif.header.descriptors_total == 60
    assert [
        sif_tools.read_object(tmp_path / "a.sif", one, limit_bytes=1) for one in sif.descriptors
    ] == [bytes([index]) for index in range(60)]
