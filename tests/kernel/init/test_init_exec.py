"""Commands: what they start with, how they end, and how they are ended."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from pathlib import Path

import pytest

from sandboxd.init import protocol as wire
from sandboxd.init.protocol import ExecFlag, KillScope, MsgType
from sandboxd.launcher.__main__ import SANDBOX_CAPABILITIES
from sandboxd.linux import capabilities
from sandboxd.model import Limits
from tests.kernel.init.harness import PATH, Refused, cpu_time_s, wait_until

pytestmark = pytest.mark.needs("root", "namespaces", "overlay", "cgroup-kill", "busybox")


def facts(client, **request) -> dict[str, str]:
    result = client.run(["/bin/probe", "facts"], **request)
    assert result.code == 0, result
    return dict(line.partition(" ")[::2] for line in result.out.decode().splitlines())


def status_of(client, **request) -> dict[str, str]:
    text = client.run(["/bin/cat", "/proc/self/status"], **request).out.decode()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


# --- what a command starts with --------------------------------------------------------------


def test_a_command_of_root(client):
    found = facts(client, cwd="/tmp", umask=0o027, nofile=512)
    assert found["ids"] == "0 0 0 0"
    assert found["groups"] == ""
    assert found["session"] == "1"
    assert (found["securebits"], found["nnp"], found["seccomp"]) == ("0", "1", "2")
    assert found["dumpable"] == "1"
    assert found["umask"] == "27"
    assert found["nofile"] == "512 512"
    assert found["core"] == "1 1"
    assert found["cwd"] == "/tmp"
    assert found["signals"] == ""
    assert found["fds"] == "0:char 1:pipe 2:pipe"
    status = status_of(client)
    granted = f"{capabilities.mask(SANDBOX_CAPABILITIES):016x}"
    assert {status[f"Cap{name}"] for name in ("Prm", "Eff", "Bnd")} == {granted}
    assert {status[f"Cap{name}"] for name in ("Inh", "Amb")} == {"0" * 16}


@pytest.mark.parametrize(
    ("user", "ids", "groups", "home"),
    [
        ("agent", "1000 1000 1000 1000", "29 44", "/home/agent"),
        ("1000", "1000 1000 1000 1000", "29 44", "/home/agent"),
        ("1000:29", "1000 1000 29 29", "", "/home/agent"),
        ("agent:video", "1000 1000 44 44", "", "/home/agent"),
        ("4711", "4711 4711 0 0", "", "/"),
        ("4711:4712", "4711 4711 4712 4712", "", "/"),
        ("far", "65535 65535 65535 65535", "", "/nowhere"),
    ],
)
def test_a_command_of_another_user_has_no_capability(client, user, ids, groups, home):
    found = facts(client, user=user)
    assert (found["ids"], found["groups"]) == (ids, groups)
    assert (found["securebits"], found["nnp"], found["seccomp"]) == ("0", "1", "2")
    status = status_of(client, user=user)
    assert {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert client.sh("echo $HOME", user=user) == f"{home}\n"


@pytest.mark.parametrize(
    "user", ["nobodyknows", "", ":0", "65536", "99999999999", "toolarge", "-1"]
)
def test_an_unknown_user_is_refused_by_name(client, user):
    result = client.run(["/bin/true"], user=user)
    assert (result.step, result.pid) == ("user", 0)


@pytest.mark.parametrize("group", ["0:nosuch", "0:", "0:65536", "0:1:2"])
def test_an_unknown_group_is_refused(client, group):
    assert client.run(["/bin/true"], user=group).step == "group"


def test_a_command_can_reopen_its_pipes(client):
    script = "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin"
    result = client.run(script, user="agent", stdin=b"in")
    assert (result.code, result.out, result.err) == (0, b"out\nin", b"err\n")


def test_the_environment_is_what_was_sent_and_home(client):
    env = ("A=1", "no equals sign", "EMPTY=", "=odd", "A=2")
    result = client.run(["/bin/cat", "/proc/self/environ"], env=env)
    assert result.out.decode().split("\0")[:-1] == [*env, "HOME=/root"]
    result = client.run(["/bin/cat", "/proc/self/environ"], env=("HOME=/x",))
    assert result.out == b"HOME=/x\0"


def test_stdin_is_empty_unless_given(client):
    assert client.sh("cat; readlink /proc/self/fd/0") == "/dev/null\n"
    assert client.run(["/bin/cat"], stdin=b"x" * 5000).out == b"x" * 5000


def test_stderr_can_be_merged(client):
    number = client.exec("echo a; echo b >&2; echo c", flags=ExecFlag.EXEC_MERGE_STDERR)
    _, fds = client.started(number)
    client.exited(number)
    assert len(fds) == 1
    assert os.read(fds[0], 100) == b"a\nb\nc\n"
    wire.close_fds(fds)
    result = client.run(["/no/such"], flags=ExecFlag.EXEC_MERGE_STDERR)
    assert (result.code, result.out) == (127, b"exec: /no/such: not found\n")


def test_the_oom_killer_prefers_commands_to_pid1(sandbox, client):
    own = Path(f"/proc/{sandbox.pid}/oom_score_adj").read_text()
    assert int(client.sh("cat /proc/self/oom_score_adj")) == int(own) + 500


@pytest.mark.parametrize("user", ["0", "agent"])
def test_pid1_cannot_be_looked_at_signalled_or_limited(sandbox, client, user):
    before = Path(f"/proc/{sandbox.pid}/limits").read_text()
    script = """
        for f in mem environ maps stack auxv; do cat /proc/1/$f 2>/dev/null && echo $f; done
        for d in fd root cwd exe; do ls /proc/1/$d/ 2>/dev/null && echo $d; done
        kill -STOP 1; kill -KILL 1; kill -TERM 1
        echo 900 > /proc/1/oom_score_adj && echo oom
        renice 5 1 >/dev/null 2>&1 && echo nice
        exit 0
    """
    assert client.run(script, user=user).out == b""
    client.call(MsgType.M_PING)
    assert Path(f"/proc/{sandbox.pid}/limits").read_text() == before
    # The same tricks work on a process of one's own.
    control = "sleep 9 & cat /proc/$!/environ | wc -c; kill -KILL $! && echo killed"
    assert client.sh(control, user=user).endswith("killed\n")


def test_the_token_is_wiped_before_a_child_belongs_to_the_user(sandbox, client):
    """Looked for by the host's root, in a child that does not exec: a file operation."""
    node = sandbox.node
    halves = [n.to_bytes(8, "little") for n in (node.token.low, node.token.high)]
    read_fd, write_fd = os.pipe()
    payload = wire.file_payload(wire.FileOp.FILE_WRITE, user="0", path="/tmp/f", length=1)
    number = client.send(MsgType.M_FILE, payload, [read_fd])
    os.close(read_fd)
    group = f"{sandbox.cgroups.v2}/e1/cgroup.procs"
    wait_until(lambda: Path(group).exists() and Path(group).read_text())
    pid = int(Path(group).read_text())
    wait_until(lambda: uid_of(pid) == 2_000_000_000)
    assert count_in_memory(pid, halves) == [0, 0]
    assert all(n >= 1 for n in count_in_memory(sandbox.pid, halves)), "the search finds nothing"
    os.write(write_fd, b"x")
    os.close(write_fd)
    assert client.exited(number).status == 0
    shell = client.exec(["/bin/sleep", "60"])
    _, fds = client.started(shell)
    pid = int(Path(f"{sandbox.cgroups.v2}/e2/cgroup.procs").read_text())
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    assert count_in_memory(pid, halves) == [0, 0]
    client.kill_tree(shell)
    wire.close_fds(fds)


def uid_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("Uid:\t")[2].split()[0])


def count_in_memory(pid: int, wanted: list[bytes]) -> list[int]:
    counts = [0] * len(wanted)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            first, last = (int(n, 16) for n in span.split("-"))
            # What the sanitizer reserves for itself is terabytes, and holds no data.
            if not rights.startswith("r") or "[v" in line or last - first > 1 << 28:
                continue
            memory.seek(first)
            try:
                data = memory.read(last - first)
            except OSError:
                continue
            for i, text in enumerate(wanted):
                counts[i] += data.count(text)
    return counts


# --- what is run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "env", "code", "err"),
    [
        (["true"], (PATH,), 0, b""),
        (["true"], ("PATH=",), 127, b"exec: true: not found\n"),
        (["true"], ("PATH=:/nowhere:/etc/passwd::/bin",), 0, b""),
        (["true"], ("PATH=" + "/x" * 3000 + ":/bin",), 0, b""),
        (["true"], ("PATHS=/bin", "PAT=/bin"), 0, b""),  # the default path
        (["nosuch"], (PATH,), 127, b"exec: nosuch: not found\n"),
        (["x" * 5000], (PATH,), 127, b"exec: " + b"x" * 400 + b": not found\n"),
        ([""], (PATH,), 127, b"exec: : not found\n"),
        (["/etc"], (PATH,), 126, b"exec: /etc: permission denied\n"),
        (["etc"], ("PATH=/",), 126, b"exec: etc: permission denied\n"),
        (["/etc/passwd"], (PATH,), 126, b"exec: /etc/passwd: permission denied\n"),
        (["/etc/passwd/x"], (PATH,), 127, b"exec: /etc/passwd/x: not found\n"),
        (["bin/true"], (PATH,), 0, b""),  # relative to the working directory
    ],
)
def test_how_a_program_is_found(client, argv, env, code, err):
    result = client.run(argv, env=env)
    assert (result.code, result.err) == (code, err)
    assert result.step == ("none" if code == 0 else "exec")
    assert result.pid > 1


def test_a_script_without_a_shebang_is_no_program(client):
    client.sh(
        "printf 'echo hi\\n' > /tmp/bare; printf '#!/no/such\\n' > /tmp/lost; chmod +x /tmp/*"
    )
    result = client.run(["/tmp/bare"])
    assert (result.code, result.err) == (126, b"exec: /tmp/bare: not an executable format\n")
    result = client.run(["/tmp/lost"])
    assert (result.code, result.err) == (127, b"exec: /tmp/lost: not found\n")


def test_a_shell_is_named_when_it_is_missing(node):
    node.namespaces.ask("lower", name=f"shellless-{node.pid}", entries={"etc": None})
    with node.sandbox(f"shellless-{node.pid}") as sandbox:
        result = sandbox.launcher.run("echo hi")
        assert (result.code, result.err) == (127, b"exec: /bin/sh: not found\n")


def test_login_shell(client):
    client.sh("echo 'export FROM_PROFILE=yes' > /etc/profile")
    assert client.sh("echo $FROM_PROFILE") == "\n"
    assert client.sh("echo $FROM_PROFILE", flags=ExecFlag.EXEC_LOGIN) == "yes\n"


def test_exit_codes_and_signals(client):
    assert client.run("exit 7").code == 7
    assert client.run("kill -SEGV $$").code == -signal.SIGSEGV
    result = client.run("x=0; while [ $x -lt 20000 ]; do x=$((x+1)); done")
    assert result.exited.user_us + result.exited.system_us > 1000
    assert result.exited.maxrss_kb > 100


def test_a_failure_to_exec_is_told_though_nobody_reads(client):
    number = client.exec(["/no/such"])
    _, fds = client.started(number)
    wire.close_fds(fds)
    assert os.waitstatus_to_exitcode(client.exited(number).status) == 127


@pytest.mark.parametrize(
    ("cwd", "number"),
    [
        ("/nowhere", errno.ENOENT),
        ("relative", errno.ENOENT),
        ("", errno.ENOENT),
        ("/etc/passwd", errno.ENOTDIR),
        ("/" + "x" * 5000, errno.ENAMETOOLONG),
        ("/proc/1/root", errno.EACCES),
    ],
)
@pytest.mark.parametrize("create", [False, True])
def test_a_working_directory_that_is_none(client, cwd, number, create):
    if create and cwd == "/nowhere":
        cwd = "/etc/passwd/below"
        number = errno.ENOTDIR
    flags = ExecFlag.EXEC_CWD_CREATE if create else 0
    result = client.run(["/bin/true"], cwd=cwd, flags=flags)
    assert result.step == "cwd"
    if not (create and cwd == "/proc/1/root"):  # a magic link there, ELOOP
        assert result.exited.failure.err == number
    assert os.WIFEXITED(result.exited.status)


def test_a_working_directory_is_made_and_is_roots(client):
    result = client.run(
        "pwd; stat -c '%u:%g %a' . ..", cwd="/srv/a//b", flags=ExecFlag.EXEC_CWD_CREATE
    )
    assert result.out == b"/srv/a/b\n0:0 755\n0:0 755\n"
    client.sh("touch /srv/a/b/file && rm -r /srv")


def test_a_working_directory_the_user_may_not_enter(client):
    client.sh("mkdir -m 700 /closed")
    result = client.run(["/bin/true"], user="agent", cwd="/closed")
    assert (result.step, result.exited.failure.err) == ("cwd", errno.EACCES)


@pytest.mark.parametrize("number", range(3, 24))
def test_no_descriptor_of_ours_is_a_working_directory(client, number):
    for path in (f"/proc/self/fd/{number}", f"/proc/thread-self/fd/{number}", f"/dev/fd/{number}"):
        assert client.run(["/bin/pwd"], cwd=path).step == "cwd"
        assert client.run([path]).code in (126, 127)


def test_large_arguments_come_in_a_memfd(client):
    argv = ["/bin/sh", "-c", "echo $#", *["y" * 100] * 9000]
    assert client.run(argv).out == b"8999\n"
    result = client.run(["/bin/true", "z" * 300_000])
    assert (result.step, result.exited.failure.err) == ("exec", errno.E2BIG)


@pytest.mark.parametrize(
    ("payload", "flags", "number"),
    [
        (b"", 0, errno.EBADMSG),
        (wire.EXEC_REQ.pack(1, 0, 64, 0, 0), 0, errno.EBADMSG),
        (wire.EXEC_REQ.pack(1, 0, 64, 0, 0) + b"0\0/\0true", 0, errno.EBADMSG),
        (wire.EXEC_REQ.pack(0, 0, 64, 0, 0) + b"0\0/\0", 0, errno.EBADMSG),
        (wire.EXEC_REQ.pack(1, 0, 64, 0, 0) + b"0\0/\0true\0more\0", 0, errno.EBADMSG),
        (wire.EXEC_REQ.pack(65537, 0, 64, 0, 0) + b"0\0/\0true\0", 0, errno.E2BIG),
        (wire.EXEC_REQ.pack(2**32 - 1, 2**32 - 1, 64, 0, 0) + b"0\0/\0true\0", 0, errno.E2BIG),
        (wire.EXEC_REQ.pack(1, 0, 64, 0, 0) + b"0\0/\0true\0", 1 << 9, errno.EINVAL),
        (wire.EXEC_REQ.pack(1, 0, 64, 0, 0) + b"0\0/\0true\0", 1 << 31, errno.EINVAL),
        (b"", ExecFlag.EXEC_PAYLOAD_FD, errno.EBADMSG),
    ],
)
def test_a_command_that_is_no_message(client, payload, flags, number):
    exited = client.exited(client.send(MsgType.M_EXEC, payload, flags=flags))
    assert wire.step_slug(exited.failure.step) == "message"
    assert exited.failure.err == number


def test_a_payload_fd_that_is_no_payload(client):
    pipe = os.pipe()
    huge = os.memfd_create("huge")
    os.truncate(huge, wire.PAYLOAD_MAX + 1)
    junk = os.memfd_create("junk")
    os.write(junk, b"\xff" * 10_000)
    for fd, number in ((pipe[0], errno.EBADMSG), (huge, errno.E2BIG), (junk, errno.EBADMSG)):
        exited = client.exited(client.send(MsgType.M_EXEC, b"", [fd], ExecFlag.EXEC_PAYLOAD_FD))
        assert (wire.step_slug(exited.failure.step), exited.failure.err) == ("message", number)
    wire.close_fds([*pipe, huge, junk])


# --- how it ends -----------------------------------------------------------------------------


def test_an_exec_ends_with_its_main_process(sandbox, client):
    number = client.exec("sleep 600 & echo started")
    _, fds = client.started(number)
    assert client.exited(number).status == 0
    assert os.read(fds[0], 100) == b"started\n"
    # What it left is still its own: killed by its id, and then told.
    assert sandbox.exec_cgroups() == ["e1"]
    assert client.kill_tree(number) is None
    assert sandbox.exec_cgroups() == []
    assert os.read(fds[0], 1) == b""
    wire.close_fds(fds)


def test_kill_main_leaves_the_rest(sandbox, client):
    number = client.exec("sleep 600 & exec sleep 601")
    _, fds = client.started(number)
    wait_until(lambda: len(commands(sandbox, 1)) == 2)
    client.kill(number, signal.SIGTERM, KillScope.KILL_MAIN)
    assert client.exited(number).status == signal.SIGTERM
    assert len(commands(sandbox, 1)) == 1
    client.kill(number, signal.SIGTERM)  # the whole tree, politely
    sandbox.wait_exec_cgroups(0)
    wire.close_fds(fds)


def commands(sandbox, serial: int) -> list[str]:
    group = sandbox.cgroups.v2 / f"e{serial}/cgroup.procs"
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in group.read_text().split()]


def test_what_escaped_dies_with_its_exec_and_only_it(sandbox, client):
    other = client.exec(["/bin/sleep", "600"])
    _, other_fds = client.started(other)
    number = client.exec(["/bin/probe", "escape", "20"])
    _, fds = client.started(number)
    assert client.exited(number).status == 0
    wait_until(lambda: len(commands(sandbox, 2)) == 20)
    client.kill(number, signal.SIGTERM)  # ignored by all
    client.call(MsgType.M_PING)
    assert len(commands(sandbox, 2)) == 20
    assert client.kill_tree(number) is None
    assert sandbox.exec_cgroups() == ["e1"]
    assert client.kill_tree(other).status == signal.SIGKILL
    wire.close_fds([*fds, *other_fds])


def test_a_fork_storm_ends_at_the_kill(sandbox, client):
    sandbox.cgroups.limit(Limits(memory_mb=256, disk_mb=64, pids=400))
    number = client.exec(["/bin/probe", "storm"])
    _, fds = client.started(number)
    wait_until(lambda: len((sandbox.cgroups.v2 / "e1/cgroup.procs").read_text().split()) > 200)
    exited = client.kill_tree(number)
    assert exited is not None
    assert exited.status == signal.SIGKILL
    assert sandbox.exec_cgroups() == []
    assert client.sh("ps | grep '[p]robe' || echo none") == "none\n"  # nor a zombie
    wire.close_fds(fds)


def test_r_exit_comes_before_r_gone_and_both_once(client):
    number = client.exec(["/bin/sleep", "600"])
    _, fds = client.started(number)
    client.kill(number, signal.SIGKILL)
    client.kill(number, signal.SIGKILL)
    ping = client.send(MsgType.M_PING)
    kinds = []
    while len(kinds) < 3:
        message, _ = client.receive()
        if message.id != ping:
            kinds.append(message.type)
        if kinds[-1:] == [MsgType.R_GONE] and kinds.count(MsgType.R_GONE) == 1:
            client.kill(number, signal.SIGKILL)  # of one that is gone: at once
    assert kinds[:2] == [MsgType.R_EXIT, MsgType.R_GONE]
    assert set(kinds[2:]) == {MsgType.R_GONE}
    wire.close_fds(fds)


def test_kill_of_nothing(client):
    client.kill(4711, signal.SIGKILL)
    assert client.answer(4711)[0].type == MsgType.R_GONE
    client.kill(4712, signal.SIGTERM)
    client.kill(4713, signal.SIGKILL, KillScope.KILL_MAIN)
    with pytest.raises(Refused, match=r"message\[6\]"):
        client.expect(client.send(MsgType.M_KILL, b"short"), MsgType.R_DONE)


def test_a_client_cannot_kill_what_another_started(sandbox, client):
    number = client.exec(["/bin/sleep", "600"])
    _, fds = client.started(number)
    stranger = sandbox.attach()
    stranger.kill(number, signal.SIGKILL)
    assert stranger.answer(number)[0].type == MsgType.R_GONE
    assert len(commands(sandbox, 1)) == 1
    client.kill_tree(number)
    wire.close_fds(fds)


def test_a_client_that_goes_takes_what_it_waits_for_and_no_more(sandbox, client):
    mortal = client.exec("sleep 600 & exec sleep 600")
    _, fds = client.started(mortal)
    ended = client.exec("sleep 600 &")
    fds += client.started(ended)[1]
    client.exited(ended)
    kept = client.exec(["/bin/sleep", "601"], flags=ExecFlag.EXEC_DETACH)
    fds += client.started(kept)[1]
    ended_kept = client.exec("sleep 602 &", flags=ExecFlag.EXEC_DETACH)
    fds += client.started(ended_kept)[1]
    client.exited(ended_kept)
    client.close()
    sandbox.wait_exec_cgroups(3)
    assert sandbox.exec_cgroups() == ["e2", "e3", "e4"]
    assert [len(commands(sandbox, n)) for n in (2, 3, 4)] == [1, 1, 1]
    assert sandbox.attach().sh("echo alive") == "alive\n"
    wire.close_fds(fds)


def test_a_client_that_goes_in_the_middle_of_starts_and_files(sandbox):
    for _ in range(10):
        client = sandbox.attach()
        read_fd, write_fd = os.pipe()
        for _ in range(8):
            client.exec(["/bin/sleep", "600"], flags=ExecFlag.EXEC_STDIN)
            payload = wire.file_payload(wire.FileOp.FILE_WRITE, user="0", path="/tmp/f", length=9)
            client.send(MsgType.M_FILE, payload, [read_fd])
            client.kill(1, signal.SIGKILL)
        client.close()
        wire.close_fds([read_fd, write_fd])
    sandbox.wait_exec_cgroups(0)
    assert sandbox.launcher.sh("ls -A /tmp") == ""
    wait_until(lambda: len(os.listdir(f"/proc/{sandbox.pid}/fd")) < 14)


def test_the_launcher_goes_and_everything_with_it(sandbox, client):
    number = client.exec(["/bin/probe", "escape", "5"], flags=ExecFlag.EXEC_DETACH)
    _, fds = client.started(number)
    sandbox.launcher.close()
    sandbox.wait_death()
    with pytest.raises(ConnectionResetError):
        while True:
            client.receive()
    assert (sandbox.cgroups.v2 / "cgroup.events").read_text().startswith("populated 0")
    wire.close_fds(fds)


# --- many ------------------------------------------------------------------------------------


def test_the_table_is_full_and_then_not(sandbox, client):
    numbers = []
    fds = []
    for _ in range(wire.EXECS_MAX):
        numbers.append(client.exec(["/bin/sleep", "600"]))
        fds += client.started(numbers[-1])[1]
    with pytest.raises(Refused) as refused:
        client.started(client.exec(["/bin/true"]))
    assert (refused.value.step, refused.value.errno) == ("table-full", errno.EAGAIN)
    client.kill_tree(numbers[100])
    assert client.sh("echo place") == "place\n"
    wire.close_fds(fds)
    client.close()
    sandbox.wait_exec_cgroups(0)


def test_ten_thousand_orphans_are_reaped(sandbox, client):
    count = 10_000
    result = client.run(["/bin/probe", "orphans", str(count)])
    assert result.code == 0
    wait_until(lambda: zombies_below(sandbox.pid) == 0)
    sandbox.wait_exec_cgroups(0)


def zombies_below(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(Path(f"/proc/{child}/stat").read_text().split()[2] == "Z" for child in children)


def test_nothing_is_lost_for_a_slow_reader_and_pid1_does_not_spin(sandbox, client):
    """More answers than a socket's queue takes, and nobody reads: they come when somebody does."""
    count = 1500
    sent = [client.send(MsgType.M_EXEC, b"", flags=1 << 30) for _ in range(200)]
    sandbox.wait_exec_cgroups(0)
    settled = cpu_time_s(sandbox.pid)
    client.sock.setblocking(False)
    asked = 0
    for _ in range(count):
        try:
            client.send(MsgType.M_KILL, b"bad")
            asked += 1
        except BlockingIOError:  # PID 1 has stopped reading, as it should
            break
    assert asked > 0
    time.sleep(0.5)  # time for it to spin in, if it did
    assert cpu_time_s(sandbox.pid) - settled < 0.3
    # Others are served meanwhile.
    assert sandbox.launcher.sh("echo hi") == "hi\n"
    client.sock.settimeout(30)
    exits = refusals = 0
    while exits < len(sent) or refusals < asked:
        message, _ = client.receive()
        exits += message.type == MsgType.R_EXIT
        refusals += message.type == MsgType.R_FAILED
    assert (exits, refusals) == (len(sent), asked)


def test_ends_of_many_execs_wait_for_a_slow_reader(sandbox, client):
    count = 450
    numbers = [client.exec(["/bin/true"], cwd="/nowhere") for _ in range(count)]
    # Each sends R_STARTED itself, and waits where the queue is full; PID 1 does not.
    assert sandbox.launcher.sh("echo hi") == "hi\n"
    before = cpu_time_s(sandbox.pid)
    time.sleep(0.3)
    assert cpu_time_s(sandbox.pid) - before < 0.15
    seen = set()
    while len(seen) < count:
        message, fds = client.receive()
        wire.close_fds(fds)
        if message.type == MsgType.R_EXIT:
            assert message.id not in seen
            seen.add(message.id)
    assert seen == set(numbers)
    sandbox.wait_exec_cgroups(0)


def test_background_processes_do_not_keep_pid1_busy(sandbox, client):
    """A watched cgroup.events reports the same event until it is read again."""
    number = client.exec("sleep 600 &")
    _, fds = client.started(number)
    client.exited(number)
    client.call(MsgType.M_PING)
    before = cpu_time_s(sandbox.pid)
    time.sleep(0.5)
    assert cpu_time_s(sandbox.pid) - before < 0.02
    client.kill_tree(number)
    wire.close_fds(fds)


def test_an_idle_pid1_costs_next_to_nothing(sandbox, client, record_property):
    client.sh("echo warm")
    client.call(MsgType.M_PING)
    rollup = Path(f"/proc/{sandbox.pid}/smaps_rollup").read_text()
    sizes = {line.split()[0][:-1]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    status = Path(f"/proc/{sandbox.pid}/status").read_text()
    rss = int(status.partition("VmRSS:")[2].split()[0])
    private = sizes["Private_Dirty"] + sizes["Private_Clean"]
    record_property("rss_kb", rss)
    print(f"an idle PID 1: RSS {rss} KiB, private {private} KiB, PSS {sizes['Pss']} KiB")
    before = cpu_time_s(sandbox.pid)
    assert not select.select([client.sock], [], [], 0.3)[0]
    # Not a busy loop; the clock itself moves by a few microseconds for what was under way.
    assert cpu_time_s(sandbox.pid) - before < 0.001
    threads = status.partition("Threads:")[2].split()[0]
    assert threads == "1"


def test_nothing_is_left_of_a_thousand_execs(sandbox, client):
    for _ in range(200):
        assert client.run(["/bin/true"]).code == 0
    before = len(os.listdir(f"/proc/{sandbox.pid}/fd"))
    for _ in range(800):
        assert client.run(["/bin/true"]).code == 0
    assert len(os.listdir(f"/proc/{sandbox.pid}/fd")) == before
    sandbox.wait_exec_cgroups(0)
