"""Limits of what goes to a disk, where writable layers have one: ext4 on loop devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.at_once import client_of, in_background
from tests.e2e.host_processes import new_marker, wait_for_marker
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

pytestmark = pytest.mark.needs("loop")

MIB = 1 << 20
LIMITS = {"disk_mb": 16, "memory_mb": 64}


@pytest.fixture(scope="module")
def disk_daemon(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    settings = {"SANDBOXD_WRITABLE_LAYER": "ext4"}
    with running_daemon(leak_check, {"busybox": busybox}, environment=settings) as daemon:
        daemon.warm_up("busybox")
        yield daemon


def held(daemon: Daemon, name: str) -> bool:
    return bool(daemon.http.get("/v1/node").json()["enforcement"][name] == "enforced")


def write(daemon: Daemon, sandbox: str, size_mb: int) -> None:
    made = daemon.exec(sandbox, f"dd if=/dev/zero of=/work/f bs=1M count={size_mb} && sync")
    assert made["exit_code"] == 0, made


READ = ["dd", "if=/work/f", "of=/dev/null", "bs=256k", "iflag=direct"]


def read_s(daemon: Daemon, sandbox: str) -> float:
    result = daemon.exec(sandbox, READ)
    assert result["exit_code"] == 0, result
    return float(result["wall_s"])


def test_reads_take_as_long_as_their_rate_says(disk_daemon: Daemon):
    """Not about speed: no machine is quicker than the rate that it is held to."""
    if not held(disk_daemon, "io_read_bps"):
        pytest.skip("no hierarchy has the controller of block devices")
    with disk_daemon.sandbox("busybox", limits={**LIMITS, "io_read_bps": 2 * MIB}) as sandbox:
        write(disk_daemon, sandbox, 6)
        assert read_s(disk_daemon, sandbox) > 2.0
        # A reset has another layer, and so another device.
        assert disk_daemon.http.post(f"/v1/sandboxes/{sandbox}/reset", json={}).is_success
        write(disk_daemon, sandbox, 6)
        assert read_s(disk_daemon, sandbox) > 2.0
        # A snapshot puts a layer on top; what is below is read as slowly.
        taken = disk_daemon.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={})
        assert taken.status_code == 201, taken.text
        assert read_s(disk_daemon, sandbox) > 2.0
        gone = disk_daemon.http.delete(f"/v1/snapshots/{taken.json()['id']}")
        assert gone.is_success, gone.text
    with disk_daemon.sandbox("busybox", limits={**LIMITS, "io_read_iops": 64}) as sandbox:
        write(disk_daemon, sandbox, 1)
        small = ["dd", "if=/work/f", "of=/dev/null", "bs=4k", "iflag=direct"]
        result = disk_daemon.exec(sandbox, small)  # 256 requests
        assert result["exit_code"] == 0, result
        assert result["wall_s"] > 2.0


def test_control_without_a_limit_the_disk_is_read_at_its_own_speed(disk_daemon: Daemon):
    with disk_daemon.sandbox("busybox", limits=LIMITS) as sandbox:
        write(disk_daemon, sandbox, 6)
        said = disk_daemon.http.get(f"/v1/sandboxes/{sandbox}").json()["limits"]
        assert said["io_read_bps"] == 0
        result = disk_daemon.exec(sandbox, [*READ[:-1], "iflag=direct"])
        assert result["exit_code"] == 0


def test_what_waits_for_its_turn_does_not_hold_up_the_end(disk_daemon: Daemon):
    """Three minutes' worth of reads at once, and a delete gives up after one: they are let through
    when the sandbox is killed."""
    if not held(disk_daemon, "io_read_bps"):
        pytest.skip("no hierarchy has the controller of block devices")
    marker = new_marker()
    with client_of(disk_daemon) as client:
        sandbox = disk_daemon.create("busybox", limits={**LIMITS, "io_read_bps": MIB})
        write(disk_daemon, sandbox, 8)
        script = f"for i in $(seq 24); do {' '.join(READ)} & done; exec sleep {marker}"
        body = {"command": script, "timeout_s": 100}
        with in_background(lambda: client.post(f"/v1/sandboxes/{sandbox}/exec", json=body)):
            wait_for_marker(marker)
            deleted = disk_daemon.http.delete(f"/v1/sandboxes/{sandbox}")
    assert deleted.status_code == 204, deleted.text


def test_what_the_kernel_cannot_hold_is_refused(disk_daemon: Daemon):
    for name in ("io_read_bps", "io_write_bps", "io_read_iops", "io_write_iops"):
        body = {"image": "busybox", "limits": {name: 1 << 30}}
        answer = disk_daemon.http.post("/v1/sandboxes", json=body)
        if held(disk_daemon, name):
            assert answer.status_code == 201, answer.text
            disk_daemon.delete(answer.json()["id"])
        else:
            refusal(answer, 422, "limit-unenforceable", "request")
