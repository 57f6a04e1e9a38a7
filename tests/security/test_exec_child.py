"""A command's process before it is one: a clone of PID 1, with PID 1's descriptors and memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sandboxd.errors import SandboxdError
from sandboxd.runtime import files
from sandboxd.runtime.control import Control
from tests.framework import times
from tests.framework.daemon import Daemon
from tests.security.probing import Inside, alive, get, put

DESCRIPTORS = range(3, 24)


def exec_in(daemon: Daemon, sandbox: str, command: object, **request: object) -> dict[str, object]:
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command, **request})
    told: dict[str, object] = answer.json()
    return told


def test_working_directory_cannot_be_a_descriptor_of_pid1s(inside: Inside) -> None:
    """As CVE-2024-21626: from the directory of a cgroup one could walk up into the host's root."""
    for number in DESCRIPTORS:
        told = exec_in(
            inside.daemon,
            inside.sandbox,
            ["/bin/ls", "-a"],
            user=inside.identity,
            cwd=f"/proc/self/fd/{number}",
        )
        assert told["error"]["code"] == "cwd-not-found", told


def test_working_directory_cannot_be_a_link_to_a_descriptor(daemon: Daemon, hostile: str) -> None:
    """The policy's own move: it puts the link where the next command is to run."""
    for number in DESCRIPTORS:
        daemon.exec(hostile, f"rm -rf /work; ln -s /proc/self/fd/{number} /work")
        told = exec_in(daemon, hostile, "pwd; cd ../../../..; ls", cwd="/work")
        assert told["error"]["code"] == "cwd-not-found", told


@pytest.mark.parametrize(
    "path", ["/proc/1/root", "/proc/1/cwd", "/proc/self/fdinfo/..", "/proc/self/task"]
)
def test_working_directory_stays_in_the_root(path: str, inside: Inside) -> None:
    told = exec_in(inside.daemon, inside.sandbox, "ls /probes; stat -c %d:%i /", cwd=path)
    if "error" not in told:
        assert told["stdout"] == "hog\nprobe\n" + inside.shell("stat -c %d:%i /")


def test_control_ordinary_working_directory_is_entered(inside: Inside) -> None:
    told = exec_in(inside.daemon, inside.sandbox, ["/bin/pwd"], cwd="/proc/self/root/work")
    assert str(told["stdout"]).strip() in ("/work", "/proc/self/root/work"), told


def test_program_cannot_be_reached_through_a_descriptor(inside: Inside) -> None:
    """Which would run a program of the host, by whatever path leads up from there."""
    for number in DESCRIPTORS:
        path = f"/proc/self/fd/{number}/../../../../bin/sh"
        told = exec_in(
            inside.daemon, inside.sandbox, [path, "-c", "echo host"], user=inside.identity
        )
        assert told["exit_code"] == 127, told


def test_script_cannot_name_an_interpreter_through_a_descriptor(inside: Inside) -> None:
    for number in DESCRIPTORS:
        script = f"#!/proc/self/fd/{number}/../../../../bin/sh\necho host\n"
        put(inside.daemon, inside.sandbox, "/tmp/script", script.encode(), mode="0755")
        told = exec_in(inside.daemon, inside.sandbox, ["/tmp/script"], user=inside.identity)
        assert told["exit_code"] in (126, 127), told


def test_own_program_file_is_not_a_path_of_the_host(daemon: Daemon, hostile: str) -> None:
    """/proc/self/exe of the child is PID 1's program, which lies on the host. Where a write
    follows that link's text, the text comes to light in the sandbox."""
    put(daemon, hostile, "/proc/self/exe", b"x")
    daemon.exec(hostile, "ln -s /proc/self/exe /link")
    put(daemon, hostile, "/link", b"x")
    found = daemon.exec(hostile, "find / -xdev -name '*init*'")["stdout"]
    assert "sandbox_init" not in found, found


def test_own_program_file_cannot_be_written(inside: Inside) -> None:
    """As CVE-2019-5736."""
    assert inside.ask("proc_open_w:1,exe") == "EACCES"
    told = exec_in(inside.daemon, inside.sandbox, ["/proc/self/exe", "version"])
    assert told.get("exit_code") in (0, 2, 126, 127), told
    alive(inside.daemon, inside.sandbox)


def test_command_holds_three_descriptors(inside: Inside) -> None:
    told = inside.shell("for fd in /proc/self/fd/*; do readlink $fd; done").split("\n")
    kinds = [line.partition(":")[0] for line in told if line]
    assert kinds[:3] == ["/dev/null", "pipe", "pipe"]
    assert all(kind.startswith("/proc/") for kind in kinds[3:]), told


def test_command_has_a_session_of_its_own(inside: Inside) -> None:
    told = inside.shell("cut -d' ' -f1,5,6,7 /proc/self/stat; exec cut -d' ' -f6 /proc/self/stat")
    assert told.split()[3] == "0"  # no terminal


def test_command_has_nothing_of_the_daemons_environment(inside: Inside) -> None:
    names = {line.partition("=")[0] for line in inside.shell("exec env").splitlines()}
    assert names <= {"PATH", "HOSTNAME", "HOME", "PWD", "SHLVL", "OLDPWD", "_"}


def _harass(inside: Inside, signal: str, seconds: float) -> None:
    """Signal every child of PID 1 that is not yet a command, for some time."""
    script = f"""
        end=$(( $(date +%s) + {int(seconds)} ))
        while [ $(date +%s) -le $end ]; do
            for status in /proc/[0-9]*/status; do
                pid=${{status#/proc/}}; pid=${{pid%/status}}
                [ $pid -gt 1 ] && grep -q '^Name:.init$' $status && kill -{signal} $pid
            done 2>/dev/null
        done
        true
    """
    httpx.post(
        f"{inside.daemon.base_url}/v1/sandboxes/{inside.sandbox}/exec",
        json={"command": script, "timeout_s": seconds + 20},
        headers={"Authorization": f"Bearer {inside.daemon.token}"},
        timeout=times.scaled(60),
    )


@pytest.mark.parametrize("signal", ["KILL", "QUIT", "SEGV"])
def test_signalled_child_is_the_sandboxs_own_trouble(
    signal: str, daemon: Daemon, hostile: str
) -> None:
    """A command that is killed before it is one ended by a signal; no error is the node's fault."""
    attacker = Inside(daemon, hostile, "root")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(_harass, attacker, signal, 3)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            told = exec_in(daemon, hostile, ["/bin/true"])
            if "error" in told:
                assert told["error"]["cause"] != "node", told
            answer = put(daemon, hostile, "/tmp/file", b"x" * 100_000)
            if not answer.is_success:
                assert answer.json()["error"]["cause"] != "node", answer.text
        running.result()
    alive(daemon, hostile)
    assert daemon.exec(hostile, "find / -xdev -name 'core*' -type f")["stdout"] == ""


def test_stopped_file_operation_is_the_sandboxs_own_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sandbox's root can stop the process: that no answer comes is no fault of the node."""
    monkeypatch.setattr(files.FileWrite, "stall_s", 0.05)

    async def write(ours: socket.socket) -> None:
        control = Control(ours, lambda _: None)
        with files.FileWrite.open(control, user="root", path="/tmp/f", length=1) as write:
            await write.write(b"x")
            await write.finish()

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(SandboxdError) as raised:
        asyncio.run(write(ours))
    assert (raised.value.cause, raised.value.retryable) == ("workload", False)


def test_memory_of_a_child_cannot_be_read(daemon: Daemon, hostile: str) -> None:
    """While a file operation waits for its bytes it is the user's process, with PID 1's memory."""
    attacker = Inside(daemon, hostile, "root")
    names = ["mem", "maps", "fd", "exe", "environ", "root"]

    def body() -> object:
        yield b"x"
        # What follows comes once the attacker has looked.
        for _ in range(200):
            if looked:
                break
            time.sleep(0.01)
        yield b"y"

    looked: list[str] = []
    with ThreadPoolExecutor() as pool:
        # A connection of its own: a second one kept alive by the daemon's client counts as a leak.
        upload = pool.submit(
            httpx.put,
            f"{daemon.base_url}/v1/sandboxes/{hostile}/files",
            params={"path": "/tmp/slow"},
            content=body(),
            headers={"Content-Length": "2", "Authorization": f"Bearer {daemon.token}"},
            timeout=times.scaled(60),
        )
        script = """
            for try in $(seq 200); do
                for status in /proc/[0-9]*/status; do
                    pid=${status#/proc/}; pid=${pid%/status}
                    [ $pid -gt 1 ] && grep -q '^Name:.init$' $status && echo $pid && exit
                done 2>/dev/null
                usleep 10000
            done
        """
        pid = attacker.shell(script).strip()
        with contextlib.ExitStack() as stack:
            stack.callback(looked.append, "done")
            assert pid, "the child was not seen"
            for name in names:
                assert attacker.ask(f"proc_read:{pid},{name}") in {"EACCES", "EPERM", "EISDIR"}
            for call in ("ptrace_seize", "vm_readv", "vm_writev", "pidfd_getfd", "kcmp"):
                assert attacker.ask(f"{call}:{pid}") in {"EACCES", "EPERM"}, call
            assert attacker.ask(f"proc_list:{pid},fd") == "EACCES"
        assert upload.result().is_success
    assert get(daemon, hostile, "/tmp/slow").content == b"xy"


HOSTILE_PASSWD = {
    "a fifo": "rm /etc/passwd; mkfifo /etc/passwd",
    "a directory": "rm /etc/passwd; mkdir /etc/passwd",
    "a device": "rm /etc/passwd; ln -s /dev/zero /etc/passwd",
    "a terminal": "rm /etc/passwd; ln -s /dev/ptmx /etc/passwd",
    "a link to itself": "rm /etc/passwd; ln -s passwd /etc/passwd",
    "PID 1's memory": "rm /etc/passwd; ln -s /proc/1/mem /etc/passwd",
    "the child's memory": "rm /etc/passwd; ln -s /proc/self/mem /etc/passwd",
    "the child's descriptor": "rm /etc/passwd; ln -s /proc/self/fd/5 /etc/passwd",
    "a socket": "rm /etc/passwd; timeout 1 nc -lU /etc/passwd",
    "huge": "dd if=/dev/zero of=/etc/passwd bs=1M count=64",
    "one long line": "head -c 2000000 /dev/zero | tr '\\0' x >/etc/passwd",
    "many lines": "yes 'a:x:1:1:a:/:/bin/sh' | head -c 4000000 >/etc/passwd",
    "binary": "head -c 100000 /dev/urandom >/etc/passwd",
    "without numbers": "echo 'agent:x::::' >/etc/passwd",
    "with numbers out of range": "echo 'agent:x:65536:4294967296:a:/:/bin/sh' >/etc/passwd",
    "with the id of PID 1": "echo 'agent:x:4294967295:65534:a:/:/bin/sh' >/etc/passwd",
}


@pytest.mark.parametrize("what", HOSTILE_PASSWD)
def test_hostile_passwd_names_nobody(what: str, daemon: Daemon, hostile: str) -> None:
    daemon.exec(hostile, HOSTILE_PASSWD[what], timeout_s=times.scaled(30))
    told = exec_in(daemon, hostile, ["/bin/id", "-u"], user="agent", timeout_s=times.scaled(20))
    assert told["error"]["code"] == "user-not-found", told
    alive(daemon, hostile)


def test_hostile_group_gives_what_the_kernel_allows(daemon: Daemon, hostile: str) -> None:
    """A thousand groups with one member: the first that fit are taken, none out of range."""
    script = "for n in $(seq 1000); do echo g$n:x:$((n * 100)):agent; done >/etc/group"
    daemon.exec(hostile, script, timeout_s=times.scaled(30))
    told = daemon.exec(hostile, ["/bin/id", "-G"], user="agent")
    groups = [int(number) for number in told["stdout"].split()]
    assert 1 < len(groups) < 200
    assert max(groups) <= 65535


def test_lease_on_passwd_holds_nobody_up(daemon: Daemon, hostile: str) -> None:
    """The child does not wait for the holder: there are no users then, and it says so at once."""
    assert Inside(daemon, hostile, "root").hold("lease") == (1, "EALREADY")
    told = exec_in(daemon, hostile, ["/bin/id"], user="agent", timeout_s=times.scaled(20))
    assert told["error"]["code"] == "user-not-found", told
    assert get(daemon, hostile, "/etc/passwd").status_code == 422
    alive(daemon, hostile)


@pytest.mark.parametrize("name", ["/dev/null", "/proc/self", "/dev/fd", "/bin/sh"])
def test_replaced_standard_file_harms_nobody_else(name: str, daemon: Daemon, hostile: str) -> None:
    daemon.exec(hostile, f"rm -rf {name}; ln -s /dev/zero {name}")
    told = exec_in(daemon, hostile, ["/bin/busybox", "cat"])
    assert (told.get("exit_code"), told.get("stdout")) == (0, ""), told
    assert put(daemon, hostile, "/tmp/x", b"x").is_success


def test_image_program_is_not_on_a_shared_writable_file(
    programs: dict[str, Path], daemon: Daemon
) -> None:
    """What one sandbox writes over a file of the image no other sees."""
    with daemon.sandbox("busybox") as one, daemon.sandbox("busybox") as other:
        daemon.exec(one, "echo hostile >/etc/group; echo x >/bin/busybox.new; rm /bin/true")
        assert "hostile" not in daemon.exec(other, "cat /etc/group")["stdout"]
        assert daemon.exec(other, ["/bin/true"])["exit_code"] == 0
    del programs
