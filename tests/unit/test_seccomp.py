"""The compiled filters, run by a classic BPF interpreter against a plain reading of the JSON."""

from __future__ import annotations

import errno
import json
import re
import struct
from pathlib import Path

import pyseccomp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxd.linux import seccomp
from sandboxd.linux.seccomp import (
    FUSE_SERVER_PROFILE,
    SANDBOX_PROFILE,
    VIEW_SERVER_PROFILE,
    ProfileError,
    SyscallToken,
)

NATIVE = pyseccomp.system_arch()
I386 = 0x40000003  # AUDIT_ARCH_I386, <linux/audit.h>
ALLOW = 0x7FFF0000
ENOSYS = 0x00050000 | errno.ENOSYS
EPERM = 0x00050000 | errno.EPERM
TOKEN = SyscallToken(0x0123456789ABCDEF, 0xFEDCBA9876543210)
PROFILES = pytest.mark.parametrize(
    "path", [SANDBOX_PROFILE, FUSE_SERVER_PROFILE, VIEW_SERVER_PROFILE], ids=lambda p: p.stem
)

# fmt: off
DANGEROUS = [
    "acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module",
    "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl",
    "kexec_file_load", "kexec_load", "keyctl", "migrate_pages", "mount", "mount_setattr",
    "move_mount", "move_pages", "open_by_handle_at", "open_tree", "perf_event_open",
    "pivot_root", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname",
    "sethostname", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2",
    "userfaultfd", "vhangup",
]
# fmt: on


def interpret(program: bytes, number: int, args: tuple[int, ...] = (), arch: int = NATIVE) -> int:
    """What the kernel does with the program (bpf(4) of the BSDs; seccomp reads words only)."""
    args = (*args, *[0] * (6 - len(args)))
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *args)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator = position = 0
    while True:
        code, jt, jf, k = instructions[position]
        position += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x54:
                accumulator &= k
            case 0x05:
                position += k
            case 0x15:
                position += jt if accumulator == k else jf
            case 0x25:
                position += jt if accumulator > k else jf
            case 0x35:
                position += jt if accumulator >= k else jf
            case 0x06:
                return k
            case _:
                raise AssertionError(f"instruction {code:#x}")


COMPARE = {
    "SCMP_CMP_NE": lambda arg, one, two: arg != one,
    "SCMP_CMP_LT": lambda arg, one, two: arg < one,
    "SCMP_CMP_LE": lambda arg, one, two: arg <= one,
    "SCMP_CMP_EQ": lambda arg, one, two: arg == one,
    "SCMP_CMP_GE": lambda arg, one, two: arg >= one,
    "SCMP_CMP_GT": lambda arg, one, two: arg > one,
    "SCMP_CMP_MASKED_EQ": lambda arg, one, two: arg & one == two,
}


def answer(name: str, errno_ret: int = 1) -> int:
    return ALLOW if name == "SCMP_ACT_ALLOW" else 0x00050000 | errno_ret


def read_plainly(profile: dict, name: str, args: tuple[int, ...]) -> int:
    args = (*args, *[0] * (6 - len(args)))
    groups = [group for group in profile["syscalls"] if name in group["names"]]
    for group in sorted(groups, key=lambda group: not group.get("args")):
        if all(
            COMPARE[arg["op"]](args[arg["index"]], arg["value"], arg.get("valueTwo", 0))
            for arg in group.get("args", [])
        ):
            return answer(group["action"], group.get("errnoRet", 1))
    return answer(profile["defaultAction"], profile.get("defaultErrnoRet", 1))


def known_syscalls() -> dict[str, int]:
    found = {}
    for number in range(600):
        try:
            found[pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, number).decode()] = number
        except ValueError:
            continue
    return found


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def number_of(name: str) -> int:
    return pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)


def interesting_arguments(profile: dict, name: str) -> list[tuple[int, ...]]:
    """Zeros, ones, and each value a rule of ``name`` mentions, a bit either side and above 32."""
    found = [(0,) * 6, (2**64 - 1,) * 6]
    for group in profile["syscalls"]:
        if name not in group["names"] or not group.get("args"):
            continue
        hit = [0] * 6
        for arg in group["args"]:
            hit[arg["index"]] = arg.get("valueTwo", arg["value"])
        found.append(tuple(hit))
        for arg in group["args"]:
            for bit in (0, 1, 4, 7, 16, 17, 28, 31, 32, 63):
                near = list(hit)
                near[arg["index"]] ^= 1 << bit
                found.append(tuple(near))
    return found


# --- the profiles ----------------------------------------------------------------------------


@PROFILES
def test_every_group_has_its_reason(path):
    assert all(len(group["comment"]) >= 8 for group in load(path)["syscalls"])


@PROFILES
def test_no_name_has_two_answers(path):
    names = [n for group in load(path)["syscalls"] if "args" not in group for n in group["names"]]
    assert sorted(names) == sorted(set(names))


@PROFILES
@pytest.mark.parametrize("optimize", [seccomp.LINEAR, seccomp.BINARY_TREE])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_program_says_what_the_profile_says(path, optimize, token):
    profile = load(path)
    program = seccomp.compile_profile(path, token, optimize)
    for name, number in known_syscalls().items():
        for args in interesting_arguments(profile, name):
            assert interpret(program, number, args) == read_plainly(profile, name, args), (
                name,
                args,
            )


def test_every_system_call_libseccomp_knows_is_decided_on_purpose():
    decided = {name for group in load(SANDBOX_PROFILE)["syscalls"] for name in group["names"]}
    assert set(known_syscalls()) <= decided


def test_every_system_call_of_the_headers_is_decided_on_purpose():
    headers = [
        path
        for path in Path("/usr/include").glob("*/asm/unistd_64.h")
        if pyseccomp.system_arch() == pyseccomp.Arch.X86_64
    ]
    if not headers:
        pytest.skip("no asm/unistd_64.h for this machine (package linux-libc-dev)")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", headers[0].read_text()))
    decided = {name for group in load(SANDBOX_PROFILE)["syscalls"] for name in group["names"]}
    # What comes after 471 gets the default until someone has thought about it.
    missing = {name for name, number in numbers.items() if int(number) <= 471} - decided
    assert not missing


# Some exist on x86-64 only (ioperm, iopl), where alone they have a number.
@pytest.mark.parametrize("name", [name for name in DANGEROUS if number_of(name) >= 0])
def test_dangerous_calls_get_eperm(name):
    assert interpret(seccomp.compile_profile(SANDBOX_PROFILE), number_of(name)) == EPERM


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        (0x00000011, True),  # fork: SIGCHLD
        (0x003D0F00, True),  # pthread_create
        (0x00004111, True),  # vfork, posix_spawn
        (0x00020000, False),  # CLONE_NEWNS
        (0x02000000, False),  # CLONE_NEWCGROUP
        (0x04000000, False),  # CLONE_NEWUTS
        (0x08000000, False),  # CLONE_NEWIPC
        (0x10000000, False),  # CLONE_NEWUSER
        (0x20000000, False),  # CLONE_NEWPID
        (0x40000000, False),  # CLONE_NEWNET
        (0x1_10000000, False),
    ],
)
def test_clone_by_its_flags(flag, allowed):
    program = seccomp.compile_profile(SANDBOX_PROFILE)
    assert interpret(program, number_of("clone"), (flag,)) == (ALLOW if allowed else EPERM)
    assert interpret(program, number_of("clone3"), (flag,)) == ENOSYS


# <bits/socket.h>, <linux/netlink.h>, <netinet/in.h>
@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ((1, 1, 0), True),  # AF_UNIX
        ((1, 0x80805, 0), True),  # SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC
        ((2, 1, 6), True),
        ((10, 0x80802, 0), True),
        ((2, 2, 1), True),  # ICMP echo
        ((10, 2, 58), True),  # ICMPv6 echo
        ((16, 3, 0), True),  # NETLINK_ROUTE
        ((16, 3, 4), False),  # NETLINK_SOCK_DIAG
        ((16, 3, 9), False),  # NETLINK_AUDIT
        ((16, 3, 12), False),  # NETLINK_NETFILTER
        ((2, 3, 1), False),  # SOCK_RAW
        ((2, 1, 132), False),  # SCTP
        ((2, 5, 0), False),
        ((2, 6, 33), False),  # DCCP
        ((10, 1, 262), False),  # MPTCP
        ((2, 1, 256), False),  # SMC
        ((17, 3, 0), False),  # AF_PACKET
        ((29, 3, 1), False),  # AF_CAN
        ((30, 1, 0), False),  # AF_TIPC
        ((38, 5, 0), False),  # AF_ALG
        ((40, 1, 0), False),  # AF_VSOCK
        ((44, 3, 0), False),  # AF_XDP
    ],
)
def test_sockets_by_family_type_and_protocol(args, allowed):
    program = seccomp.compile_profile(SANDBOX_PROFILE)
    refused = 0x00050000 | errno.EAFNOSUPPORT
    assert interpret(program, number_of("socket"), args) == (ALLOW if allowed else refused)


@pytest.mark.parametrize("command", [0x5412, 0x541C, 0x541D, 0x5423])
def test_terminal_injection_is_refused_whatever_the_upper_half_holds(command):
    program = seccomp.compile_profile(SANDBOX_PROFILE)
    for high in (0, 1 << 32, 0xFFFFFFFF << 32):
        assert interpret(program, number_of("ioctl"), (0, command | high)) == EPERM
    assert interpret(program, number_of("ioctl"), (0, 0x5413)) == ALLOW  # TIOCGWINSZ


def test_foreign_entry_points_are_refused_before_arguments_count():
    program = seccomp.compile_profile(SANDBOX_PROFILE, TOKEN)
    shown = (0, 0, 0, 0, TOKEN.low, TOKEN.high)
    for number in range(600):
        assert interpret(program, number, shown, arch=I386) == ENOSYS
        assert interpret(program, 0x40000000 | number, shown) == ENOSYS


@pytest.mark.parametrize("number", [470, 5000, 2**31 - 1, 2**32 - 1])
def test_unknown_calls_get_enosys(number):
    assert interpret(seccomp.compile_profile(SANDBOX_PROFILE), number) == ENOSYS


# --- the token -------------------------------------------------------------------------------

EXEMPT = [
    ("clone3", ENOSYS),
    ("move_mount", EPERM),
    ("pivot_root", EPERM),
    ("sethostname", EPERM),
    ("umount2", EPERM),
]


@pytest.mark.parametrize("optimize", [seccomp.LINEAR, seccomp.BINARY_TREE])
@pytest.mark.parametrize(("name", "denied"), EXEMPT)
def test_token_opens_the_exempt_calls(name, denied, optimize):
    program = seccomp.compile_profile(SANDBOX_PROFILE, TOKEN, optimize)
    number = number_of(name)
    assert interpret(program, number, (1, 2, 3, 4, TOKEN.low, TOKEN.high)) == ALLOW
    assert interpret(program, number) == denied
    for bit in range(64):
        high = TOKEN.high ^ 1 << bit
        assert interpret(program, number, (1, 2, 3, 4, TOKEN.low, high)) == denied
        low = TOKEN.low ^ 1 << bit
        # move_mount(2) has its flags in the fifth argument.
        expected = ALLOW if name == "move_mount" else denied
        assert interpret(program, number, (1, 2, 3, 4, low, TOKEN.high)) == expected


def test_token_opens_nothing_else():
    plain = seccomp.compile_profile(SANDBOX_PROFILE)
    program = seccomp.compile_profile(SANDBOX_PROFILE, TOKEN)
    shown = (0, 0, 0, 0, TOKEN.low, TOKEN.high)
    opened = {
        name
        for name, number in known_syscalls().items()
        if interpret(program, number, shown) != interpret(plain, number, shown)
    }
    assert opened == {name for name, _ in EXEMPT}


def test_token_keeps_to_itself_and_is_never_what_idle_registers_hold():
    assert f"{TOKEN.low}" not in repr(TOKEN)
    assert f"{TOKEN.high}" not in repr(TOKEN)
    assert SyscallToken.draw() != SyscallToken.draw()
    for low, high in ((0, 1), (1, 0), (2**64, 1), (1, -1)):
        with pytest.raises(ValueError):
            SyscallToken(low, high)


# --- profiles of users -----------------------------------------------------------------------


def profile_of(*groups: dict, default: str = "SCMP_ACT_ERRNO", **more: object) -> dict:
    return {
        "defaultAction": default,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": list(groups),
        **more,
    }


def group(action: str = "SCMP_ACT_ALLOW", names: object = ("read",), **more: object) -> dict:
    return {"names": list(names), "action": action, **more}


def arg(**more: object) -> dict:
    return {"index": 0, "value": 1, "op": "SCMP_CMP_EQ", **more}


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ([], "an object is expected"),
        (profile_of(listenerPath="/x"), "unknown key 'listenerPath'"),
        ({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}, "'architectures' is missing"),
        (profile_of(default="SCMP_ACT_PERMIT"), "unknown action 'SCMP_ACT_PERMIT'"),
        (profile_of(group("SCMP_ACT_NOTIFY")), "SCMP_ACT_NOTIFY is not supported"),
        (profile_of(group("SCMP_ACT_LOG")), "SCMP_ACT_LOG is not supported"),
        (profile_of(group("SCMP_ACT_ERRNO", errnoRet=4096)), "from 0 to 4095"),
        (profile_of(group("SCMP_ACT_ERRNO", errnoRet=True)), "from 0 to 4095"),
        (profile_of(group(includes={})), "unknown key 'includes'"),
        (profile_of(group(names=["re ad"])), "no name of a system call"),
        (profile_of(group(names=[3])), "no name of a system call"),
        (profile_of(group(), group("SCMP_ACT_ERRNO")), "another action in an earlier group"),
        (profile_of(group(args=[arg(index=6)])), "from 0 to 5"),
        (profile_of(group(args=[arg(value=2**64)])), "from 0 to"),
        (profile_of(group(args=[arg(op="EQ")])), "unknown operator"),
        (profile_of(group(args=[arg(), arg()])), "compared twice"),
        (profile_of(group(args=[arg(op="SCMP_CMP_MASKED_EQ", valueTwo=2)])), "can never match"),
        (profile_of(*[group()] * 1025), "1024 at most"),
        (profile_of(group(names=["read"] * 4097)), "4096 at most"),
        (profile_of(*[group(names=["read"] * 100)] * 41), "more than 4096 names"),
        (profile_of(architectures=["SCMP_ARCH_X86"]), "32-bit entry points are refused"),
        (profile_of(architectures=[]), "the one of this machine is not among them"),
        (profile_of(*[group(args=[arg(value=n)]) for n in range(1000)]), "the kernel takes 4096"),
    ],
)
def test_malformed_profiles_are_refused_by_name(profile, message):
    with pytest.raises(ProfileError, match=re.escape(message)):
        seccomp.compile_profile(profile)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[" * 100_000, "not JSON"), (" " * 300_000, "more than 262144 bytes")],
)
def test_malformed_files_are_refused(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        seccomp.compile_profile(path)


def test_errno_defaults_to_eperm_as_the_specification_says():
    program = seccomp.compile_profile(profile_of(group("SCMP_ACT_ERRNO", ["write"], errnoRet=5)))
    assert interpret(program, number_of("read")) == EPERM
    assert interpret(program, number_of("write")) == 0x00050005


def test_unknown_names_are_reported_and_get_the_default():
    profile = profile_of(group(names=["read", "no_such_call", "also_none"]))
    assert seccomp.unknown_syscalls(profile) == ["also_none", "no_such_call"]
    assert interpret(seccomp.compile_profile(profile), number_of("read")) == ALLOW


def test_unknown_name_may_not_be_denied_by_a_profile_that_allows_the_rest():
    profile = profile_of(group("SCMP_ACT_ERRNO", ["no_such_call"]), default="SCMP_ACT_ALLOW")
    with pytest.raises(ProfileError, match="does not know no_such_call"):
        seccomp.compile_profile(profile)


def test_names_of_other_architectures_are_passed_over():
    profile = profile_of(group(names=["read", "socketcall", "_llseek"]))
    assert seccomp.unknown_syscalls(profile) == []
    assert interpret(seccomp.compile_profile(profile), number_of("read")) == ALLOW


def test_block_longer_than_a_conditional_jump():
    groups = [group(names=["clone"], args=[arg(value=n)]) for n in range(100)]
    program = seccomp.compile_profile(profile_of(*groups, group()))
    assert interpret(program, number_of("clone"), (99,)) == ALLOW
    assert interpret(program, number_of("clone"), (100,)) == EPERM
    assert interpret(program, number_of("read")) == ALLOW


WORDS = st.sampled_from([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])
VALUES = st.builds(lambda high, low: high << 32 | low, WORDS, WORDS)


@st.composite
def conditions(draw: st.DrawFn) -> list[dict]:
    found = []
    for index in draw(st.lists(st.integers(0, 5), max_size=6, unique=True)):
        op = draw(st.sampled_from(sorted(COMPARE)))
        value, two = draw(VALUES), draw(VALUES)
        if op == "SCMP_CMP_MASKED_EQ":
            found.append({"index": index, "op": op, "value": value, "valueTwo": two & value})
        else:
            found.append({"index": index, "op": op, "value": value})
    return found


ACTIONS = st.sampled_from([1, 2, 3])


@settings(max_examples=300, deadline=None)
@given(
    rules=st.lists(st.tuples(conditions(), ACTIONS), max_size=4),
    args=st.tuples(*[VALUES] * 6),
)
def test_any_comparison_of_any_argument(rules, args):
    # Rules without conditions must not contradict each other.
    rules = [(found, number if found else 9) for found, number in rules]
    profile = profile_of(
        *[
            group("SCMP_ACT_ERRNO", ["futex"], errnoRet=number, args=found)
            for found, number in rules
        ]
    )
    program = seccomp.compile_profile(profile)
    assert interpret(program, number_of("futex"), args) == read_plainly(profile, "futex", args)


class TestMarks:
    """The filter of sandboxes whose execs are told apart by RLIMIT_LOCKS (10)."""

    HIGH = 1 << 32
    """The kernel looks at the lower half of the register only."""

    @pytest.fixture
    def program(self) -> bytes:
        return seccomp.compile_profile(
            seccomp.with_marks(SANDBOX_PROFILE), exempt=TOKEN, also_exempt=seccomp.MARKS
        )

    @pytest.mark.parametrize("resource", [10, 10 + HIGH])
    def test_nobody_sets_it(self, program, resource):
        assert interpret(program, number_of("setrlimit"), (resource, 1)) == EPERM
        assert interpret(program, number_of("prlimit64"), (0, resource, 1, 0)) == EPERM
        assert interpret(program, number_of("prlimit64"), (7, resource, 1, 1)) == EPERM

    def test_nobody_sets_any_of_pid_1(self, program):
        assert interpret(program, number_of("prlimit64"), (1, 7, 1, 0)) == EPERM
        assert interpret(program, number_of("prlimit64"), (1 + self.HIGH, 7, 1, 0)) == EPERM
        assert interpret(program, number_of("prlimit64"), (1, 7, 0, 1)) == ALLOW
        assert interpret(program, number_of("prlimit64"), (2, 7, 1, 0)) == ALLOW

    def test_anybody_reads_it_and_sets_others(self, program):
        assert interpret(program, number_of("prlimit64"), (0, 10, 0, 1)) == ALLOW
        assert interpret(program, number_of("prlimit64"), (0, 7, 1, 0)) == ALLOW
        assert interpret(program, number_of("setrlimit"), (7, 1)) == ALLOW

    def test_pid_1_sets_it_with_both_halves_of_its_token(self, program):
        mark = (0, 10, 1, 0)
        assert interpret(program, number_of("prlimit64"), (*mark, TOKEN.low, TOKEN.high)) == ALLOW
        assert interpret(program, number_of("prlimit64"), (*mark, TOKEN.low, 1)) == EPERM
        assert interpret(program, number_of("prlimit64"), (*mark, 1, TOKEN.high)) == EPERM
