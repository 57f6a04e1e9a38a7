"""The Python mirror of protocol.h against what a C compiler makes of that header."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.init import protocol

HEADER_DIR = Path(protocol.__file__).parent

ENUMS = (
    protocol.MsgType,
    protocol.ExecFlag,
    protocol.FileOp,
    protocol.FileFlag,
    protocol.RootFlag,
    protocol.ArchiveFlaw,
    protocol.KillScope,
    protocol.Step,
)
MACROS = (
    "PROTOCOL_VERSION",
    "MSG_MAX",
    "PAYLOAD_MAX",
    "MSG_FDS_MAX",
    "EXECS_MAX",
    "CLIENTS_MAX",
    "CGROUP_V1_MAX",
    "HOST_MOUNTS_MAX",
    "HOST_TARGETS_MAX",
    "PATTERNS_MAX",
    "ENTRY_PATH_MAX",
    "STATUS_FD",
)
# C struct -> (our layout, its fields in order; nested ones are flattened by the layout)
STRUCTS = {
    "msg": (protocol.MSG, ("type", "id", "len", "flags")),
    "zygote_init": (
        protocol.ZYGOTE_INIT,
        (
            *("version", "id", "map_count", "map_last", "filter_len", "no_cgroups"),
            *("token[0]", "token[1]", "caps"),
        ),
    ),
    "zygote_cloned": (protocol.ZYGOTE_CLONED, ("pid", "err")),
    "setup": (
        protocol.SETUP,
        (
            "cgroup_v1_count",
            "shm_bytes_mb",
            "shm_inodes",
            "dev_inodes",
            "pty_max",
            "pending_signals",
            "memlock_kb",
            "msgqueue_kb",
            "sysctl_count",
            "mask_count",
            "readonly_count",
        ),
    ),
    "exec_req": (protocol.EXEC_REQ, ("argc", "envc", "nofile", "umask", "tty_size")),
    "file_req": (
        protocol.FILE_REQ,
        (
            "op",
            "flags",
            "mode",
            "depth",
            "offset",
            "length",
            "entries",
            "size_min",
            "size_max",
            "mtime_min_ns",
            "mtime_max_ns",
            "types",
            "include_count",
            "exclude_count",
            "reserved",
        ),
    ),
    "file_entry": (
        protocol.FILE_ENTRY,
        (
            "err",
            "mode",
            "uid",
            "gid",
            "nlink",
            "path_len",
            "target_len",
            "reserved",
            "size",
            "inode",
            "mtime_ns",
        ),
    ),
    "kill_req": (protocol.KILL_REQ, ("signal", "scope")),
    "socket_req": (protocol.SOCKET_REQ, ("family",)),
    "failure": (protocol.FAILURE, ("step", "index", "err", "reserved")),
    "started": (protocol.STARTED, ("pid", "cgroup")),
    "exited": (
        protocol.EXITED,
        (
            "failure.step",
            "failure.index",
            "failure.err",
            "failure.reserved",
            "status",
            "mode",
            "uid",
            "gid",
            "size",
            "mtime_ns",
            "user_us",
            "system_us",
            "maxrss_kb",
        ),
    ),
}


@pytest.fixture(scope="module")
def from_c(tmp_path_factory):
    """What the compiler says: ``{expression: number}``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    names = [member.name for enum in ENUMS for member in enum] + list(MACROS)
    expressions = [*names]
    for struct, (_, fields) in STRUCTS.items():
        expressions.append(f"sizeof(struct {struct})")
        expressions += [f"offsetof(struct {struct}, {field})" for field in fields]
        expressions += [f"sizeof(((struct {struct} *)0)->{field})" for field in fields]
    prints = "\n".join(f'printf("%s=%lld\\n", "{e}", (long long)({e}));' for e in expressions)
    source = tmp_path_factory.mktemp("protocol") / "print.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n"
        f'#include "protocol.h"\nint main(void) {{\n{prints}\nreturn 0;\n}}\n'
    )
    program = source.with_suffix("")
    subprocess.run(
        [compiler, "-std=gnu11", f"-I{HEADER_DIR}", "-o", program, source], check=True, timeout=60
    )
    out = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    return {key: int(value) for key, value in (line.split("=") for line in out.splitlines())}


def test_every_number_is_that_of_the_header(from_c):
    ours = {member.name: int(member) for enum in ENUMS for member in enum}
    ours |= {name: getattr(protocol, name) for name in MACROS}
    assert ours == {name: from_c[name] for name in ours}


def test_no_step_is_missing_in_between():
    assert [int(step) for step in protocol.Step] == list(range(len(protocol.Step)))


@pytest.mark.parametrize("name", STRUCTS)
def test_every_layout_is_that_of_the_compiler(from_c, name):
    layout, fields = STRUCTS[name]
    assert layout.size == from_c[f"sizeof(struct {name})"]
    codes = "".join(
        code * int(count or 1) for count, code in re.findall(r"(\d*)([IiQq])", layout.format)
    )
    assert len(codes) == len(fields)
    offset = 0
    for field, code in zip(fields, codes, strict=True):
        size = 4 if code in "Ii" else 8
        assert from_c[f"offsetof(struct {name}, {field})"] == offset, field
        assert from_c[f"sizeof(((struct {name} *)0)->{field})"] == size, field
        offset += size
    assert offset == layout.size


@given(st.binary(max_size=300))
def test_unpack_takes_any_bytes_or_refuses_them(data):
    try:
        message = protocol.unpack(data)
    except protocol.ProtocolError:
        return
    assert len(message.payload) == len(data) - protocol.MSG.size
    for reader in (protocol.unpack_failure, protocol.unpack_started, protocol.unpack_exited):
        try:
            reader(message.payload)
        except protocol.ProtocolError:
            continue


def test_strings_with_nul_or_surrogates_are_refused():
    assert protocol.cstrings(("a", "", "ü")) == b"a\0\0\xc3\xbc\0"
    assert protocol.cstrings(()) == b""
    for bad in ("a\0b", "\ud800"):
        with pytest.raises(ValueError):
            protocol.cstrings((bad,))


def test_a_message_above_the_limit_is_not_packed():
    protocol.pack(protocol.MsgType.M_EXEC, 1, b"x" * (protocol.MSG_MAX - protocol.MSG.size))
    with pytest.raises(ValueError):
        protocol.pack(protocol.MsgType.M_EXEC, 1, b"x" * protocol.MSG_MAX)


def test_fds_cross_and_are_close_on_exec():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        read_fd, write_fd = os.pipe()
        protocol.send(ours, protocol.pack(protocol.MsgType.M_FILE, 7, b"x", 3), (write_fd,))
        os.close(write_fd)
        data, fds = protocol.receive(theirs)
        assert protocol.unpack(data) == protocol.Message(protocol.MsgType.M_FILE, 7, b"x", 3)
        assert [os.get_inheritable(fd) for fd in fds] == [False]
        os.write(fds[0], b"through")
        protocol.close_fds(fds)
        assert os.read(read_fd, 100) == b"through"
        os.close(read_fd)


def test_more_fds_than_allowed_are_closed_not_kept():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        read_fd, write_fd = os.pipe()
        protocol.send(ours, b"m" * 16, [write_fd] * (protocol.MSG_FDS_MAX + 1))
        os.close(write_fd)
        with pytest.raises(protocol.ProtocolError):
            protocol.receive(theirs)
        # The end of the pipe shows that no copy of the other end is left.
        assert os.read(read_fd, 1) == b""
        os.close(read_fd)
