"""Sandboxes whose writable layer is an ext4 on a loop device: the same promises as on tmpfs.

It is what serves before Linux 6.6; here it is asked for, so that it is tried on any kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import probes
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

pytestmark = pytest.mark.needs("loop")

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def disk_daemon(
    request: pytest.FixtureRequest, leak_check: LeakCheck, busybox: Path
) -> Iterator[Daemon]:
    if probes.missing("overlay-tmpfs"):
        # Every daemon's layers are such; another one is dear on an emulated CPU.
        yield request.getfixturevalue("daemon")
        return
    # Swept often: what is attached for a sandbox is not lost.
    settings = {"SANDBOXD_WRITABLE_LAYER": "ext4", "SANDBOXD_SWEEP_S": "0.5"}
    with running_daemon(leak_check, {"busybox": busybox}, environment=settings) as daemon:
        daemon.warm_up("busybox")
        yield daemon


def output(daemon: Daemon, sandbox: str, script: str) -> str:
    result = daemon.exec(sandbox, ["sh", "-c", script])
    assert result["exit_code"] == 0, result
    return str(result["stdout"])


def loop_devices() -> set[str]:
    """Those that have a file behind them."""
    return {
        device.name for device in Path("/sys/block").glob("loop*") if (device / "loop").is_dir()
    }


def test_the_node_says_what_serves(disk_daemon: Daemon) -> None:
    node = disk_daemon.http.get("/v1/node").json()
    assert node["features"]["writable_layer"] == "ext4"
    assert node["enforcement"]["disk_mb"] == "enforced"


def test_files_of_the_image_are_changed_and_removed(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox") as name:
        script = """
            echo agent:x:7:7::/:/bin/sh >> /etc/passwd; rm /etc/group; rm -r /home; mkdir /home
            tail -n 1 /etc/passwd; ls -A /home; ls /etc
        """
        assert output(disk_daemon, name, script) == "agent:x:7:7::/:/bin/sh\npasswd\n"
    with disk_daemon.sandbox("busybox") as name:
        assert "agent:x:7" not in output(disk_daemon, name, "cat /etc/passwd; ls -d /home/agent")


def test_owners_modes_and_links_are_kept(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox") as name:
        script = """
            cd /work; touch f; chown 1000:65534 f; chmod 4755 f; ln f g; ln -s f h; mkfifo p
            stat -c '%u %g %a %h %F' f; readlink h; stat -c %F p
        """
        expected = "1000 65534 4755 2 regular empty file\nf\nfifo\n"
        assert output(disk_daemon, name, script) == expected


def test_exactly_so_many_bytes_as_promised(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox", limits={"disk_mb": 8}) as name:
        script = "dd if=/dev/zero of=/f bs=4096 2>&1; stat -c %s /f; rm /f; df -Pk /"
        *said, size, _, usage = output(disk_daemon, name, script).splitlines()
        assert "No space left on device" in "".join(said)
        assert int(size) == 8 * MIB
        assert int(usage.split()[3]) == 8 * 1024


def test_exactly_so_many_files_as_promised(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox", limits={"inodes": 100}) as name:
        script = "cd /work; i=0; while touch f$i 2>err; do i=$((i+1)); done; echo $i"
        # /work itself is copied up from the image, and `err` is a file.
        assert int(output(disk_daemon, name, script)) == 100 - 2


def test_a_full_disk_can_be_emptied(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox", limits={"disk_mb": 4}) as name:
        output(disk_daemon, name, "dd if=/dev/zero of=/work/f bs=4096 2>/dev/null; rm /work/f")
        output(disk_daemon, name, "rm /etc/passwd; dd if=/dev/zero of=/work/f bs=1M count=3")


def test_reset_begins_anew(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox") as name:
        output(disk_daemon, name, "echo x > /work/f; rm /etc/group")
        assert disk_daemon.http.post(f"/v1/sandboxes/{name}/reset").is_success
        assert output(disk_daemon, name, "ls /work /etc") == "/etc:\ngroup\npasswd\n\n/work:\n"


@pytest.mark.parametrize("on_running", ["fail", "copy"])
def test_snapshot_and_fork(disk_daemon: Daemon, on_running: str) -> None:
    http = disk_daemon.http
    with disk_daemon.sandbox("busybox") as name:
        output(disk_daemon, name, "echo 1 > /work/f; rm /etc/group; ln /work/f /work/g")
        if on_running == "copy":
            started = http.post(
                f"/v1/sandboxes/{name}/processes", json={"command": ["sleep", "600"]}
            )
            assert started.is_success, started.text
        taken = http.post(f"/v1/sandboxes/{name}/snapshots", json={"on_running": on_running})
        assert taken.is_success, taken.text
        snapshot = taken.json()["id"]
        output(disk_daemon, name, "echo 2 > /work/f")
        answer = http.post("/v1/sandboxes", json={"snapshot": snapshot})
        assert answer.is_success, answer.text
        fork = answer.json()["id"]
        try:
            script = "cat /work/f /work/g; ls /etc; echo 3 > /work/f"
            assert output(disk_daemon, fork, script) == "1\n1\npasswd\n"
        finally:
            disk_daemon.delete(fork)
        assert output(disk_daemon, name, "cat /work/f") == "2\n"
        assert http.delete(f"/v1/snapshots/{snapshot}").is_success


def test_one_device_a_sandbox_whose_file_has_no_name(disk_daemon: Daemon) -> None:
    """And it goes with the sandbox: the leak check counts loop devices."""
    before = loop_devices()
    with disk_daemon.sandbox("busybox") as name:
        output(disk_daemon, name, "echo x > /work/f")
        (device,) = loop_devices() - before
        backing = Path(f"/sys/block/{device}/loop/backing_file").read_text()
        assert backing.startswith(f"{disk_daemon.state_dir}/")
        assert backing.endswith("(deleted)\n")


def test_two_sandboxes_write_to_their_own(disk_daemon: Daemon) -> None:
    with disk_daemon.sandbox("busybox") as one, disk_daemon.sandbox("busybox") as two:
        output(disk_daemon, one, "echo one > /work/f")
        output(disk_daemon, two, "echo two > /work/f")
        assert output(disk_daemon, one, "cat /work/f") == "one\n"
        assert output(disk_daemon, two, "cat /work/f") == "two\n"
