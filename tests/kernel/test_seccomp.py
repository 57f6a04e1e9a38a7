"""The filters in the kernel: what reaches it, what does not, and squashfuse_ll served under one.

A probe has harmless arguments. Without the filter it gets as far as the kernel's own complaint
(EBADF, EFAULT, EINVAL …), which is the positive control; with it, the filter's answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyseccomp
import pytest

from sandboxd.linux import seccomp
from sandboxd.linux.seccomp import FUSE_SERVER_PROFILE, SANDBOX_PROFILE, SyscallToken
from tests.framework import times

pytestmark = pytest.mark.needs("seccomp")

MINUS_1 = 2**64 - 1
PR_SET_NO_NEW_PRIVS = 38

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = (ctypes.c_long, *[ctypes.c_ulong] * 6)
libc.syscall.restype = ctypes.c_long
libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def raw(name: str, *args: int) -> int:
    """The errno of a system call made with all six registers; 0 if it succeeds."""
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    ctypes.set_errno(0)
    result = libc.syscall(number, *args, *[0] * (6 - len(args)))
    return ctypes.get_errno() if result == -1 else 0


def in_child(probe: Callable[[], int], bpf: bytes | None = None) -> int:
    """``probe()`` in a forked child, under ``bpf`` if it is given; -signal if that ended it."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if bpf is not None:
                libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                seccomp.load(bpf)
            os.write(writable, str(probe()).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(answer)


@pytest.fixture(scope="module")
def sandbox_filter() -> bytes:
    return seccomp.compile_profile(SANDBOX_PROFILE)


@pytest.fixture(scope="module")
def fuse_filter() -> bytes:
    return seccomp.compile_profile(FUSE_SERVER_PROFILE)


# --- the token -------------------------------------------------------------------------------

TOKEN = SyscallToken.draw()
# Name, first arguments, what the kernel itself says to them, what the filter says.
EXEMPT = [
    ("clone3", (0, 0), errno.EINVAL, errno.ENOSYS),
    ("move_mount", (MINUS_1, 0, MINUS_1, 0, 0xFFFFFFFF), errno.EINVAL, errno.EPERM),
    ("pivot_root", (0, 0), errno.EFAULT, errno.EPERM),
    ("sethostname", (0, 65), errno.EINVAL, errno.EPERM),
    ("umount2", (0, 0x7FFFFFFF), errno.EINVAL, errno.EPERM),
]


def with_token(args: tuple[int, ...], low: int, high: int) -> tuple[int, ...]:
    """``args`` and the token, as far as ``args`` leave it room."""
    if len(args) == 5:
        return (*args, high)
    return (*args, *[0] * (4 - len(args)), low, high)


@pytest.mark.needs("root")
@pytest.mark.parametrize(("name", "args", "reached", "denied"), EXEMPT)
def test_token_reaches_the_kernel_and_nothing_less_does(name, args, reached, denied):
    bpf = seccomp.compile_profile(SANDBOX_PROFILE, TOKEN)
    tries = {
        "with the token": (with_token(args, TOKEN.low, TOKEN.high), reached),
        "without": (args, denied),
        "high half, lowest bit flipped": (with_token(args, TOKEN.low, TOKEN.high ^ 1), denied),
        "high half, bit 32 flipped": (with_token(args, TOKEN.low, TOKEN.high ^ 1 << 32), denied),
        "high half, top bit flipped": (with_token(args, TOKEN.low, TOKEN.high ^ 1 << 63), denied),
    }
    if len(args) < 5:
        for bit in (0, 31, 32, 63):
            flipped = with_token(args, TOKEN.low ^ 1 << bit, TOKEN.high)
            tries[f"low half, bit {bit} flipped"] = (flipped, denied)
    assert in_child(lambda: raw(name, *args)) == reached, "positive control"
    for what, (registers, expected) in tries.items():
        assert in_child(lambda r=registers: raw(name, *r), bpf) == expected, what


@pytest.mark.parametrize(("name", "args", "reached", "denied"), EXEMPT)
def test_token_is_worth_nothing_to_a_filter_without_it(name, args, reached, denied, sandbox_filter):
    registers = with_token(args, TOKEN.low, TOKEN.high)
    assert in_child(lambda: raw(name, *registers), sandbox_filter) == denied


# --- what a sandbox may not ------------------------------------------------------------------

# Name, arguments, what the kernel says without the filter.
REFUSED = [
    ("mount", (0, 0, 0, 0, 0), errno.EFAULT),
    ("fsopen", (0, 0xFFFF), errno.EINVAL),
    ("fsconfig", (MINUS_1, 0, 0, 0, 0), errno.EINVAL),
    ("fsmount", (MINUS_1, 0, 0), errno.EBADF),
    ("fspick", (MINUS_1, 0, 0xFFFF), errno.EINVAL),
    ("open_tree", (MINUS_1, 0, 0x7FFFFFFF), errno.EINVAL),
    ("mount_setattr", (MINUS_1, 0, 0x7FFFFFFF, 0, 0), errno.EINVAL),
    ("setns", (MINUS_1, 0), errno.EBADF),
    ("unshare", (0x10000001,), errno.EINVAL),
    ("clone", (0x10000200,), errno.EINVAL),  # CLONE_NEWUSER | CLONE_FS
    ("bpf", (MINUS_1, 0, 0), errno.EINVAL),
    ("perf_event_open", (0, 0, 0, 0, 0), errno.EFAULT),
    ("userfaultfd", (0x7FFFFFFF,), errno.EINVAL),
    ("io_uring_setup", (0, 0), errno.EFAULT),
    ("keyctl", (0xFFFF,), errno.EOPNOTSUPP),
    ("add_key", (0, 0, 0, 0), errno.EFAULT),
    ("open_by_handle_at", (MINUS_1, 0, 0), errno.EFAULT),
    ("kexec_load", (0, 0, 0, 0x7FFFFFFF), errno.EINVAL),
    ("init_module", (0, 0, 0), errno.ENOEXEC),
    ("finit_module", (MINUS_1, 0, 0xFFFF), errno.EINVAL),
    ("delete_module", (0, 0), errno.EFAULT),
    ("reboot", (0, 0, 0, 0), errno.EINVAL),
    ("swapon", (0, 0x7FFFFFFF), errno.EINVAL),
    ("acct", (1,), errno.EFAULT),
    ("quotactl", (0x7FFFFFFF, 0, 0, 0), errno.EINVAL),
    ("syslog", (0xFFFF, 0, 0), errno.EINVAL),
    ("clock_settime", (0, 0), errno.EFAULT),
    ("clock_adjtime", (0, 0), errno.EFAULT),
    ("settimeofday", (1, 0), errno.EFAULT),
    ("ioctl", (MINUS_1, 0x5412), errno.EBADF),
    ("ioctl", (MINUS_1, 0x5412 | 1 << 32), errno.EBADF),
    ("ioctl", (MINUS_1, 0x541C), errno.EBADF),
    ("fanotify_init", (0x7FFFFFFF, 0), errno.EINVAL),
]
NOT_BUILT_IN = {errno.ENOSYS, errno.EOPNOTSUPP}


@pytest.mark.needs("root")
@pytest.mark.parametrize(("name", "args", "reached"), REFUSED)
def test_dangerous_call_does_not_reach_the_kernel(name, args, reached, sandbox_filter):
    control = in_child(lambda: raw(name, *args))
    assert control in {reached, *NOT_BUILT_IN}, "positive control"
    assert in_child(lambda: raw(name, *args), sandbox_filter) == errno.EPERM


# AF_ALG, AF_VSOCK, AF_PACKET, AF_XDP, raw IP, netlink netfilter: type 15 is EINVAL to the kernel.
@pytest.mark.parametrize("family", [38, 40, 17, 44, 2, 16])
def test_socket_of_another_sort_does_not_reach_the_kernel(family, sandbox_filter):
    args = (family, 15, 12)
    assert in_child(lambda: raw("socket", *args)) == errno.EINVAL, "positive control"
    assert in_child(lambda: raw("socket", *args), sandbox_filter) == errno.EAFNOSUPPORT


def entry_i386() -> int:
    """getpid by ``int $0x80``: mov $20, %eax; int $0x80; ret."""
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(bytes.fromhex("b814000000 cd80 c3"))
        buffer = ctypes.c_char.from_buffer(page)
        result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(buffer))()
        del buffer
    return 0 if result > 0 else -result


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int $0x80 is an x86 instruction")
def test_i386_entry_point_is_refused(sandbox_filter):
    if in_child(entry_i386) == -signal.SIGSEGV:
        pytest.skip("this kernel has no i386 entry point (CONFIG_IA32_EMULATION)")
    assert in_child(entry_i386) == 0, "positive control"
    assert in_child(entry_i386, sandbox_filter) == errno.ENOSYS


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 belongs to x86-64")
def test_x32_entry_point_is_refused(sandbox_filter):
    def probe() -> int:
        return ctypes.get_errno() if libc.syscall(0x40000000 | 39, *[0] * 6) == -1 else 0

    assert in_child(probe, sandbox_filter) == errno.ENOSYS


# --- what a sandbox may ----------------------------------------------------------------------

ALLOWED = [
    ("ptrace", (MINUS_1, MINUS_1), errno.ESRCH),
    ("process_vm_readv", (MINUS_1, 0, 0, 0, 0, 1), errno.EINVAL),
    ("prctl", (38, 1, 0, 0, 0), 0),
    ("personality", (0x40000,), 0),  # ADDR_NO_RANDOMIZE, gdb
    ("personality", (0xFFFFFFFF,), 0),
    ("unshare", (0x200,), 0),  # CLONE_FS
    ("sync", (), 0),
    ("socket", (1, 0x80001, 0), 0),
    ("socket", (2, 0x80001, 6), 0),
    ("socket", (10, 0x80002, 17), 0),
    ("socket", (16, 0x80003, 0), 0),
    ("ioctl", (MINUS_1, 0x5413), errno.EBADF),  # TIOCGWINSZ
    ("name_to_handle_at", (MINUS_1, 0, 0, 0, 0), errno.EFAULT),
]


@pytest.mark.parametrize(("name", "args", "expected"), ALLOWED)
def test_needed_call_reaches_the_kernel(name, args, expected, sandbox_filter):
    assert in_child(lambda: raw(name, *args)) == expected
    assert in_child(lambda: raw(name, *args), sandbox_filter) == expected


LAUNCHER = """
import ctypes, os, sys
from sandboxd.linux import seccomp
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
seccomp.load(open(sys.argv[1], "rb").read())
os.execv(sys.argv[2], sys.argv[2:])
"""


PATH_TO_US = {**os.environ, "PYTHONPATH": str(Path(seccomp.__file__).parents[2])}


def under(bpf_file: Path, program: str, *args: str) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, str(bpf_file), program, *args]


@pytest.fixture
def sandbox_filter_file(tmp_path: Path, sandbox_filter: bytes) -> Path:
    path = tmp_path / "sandbox.bpf"
    path.write_bytes(sandbox_filter)
    return path


def test_filter_is_inherited_through_exec(sandbox_filter_file):
    command = under(
        sandbox_filter_file, "/bin/sh", "-c", "grep -E 'Seccomp|NoNew' /proc/self/status"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=PATH_TO_US)
    status = dict(line.split(":\t") for line in done.stdout.splitlines())
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    # Since Linux 5.9.
    assert status.get("Seccomp_filters", "1") == "1"


WORK = """
import concurrent.futures, multiprocessing, os, socket, subprocess, tempfile, threading
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
with concurrent.futures.ProcessPoolExecutor(2) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
assert subprocess.check_output(["/bin/sh", "-c", "echo | cat; exit 0"]) == b"\\n"
assert multiprocessing.get_context("spawn").Semaphore(1).acquire()
a, b = socket.socketpair(); a.sendall(b"x"); assert b.recv(1) == b"x"
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
socket.if_nameindex(); socket.getaddrinfo("localhost", 1)
with tempfile.TemporaryDirectory() as scratch:
    os.mkfifo(scratch + "/fifo"); os.symlink("x", scratch + "/link"); os.sync()
print("done")
"""


def test_python_with_processes_threads_and_sockets(sandbox_filter_file):
    command = under(sandbox_filter_file, sys.executable, "-c", WORK)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=PATH_TO_US)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_load_needs_no_new_privs_or_the_capability(sandbox_filter):
    def probe() -> int:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        try:
            seccomp.load(sandbox_filter)
        except OSError as exc:
            return exc.errno
        return 0

    assert in_child(probe) == errno.EACCES


def test_load_refuses_what_is_no_program():
    def probe() -> int:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        try:
            seccomp.load(b"")
        except OSError as exc:
            return exc.errno
        return 0

    assert in_child(probe) == errno.EINVAL


# --- the squashfs server ---------------------------------------------------------------------

FUSE_REFUSED = [
    ("socket", (1, 1, 0), errno.ENOSYS),
    ("ptrace", (0,), errno.ENOSYS),
    ("process_vm_readv", (0,), errno.ENOSYS),
    ("mount", (0, 0, 0, 0, 0), errno.ENOSYS),
    ("umount2", (0, 0), errno.EPERM),
    ("unshare", (0,), errno.ENOSYS),
    ("clone", (signal.SIGCHLD,), errno.EPERM),
    ("clone", (0x10010000,), errno.EPERM),
    ("clone3", (0, 0), errno.ENOSYS),
    ("kill", (MINUS_1, 0), errno.EPERM),
    ("tgkill", (1, 1, 0), errno.EPERM),
    ("unlinkat", (MINUS_1, 0, 0), errno.ENOSYS),
    ("openat", (MINUS_1, 0, os.O_WRONLY), errno.EPERM),
    ("openat", (MINUS_1, 0, os.O_RDWR), errno.EPERM),
    ("openat", (MINUS_1, 0, os.O_RDONLY | os.O_CREAT), errno.EPERM),
    ("openat", (MINUS_1, 0, os.O_RDONLY | os.O_TRUNC), errno.EPERM),
    ("openat", (MINUS_1, 0, os.O_TMPFILE), errno.EPERM),
    ("openat", (MINUS_1, 0, os.O_RDONLY | os.O_CLOEXEC), errno.EFAULT),
    ("prlimit64", (0, 7, 1, 0), errno.EPERM),
    ("prctl", (4, 1), errno.EPERM),  # PR_SET_DUMPABLE
]


@pytest.mark.parametrize(("name", "args", "expected"), FUSE_REFUSED)
def test_squashfs_server_may_not(name, args, expected, fuse_filter):
    assert in_child(lambda: raw(name, *args), fuse_filter) == expected


SERVE = """
import ctypes, os, subprocess, sys
bpf, image, mountpoint, server, launcher = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)
def checked(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
CLONE_NEWNS, MS_PRIVATE_REC, MS_RDONLY_NOSUID_NODEV = 0x20000, 0x44000, 7
checked(libc.unshare(CLONE_NEWNS))
checked(libc.mount(None, b"/", None, MS_PRIVATE_REC, None))
fuse, source = os.open("/dev/fuse", os.O_RDWR), os.open(image, os.O_RDONLY)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
checked(libc.mount(b"image", mountpoint.encode(), b"fuse", MS_RDONLY_NOSUID_NODEV, options))
command = [server, "-f", f"/proc/self/fd/{source}", f"/dev/fd/{fuse}"]
process = subprocess.Popen(
    [sys.executable, "-c", launcher, bpf, *command], pass_fds=(fuse, source)
)
os.close(fuse)
os.chdir(mountpoint)
assert sorted(os.listdir(".")) == ["directory", "large", "link", "small"], os.listdir(".")
assert open("small").read() == "text"
assert open("large", "rb").read() == bytes(range(256)) * 4096
assert os.readlink("link") == "small"
assert len(os.listdir("directory")) == 200
assert os.listxattr("small") in (["user.name"], [])
assert os.statvfs(".").f_blocks > 0
try:
    os.open("small", os.O_WRONLY)
except OSError as exc:
    assert exc.strerror == "Read-only file system"
else:
    raise AssertionError("written")
os.chdir("/")
checked(libc.umount2(mountpoint.encode(), 0))
print("served", process.wait(200))
"""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("content")
    (root / "small").write_text("text")
    (root / "large").write_bytes(bytes(range(256)) * 4096)
    (root / "link").symlink_to("small")
    (root / "directory").mkdir()
    for number in range(200):
        (root / "directory" / str(number)).touch()
    # Below Linux 6.6 a tmpfs has no user xattrs; the rest is still worth serving.
    with contextlib.suppress(OSError):
        os.setxattr(root / "small", "user.name", b"value")
    return root


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("compressor", ["gzip", "lz4", "xz", "zstd"])
def test_squashfuse_serves_under_its_filter(compressor, content, fuse_filter, tmp_path):
    image, mountpoint, bpf = tmp_path / "image", tmp_path / "mnt", tmp_path / "fuse.bpf"
    mountpoint.mkdir()
    bpf.write_bytes(fuse_filter)
    pack = ["mksquashfs", content, image, "-comp", compressor, "-quiet", "-no-progress"]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    server = shutil.which("squashfuse_ll")
    assert server is not None
    done = subprocess.run(
        [sys.executable, "-c", SERVE, bpf, image, mountpoint, server, LAUNCHER],
        capture_output=True,
        text=True,
        check=False,
        timeout=times.scaled(60),
        env=PATH_TO_US,
    )
    assert (done.returncode, done.stdout) == (0, "served 0\n"), done.stderr
