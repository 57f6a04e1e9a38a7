"""Seccomp: from a profile in OCI JSON to a classic BPF program, and loading one.

Not for deciding what a sandbox may do: that is in the profiles beside this file, a reason on each
group. A profile is the ``linux.seccomp`` object of the OCI runtime specification, where each group
may also have a ``comment``; what needs a supervisor (``SCMP_ACT_NOTIFY``, ``SCMP_ACT_TRACE``) or
writes to the host's log for every call (``SCMP_ACT_LOG``) is refused.

The program has two parts::

    guards   arch is ours? then, for each call whose answer depends on its arguments:
               the token, where the call is exempt  -> ALLOW
               its rules in file order, first match -> their action
               its rule without arguments, if any, else the default action
    table    libseccomp: foreign architecture or x32 number -> ENOSYS; number -> action

libseccomp cannot write the guards. It keeps one answer for a call once a rule without arguments
is there: "deny ioctl TIOCSTI, allow ioctl" compiles without complaint to "allow ioctl" (2.5.4).
It does write the table, as a binary search.

Why foreign entry points (i386's ``int 0x80``, x32) get ENOSYS and are not killed: a kernel built
without them says the same, every libc stops at start-up on it, and a kill by seccomp writes to the
host's audit log, which a sandbox could then flood. Nothing looks at arguments before this check.

Length costs little at run time: since Linux 5.11 the kernel keeps a bitmap of calls that are
allowed whatever their arguments, and does not run the program for those.
"""

import ctypes
import errno
import json
import os
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pyseccomp

from sandboxd.linux import _libc

SANDBOX_PROFILE: Final = Path(__file__).with_name("profiles") / "sandbox.json"
"""For everything that runs in a sandbox."""

FUSE_SERVER_PROFILE: Final = Path(__file__).with_name("profiles") / "fuse_server.json"
"""For squashfuse_ll, which parses bytes nobody vouches for."""

VIEW_SERVER_PROFILE: Final = Path(__file__).with_name("profiles") / "view_server.json"
"""For the proc views: a Python whose set-up is done."""

RESOLVER_PROFILE: Final = Path(__file__).with_name("profiles") / "resolver.json"
"""For what reads sandboxes' DNS queries: refuses what that has no use for."""

BPF_MAXINSNS: Final = 4096
PROGRAM_BYTES_MAX: Final = 8 * BPF_MAXINSNS
MAX_PROFILE_BYTES: Final = 256 * 1024
MAX_GROUPS: Final = 1024
MAX_NAMES: Final = 4096
MAX_ERRNO: Final = 4095

_U64: Final = 2**64 - 1
_U32: Final = 2**32 - 1


class ProfileError(ValueError):
    """The profile is not one this node can enforce; the message names the place."""


@dataclass(frozen=True)
class SyscallToken:
    """128 random bits that PID 1 passes in the argument registers a system call leaves unused.

    PID 1 lives under the filter it gives its sandbox and still needs ``clone3`` (with
    CLONE_INTO_CGROUP), ``move_mount``, ``pivot_root``, ``umount2`` and ``sethostname``. ``low``
    goes into the fifth argument (args[4]) and ``high`` into the sixth; ``move_mount`` uses five
    arguments itself, so it shows ``high`` only.

    The sandbox cannot learn it: the memory of PID 1 is not dumpable, and a filter is read back
    (PTRACE_SECCOMP_GET_FILTER) only with CAP_SYS_ADMIN in the initial user namespace. Whatever
    PID 1 forks to run code of the sandbox must have forgotten it.
    """

    low: int = field(repr=False)
    high: int = field(repr=False)

    def __post_init__(self) -> None:
        if not (0 < self.low <= _U64 and 0 < self.high <= _U64):
            # Zero is what an unused register often holds anyway.
            raise ValueError("each half of a SyscallToken is a non-zero u64")

    @classmethod
    def draw(cls) -> "SyscallToken":
        return cls(secrets.randbelow(_U64) + 1, secrets.randbelow(_U64) + 1)


# --- the profile -----------------------------------------------------------------------------

Op = Literal["NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"]

_OPS: Final[dict[str, Op]] = {
    "SCMP_CMP_NE": "NE",
    "SCMP_CMP_LT": "LT",
    "SCMP_CMP_LE": "LE",
    "SCMP_CMP_EQ": "EQ",
    "SCMP_CMP_GE": "GE",
    "SCMP_CMP_GT": "GT",
    "SCMP_CMP_MASKED_EQ": "MASKED_EQ",
}
_ACTIONS: Final[dict[str, int]] = {
    "SCMP_ACT_ALLOW": pyseccomp.ALLOW,
    "SCMP_ACT_KILL": pyseccomp.KILL_THREAD,
    "SCMP_ACT_KILL_THREAD": pyseccomp.KILL_THREAD,
    "SCMP_ACT_KILL_PROCESS": pyseccomp.KILL_PROCESS,
    "SCMP_ACT_TRAP": pyseccomp.TRAP,
}
_ARCHITECTURES: Final = {
    "SCMP_ARCH_X86_64": pyseccomp.Arch.X86_64,
    "SCMP_ARCH_AARCH64": pyseccomp.Arch.AARCH64,
}
_REFUSED_ACTIONS: Final = {
    "SCMP_ACT_NOTIFY": "no supervisor listens",
    "SCMP_ACT_TRACE": "no tracer listens",
    "SCMP_ACT_LOG": "it would let a sandbox write to the host's log",
}


@dataclass(frozen=True)
class _Condition:
    """One comparison of a whole 64-bit argument; ``mask`` matters to MASKED_EQ only."""

    index: int
    op: Op
    value: int
    mask: int = _U64


@dataclass
class _Decision:
    """What becomes of one system call: the first guard that matches, else ``otherwise``."""

    guards: list[tuple[tuple[_Condition, ...], int]] = field(default_factory=list)
    otherwise: int | None = None


@dataclass(frozen=True)
class _Profile:
    default: int
    decisions: Mapping[str, _Decision]


def _object(
    value: object, where: str, required: Iterable[str], optional: Iterable[str]
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: an object is expected")
    required, optional = set(required), set(optional)
    if unknown := sorted(str(key) for key in value.keys() - required - optional):
        raise ProfileError(f"{where}: unknown key {unknown[0]!r}")
    if missing := sorted(required - value.keys()):
        raise ProfileError(f"{where}: key {missing[0]!r} is missing")
    return value


def _list(value: object, where: str, limit: int) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where}: a list is expected")
    if len(value) > limit:
        raise ProfileError(f"{where}: {len(value)} entries, {limit} at most")
    return value


def _int(value: object, where: str, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ProfileError(f"{where}: an integer from 0 to {limit} is expected")
    return value


def _action(name: object, errno_ret: object, where: str) -> int:
    if name == "SCMP_ACT_ERRNO":
        # EPERM where none is given, as the OCI specification has it.
        return int(pyseccomp.ERRNO(_int(errno_ret, f"{where}: errno", MAX_ERRNO)))
    if isinstance(name, str) and name in _REFUSED_ACTIONS:
        raise ProfileError(f"{where}: {name} is not supported: {_REFUSED_ACTIONS[name]}")
    if not isinstance(name, str) or name not in _ACTIONS:
        raise ProfileError(f"{where}: unknown action {name!r}")
    return _ACTIONS[name]


def _condition(value: object, where: str) -> _Condition:
    arg = _object(value, where, ("index", "value", "op"), ("valueTwo",))
    index = _int(arg["index"], f"{where}.index", 5)
    first = _int(arg["value"], f"{where}.value", _U64)
    second = _int(arg.get("valueTwo", 0), f"{where}.valueTwo", _U64)
    op = _OPS.get(arg["op"]) if isinstance(arg["op"], str) else None
    if op is None:
        raise ProfileError(f"{where}: unknown operator {arg['op']!r}")
    if op != "MASKED_EQ":
        return _Condition(index, op, first)
    if second & ~first:
        raise ProfileError(f"{where}: valueTwo has bits outside the mask, so it can never match")
    return _Condition(index, op, second, first)


def _conditions(value: object, where: str) -> tuple[_Condition, ...]:
    # null is what Go programs write for an empty list.
    found = tuple(
        _condition(arg, f"{where}[{i}]") for i, arg in enumerate(_list(value or [], where, 6))
    )
    if len({condition.index for condition in found}) != len(found):
        # Runtimes disagree whether two conditions on one argument mean "and" or "or".
        raise ProfileError(f"{where}: an argument is compared twice; write two groups")
    return found


def _parse(profile: Mapping[str, Any] | Path) -> _Profile:
    if isinstance(profile, Path):
        with profile.open("rb") as file:
            text = file.read(MAX_PROFILE_BYTES + 1)
        if len(text) > MAX_PROFILE_BYTES:
            raise ProfileError(f"profile: more than {MAX_PROFILE_BYTES} bytes")
        try:
            profile = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ProfileError(f"profile: not JSON: {exc}") from exc
    top = _object(
        profile, "profile", ("defaultAction", "architectures", "syscalls"), ("defaultErrnoRet",)
    )
    for name in _list(top["architectures"], "architectures", len(_ARCHITECTURES)):
        if name not in _ARCHITECTURES:
            raise ProfileError(
                f"architectures: {name!r} is not one of {', '.join(_ARCHITECTURES)}; "
                "the 32-bit entry points are refused to every sandbox"
            )
    if pyseccomp.system_arch() not in {_ARCHITECTURES[name] for name in top["architectures"]}:
        raise ProfileError("architectures: the one of this machine is not among them")

    decisions: dict[str, _Decision] = {}
    default = _action(top["defaultAction"], top.get("defaultErrnoRet", errno.EPERM), "default")
    names_seen = 0
    for i, value in enumerate(_list(top["syscalls"], "syscalls", MAX_GROUPS)):
        where = f"syscalls[{i}]"
        group = _object(value, where, ("names", "action"), ("errnoRet", "args", "comment"))
        action = _action(group["action"], group.get("errnoRet", errno.EPERM), where)
        conditions = _conditions(group.get("args"), f"{where}.args")
        names = _list(group["names"], f"{where}.names", MAX_NAMES)
        names_seen += len(names)
        if names_seen > MAX_NAMES:
            raise ProfileError(f"syscalls: more than {MAX_NAMES} names")
        for name in names:
            if not isinstance(name, str) or not name.isascii() or not name.isidentifier():
                raise ProfileError(f"{where}: {name!r} is no name of a system call")
            decision = decisions.setdefault(name, _Decision())
            if conditions:
                decision.guards.append((conditions, action))
            elif decision.otherwise not in (None, action):
                raise ProfileError(f"{where}: {name} has another action in an earlier group")
            else:
                decision.otherwise = action
    return _Profile(default, decisions)


def unknown_syscalls(profile: Mapping[str, Any] | Path) -> list[str]:
    """Names in ``profile`` that this libseccomp does not know, sorted.

    They are newer than it, or misspelled. The filter gives them the default action.
    """
    return sorted(name for name in _parse(profile).decisions if _number(name) is None)


# --- the guards ------------------------------------------------------------------------------

# <linux/bpf_common.h>, <linux/filter.h>
_LD_W_ABS: Final = 0x20
_AND_K: Final = 0x54
_JA: Final = 0x05
_JEQ_K: Final = 0x15
_JGT_K: Final = 0x25
_JGE_K: Final = 0x35
_RET_K: Final = 0x06

# struct seccomp_data { int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6]; }
_OFFSET_NR: Final = 0
_OFFSET_ARCH: Final = 4
_OFFSET_ARGS: Final = 16

Target = Literal["next", "pass", "fail"]
"""Where a jump inside one condition goes: on, past the condition (it holds), to the next rule."""


@dataclass(frozen=True)
class _Step:
    code: int
    k: int
    jt: Target = "next"
    jf: Target = "next"


def _masked_eq(low: int, high: int, value: int, mask: int) -> list[_Step]:
    steps = []
    for offset, shift in ((high, 32), (low, 0)):
        word, word_mask = value >> shift & _U32, mask >> shift & _U32
        if word_mask == 0:
            continue
        steps.append(_Step(_LD_W_ABS, offset))
        if word_mask != _U32:
            steps.append(_Step(_AND_K, word_mask))
        steps.append(_Step(_JEQ_K, word, "next", "fail"))
    if steps:
        steps[-1] = _Step(_JEQ_K, steps[-1].k, "pass", "fail")
    return steps


def _greater(low: int, high: int, value: int, last: int) -> list[_Step]:
    return [
        _Step(_LD_W_ABS, high),
        _Step(_JGT_K, value >> 32, "pass", "next"),
        _Step(_JEQ_K, value >> 32, "next", "fail"),
        _Step(_LD_W_ABS, low),
        _Step(last, value & _U32, "pass", "fail"),
    ]


def _negated(steps: list[_Step]) -> list[_Step]:
    other: dict[Target, Target] = {"next": "next", "pass": "fail", "fail": "pass"}
    return [_Step(step.code, step.k, other[step.jt], other[step.jf]) for step in steps]


def _steps(condition: _Condition) -> list[_Step]:
    """The 64-bit comparison in 32-bit words; both architectures here are little-endian."""
    low = _OFFSET_ARGS + 8 * condition.index
    high = low + 4
    value = condition.value
    match condition.op:
        case "EQ" | "MASKED_EQ":
            return _masked_eq(low, high, value, condition.mask)
        case "NE":
            return _negated(_masked_eq(low, high, value, _U64))
        case "GT":
            return _greater(low, high, value, _JGT_K)
        case "GE":
            return _greater(low, high, value, _JGE_K)
        case "LE":
            return _negated(_greater(low, high, value, _JGT_K))
        case "LT":
            return _negated(_greater(low, high, value, _JGE_K))


def _insn(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    """struct sock_filter { __u16 code; __u8 jt; __u8 jf; __u32 k; }"""
    return struct.pack("<HBBI", code, jt, jf, k)


_INSN_BYTES: Final = 8


def _rule(conditions: Iterable[_Condition], action: int) -> bytes:
    """All of ``conditions`` hold: return ``action``; else go on behind the rule.

    At most 6 conditions of 6 instructions, so every jump fits its 8 bits.
    """
    tests = [_steps(condition) for condition in conditions]
    length = sum(map(len, tests)) + 1
    program = b""
    position = 0
    for steps in tests:
        end = position + len(steps)
        for step in steps:
            position += 1
            distance = {"next": 0, "pass": end - position, "fail": length - position}
            program += _insn(step.code, step.k, distance[step.jt], distance[step.jf])
    return program + _insn(_RET_K, action)


def _only_if(value: int, body: bytes) -> bytes:
    """Run ``body`` if the accumulator is ``value``, else jump over it, however long it is."""
    length = len(body) // _INSN_BYTES
    if length <= 0xFF:
        return _insn(_JEQ_K, value, 0, length) + body
    return _insn(_JEQ_K, value, 1, 0) + _insn(_JA, length) + body


def _guards(decisions: Mapping[int, _Decision], default: int) -> bytes:
    body = _insn(_LD_W_ABS, _OFFSET_NR)
    for number, decision in decisions.items():
        otherwise = default if decision.otherwise is None else decision.otherwise
        block = b"".join(_rule(*guard) for guard in decision.guards) + _insn(_RET_K, otherwise)
        body += _only_if(number, block)
    return _insn(_LD_W_ABS, _OFFSET_ARCH) + _only_if(pyseccomp.system_arch(), body)


# --- the program -----------------------------------------------------------------------------

_EXEMPT: Final = {
    "clone3": ("low", "high"),
    "move_mount": ("high",),
    "prlimit64": ("low", "high"),
    "pivot_root": ("low", "high"),
    "sethostname": ("low", "high"),
    "umount2": ("low", "high"),
}
_ALWAYS_EXEMPT: Final = tuple(name for name in _EXEMPT if name != "prlimit64")
_TOKEN_ARGUMENT: Final = {"low": 4, "high": 5}

_NR_SCMP_ERROR: Final = -1


_RLIMIT_LOCKS: Final = 10  # <asm-generic/resource.h>


def with_marks(profile: Path) -> dict[str, Any]:
    """A profile under which nobody changes the mark by which PID 1 tells execs apart where there
    are no cgroups: RLIMIT_LOCKS (init/mark.c). For use with ``MARKS`` as ``also_exempt``."""
    parsed: dict[str, Any] = json.loads(profile.read_text(encoding="utf-8"))
    # The kernel takes an unsigned int: the upper half of the register is not looked at.
    which = {"value": _U32, "valueTwo": _RLIMIT_LOCKS, "op": "SCMP_CMP_MASKED_EQ"}
    sets = {"index": 2, "value": 0, "op": "SCMP_CMP_NE"}
    for name, args in (
        ("setrlimit", [{"index": 0, **which}]),
        ("prlimit64", [{"index": 1, **which}, sets]),
        # PID 1 itself, which may have the id of the sandbox's root here.
        ("prlimit64", [{"index": 0, "value": _U32, "valueTwo": 1, "op": which["op"]}, sets]),
    ):
        parsed["syscalls"].append({"names": [name], "action": "SCMP_ACT_ERRNO", "args": args})
    return parsed


MARKS: Final = ("prlimit64",)


def _number(name: str) -> int | None:
    """libseccomp's number for ``name``: negative if only other architectures have the call."""
    number = int(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name))
    return None if number == _NR_SCMP_ERROR else number


def _exempted(name: str, decision: _Decision, token: SyscallToken) -> _Decision:
    conditions = tuple(
        _Condition(_TOKEN_ARGUMENT[half], "EQ", getattr(token, half)) for half in _EXEMPT[name]
    )
    return _Decision([(conditions, pyseccomp.ALLOW), *decision.guards], decision.otherwise)


def _table(actions: Mapping[int, int], default: int, optimize: int) -> bytes:
    table = pyseccomp.SyscallFilter(default)
    table.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.ERRNO(errno.ENOSYS))
    table.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, optimize)
    for number, action in actions.items():
        if action != default:  # libseccomp takes such a rule for a mistake (EACCES)
            table.add_rule(action, number)
    with os.fdopen(os.memfd_create("seccomp", os.MFD_CLOEXEC), "r+b") as file:
        table.export_bpf(file)
        file.seek(0)
        return file.read()


LINEAR: Final = 1
BINARY_TREE: Final = 2
"""Values of libseccomp's SCMP_FLTATR_CTL_OPTIMIZE.

Measured with the sandbox profile and a token on Linux 6.18 (2 cores, JIT on): linear is 462
instructions, 0.33 to 0.53 ms to load, 178 to 203 ns for a call the table refuses; the tree is 547,
0.15 to 0.21 ms and 158 ns. Loading is paid once for each sandbox: the kernel walks the program for
every system call to fill its bitmap of calls that are always allowed, which then cost the same
under either. Spawning /bin/true under an inherited filter costs what it costs without one.
"""


def compile_profile(
    profile: Mapping[str, Any] | Path,
    exempt: SyscallToken | None = None,
    optimize: int = BINARY_TREE,
    also_exempt: tuple[str, ...] = (),
) -> bytes:
    """The filter as ``struct sock_filter[]``, to be pointed to by a ``struct sock_fprog``.

    It is for the architecture of this machine; ``architectures`` must name it. With ``exempt``, the
    calls of :class:`SyscallToken` are allowed where their registers hold the token, whatever the
    profile says of them. Who loads it should give SECCOMP_FILTER_FLAG_SPEC_ALLOW: before Linux 5.16
    a filter otherwise turns on speculation mitigations that slow Python by half.

    :raises ProfileError: malformed, unbounded, or not enforceable here.
    """
    parsed = _parse(profile)
    decisions = dict(parsed.decisions)
    if exempt is not None:
        for name in (*_ALWAYS_EXEMPT, *also_exempt):
            decisions[name] = _exempted(name, decisions.get(name, _Decision()), exempt)

    guards: dict[int, _Decision] = {}
    actions: dict[int, int] = {}
    for name, decision in decisions.items():
        number = _number(name)
        if number is None:
            _check_default_will_do(name, decision, parsed.default)
        elif number < 0:
            continue
        elif decision.guards:
            guards[number] = decision
        elif decision.otherwise is not None:
            actions[number] = decision.otherwise
    program = _guards(guards, parsed.default) + _table(actions, parsed.default, optimize)
    if len(program) > BPF_MAXINSNS * _INSN_BYTES:
        raise ProfileError(
            f"profile: {len(program) // _INSN_BYTES} instructions, the kernel takes {BPF_MAXINSNS}"
        )
    return program


def _check_default_will_do(name: str, decision: _Decision, default: int) -> None:
    """A name libseccomp does not know gets the default action, which must not be the laxer one."""
    answers = [action for _, action in decision.guards]
    if decision.otherwise is not None:
        answers.append(decision.otherwise)
    if default == pyseccomp.ALLOW and any(action != pyseccomp.ALLOW for action in answers):
        raise ProfileError(
            f"libseccomp does not know {name}, and what it does not know would be allowed: "
            "use a refusing defaultAction"
        )


# --- loading ---------------------------------------------------------------------------------

SECCOMP_SET_MODE_FILTER: Final = 1
SECCOMP_FILTER_FLAG_SPEC_ALLOW: Final = 1 << 2


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_seccomp = _libc.syscall(
    _libc.by_machine(317, 277), ctypes.c_ulong, ctypes.c_ulong, ctypes.POINTER(_SockFprog)
)


def load(bpf: bytes, spec_allow: bool = True) -> None:
    """seccomp(2) with SECCOMP_SET_MODE_FILTER on the calling thread, for good, and across exec.

    The caller has set no_new_privs, or holds CAP_SYS_ADMIN in its user namespace (else EACCES).
    """
    program = _SockFprog(len(bpf) // _INSN_BYTES, bpf)
    flags = SECCOMP_FILTER_FLAG_SPEC_ALLOW if spec_allow else 0
    _seccomp("load a seccomp filter", SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program))
