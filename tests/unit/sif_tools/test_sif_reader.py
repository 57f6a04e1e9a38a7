"""The parser against 31 real files, and against what is wrong with a file in every single way."""

from __future__ import annotations

import os
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import sif_tools
from sif_tools import errors
from sif_tools import format as sif_format

# Counted by hand from the vectors' own descriptor tables (with a hex dump, not with this parser).
OBJECTS = {
    "empty": 0,
    "empty-id": 0,
    "empty-launch-script": 0,
    "one-group": 2,
    "one-group-signed-dsse": 3,
    "one-group-signed-legacy": 3,
    "one-group-signed-legacy-all": 4,
    "one-group-signed-legacy-group": 3,
    "one-group-signed-pgp": 3,
    "one-object-crypt-message": 1,
    "one-object-generic-json": 1,
    "one-object-oci-blob": 1,
    "one-object-oci-root-index": 1,
    "one-object-sbom": 1,
    "one-object-time": 1,
    "two-groups": 3,
    "two-groups-signed-dsse": 5,
    "two-groups-signed-legacy": 4,
    "two-groups-signed-legacy-all": 5,
    "two-groups-signed-legacy-group": 4,
    "two-groups-signed-pgp": 5,
    "busybox_amd64": 5,
    "busybox_arm64": 5,
    "busybox_ppc64le": 5,
}


def all_vectors(vectors: Path) -> list[Path]:
    found = sorted(vectors.rglob("*.sif"))
    assert len(found) == 31
    return found


def busybox(vectors: Path, arch: str = "amd64") -> Path:
    return vectors / "apptainer+apptainer" / "e2e" / "testdata" / f"busybox_{arch}.sif"


def test_every_vector_parses_with_its_number_of_objects(vectors: Path) -> None:
    for path in all_vectors(vectors):
        sif = sif_tools.read_sif(path)
        assert len(sif.descriptors) == OBJECTS[path.stem], path
        assert sif.file_size_bytes == path.stat().st_size


def test_busybox_header_and_descriptors(vectors: Path) -> None:
    sif = sif_tools.read_sif(busybox(vectors))
    assert sif.header.launch_script == b"#!/usr/bin/env run-singularity\n"
    assert sif.header.arch == "amd64"
    assert sif.header.created_s == 1627931376
    assert [one.type_name for one in sif.descriptors] == [
        "deffile",
        "json",
        "json",
        "partition",
        "signature",
    ]
    assert sif.descriptors[4].linked_group_id == 1
    assert sif.descriptors[4].group_id == 0
    assert sif.primary is not None
    assert (sif.primary.offset_bytes, sif.primary.size_bytes) == (45056, 745472)


def test_an_fd_is_read_without_moving_it(vectors: Path) -> None:
    with busybox(vectors).open("rb") as file:
        file.seek(77)
        sif = sif_tools.read_sif(file.fileno())
        config = sif_tools.image_config(sif, file.fileno())
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 77
    assert config.cmd == ("sh",)
    assert config.env == ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
    assert config.entrypoint == ()
    assert config.labels == {}


def test_labels_of_an_apptainer_build(vectors: Path) -> None:
    sif = sif_tools.read_sif(busybox(vectors))
    labels = sif_tools.image_labels(sif, busybox(vectors))
    assert labels["org.label-schema.build-arch"] == "amd64"
    assert labels["org.label-schema.usage.singularity.version"] == "3.8.1"


def test_config_defaults_where_there_is_none(vectors: Path) -> None:
    path = vectors / "apptainer+sif" / "test" / "images" / "one-group.sif"
    config = sif_tools.image_config(sif_tools.read_sif(path), path)
    assert [one.partition("=")[0] for one in config.env] == ["PATH"]
    assert config.cmd == ()


def test_the_right_machine_may_mount_busybox(vectors: Path) -> None:
    for arch, machine, size in (
        ("amd64", "x86_64", 745472),
        ("arm64", "aarch64", 794624),
        ("ppc64le", "ppc64le", 2568192),
    ):
        path = busybox(vectors, arch)
        part = sif_tools.mountable_partition(sif_tools.read_sif(path), path, machine)
        assert part.size_bytes == size
        assert part.superblock.compression == "gzip"


def test_partition_facts_agree_with_unsquashfs(vectors: Path) -> None:
    part = sif_tools.mountable_partition(
        sif_tools.read_sif(busybox(vectors)), busybox(vectors), "x86_64"
    )
    block = part.superblock
    # unsquashfs -o 45056 -s: "Filesystem size 744412 bytes", "Number of inodes 55"
    assert (block.bytes_used, block.inodes, block.block_size_bytes) == (744412, 55, 131072)


@pytest.mark.parametrize(
    ("arch", "machine"),
    [("amd64", "aarch64"), ("arm64", "x86_64"), ("ppc64le", "x86_64"), ("amd64", "vax")],
)
def test_other_architectures_are_refused(vectors: Path, arch: str, machine: str) -> None:
    path = busybox(vectors, arch)
    with pytest.raises(errors.WrongArchitecture) as caught:
        sif_tools.mountable_partition(sif_tools.read_sif(path), path, machine)
    assert arch in caught.value.message


def test_no_other_vector_is_mountable_on_amd64(vectors: Path) -> None:
    """Empty ones have no partition, old ones have junk for one, the rest are made for 386."""
    seen = set()
    for path in all_vectors(vectors):
        if path.stem == "busybox_amd64":
            continue
        with pytest.raises(sif_tools.SifError) as caught:
            sif_tools.mountable_partition(sif_tools.read_sif(path), path, "x86_64")
        seen.add(caught.value.code)
    assert seen == {"no-primary-partition", "bad-squashfs", "wrong-architecture"}


def test_junk_partitions_are_valid_sifs_and_bad_squashfs(vectors: Path) -> None:
    junk = vectors / "apptainer+apptainer" / "test" / "images" / "one-group.sif"
    with pytest.raises(errors.BadSquashfs):
        sif_tools.mountable_partition(sif_tools.read_sif(junk), junk, "i686")


# ── one thing wrong at a time ───────────────────────────────────────────────────────────────────


def put(offset: int, form: str, *values: int | bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into(form, data, offset, *values)

    return change


def both(
    one: Callable[[bytearray], None], other: Callable[[bytearray], None]
) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        one(data)
        other(data)

    return change


def descriptor(index: int, field: int) -> int:
    return 4096 + 585 * index + field


WRONG_STRUCTURE: dict[str, tuple[Callable[[bytearray], None], type[errors.SifError]]] = {
    "magic": (put(32, "<10s", b"SIF_MAGIK\0"), errors.NotASif),
    "version": (put(42, "<3s", b"02\0"), errors.UnsupportedVersion),
    "negative count": (put(88, "<q", -1), errors.BadSif),
    "huge count": (put(88, "<q", 1 << 60), errors.BadSif),
    "count and size disagree": (put(88, "<q", 47), errors.BadSif),
    "more free than there are": (put(80, "<q", 49), errors.BadSif),
    "negative free": (put(80, "<q", -1), errors.BadSif),
    "huge table": (put(104, "<q", 1 << 62), errors.BadSif),
    "table past the end": (put(96, "<q", 1 << 40), errors.BadSif),
    "table at the largest offset": (put(96, "<q", (1 << 63) - 1), errors.BadSif),
    "negative table offset": (put(96, "<q", -4096), errors.BadSif),
    "table inside the header": (put(96, "<q", 64), errors.BadSif),
    "data inside the table": (put(112, "<q", 4096), errors.BadSif),
    "data past the end": (put(120, "<q", 1 << 40), errors.BadSif),
    "negative data size": (put(120, "<q", -1), errors.BadSif),
    "object past the end": (put(descriptor(3, 25), "<q", 1 << 40), errors.BadSif),
    "object at the largest offset": (put(descriptor(3, 17), "<q", (1 << 63) - 1), errors.BadSif),
    "negative object offset": (put(descriptor(3, 17), "<q", -1), errors.BadSif),
    "negative object size": (put(descriptor(3, 25), "<q", -1), errors.BadSif),
    "object inside the table": (put(descriptor(0, 17), "<q", 8192), errors.BadSif),
    "objects overlap": (put(descriptor(0, 25), "<q", 5000), errors.BadSif),
    "same id twice": (put(descriptor(1, 5), "<I", 1), errors.BadSif),
    "id zero": (put(descriptor(1, 5), "<I", 0), errors.BadSif),
    "partition arch is not the header's": (put(45, "<3s", b"04\0"), errors.BadSif),
    "two primary partitions": (
        both(
            put(descriptor(0, 0), "<i", 0x4004),
            put(descriptor(0, 201), "<ii3s", 1, 2, b"02\0"),
        ),
        errors.BadSif,
    ),
}


@pytest.mark.parametrize("what", WRONG_STRUCTURE)
def test_wrong_structure_is_refused(vectors: Path, tmp_path: Path, what: str) -> None:
    change, error = WRONG_STRUCTURE[what]
    data = bytearray(busybox(vectors).read_bytes())
    change(data)
    path = tmp_path / "wrong.sif"
    path.write_bytes(data)
    with pytest.raises(error):
        sif_tools.read_sif(path)


SUPERBLOCK = 45056
WRONG_PARTITION: dict[str, tuple[Callable[[bytearray], None], type[errors.SifError]]] = {
    "ext3": (put(descriptor(3, 201), "<i", 2), errors.UnsupportedPartition),
    "encrypted": (put(descriptor(3, 201), "<i", 5), errors.UnsupportedPartition),
    "unknown file system": (put(descriptor(3, 201), "<i", 99), errors.UnsupportedPartition),
    "not primary": (put(descriptor(3, 205), "<i", 1), errors.NoPrimaryPartition),
    "too small": (put(descriptor(3, 25), "<q", 2047), errors.BadSquashfs),
    "magic": (put(SUPERBLOCK, "<4s", b"sqsh"), errors.BadSquashfs),
    "no inodes": (put(SUPERBLOCK + 4, "<I", 0), errors.BadSquashfs),
    "block size zero": (put(SUPERBLOCK + 12, "<I", 0), errors.BadSquashfs),
    "block size no power of two": (put(SUPERBLOCK + 12, "<I", 131073), errors.BadSquashfs),
    "block log alone": (put(SUPERBLOCK + 22, "<H", 16), errors.BadSquashfs),
    "block too large": (
        both(put(SUPERBLOCK + 12, "<I", 1 << 21), put(SUPERBLOCK + 22, "<H", 21)),
        errors.BadSquashfs,
    ),
    "compression": (put(SUPERBLOCK + 20, "<H", 7), errors.BadSquashfs),
    "version": (put(SUPERBLOCK + 28, "<H", 3), errors.BadSquashfs),
    "longer than its partition": (put(SUPERBLOCK + 40, "<Q", 745473), errors.BadSquashfs),
    "bytes used nothing": (put(SUPERBLOCK + 40, "<Q", 0), errors.BadSquashfs),
    "inode table outside": (put(SUPERBLOCK + 64, "<Q", 1 << 50), errors.BadSquashfs),
}


@pytest.mark.parametrize("what", WRONG_PARTITION)
def test_wrong_partition_parses_and_is_not_mountable(
    vectors: Path, tmp_path: Path, what: str
) -> None:
    change, error = WRONG_PARTITION[what]
    data = bytearray(busybox(vectors).read_bytes())
    change(data)
    path = tmp_path / "wrong.sif"
    path.write_bytes(data)
    sif = sif_tools.read_sif(path)
    with pytest.raises(error):
        sif_tools.mountable_partition(sif, path, "x86_64")


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(errors.Unreadable):
        sif_tools.read_sif(tmp_path / "nothing.sif")
    with pytest.raises(errors.NotASif):
        sif_tools.read_sif(tmp_path)
    with pytest.raises(errors.Unreadable):
        sif_tools.read_sif("a\0b")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(errors.NotASif):
        sif_tools.read_sif(tmp_path / "fifo")
    (tmp_path / "short").write_bytes(b"x" * 127)
    with pytest.raises(errors.NotASif):
        sif_tools.read_sif(tmp_path / "short")
    with pytest.raises(errors.Unreadable):
        sif_tools.read_sif(1 << 20)


@pytest.mark.parametrize(
    "config",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"Env": "PATH"}',
        b'{"Env": [1]}',
        b'{"Cmd": {}}',
        b'{"User": 0}',
        b'{"User": "a\\u0000b"}',
        b'{"Labels": {"a": 1}}',
        b'{"n": ' + b"9" * 10_000 + b"}",
    ],
)
def test_wrong_config_is_a_named_error(tmp_path: Path, config: bytes) -> None:
    path = tmp_path / "a.sif"
    sif_tools.write_sif(
        path,
        [sif_tools.DataObject(sif_format.DataType.JSON, config, name="oci-config.json")],
    )
    with pytest.raises(errors.BadImageConfig):
        sif_tools.image_config(sif_tools.read_sif(path), path)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.sif"
    content = b" " * (5 << 20)
    sif_tools.write_sif(
        path, [sif_tools.DataObject(sif_format.DataType.JSON, content, name="oci-config.json")]
    )
    with pytest.raises(errors.BadSif):
        sif_tools.image_config(sif_tools.read_sif(path), path)


def test_mutated_vectors_raise_nothing_but_sif_errors(vectors: Path, tmp_path: Path) -> None:
    """Bytes of header, table and superblock changed at random; seeds make a failure repeatable.

    SANDBOXD_TESTS_FUZZ_ITERATIONS: how many in all.
    """
    wanted = int(os.environ.get("SANDBOXD_TESTS_FUZZ_ITERATIONS", "100000"))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = tmp_path / "mutated.sif"
    interesting = (0, 1, 0x7F, 0x80, 0xFF)
    outcomes = {"parsed": 0, "refused": 0}
    for source in all_vectors(vectors):
        original = source.read_bytes()[:65536]
        with path.open("w+b") as file:
            for seed in range(-(-wanted // len(all_vectors(vectors)))):
                dice = random.Random(f"{source.name} {seed}")
                data = bytearray(original)
                for _ in range(dice.randint(1, 8)):
                    span = dice.choice(((32, 128), (4096, 4096 + 585 * 6), (0, len(data))))
                    data[dice.randrange(*span)] = dice.choice((*interesting, dice.randrange(256)))
                if dice.random() < 0.2:
                    del data[dice.randrange(len(data)) :]
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), data, 0)
                try:
                    sif = sif_tools.read_sif(file.fileno())
                    sif_tools.image_config(sif, file.fileno())
                    sif_tools.image_labels(sif, file.fileno())
                    sif_tools.mountable_partition(sif, file.fileno(), "x86_64")
                    outcomes["parsed"] += 1
                except sif_tools.SifError:
                    outcomes["refused"] += 1
    assert sum(outcomes.values()) >= wanted
    assert outcomes["refused"] > wanted / 4
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 64 * 1024
