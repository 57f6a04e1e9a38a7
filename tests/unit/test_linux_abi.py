"""Numbers, sizes and offsets of `sandboxd.linux` against the C headers, by compiling them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from sandboxd.linux import capabilities, mount, namespaces, pidfd, process
from sandboxd.linux.probes import mounts, processes


def evaluate(tmp_path: Path, headers: list[str], expressions: list[str]) -> dict[str, int]:
    """What the C compiler makes of each expression."""
    lines = ["#define _GNU_SOURCE", "#include <stddef.h>", "#include <stdio.h>"]
    lines += [f"#include <{header}>" for header in headers]
    lines += ["int main(void) {"]
    lines += [f'  printf("%lld\\n", (long long)({expression}));' for expression in expressions]
    lines += ["  return 0;", "}"]
    source, program = tmp_path / "values.c", tmp_path / "values"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-o", program, source], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(expressions, map(int, output.split()), strict=True))


def constants(module: object, *prefixes: str) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith(prefixes) and isinstance(value, int)
    }


# UMOUNT_* are of sys/mount.h, which does not go together with linux/mount.h.
@pytest.mark.parametrize(
    ("headers", "ours"),
    [
        (
            ["fcntl.h", "linux/mount.h"],
            constants(
                mount, "MS_", "OPEN_TREE_", "MOVE_MOUNT_", "FSOPEN_", "FSMOUNT_", "MOUNT_ATTR_"
            ),
        ),
        (["linux/mount.h"], constants(mount, "FSCONFIG_")),
        (["fcntl.h"], constants(mount, "AT_")),
        (["sys/mount.h"], constants(mount, "MNT_", "UMOUNT_")),
        (["linux/sched.h"], constants(namespaces, "CLONE_")),
        (["linux/sched.h"], constants(process, "CLONE_")),
        (["linux/capability.h"], constants(capabilities, "CAP_")),
        (["linux/securebits.h"], constants(capabilities, "SECBIT_")),
        (["linux/prctl.h"], constants(capabilities, "PR_")),
        (["linux/fuse.h"], {"FUSE_INIT": mounts.FUSE_INIT}),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_constants_are_those_of_the_headers(tmp_path, headers, ours):
    assert ours
    assert evaluate(tmp_path, headers, list(ours)) == ours


def test_capability_names_are_at_their_numbers(tmp_path):
    names = [*capabilities.NAMES, "CAP_LAST_CAP"]
    found = evaluate(tmp_path, ["linux/capability.h"], names)
    assert [found[name] for name in capabilities.NAMES] == list(range(len(capabilities.NAMES)))
    assert found["CAP_LAST_CAP"] == len(capabilities.NAMES) - 1


@pytest.mark.parametrize(
    ("structure", "name", "header"),
    [
        (mount.MountAttr, "struct mount_attr", "linux/mount.h"),
        (process.CloneArgs, "struct clone_args", "linux/sched.h"),
        (capabilities.CapHeader, "struct __user_cap_header_struct", "linux/capability.h"),
        (capabilities.CapData, "struct __user_cap_data_struct", "linux/capability.h"),
    ],
)
def test_structures_are_laid_out_as_in_c(tmp_path, structure, name, header):
    fields = [field[0] for field in structure._fields_]
    offsets = {f"offsetof({name}, {field})": getattr(structure, field).offset for field in fields}
    expected = {f"sizeof({name})": ctypes.sizeof(structure), **offsets}
    assert evaluate(tmp_path, [header], list(expected)) == expected


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (mounts.FUSE_IN_HEADER, "struct fuse_in_header"),
        (mounts.FUSE_OUT_HEADER, "struct fuse_out_header"),
        (mounts.FUSE_INIT_OUT, "struct fuse_init_out"),
    ],
)
def test_fuse_messages_have_the_size_of_c(tmp_path, ours, name):
    assert evaluate(tmp_path, ["linux/fuse.h"], [f"sizeof({name})"]) == {
        f"sizeof({name})": ours.size
    }


def test_system_call_numbers(tmp_path):
    ours: dict[str, int] = {}
    for module in (mount, process, pidfd, processes):
        ours |= constants(module, "NR_")
    expected = {f"SYS_{name.removeprefix('NR_').lower()}": nr for name, nr in ours.items()}
    assert len(expected) == 10
    assert evaluate(tmp_path, ["sys/syscall.h"], list(expected)) == expected
