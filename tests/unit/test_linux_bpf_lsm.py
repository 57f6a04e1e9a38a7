"""Where the kernel's own description of its types says that the hook's name is."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from sandboxd.linux import bpf_lsm
from sandboxd.linux.id_ranges import IdRange

# Kinds of <linux/btf.h>.
INT, PTR, STRUCT, ENUM, FUNC, PROTO = 1, 2, 4, 6, 12, 13
HOOK = "bpf_lsm_inode_setxattr"


def btf(hook: str, arguments: list[str]) -> bytes:
    """A description in which types of other sizes come before the hook."""
    names = b"\0"
    places: dict[str, int] = {}
    for name in ("int", "some", "member", "other", hook, *arguments):
        places[name] = len(names)
        names += name.encode() + b"\0"
    types = struct.pack("=IIII", places["int"], INT << 24, 4, 32)
    types += struct.pack("=III", 0, PTR << 24, 1)
    types += struct.pack("=IIIIII", places["some"], STRUCT << 24 | 1, 4, places["member"], 1, 0)
    types += struct.pack("=IIIII", places["other"], ENUM << 24 | 1, 4, places["member"], 7)
    types += struct.pack("=III", 0, PROTO << 24 | len(arguments), 1)
    for name in arguments:
        types += struct.pack("=II", places[name], 2)
    types += struct.pack("=III", places[hook], FUNC << 24, 5)
    header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(names))
    return header + types + names


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["dentry", "name", "value", "size", "flags"], 1),
        (["mnt_userns", "dentry", "name", "value", "size", "flags"], 2),
    ],
)
def test_the_name_is_found_where_a_kernel_has_it(arguments: list[str], place: int) -> None:
    assert bpf_lsm._hook(btf(HOOK, arguments)) == (6, place)


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (btf("bpf_lsm_inode_getxattr", ["name"]), errno.ENOENT),
        (btf(HOOK, ["dentry"]), errno.ENOENT),
        (b"\xeb\x9f" + bytes(30), errno.EINVAL),  # of the other byte order
    ],
)
def test_what_has_no_such_hook_is_refused(content: bytes, number: int) -> None:
    with pytest.raises(OSError) as raised:
        bpf_lsm._hook(content)
    assert raised.value.errno == number


def test_a_kernel_without_types_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bpf_lsm, "BTF", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        bpf_lsm.refuse_security_attributes(IdRange(1, 1))
