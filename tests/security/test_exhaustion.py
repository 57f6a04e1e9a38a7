"""Exhaustion hits its owner only: a neighbour and the node go on, and a delete ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import times
from tests.framework.daemon import Daemon
from tests.security.probing import Inside, alive, install

SMALL = {"memory_mb": 64, "disk_mb": 16, "shm_mb": 8, "pids": 64, "inodes": 500, "nofile": 256}


@pytest.fixture
def small(daemon: Daemon, programs: dict[str, Path]) -> Iterator[str]:
    with daemon.sandbox("busybox", limits=SMALL) as name:
        install(daemon, name, programs)
        yield name


def neighbour_goes_on(daemon: Daemon, standing: str) -> None:
    alive(daemon, standing)
    with daemon.sandbox("busybox") as fresh:
        alive(daemon, fresh)


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_processes(mode: str, identity: str, daemon: Daemon, small: str, standing: str) -> None:
    taken, why = Inside(daemon, small, identity).hog(mode, 1000) if mode == "threads" else (0, "")
    if mode == "processes":
        answer = daemon.exec(small, ["/probes/hog", mode, "1000"], user=identity)
        taken, why = answer["stdout"].split()[0], answer["stdout"].split()[1]
    assert int(taken) <= SMALL["pids"]
    assert why == "EAGAIN"
    neighbour_goes_on(daemon, standing)
    alive(daemon, small)


def test_fork_bomb(daemon: Daemon, small: str, standing: str) -> None:
    answer = daemon.exec(small, "b() { b | b & }; b; sleep 30", timeout_s=2, grace_s=0.2)
    assert answer["timed_out"] or answer["exit_code"] != 0
    neighbour_goes_on(daemon, standing)
    alive(daemon, small)


def test_memory(daemon: Daemon, small: str, standing: str) -> None:
    answer = daemon.exec(small, ["/probes/hog", "memory", "4096"])
    assert (answer["exit_code"], answer["oom_killed"]) == (137, True)
    neighbour_goes_on(daemon, standing)
    alive(daemon, small)


def test_control_memory_within_the_limit(daemon: Daemon, small: str) -> None:
    assert Inside(daemon, small, "root").hog("memory", 32) == (32, "enough")


def test_memory_hidden_in_shared_segments(daemon: Daemon, small: str, standing: str) -> None:
    """System V segments belong to no process: they are held to what /dev/shm may take."""
    taken, why = Inside(daemon, small, "agent").hog("shm", 4096)
    assert (taken, why) == (SMALL["shm_mb"], "ENOSPC")
    alive(daemon, small)
    neighbour_goes_on(daemon, standing)


def test_memory_hidden_in_sockets(daemon: Daemon, small: str, standing: str) -> None:
    """On cgroup v1 socket buffers are counted apart: what they hold is bounded all the same."""
    daemon.exec(small, "ulimit -n 256")
    packets, why = Inside(daemon, small, "root").hog("udp", 4000)
    assert why in ("EMFILE", "ENOBUFS")
    assert packets * 60_000 < 32 << 20
    neighbour_goes_on(daemon, standing)


def test_memory_hidden_in_many_sockets(
    daemon: Daemon, programs: dict[str, Path], standing: str
) -> None:
    """The same with descriptors enough to hold more than the sandbox's whole memory.

    It may be lost where its writable layer is a file of the host's: the loop device's worker, which
    writes on the sandbox's account, finds PID 1 alone to be killed as long as the process that was
    killed first is still closing its sockets (a quarter of a second on an emulated CPU).
    """
    on_disk = daemon.http.get("/v1/node").json()["features"]["writable_layer"] == "ext4"
    limits = {**SMALL, "nofile": 8192}
    with daemon.sandbox("busybox", limits=limits) as name:
        install(daemon, name, programs)
        request = {"command": ["/probes/hog", "udp", "4000"]}
        answer = daemon.http.post(f"/v1/sandboxes/{name}/exec", json=request)
        lost = not answer.is_success
        if not lost:
            told = answer.json()
            taken = int(told["stdout"].split()[0]) if told["exit_code"] == 0 else 0
            assert taken * 60_000 < 64 << 20, told
            answer = daemon.http.post(f"/v1/sandboxes/{name}/exec", json={"command": "true"})
            lost = not answer.is_success
        if lost:
            error = answer.json()["error"]
            assert (error["code"], error["cause"], error["retryable"]) == (
                "oom-killed",
                "workload",
                False,
            )
            assert on_disk
    neighbour_goes_on(daemon, standing)


@pytest.mark.parametrize("mode", ["disk", "dev_shm"])
def test_bytes(mode: str, identity: str, daemon: Daemon, small: str, standing: str) -> None:
    taken, why = Inside(daemon, small, identity).hog(mode, 4096)
    assert why == "ENOSPC"
    assert taken <= SMALL["disk_mb"]
    neighbour_goes_on(daemon, standing)
    alive(daemon, small)


def test_inodes(identity: str, daemon: Daemon, small: str, standing: str) -> None:
    taken, why = Inside(daemon, small, identity).hog("inodes", 100_000)
    assert why == "ENOSPC"
    assert 100 < taken <= SMALL["inodes"]
    neighbour_goes_on(daemon, standing)
    alive(daemon, small)


@pytest.mark.parametrize("mode", ["files", "pipes", "epoll", "ptys", "inotify"])
def test_descriptors(mode: str, identity: str, daemon: Daemon, small: str, standing: str) -> None:
    _, why = Inside(daemon, small, identity).hog(mode, 1_000_000)
    assert why in ("EMFILE", "EPERM", "ENOSPC")
    neighbour_goes_on(daemon, standing)
    alive(daemon, small)


def test_ten_thousand_orphans_are_reaped(daemon: Daemon, hostile: str) -> None:
    taken, why = Inside(daemon, hostile, "agent").hog(
        "orphans", 10_000, timeout_s=times.scaled(110)
    )
    assert (taken, why) == (10_000, "enough")
    script = """
        for try in $(seq 100); do
            [ $(ls -d /proc/[0-9]* | wc -l) -lt 8 ] && break; usleep 50000
        done
        grep -c '^State:.Z' /proc/[0-9]*/status | grep -vc ':0$'
    """
    answer = daemon.exec(hostile, script)
    assert answer["stdout"].strip() == "0"
    alive(daemon, hostile)


def test_output_flood(daemon: Daemon, small: str, standing: str) -> None:
    answer = daemon.exec(small, "yes", timeout_s=times.scaled(1), grace_s=0, max_output_bytes=1000)
    assert answer["timed_out"]
    assert answer["stdout_truncated"]
    assert answer["stdout_total_bytes"] > 1_000_000
    assert len(answer["stdout"]) <= 1000
    neighbour_goes_on(daemon, standing)


def test_background_output_flood(daemon: Daemon, hostile: str, standing: str) -> None:
    """Pipes that a command leaves behind are drained, slowly."""
    for _ in range(40):
        daemon.exec(hostile, "yes & yes >&2 &", max_output_bytes=1000)
    neighbour_goes_on(daemon, standing)
    alive(daemon, hostile)


def test_table_of_commands(daemon: Daemon, hostile: str, standing: str) -> None:
    """Each command that leaves a process behind keeps its place; the pids limit comes first, and
    running out of either is the workload's own doing."""
    errors = []
    for _ in range(700):
        answer = daemon.http.post(
            f"/v1/sandboxes/{hostile}/exec", json={"command": "sleep 600 >/dev/null 2>&1 &"}
        )
        if not answer.is_success or answer.json()["exit_code"] != 0:
            errors.append(answer)
            if len(errors) > 3:
                break
    assert errors
    for answer in errors:
        if not answer.is_success:
            error = answer.json()["error"]
            assert (error["cause"], error["retryable"]) == ("workload", False), error
    neighbour_goes_on(daemon, standing)
    # What is full can still be emptied from outside.
    daemon.delete(hostile)


def test_deep_directories_are_taken_down(
    daemon: Daemon, standing: str, programs: dict[str, Path]
) -> None:
    name = daemon.create("busybox")
    install(daemon, name, programs)
    answer = daemon.exec(name, "mkdir /tmp/deep; cd /tmp/deep; exec /probes/hog depth 20000")
    assert int(answer["stdout"].split()[0]) > 1000, answer
    daemon.delete(name)
    neighbour_goes_on(daemon, standing)


@pytest.mark.parametrize(
    "kind",
    [
        "kill -STOP $$",
        "trap '' 1 2 3 15; while :; do :; done",
        "setsid sh -c 'trap \"\" 15; sleep 600' & sleep 600",
        "sh -c 'while :; do sleep 600 & done'; while :; do :; done",
        "(sleep 600 & kill -STOP $!); sleep 600",
    ],
)
def test_process_that_does_not_want_to_end_ends(kind: str, daemon: Daemon, hostile: str) -> None:
    answer = daemon.exec(hostile, kind, timeout_s=0.7, grace_s=0.2)
    assert answer["timed_out"]
    left = daemon.exec(hostile, "ps | grep -c 'slee[p] 600'")["stdout"].strip()
    assert left == "0"
    alive(daemon, hostile)


def test_traced_processes_end_with_their_sandbox(daemon: Daemon, programs: dict[str, Path]) -> None:
    name = daemon.create("busybox")
    install(daemon, name, programs)
    script = "for n in 1 2 3; do /probes/hog hold threads 20 >/dev/null 2>&1 & done"
    Inside(daemon, name, "root").shell(f"{script}; /probes/probe ptrace_attach:child")
    daemon.delete(name)


def test_descriptors_of_one_sandbox_fit_the_hosts_table(daemon: Daemon, standing: str) -> None:
    """fs.file-max is one number for the host, and ENFILE would hit everybody who is not root."""
    limits = daemon.http.get(f"/v1/sandboxes/{standing}").json()["limits"]
    most = int(Path("/proc/sys/fs/file-max").read_text())
    if limits["pids"] * limits["nofile"] > most:
        pytest.xfail(
            f"a sandbox's {limits['pids']} processes may open {limits['nofile']} files each,"
            f" and the host has {most}: raise fs.file-max, as systemd does"
        )
