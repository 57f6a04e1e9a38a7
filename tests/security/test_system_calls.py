"""System calls that a sandbox has no business with: refused before their arguments are looked at.

The control is the same call, with arguments that are wrong on purpose, by the host's root: there
it reaches the kernel, which complains of the arguments.
"""

from __future__ import annotations

import pytest

from tests.security.probing import REACHED, Host, Inside

_REFUSED = """
mount umount2 pivot_root fsopen fsconfig fsmount fspick open_tree move_mount mount_setattr setns
bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
add_key request_key keyctl kexec_load kexec_file_load init_module finit_module delete_module
reboot swapon swapoff acct quotactl quotactl_fd syslog open_by_handle_at
settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname
fanotify_init fanotify_mark migrate_pages move_pages iopl ioperm vhangup
"""
_NOT_THERE = "open_tree_attr listmount statmount io_setup memfd_secret cachestat modify_ldt"
REFUSED, NOT_THERE = _REFUSED.split(), _NOT_THERE.split()
# Which a kernel may be built without, or its lockdown may refuse to the host's root as well.
OPTIONAL = {"ENOSYS", "EPERM"}


@pytest.mark.parametrize("call", REFUSED)
def test_call_is_refused(call: str, inside: Inside, host: Host) -> None:
    assert inside.ask(call) == "EPERM"
    control = host.ask(call)
    assert control in REACHED | OPTIONAL or control.startswith("ok"), control


def test_most_controls_reach_the_kernel(host: Host) -> None:
    """So that the controls above, each of which may be missing somewhere, are worth something."""
    reached = [call for call in REFUSED if host.ask(call) in REACHED or "ok" in host.ask(call)]
    assert len(reached) > len(REFUSED) * 3 // 4, sorted(set(REFUSED) - set(reached))


@pytest.mark.parametrize("call", NOT_THERE)
def test_call_is_not_there(call: str, inside: Inside, host: Host) -> None:
    assert inside.ask(call) == "ENOSYS"
    control = host.ask(call)
    assert control in REACHED | {"ENOSYS"} or control.startswith("ok"), control


# --- entry points of other architectures --------------------------------------------------------


@pytest.mark.parametrize("entry", ["int80_getpid", "x32_getpid"])
def test_foreign_entry_point_is_closed(entry: str, inside: Inside, host: Host) -> None:
    assert inside.ask(entry) == "ENOSYS"
    # x32 is compiled into few kernels, i386 into most.
    assert host.ask(entry).startswith("ok") or host.ask(entry) in ("ENOSYS", "signal 11")


# --- sockets ------------------------------------------------------------------------------------

FAMILIES = {
    "AF_ALG": "38,5,0",
    "AF_VSOCK": "40,1,0",
    "AF_PACKET": "17,3,0",
    "AF_XDP": "44,3,0",
    "AF_TIPC": "30,1,0",
    "AF_RDS": "21,5,0",
    "AF_CAN": "29,3,1",
    "AF_BLUETOOTH": "31,3,1",
    "AF_NFC": "39,5,0",
    "AF_KEY": "15,3,2",
    "AF_PPPOX": "24,1,0",
    "AF_LLC": "26,1,0",
    "AF_QIPCRTR": "42,2,0",
    "AF_INET raw": "2,3,1",
    "AF_INET6 raw": "10,3,58",
    "SCTP": "2,1,132",
    "MPTCP": "2,1,262",
    "SMC": "2,1,256",
    "DCCP": "2,6,33",
    "UDP-Lite": "2,2,136",
    "netlink audit": "16,3,9",
    "netlink uevent": "16,3,15",
    "netlink netfilter": "16,3,12",
    "netlink sock_diag": "16,3,4",
    "netlink generic": "16,3,16",
    "netlink xfrm": "16,3,6",
    "netlink crypto": "16,3,21",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_socket_is_refused(family: str, inside: Inside) -> None:
    assert inside.ask(f"socket:{FAMILIES[family]}") == "EAFNOSUPPORT"


@pytest.mark.parametrize("family", ["AF_TIPC", "AF_BLUETOOTH", "AF_VSOCK"])
def test_socketpair_is_refused(family: str, inside: Inside) -> None:
    assert inside.ask(f"socketpair:{FAMILIES[family]}") == "EAFNOSUPPORT"


@pytest.mark.parametrize(
    "allowed", ["1,1,0", "1,2,0", "2,1,0", "2,2,0", "10,1,6", "10,2,17", "16,3,0", "2,524289,0"]
)
def test_control_ordinary_sockets_are_allowed(allowed: str, inside: Inside) -> None:
    assert inside.ask(f"socket:{allowed}").startswith("ok")


@pytest.mark.parametrize("family", ["2,3,1", "17,3,0", "16,3,15", "16,3,4"])
def test_control_refused_sockets_exist_on_the_host(family: str, host: Host) -> None:
    assert host.ask(f"socket:{family}").startswith("ok")


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["5412", "541c", "541d", "5423", "100000541c", "ffffffff00005412"]
)
def test_terminal_ioctl_is_refused(command: str, inside: Inside) -> None:
    """TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD; also with high bits, which the kernel cuts off."""
    assert inside.ask(f"tty_ioctl:{command}") == "EPERM"


@pytest.mark.parametrize("high", ["0", "100000000", "f00000000"])
def test_typing_into_the_own_terminal_is_refused(high: str, inside: Inside) -> None:
    assert inside.ask(f"tiocsti:{high}") == "EPERM"


@pytest.mark.parametrize("command", ["1031", "0x100000407"])
def test_growing_a_pipe_is_refused(command: str, inside: Inside) -> None:
    """F_SETPIPE_SZ, also with high bits: an output pipe's pages are the node's own id's."""
    assert inside.ask(f"pipe_fcntl:{command}") == "EPERM"


def test_control_other_commands_on_a_pipe_reach_the_kernel(inside: Inside) -> None:
    assert inside.ask("pipe_fcntl:1032").startswith("ok")  # F_GETPIPE_SZ


def test_control_other_terminal_ioctls_reach_the_kernel(inside: Inside) -> None:
    assert inside.ask("tty_ioctl:5413") == "EFAULT"  # TIOCGWINSZ


@pytest.mark.parametrize("personality", ["400000", "100000", "4000000", "440000"])
def test_personality_that_undoes_mitigations_is_refused(
    personality: str, inside: Inside, host: Host
) -> None:
    assert inside.ask(f"personality:{personality}") == "EPERM"
    assert host.ask(f"personality:{personality}").startswith("ok")


def test_control_harmless_personality_is_allowed(inside: Inside) -> None:
    assert inside.ask("personality:40000") == "ok 0"


# --- the token with which PID 1 passes its own filter --------------------------------------------


def test_token_is_not_guessed(inside: Inside, host: Host) -> None:
    assert inside.ask("guess_token:20000") == "ENOSYS"
    assert host.ask("guess_token:1") == "ok 1"


def test_filter_cannot_be_read_back(inside: Inside) -> None:
    """It holds the token."""
    assert inside.ask("read_filter") == "EACCES"
