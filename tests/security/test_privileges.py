"""Privileges: what a command holds exactly, and that nothing it does gains more."""

from __future__ import annotations

import pytest

from sandboxd.launcher.__main__ import SANDBOX_CAPABILITIES
from tests.security.probing import Host, Inside

ALLOWED = sum(1 << number for number in SANDBOX_CAPABILITIES)
# linux/capability.h, by hand: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
# net_bind_service, sys_chroot, setfcap.
EXPECTED = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))


def status(inside: Inside, pid: str = "self") -> dict[str, str]:
    lines = inside.shell(f"cat /proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_capabilities_are_exactly_the_allowed_ones(inside: Inside) -> None:
    assert ALLOWED == EXPECTED
    held = EXPECTED if inside.identity == "root" else 0
    told = {name: int(value, 16) for name, value in status(inside).items() if name[:3] == "Cap"}
    assert told == {
        "CapInh": 0,
        "CapPrm": held,
        "CapEff": held,
        "CapBnd": EXPECTED,
        "CapAmb": 0,
    }


def test_no_new_privileges_and_one_filter(inside: Inside) -> None:
    told = status(inside)
    assert (told["NoNewPrivs"], told["Seccomp"]) == ("1", "2")
    assert told["Groups"] == ""


def test_no_new_privileges_cannot_be_taken_back(inside: Inside) -> None:
    assert inside.ask("no_new_privs_off") == "EINVAL"


def test_securebits_are_clear(inside: Inside) -> None:
    assert inside.ask("securebits") == "ok 0"


@pytest.mark.parametrize(
    "number", [2, 9, 12, 13, 14, 16, 17, 19, 20, 21, 22, 23, 24, 25, 27, 33, 38, 39, 40]
)
def test_capability_is_out_of_bounds(number: int, inside: Inside, host: Host) -> None:
    assert inside.ask(f"bounding_has:{number}") == "ok 0"
    assert host.ask(f"bounding_has:{number}") in ("ok 1", "ok 0")


def test_setuid_program_gains_nothing(as_root: Inside) -> None:
    script = """
        cp /probes/probe /tmp/suid; chown 0:0 /tmp/suid; chmod 6755 /tmp/suid; stat -c %a /tmp/suid
        echo secret >/tmp/secret; chmod 600 /tmp/secret; /tmp/suid open_r:/tmp/secret
    """
    assert as_root.shell(script) == "6755\nopen_r:/tmp/secret ok 3\n"
    agent = Inside(as_root.daemon, as_root.sandbox, "agent", as_root.channel)
    assert agent.shell("/tmp/suid open_r:/tmp/secret") == "open_r:/tmp/secret EACCES\n"
    as_root.shell("rm /tmp/suid /tmp/secret")


def test_control_setuid_bits_stay_on_the_file(as_root: Inside) -> None:
    """So that it is no_new_privs that the test above is about."""
    script = "chown 1000 /tmp/own; chmod 4755 /tmp/own; stat -c %a:%u /tmp/own; rm /tmp/own"
    assert as_root.shell(f"touch /tmp/own; {script}").strip() == "4755:1000"


NAMESPACES = {
    "mnt": "20000",
    "cgroup": "2000000",
    "uts": "4000000",
    "ipc": "8000000",
    "user": "10000000",
    "pid": "20000000",
    "net": "40000000",
    "time": "80",
}
"""CLONE_NEW* by name (clone(2), unshare(2))."""


@pytest.mark.parametrize("name", NAMESPACES)
def test_namespace_cannot_be_unshared(name: str, inside: Inside, host: Host) -> None:
    assert inside.ask(f"unshare:{NAMESPACES[name]}") == "EPERM"
    assert host.ask(f"unshare:{NAMESPACES[name]}") == "ok 0"
    if name != "time":
        assert inside.ask(f"clone:{NAMESPACES[name]}") == "EPERM"
        assert host.ask(f"clone:{NAMESPACES[name]}") == "ok 0"


def test_all_namespaces_at_once_cannot_be_unshared(inside: Inside) -> None:
    assert inside.ask("unshare:7e020080") == "EPERM"
    assert inside.ask("clone:7e020000") == "EPERM"


def test_clone3_is_not_there(inside: Inside, host: Host) -> None:
    assert inside.ask("clone3") == "ENOSYS"
    assert host.ask("clone3") == "ok 0"


def test_control_plain_unshare_and_clone_are_allowed(inside: Inside) -> None:
    assert inside.ask("unshare:400") == "ok 0"  # CLONE_FILES
    assert inside.ask("clone:0") == "ok 0"


@pytest.mark.parametrize(
    "word", ["nice:-1", "scheduler:1", "scheduler:2", "ioprio_realtime", "prctl_mm"]
)
def test_priority_cannot_be_raised(word: str, inside: Inside, host: Host) -> None:
    assert inside.ask(word) in ("EPERM", "EACCES")
    assert host.ask(word).startswith("ok") or host.ask(word) in ("EINVAL", "EPERM")


def test_control_priority_can_be_lowered(inside: Inside) -> None:
    assert inside.ask("nice:5") == "ok 0"


@pytest.mark.parametrize("limit", [4, 6, 7, 8, 11, 12, 13, 14])
def test_hard_limit_cannot_be_raised(limit: int, inside: Inside, host: Host) -> None:
    """CORE, NPROC, NOFILE, MEMLOCK, SIGPENDING, MSGQUEUE, NICE, RTPRIO (getrlimit(2))."""
    assert inside.ask(f"raise_limit:{limit}") in ("EPERM", "ERANGE")
    assert host.ask(f"raise_limit:{limit}") in ("ok 0", "ERANGE", "EPERM")


def test_core_limit_keeps_the_hosts_helper_from_starting(inside: Inside) -> None:
    """1 and not 0: a piped helper is started in spite of 0 (core(5))."""
    assert inside.shell("grep 'core file size' /proc/self/limits").split()[4:6] == ["1", "1"]


def test_oom_score_cannot_go_below_the_ordinary(inside: Inside) -> None:
    """Or a hog would have the kernel kill the host's processes before itself."""
    assert inside.ask("oom_score:-1") == "EACCES"
    assert inside.ask("oom_score:-1000") == "EACCES"
    assert inside.ask("oom_score:1000").startswith("ok")
    assert inside.shell("cat /proc/self/oom_score_adj").strip() == "500"


def test_user_map_names_no_other_id(as_root: Inside) -> None:
    """Only ids of the sandbox's own range; PID 1's is not among them."""
    first, _, count = as_root.shell("cat /proc/self/uid_map").split()
    assert (first, count) == ("0", "65536")
    assert status(as_root, "1")["Uid"].split() == ["65534"] * 4
    assert as_root.run(["/bin/chown", "65536", "/tmp"])["exit_code"] != 0


@pytest.mark.parametrize("user", ["65536", "4294967295", "-1", "0x0", "nobody-there", "0:65536"])
def test_user_out_of_range_is_refused(user: str, as_root: Inside) -> None:
    answer = as_root.daemon.http.post(
        f"/v1/sandboxes/{as_root.sandbox}/exec", json={"command": ["/bin/id"], "user": user}
    )
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "user-not-found"
