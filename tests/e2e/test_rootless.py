"""`sandboxd serve` as an ordinary user with a range of subordinate ids: all of a sandbox's life,
what holds its limits without cgroups, and what is refused by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.background import Background
from tests.e2e.refusals import refusal
from tests.e2e.shell_sessions import session
from tests.framework import host_state, times
from tests.framework import ordinary_user as framework
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck
from tests.framework.ordinary_user import FIRST_SUBID, UID, OrdinaryUser, ordinary_user

SUBIDS = 65_538


@pytest.fixture(scope="module")
def user() -> Iterator[OrdinaryUser]:
    with ordinary_user(SUBIDS) as made:
        yield made


@pytest.fixture(scope="module")
def his(leak_check: LeakCheck, user: OrdinaryUser, busybox: Path) -> Iterator[Daemon]:
    with framework.running_daemon(leak_check, {"busybox": busybox}, user) as daemon:
        daemon.warm_up("busybox")
        yield daemon


@pytest.fixture
def box(his: Daemon) -> Iterator[str]:
    with his.sandbox("busybox") as name:
        yield name


def running(daemon: Daemon, sandbox: str, word: str) -> int:
    """How many processes of a sandbox have this word as their only argument."""
    script = f"n=0; for p in $(pidof {word}); do n=$((n+1)); done; echo $n"
    return int(daemon.exec(sandbox, script)["stdout"])


def wait_dead(daemon: Daemon, sandbox: str) -> dict[str, object]:
    """The sandbox once it has failed; the watchdog tells nobody that it looks."""
    deadline = time.monotonic() + times.scaled(20)
    while True:
        seen = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        if seen["state"] == "failed":
            return dict(seen["failure"])
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)


# --- what it is ----------------------------------------------------------------------------------


def test_the_node_says_what_this_user_gets(his: Daemon) -> None:
    node = his.http.get("/v1/node").json()
    assert (node["mode"], node["ids"], node["cgroup"]) == ("rootless", "range", "watchdog")
    held = {"disk_mb", "inodes", "nofile", "shm_mb"}
    watched = {"memory_mb", "pids"}
    assert {name for name, how in node["enforcement"].items() if how == "enforced"} == held
    assert {name for name, how in node["enforcement"].items() if how == "watchdog"} == watched
    assert node["enforcement"]["cpus"] == "none"
    assert node["network"]["allow"] is node["network"]["full"] is False
    assert "root" in node["network"]["refusal"]


def test_no_process_of_a_sandbox_is_the_users_or_roots(his: Daemon, box: str) -> None:
    his.exec(box, "sleep 300 &")
    Background.start(his.http, box, ["sleep", "300"], user="agent")
    ids = framework.host_ids(his)
    # Positive control: daemon, hostd and what watches that are seen, and are his.
    assert sum(uid == UID for _, uid in ids.values()) == 3
    sleepers = {uid for name, uid in ids.values() if name == "sleep"}
    assert sleepers == {FIRST_SUBID, FIRST_SUBID + 1000}
    others = {uid for _, uid in ids.values()} - {UID}
    assert all(FIRST_SUBID <= uid < FIRST_SUBID + SUBIDS for uid in others)
    inits = {uid for name, uid in ids.values() if name == "init"}
    assert inits == {FIRST_SUBID + 65_536}


# --- the life of a sandbox -----------------------------------------------------------------------


def test_commands_have_their_exit_and_their_user(his: Daemon, box: str) -> None:
    answer = his.exec(box, "echo out; echo err >&2; exit 7")
    assert (answer["exit_code"], answer["stdout"], answer["stderr"]) == (7, "out\n", "err\n")
    assert his.exec(box, "kill -9 $$")["signal"] == signal.SIGKILL
    assert his.exec(box, "id -u; id -g", user="agent")["stdout"] == "1000\n1000\n"
    assert his.exec(box, "cat", stdin="in")["stdout"] == "in"


def test_root_of_a_sandbox_owns_what_it_says(his: Daemon, box: str) -> None:
    script = "touch /tmp/f && chown 65534:65535 /tmp/f && stat -c %u:%g /tmp/f"
    answer = his.exec(box, script)
    assert (answer["exit_code"], answer["stdout"]) == (0, "65534:65535\n"), answer


def test_the_images_own_files_can_be_changed(his: Daemon, box: str) -> None:
    script = "rm -r /etc && mkdir /etc && echo new >/etc/passwd && cat /etc/passwd"
    answer = his.exec(box, script)
    assert (answer["exit_code"], answer["stdout"]) == (0, "new\n"), answer


def test_files_go_in_and_out(his: Daemon, box: str) -> None:
    url = f"/v1/sandboxes/{box}/files"
    content = os.urandom(3 << 20)
    where = {"path": "/home/agent/data", "user": "agent"}
    assert his.http.put(url, params={**where, "mode": "0640"}, content=content).is_success
    assert his.http.get(url, params=where).content == content
    assert his.exec(box, "stat -c %U:%a /home/agent/data")["stdout"] == "agent:640\n"


def test_a_session_keeps_its_shell(his: Daemon, box: str) -> None:
    with session(his.http, box) as shell:
        shell.run("cd /tmp; x=5")
        assert shell.out("echo $PWD $x") == "/tmp 5\n"


def test_a_terminal_is_given(his: Daemon, box: str) -> None:
    size = {"cols": 91, "rows": 27}
    script = "stty size; test -t 0 && stat -c %U $(tty)"
    answer = his.exec(box, script, tty=size, user="agent")
    assert answer["stdout"] == "27 91\r\nagent\r\n"


def test_reset_begins_anew(his: Daemon, box: str) -> None:
    his.exec(box, "touch /tmp/old; sleep 300 &")
    assert his.http.post(f"/v1/sandboxes/{box}/reset").is_success
    assert his.exec(box, "ls /tmp")["stdout"] == ""
    assert running(his, box, "sleep") == 0


def test_rollback_and_fork_see_the_moment_of_the_snapshot(his: Daemon, box: str) -> None:
    his.exec(box, "echo one >/tmp/f")
    made = his.http.post(f"/v1/sandboxes/{box}/snapshots", json={})
    assert made.status_code == httpx.codes.CREATED, made.text
    his.exec(box, "echo two >/tmp/f")
    body = {"snapshot": made.json()["id"]}
    fork = his.http.post("/v1/sandboxes", json=body).raise_for_status().json()["id"]
    assert his.exec(fork, "cat /tmp/f")["stdout"] == "one\n"
    his.delete(fork)
    assert his.http.post(f"/v1/sandboxes/{box}/rollback", json=body).is_success
    assert his.exec(box, "cat /tmp/f")["stdout"] == "one\n"
    assert his.http.delete(f"/v1/snapshots/{body['snapshot']}").is_success


def test_a_deleted_sandbox_leaves_no_process(his: Daemon) -> None:
    with his.sandbox("busybox") as box:
        until = 'until [ "$(pidof sleep | wc -w)" = 2 ]; do usleep 2000; done'
        his.exec(box, f"setsid sleep 300 & setsid sleep 301 & {until}")
        assert running(his, box, "sleep") == 2
    assert "sleep" not in {name for name, _ in framework.host_ids(his).values()}


# --- execs told apart without cgroups ------------------------------------------------------------


def test_a_timeout_ends_the_whole_tree_and_nothing_else(his: Daemon, box: str) -> None:
    """Orphans in sessions of their own included; what an earlier command left lives on."""
    his.exec(box, "setsid sleep 300 &")
    script = "(setsid sh -c 'usleep 1; sleep 301 & sleep 302' &); trap '' TERM; sleep 303 & wait; :"
    answer = his.exec(box, script, timeout_s=1, grace_s=0.2)
    assert answer["timed_out"] is True
    assert running(his, box, "sleep") == 1


def test_a_fork_storm_is_ended_and_nothing_else(his: Daemon, box: str) -> None:
    his.exec(box, "setsid sleep 300 &")
    answer = his.exec(box, "x() { x | x & }; x; sleep 60", timeout_s=1)
    assert answer["timed_out"] is True
    count = "n=0; for p in /proc/[0-9]*; do n=$((n+1)); done; echo $n"
    # PID 1, the sleep, and the shell that counts.
    assert his.exec(box, count)["stdout"] == "3\n"


def test_a_chain_of_forks_is_ended(his: Daemon, box: str) -> None:
    """Each process lives only until it has started the next: a look may always come too late."""
    script = "echo '(exec sh /tmp/hop) & exit 0' >/tmp/hop; sh /tmp/hop; sh /tmp/hop; sleep 60"
    answer = his.exec(box, script, timeout_s=1)
    assert answer["timed_out"] is True
    first, second = (
        his.exec(box, "cat /proc/sys/kernel/ns_last_pid 2>/dev/null; ls -d /proc/[0-9]* | wc -l")
        for _ in range(2)
    )
    assert first["exit_code"] == second["exit_code"] == 0
    assert running(his, box, "sh") <= 1


def test_no_process_can_pass_for_another_commands(his: Daemon, box: str) -> None:
    said = his.exec(box, "ulimit -x 77; ulimit -Hx 77; ulimit -n 77 && ulimit -n; ulimit -x")
    changed, mark = said["stdout"].split()
    assert changed == "77"  # positive control: another limit is the command's to change
    assert mark != "77"
    assert said["stderr"].count("not permitted") == 2


def test_a_background_process_is_killed_with_its_children(his: Daemon, box: str) -> None:
    process = Background.start(his.http, box, "setsid sleep 300 & sleep 301")
    other = Background.start(his.http, box, ["sleep", "302"])
    assert process.signal("SIGKILL", "tree").status_code == httpx.codes.NO_CONTENT
    assert process.wait()["signal"] == signal.SIGKILL
    assert running(his, box, "sleep") == 1
    assert other.get()["state"] == "running"


# --- limits by a watchdog ------------------------------------------------------------------------


def test_too_much_memory_is_killed_and_said(his: Daemon) -> None:
    with his.sandbox("busybox", limits={"memory_mb": 96}) as name:
        answer = his.exec(name, 'a=$(head -c 300m /dev/zero | tr "\\0" x); sleep 60')
        assert (answer["signal"], answer["oom_killed"]) == (signal.SIGKILL, True)
        assert his.exec(name, "echo alive")["stdout"] == "alive\n"
        usage = his.http.get(f"/v1/sandboxes/{name}/stats").json()
        assert usage["memory"]["oom_kills"] >= 1
        assert usage["memory"]["limit_bytes"] == 96 << 20


def test_memory_within_the_limit_is_left_alone(his: Daemon) -> None:
    with his.sandbox("busybox", limits={"memory_mb": 96}) as name:
        answer = his.exec(name, 'a=$(head -c 30m /dev/zero | tr "\\0" x); sleep 2; echo ${#a}')
        assert (answer["exit_code"], answer["stdout"]) == (0, f"{30 << 20}\n")


def test_one_user_meets_the_limit_of_processes(his: Daemon) -> None:
    with his.sandbox("busybox", limits={"pids": 20}) as name:
        answer = his.exec(name, "for i in $(seq 40); do sleep 300 & done; wait", timeout_s=20)
        assert "can't fork" in answer["stderr"]
        # One in the place of the shell, and one that the kernel lets pass as its user is at the
        # limit and not yet above it.
        for _ in range(2):
            Background.start(his.http, name, ["sleep", "300"])
        more = his.http.post(f"/v1/sandboxes/{name}/exec", json={"command": ["true"]})
        refusal(more, httpx.codes.CONFLICT, "pids-exhausted", "workload")
        assert his.exec(name, ["id", "-u"], user="agent")["stdout"] == "1000\n"
        assert his.http.get(f"/v1/sandboxes/{name}").json()["state"] == "running"


def test_more_processes_by_several_users_end_the_sandbox(his: Daemon) -> None:
    with his.sandbox("busybox", limits={"pids": 20}) as name:
        for user in ("1001", "1002"):
            script = "for i in $(seq 15); do setsid sleep 300 & done"
            his.http.post(
                f"/v1/sandboxes/{name}/exec", json={"command": script, "user": user}
            ).raise_for_status()
        failure = wait_dead(his, name)
        assert failure["code"] == "pids-exhausted"
        assert failure["cause"] == "workload"


def test_the_disk_is_held_as_ever(his: Daemon) -> None:
    with his.sandbox("busybox", limits={"disk_mb": 8}) as name:
        answer = his.exec(name, "head -c 16m /dev/zero >/tmp/f")
        assert answer["exit_code"] != 0
        size, count = his.exec(name, "stat -c '%s %h' /tmp/f")["stdout"].split()
        assert (int(size) <= 8 << 20, count) == (True, "1")


# --- refused by name -----------------------------------------------------------------------------


def test_nothing_is_frozen_while_something_runs(his: Daemon, box: str) -> None:
    url = f"/v1/sandboxes/{box}"
    assert his.http.post(f"{url}/pause").is_success  # positive control: nothing runs
    assert his.http.post(f"{url}/resume").is_success
    his.exec(box, "sleep 300 &")
    for path, body in (
        ("pause", None),
        ("snapshots", {"on_running": "copy"}),
        ("exec", {"command": "true", "exclusive": "freeze"}),
    ):
        answer = his.http.post(f"{url}/{path}", json=body)
        refusal(answer, httpx.codes.NOT_IMPLEMENTED, "freeze-unsupported", "request")
    assert his.http.get(url).json()["state"] == "running"
    assert his.exec(box, "echo on")["stdout"] == "on\n"


def test_neither_network_nor_files_of_the_host(his: Daemon) -> None:
    body = {"image": "busybox", "network": {"allow": ["example.org:443"]}}
    answer = his.http.post("/v1/sandboxes", json=body)
    refusal(answer, httpx.codes.NOT_IMPLEMENTED, "network-unavailable", "node")
    body = {"image": "busybox", "mounts": [{"source": "/etc", "target": "/mnt"}]}
    answer = his.http.post("/v1/sandboxes", json=body)
    refusal(answer, httpx.codes.FORBIDDEN, "mount-not-allowed", "request")


# --- its start and its end -----------------------------------------------------------------------


def ended(daemon: Daemon) -> None:
    """Wait until no process of a daemon's is there but the ended ones of our own."""
    deadline = time.monotonic() + times.scaled(20)
    while left := [
        pid
        for pid, process in host_state.process_table().items()
        if pid in daemon.family and process.state != "Z"
    ]:
        assert time.monotonic() < deadline, (left, daemon.log_tail())
        time.sleep(0.02)


def test_nothing_outlives_a_killed_daemon_and_another_starts(
    leak_check: LeakCheck, user: OrdinaryUser, busybox: Path
) -> None:
    with framework.running_daemon(leak_check, {"busybox": busybox}, user) as daemon:
        name = daemon.create("busybox")
        daemon.exec(name, "setsid sleep 300 &")
        daemon.refresh_family()
        daemon.kill(signal.SIGKILL)
        ended(daemon)
        again = framework.start(user, daemon.state_dir.parent)
        try:
            again.wait_ready()
            assert again.http.get("/v1/sandboxes").json()["sandboxes"] == []
            with again.sandbox("busybox") as name:
                assert again.exec(name, "echo again")["stdout"] == "again\n"
        finally:
            again.stop()


def test_nothing_outlives_a_killed_hostd(
    leak_check: LeakCheck, user: OrdinaryUser, busybox: Path
) -> None:
    with framework.running_daemon(leak_check, {"busybox": busybox}, user) as daemon:
        name = daemon.create("busybox")
        daemon.exec(name, "setsid sleep 300 &")
        daemon.refresh_family()
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in daemon.family}
        (hostd,) = [pid for pid, line in words.items() if b"sandboxd.host\0" in line]
        os.kill(hostd, signal.SIGKILL)
        ended(daemon)


def test_a_user_who_is_let_have_little(
    leak_check: LeakCheck, user: OrdinaryUser, busybox: Path
) -> None:
    """Hard limits as clusters set them: sandboxes have less, and work."""
    little = ["prlimit", "--core=0", "--nofile=1024:4096", "--memlock=65536", "--sigpending=1000"]
    with framework.running_daemon(
        leak_check, {"busybox": busybox}, user, before=[*little, "--"]
    ) as daemon:
        node = daemon.http.get("/v1/node").json()
        assert node["default_limits"]["nofile"] == node["max_limits"]["nofile"] == 2048
        with daemon.sandbox("busybox") as name:
            assert daemon.exec(name, "ulimit -n; ulimit -c")["stdout"] == "2048\n0\n"
            assert daemon.exec(name, "kill -SEGV $$")["signal"] == signal.SIGSEGV


def test_fuse_that_is_closed_to_the_user_is_named(user: OrdinaryUser) -> None:
    with ordinary_user(SUBIDS, fuse_mode=0o600) as other:
        answer = other.sandboxd("serve", "--listen", "127.0.0.1:0")
        assert answer.returncode == 1
        assert "hostd: fuse: " in answer.stderr
        assert "Permission denied" in answer.stderr
        assert "/dev/fuse" in answer.stderr


def test_a_runtime_directory_of_somebody_elses_is_refused(user: OrdinaryUser) -> None:
    answer = user.sandboxd("serve", "--listen", "127.0.0.1:0", "--runtime-dir", "/usr")
    assert answer.returncode == 1
    assert "/usr is not a directory of this user's" in answer.stderr


def test_doctor_tells_what_this_user_gets(user: OrdinaryUser) -> None:
    answer = user.sandboxd("doctor")
    assert answer.returncode == 0, answer.stdout
    assert f"{SUBIDS} from {FIRST_SUBID} of {framework.NAME}" in answer.stdout
    assert "a watchdog kills" in answer.stdout
    assert "none but loopback" in answer.stdout
