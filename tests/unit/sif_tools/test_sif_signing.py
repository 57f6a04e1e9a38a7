"""Signatures: those of Apptainer's vectors, our own, and every way to change what is signed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sif_tools
from sif_tools import errors
from sif_tools import format as sif_format
from sif_tools.cli import main
from sif_tools.edit import add_object, delete_object, set_primary
from sif_tools.format import DataType, FsType, PartType
from sif_tools.signing import pgp
from sif_tools.signing.sign import sign_sif
from sif_tools.signing.verify import Verification, verify_sif
from sif_tools.writer import DataObject, partition_object, write_sif
from tests.unit.sif_tools import signing_keys

FINGERPRINT = "12045C8C0B1004D058DE4BEDA20C27EE7FF7BA84"


@pytest.fixture(autouse=True)
def _needs_tools(tool: Callable[[str], str]) -> None:
    tool("gpg")
    tool("openssl")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    found = {}
    for name in ("ED25519_PEM", "RSA_PEM", "ECDSA_PEM", "PGP"):
        found[name] = tmp_path / name
        found[name].write_text(getattr(signing_keys, name))
    return found


@pytest.fixture
def signer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A key of our own in a GnuPG home of its own; the agent that gpg starts ends with it."""
    home = tmp_path_factory.mktemp("g")
    home.chmod(0o700)
    before = os.environ.get("GNUPGHOME")
    os.environ["GNUPGHOME"] = str(home)
    try:
        command = ["gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key"]
        subprocess.run([*command, "signer@example.org", "ed25519", "sign"], check=True)
        yield "signer@example.org"
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], check=False)
        if before is None:
            del os.environ["GNUPGHOME"]
        else:
            os.environ["GNUPGHOME"] = before


def make(path: Path) -> Path:
    write_sif(
        path,
        [
            DataObject(DataType.DEFFILE, b"bootstrap: x\n", name="deffile"),
            partition_object(
                bytes(4096),
                fs_type=FsType.SQUASHFS,
                part_type=PartType.PRIMARY_SYSTEM,
                arch="amd64",
            ),
            partition_object(
                b"x" * 5000, fs_type=FsType.RAW, part_type=PartType.SYSTEM, arch="arm64"
            ),
            DataObject(DataType.GENERIC, b"in a group of its own", group_id=2),
        ],
    )
    return path


def vector(vectors: Path, name: str) -> Path:
    return vectors / "apptainer+sif/test/images" / name


@pytest.mark.parametrize("name", ["one-group-signed-pgp.sif", "two-groups-signed-pgp.sif"])
def test_pgp_vectors(vectors: Path, keys: dict[str, Path], name: str) -> None:
    found = verify_sif(vector(vectors, name), pgp_keys=[keys["PGP"]])
    assert found.is_valid
    assert not found.unsigned_objects
    assert {one.signer for one in found.signatures} == {FINGERPRINT}


@pytest.mark.parametrize("name", ["one-group-signed-dsse.sif", "two-groups-signed-dsse.sif"])
@pytest.mark.parametrize("key", ["ED25519_PEM", "RSA_PEM"])
def test_dsse_vectors(vectors: Path, keys: dict[str, Path], name: str, key: str) -> None:
    path = vector(vectors, name)
    assert verify_sif(path, dsse_keys=[keys[key]]).is_valid
    assert verify_sif(path, dsse_keys=[keys["ECDSA_PEM"], keys[key]]).is_valid
    for wrong in ([], [keys["ECDSA_PEM"]]):
        found = verify_sif(path, dsse_keys=wrong)
        assert not found.is_valid
        # Everything but the key is right.
        assert {problem for one in found.signatures for problem in one.problems} <= {
            "the key is not known",
            "no given key made it",
        }


@pytest.mark.parametrize("name", ["legacy", "legacy-all", "legacy-group"])
def test_legacy_vectors(vectors: Path, keys: dict[str, Path], name: str) -> None:
    path = vector(vectors, f"one-group-signed-{name}.sif")
    found = verify_sif(path, pgp_keys=[keys["PGP"]], legacy=True)
    assert all(one.is_valid for one in found.signatures)
    assert found.is_valid == (name != "legacy")  # that one covers one of two objects
    assert not verify_sif(path, pgp_keys=[keys["PGP"]]).is_valid


def test_real_images_are_what_was_signed(vectors: Path, keys: dict[str, Path]) -> None:
    """Their key is nowhere at hand: digests can be compared, nothing is proven."""
    for arch in ("amd64", "arm64", "ppc64le"):
        path = vectors / f"apptainer+apptainer/e2e/testdata/busybox_{arch}.sif"
        found = verify_sif(path, pgp_keys=[keys["PGP"]])
        assert not found.is_valid
        assert [one.problems for one in found.signatures] == [["the key is not known"]]
        assert found.signatures[0].covers == [1, 2, 3, 4]


def test_our_own(tmp_path: Path, signer: str) -> None:
    path = make(tmp_path / "a.sif")
    assert not verify_sif(path).is_valid
    assert sign_sif(path, signer) == [5, 6]
    found = verify_sif(path)
    assert found.is_valid
    assert [one.covers for one in found.signatures] == [[1, 2, 3], [4]]
    exported = tmp_path / "key"
    command = ["gpg", "--batch", "--armor", "--export", signer]
    exported.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    assert verify_sif(path, pgp_keys=[exported]).is_valid


def test_our_own_as_gpg_and_the_format_see_it(tmp_path: Path, signer: str) -> None:
    """The message by gpg alone, the digests by sha256 of ranges that are written out here."""
    path = make(tmp_path / "a.sif")
    sign_sif(path, signer)
    signature = sif_tools.read_sif(path).descriptors[4]
    data = sif_tools.read_object(path, signature, limit_bytes=1 << 20)
    shown = subprocess.run(
        ["gpg", "--batch", "--decrypt"], input=data, capture_output=True, check=True
    )
    node = json.loads(shown.stdout)
    assert list(node) == ["version", "header", "objects"]
    assert [one["relativeId"] for one in node["objects"]] == [0, 1, 2]
    raw = path.read_bytes()

    def digest(*ranges: bytes) -> str:
        command = ["sha256sum"]
        made = subprocess.run(command, input=b"".join(ranges), capture_output=True, check=True)
        return "sha256:" + made.stdout.split()[0].decode()

    assert node["header"]["digest"] == digest(raw[:45], raw[48:64])
    row = raw[4096 : 4096 + 585]
    covered = row[:5] + bytes(4) + row[13:17] + row[25:33] + row[41:49] + row[57:73] + row[73:]
    assert node["objects"][0]["descriptorDigest"] == digest(covered)
    assert node["objects"][0]["objectDigest"] == digest(b"bootstrap: x\n")
    listed = subprocess.run(
        ["gpg", "--batch", "--with-colons", "--list-keys", signer], capture_output=True, check=True
    )
    fingerprint = listed.stdout.split(b"fpr:::::::::")[1].split(b":")[0].decode()
    assert signature.extra[:4] == b"\1\0\0\0"
    assert signature.extra[4:24].hex().upper() == fingerprint
    assert (signature.group_id, signature.linked_group_id) == (0, 1)


def problems(found: Verification) -> str:
    return "; ".join(problem for one in found.signatures for problem in one.problems)


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (0, "header"),  # the launch script
        (48, "header"),  # the UUID
        (4096 + 25, None),  # a size: the SIF itself is broken then, or an object changed
        (4096 + 41, "descriptor of object 1"),  # created
        (4096 + 73, "descriptor of object 1"),  # name
        (4096 + 585 + 201, None),  # a partition's file system type
        (4096 + 585 + 585 + 300, "descriptor of object 3"),  # the rest of extra
        (32176, "object 1 was changed"),
        (32768 + 4000, "object 2 was changed"),
    ],
)
def test_tampering(
    vectors: Path, tmp_path: Path, signer: str, offset: int, said: str | None
) -> None:
    path = make(tmp_path / "a.sif")
    sign_sif(path, signer)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    changed = tmp_path / "b.sif"
    changed.write_bytes(data)
    try:
        found = verify_sif(changed)
    except errors.SifError:
        assert said is None
        return
    assert not found.is_valid
    if said is not None:
        assert said in problems(found)


def test_an_object_added_to_or_taken_from_a_group(tmp_path: Path, signer: str) -> None:
    path = make(tmp_path / "a.sif")
    sign_sif(path, signer)
    shutil.copy(path, tmp_path / "b.sif")
    added = add_object(tmp_path / "b.sif", DataObject(DataType.GENERIC, b"more", group_id=1))
    found = verify_sif(tmp_path / "b.sif")
    assert not found.is_valid
    assert f"object {added} is not covered" in problems(found)
    delete_object(path, 3)
    assert "object 3 is missing" in problems(verify_sif(path))


def test_an_object_outside_of_groups_is_told(tmp_path: Path, signer: str) -> None:
    path = make(tmp_path / "a.sif")
    sign_sif(path, signer)
    added = add_object(path, DataObject(DataType.GENERIC, b"more", group_id=0))
    found = verify_sif(path)
    assert found.is_valid
    assert found.unsigned_objects == [added]


def test_a_group_without_a_signature(tmp_path: Path, signer: str) -> None:
    path = make(tmp_path / "a.sif")
    sign_sif(path, signer, group_id=2)
    found = verify_sif(path)
    assert not found.is_valid
    assert found.unsigned_groups == [1]


def test_a_signature_of_another_file(tmp_path: Path, signer: str) -> None:
    path, other = make(tmp_path / "a.sif"), tmp_path / "other.sif"
    sign_sif(path, signer)
    signature = sif_tools.read_sif(path).descriptors[4]
    stolen = sif_tools.read_object(path, signature, limit_bytes=1 << 20)
    write_sif(other, [DataObject(DataType.GENERIC, b"evil")])
    item = DataObject(
        DataType.SIGNATURE, stolen, group_id=0, linked_group_id=1, extra=signature.extra
    )
    add_object(other, item)
    assert not verify_sif(other).is_valid


@pytest.mark.parametrize("what", ["text", "signature", "before", "twice", "fingerprint"])
def test_a_changed_message(tmp_path: Path, signer: str, what: str) -> None:
    path = make(tmp_path / "a.sif")
    sign_sif(path, signer)
    signature = sif_tools.read_sif(path).descriptors[4]
    data = sif_tools.read_object(path, signature, limit_bytes=1 << 20)
    extra = signature.extra
    if what == "text":
        data = data.replace(b'"version":1', b'"version": 1')
    elif what == "signature":
        head, mark, tail = data.partition(b"-----BEGIN PGP SIGNATURE-----\n\n")
        data = head + mark + tail[:20] + (b"A" if tail[20:21] != b"A" else b"B") + tail[21:]
    elif what == "before":
        data = b"unsigned words\n" + data
    elif what == "twice":
        data = data.replace(b"SHA256", b"SHA256", 1) + data
    else:
        extra = extra[:4] + bytes(20) + extra[24:]
    delete_object(path, 6)
    delete_object(path, 5)
    add_object(
        path,
        DataObject(DataType.SIGNATURE, data, group_id=0, linked_group_id=1, extra=extra),
    )
    found = verify_sif(path)
    assert found.unsigned_groups == [1, 2]
    assert not any(one.is_valid for one in found.signatures)


def test_a_changed_envelope(vectors: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    path = tmp_path / "a.sif"
    shutil.copy(vector(vectors, "one-group-signed-dsse.sif"), path)
    path.chmod(0o644)
    signature = sif_tools.read_sif(path).descriptors[2]
    node = json.loads(sif_tools.read_object(path, signature, limit_bytes=1 << 20))
    payload = json.loads(base64.b64decode(node["payload"]))
    node["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    delete_object(path, 3)
    item = DataObject(
        DataType.SIGNATURE,
        json.dumps(node).encode(),
        group_id=0,
        linked_group_id=1,
        extra=signature.extra,
    )
    add_object(path, item)
    found = verify_sif(path, dsse_keys=[keys["ED25519_PEM"], keys["RSA_PEM"]])
    assert problems(found) == "no given key made it"


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[" * 100_000, b'{"payloadType": "application/vnd.sylabs.sif-metadata+json"}',
     b"-----BEGIN PGP SIGNED MESSAGE-----\n", os.urandom(3000)],
)  # fmt: skip
def test_signatures_that_are_none(tmp_path: Path, keys: dict[str, Path], data: bytes) -> None:
    path = make(tmp_path / "a.sif")
    add_object(path, DataObject(DataType.SIGNATURE, data, group_id=0, linked_group_id=1))
    found = verify_sif(path, pgp_keys=[keys["PGP"]])
    assert not found.is_valid
    assert problems(found)


def test_dashes_are_taken_back() -> None:
    message = b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n- -a\nb\n"
    assert pgp.plain_text(message + b"-----BEGIN PGP SIGNATURE-----\n") == b"-a\nb"


# ── editing ─────────────────────────────────────────────────────────────────────────────────────


def test_edits_keep_everything_else(tmp_path: Path) -> None:
    path = make(tmp_path / "a.sif")
    before = path.read_bytes()
    added = add_object(path, DataObject(DataType.SBOM, b"{}", name="sbom", group_id=1))
    assert added == 5
    sif = sif_tools.read_sif(path)
    assert sif_tools.read_object(path, sif.descriptors[4], limit_bytes=9) == b"{}"
    delete_object(path, 5)
    assert path.read_bytes() == before
    assert (path.stat().st_mode & 0o777) == 0o444
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.sif"]


def test_a_deleted_object_is_gone_from_the_bytes(tmp_path: Path) -> None:
    path = make(tmp_path / "a.sif")
    delete_object(path, 1)
    data = path.read_bytes()
    assert b"bootstrap" not in data
    assert sif_tools.read_sif(path).header.descriptors_free == 45
    assert add_object(path, DataObject(DataType.GENERIC, b"again")) == 1
    with pytest.raises(errors.NoSuchObject):
        delete_object(path, 9)
    delete_object(path, 2)
    assert sif_tools.read_sif(path).header.arch == sif_format.UNKNOWN_ARCH


def test_set_primary(tmp_path: Path) -> None:
    path = make(tmp_path / "a.sif")
    set_primary(path, 3)
    sif = sif_tools.read_sif(path)
    assert sif.primary is not None
    assert (sif.primary.object_id, sif.header.arch) == (3, "arm64")
    assert sif.descriptors[1].part_type == PartType.SYSTEM
    for wrong in (1, 4):
        with pytest.raises(errors.BadObject):
            set_primary(path, wrong)
    extra = partition_object(
        b"x" * 4096, fs_type=FsType.RAW, part_type=PartType.PRIMARY_SYSTEM, arch="amd64"
    )
    with pytest.raises(errors.BadObject):
        add_object(path, extra)


def test_vectors_can_be_edited(vectors: Path, tmp_path: Path, keys: dict[str, Path]) -> None:
    """Old layouts keep their offsets, and other groups' signatures stay valid."""
    path = tmp_path / "a.sif"
    shutil.copy(vector(vectors, "two-groups-signed-pgp.sif"), path)
    add_object(path, DataObject(DataType.GENERIC, b"x", group_id=3))
    found = verify_sif(path, pgp_keys=[keys["PGP"]])
    assert all(one.is_valid for one in found.signatures)
    assert found.unsigned_groups == [3]


def test_the_verbs(
    tmp_path: Path,
    signer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    path, content = make(tmp_path / "a.sif"), tmp_path / "content"
    content.write_bytes(b"content \xff")

    def run(*words: str) -> bytes:
        monkeypatch.setattr("sys.argv", ["sif-tools", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        out = capsysbinary.readouterr().out
        return out if caught.value.code == 0 else b"status %d" % int(str(caught.value.code))

    assert run("verify", str(path)) == b"status 1"
    assert run("add", str(path), str(content), "--type", "generic") == b"5\n"
    assert run("dump", str(path), "5", "--output", str(tmp_path / "out")) == b""
    assert (tmp_path / "out").read_bytes() == b"content \xff"
    assert run("setprim", str(path), "3") == b""
    assert run("del", str(path), "4") == b""
    assert run("del", str(path), "4") == b"status 1"
    assert run("sign", str(path), "--key", signer) == b"4\n"
    assert b"verified" in run("verify", str(path))
    assert json.loads(run("verify", str(path), "--json"))["is_valid"] is True
