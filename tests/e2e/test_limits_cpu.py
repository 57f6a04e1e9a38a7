"""Which CPUs a sandbox runs on, and how much of one it gets beside others: what is said, what the
kernel holds, and what programs see, are one thing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.command_line import CommandLine
from tests.e2e.host_processes import family_with, new_marker, pids_with
from tests.e2e.refusals import refusal
from tests.e2e.test_limits import cgroup_files
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

CPUS = sorted(os.sched_getaffinity(0))
LAST = CPUS[-1]

SEEN = """
    nproc; grep -c ^processor /proc/cpuinfo; cat /sys/devices/system/cpu/online
    awk '/^Cpus_allowed_list/ {print $2}' /proc/self/status
"""

needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def seen(daemon: Daemon, sandbox: str) -> list[str]:
    return str(daemon.exec(sandbox, SEEN)["stdout"]).split()


@needs_two
def test_programs_see_the_cpus_they_run_on(daemon: Daemon):
    for cpu in (LAST, CPUS[0]):
        with daemon.sandbox("busybox", limits={"cpuset": str(cpu)}) as sandbox:
            assert seen(daemon, sandbox) == ["1", "1", str(cpu), str(cpu)]
            said = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
            assert said["limits"]["cpuset"] == str(cpu)
            # Again after a reset: that is another slot.
            assert daemon.http.post(f"/v1/sandboxes/{sandbox}/reset", json={}).is_success
            assert seen(daemon, sandbox)[2:] == [str(cpu), str(cpu)]
    pair = f"{CPUS[0]},{LAST}"
    with daemon.sandbox("busybox", limits={"cpuset": pair, "cpus": 2}) as sandbox:
        assert seen(daemon, sandbox)[:2] == ["2", "2"]


@needs_two
def test_a_program_cannot_leave_its_cpus(daemon: Daemon):
    """The positive control: without a cpuset it can move wherever the node may run."""
    move = ["taskset", f"{1 << CPUS[0]:x}", "awk", "/^Cpus_allowed_list/ {print $2}"]
    move.append("/proc/self/status")
    with daemon.sandbox("busybox", limits={"cpuset": str(LAST)}) as sandbox:
        assert daemon.exec(sandbox, move, user="root")["exit_code"] != 0
        assert seen(daemon, sandbox)[3] == str(LAST)
    with daemon.sandbox("busybox") as sandbox:
        assert daemon.exec(sandbox, move, user="root")["stdout"] == f"{CPUS[0]}\n"


@needs_two
def test_a_cpuset_of_one_sandbox_is_not_of_the_next(daemon: Daemon):
    """Slots are made, and primed, ahead."""
    spec = {"limits": {"cpuset": str(LAST), "cpu_weight": 7}}
    for _ in range(6):
        with daemon.sandbox("busybox", **spec):
            pass
        with daemon.sandbox("busybox", limits={"cpus": len(CPUS)}) as sandbox:
            assert seen(daemon, sandbox)[0] == str(len(CPUS))


def test_the_kernels_own_files_say_the_weight(daemon: Daemon):
    for weight, shares in ((100, 1024), (400, 4096), (10_000, 102_400), (1, 10)):
        marker = new_marker()
        with daemon.sandbox("busybox", limits={"cpu_weight": weight}) as sandbox:
            daemon.exec(sandbox, f"sleep {marker} & true")
            (pid,) = pids_with(marker)
            held = cgroup_files(pid, "cpu", {"v1": "cpu.shares", "v2": "cpu.weight"})
            assert held in ({"v1": str(shares)}, {"v2": str(weight)})


def test_what_serves_comes_before_what_is_served(daemon: Daemon, sandbox: str):
    marker = new_marker()
    daemon.exec(sandbox, f"sleep {marker} & true")
    (pid,) = pids_with(marker)
    family = daemon.refresh_family()
    ordinary = max(0, os.getpriority(os.PRIO_PROCESS, 0))

    def nice(words: str) -> set[int]:
        found = family_with(family, words)
        assert found, words
        return {os.getpriority(os.PRIO_PROCESS, pid) for pid in found}

    for words in (marker, "squashfuse", "init zygote", "sandboxd.views"):
        assert nice(words) == {ordinary}, words
    assert os.getpriority(os.PRIO_PROCESS, daemon.api_pid) < ordinary
    assert min(nice("sandboxd.launcher")) < ordinary
    # And the sandboxes together have a whole process's weight on every CPU.
    held = cgroup_files(pid, "cpu", {"v1": "../cpu.shares", "v2": "../node/cpu.weight"})
    assert held in ({"v1": str(1024 * len(CPUS))}, {"v2": "10000"})


def used_s(daemon: Daemon, sandbox: str) -> float:
    """By the kernel's count of run time (cpuacct, or cpu.stat)."""
    return float(daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()["cpu"]["usage_s"])


def test_who_weighs_four_times_as_much_gets_four_times_as_much(daemon: Daemon):
    limits = {"cpuset": str(LAST), "cpus": 1}
    burn = {"command": "while :; do :; done", "timeout_s": 12, "grace_s": 0}
    with (
        daemon.sandbox("busybox", limits={**limits, "cpu_weight": 100}) as light,
        daemon.sandbox("busybox", limits={**limits, "cpu_weight": 400}) as heavy,
        client_of(daemon) as client,
    ):

        def burning(sandbox: str) -> None:
            client.post(f"/v1/sandboxes/{sandbox}/exec", json=burn)

        with in_background(lambda: burning(light)), in_background(lambda: burning(heavy)):
            while min(used_s(daemon, light), used_s(daemon, heavy)) < 0.02:
                pass  # both are at it from here on
            before = {name: used_s(daemon, name) for name in (light, heavy)}
            while used_s(daemon, light) - before[light] < 0.5:
                pass
            used = {name: used_s(daemon, name) - before[name] for name in (light, heavy)}
            # Their ends are not waited for.
            for name in (light, heavy):
                daemon.delete(name)
    assert used[heavy] / used[light] == pytest.approx(4, rel=0.25)


def test_what_cannot_be_had_is_refused_by_name(daemon: Daemon):
    def asked(**limits: object) -> httpx.Response:
        return daemon.http.post("/v1/sandboxes", json={"image": "busybox", "limits": limits})

    node = daemon.http.get("/v1/node").json()
    answer = asked(cpuset=f"{LAST},8191")
    refusal(answer, 422, "cpuset-unavailable", "request")
    assert answer.json()["error"]["detail"]["cpus"] == node["cpus"]
    for wrong in ("a", "3-1", "0-", "9999", "0" * 2000, 3, "0\n"):
        refusal(asked(cpuset=wrong), 422, "request-invalid", "request")
    for weight in (0, 10_001, 1.5, "100"):
        refusal(asked(cpu_weight=weight), 422, "request-invalid", "request")
    for name in ("io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops"):
        refusal(asked(**{name: 5}), 422, "request-invalid", "request")
        # Layers in memory: there is nothing to hold.
        refusal(asked(**{name: 1 << 30}), 422, "limit-unenforceable", "request")
    with daemon.sandbox("busybox", limits={"cpuset": "", "io_read_bps": 0}):
        pass


@pytest.fixture(scope="module")
def bounded_daemon(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    settings = {"SANDBOXD_MAX_LIMITS_CPUSET": str(LAST)}
    with running_daemon(leak_check, {"busybox": busybox}, environment=settings) as daemon:
        daemon.warm_up("busybox")
        yield daemon


@needs_two
def test_an_operator_keeps_cpus_for_the_job(bounded_daemon: Daemon):
    with bounded_daemon.sandbox("busybox") as sandbox:
        assert seen(bounded_daemon, sandbox) == ["1", "1", str(LAST), str(LAST)]
    body = {"image": "busybox", "limits": {"cpuset": str(CPUS[0])}}
    refusal(
        bounded_daemon.http.post("/v1/sandboxes", json=body), 422, "cpuset-unavailable", "request"
    )


@needs_two
def test_to_ask_for_no_cpus_by_name_is_not_to_have_all(bounded_daemon: Daemon):
    assert bounded_daemon.http.get("/v1/node").json()["cpus"] == str(LAST)
    limits = {"cpuset": "", "cpus": len(CPUS)}
    with bounded_daemon.sandbox("busybox", limits=limits) as sandbox:
        said = bounded_daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        assert said["limits"]["cpuset"] == str(LAST)
        assert seen(bounded_daemon, sandbox) == ["1", "1", str(LAST), str(LAST)]


@pytest.mark.parametrize(("most", "here"), [(f"{LAST}-8191", str(LAST)), ("8190-8191", "")])
def test_cpus_kept_for_nodes_of_another_size(
    leak_check: LeakCheck, busybox: Path, most: str, here: str
):
    """A configuration that many nodes share: whoever asks for nothing has those that are here."""
    settings = {"SANDBOXD_MAX_LIMITS_CPUSET": most}
    with running_daemon(leak_check, {"busybox": busybox}, environment=settings) as daemon:
        assert daemon.http.get("/v1/node").json()["cpus"] == here
        for limits in ({}, {"cpuset": ""}):
            body = {"image": "busybox", "limits": limits}
            answer = daemon.http.post("/v1/sandboxes", json=body)
            if here:
                assert answer.json()["limits"]["cpuset"] == here
                daemon.delete(answer.json()["id"])
            else:
                refusal(answer, 422, "cpuset-unavailable", "request")


def test_the_command_line_asks_for_them(daemon: Daemon):
    words = ["run", "--cpuset", str(LAST), "--cpu-weight", "300", "--json", "busybox", "--"]
    done = CommandLine(daemon)(*words, "nproc")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["result"]["stdout"] == "MQo="  # base64 of "1\n"
    limits = said["sandbox"]["limits"]
    assert (limits["cpuset"], limits["cpu_weight"]) == (str(LAST), 300)
