"""A snapshot that another node goes on with: as a delta SIF, stacked on its image again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.refusals import refusal
from tests.e2e.test_snapshots import sh, take
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

WRITE = r"""
mkdir -p /d/sub; head -c 300000 /bin/busybox > /d/a; ln /d/a /d/sub/hard; ln -s a /d/sym
mkfifo /d/fifo; chown 42:43 /d/a; chmod 4751 /d/a; chown 7:8 /d/sub; chmod 1770 /d/sub
chown -h 5:6 /d/sym; rm /bin/true; rm -r /home; rm -r /etc; mkdir /etc; echo new > /etc/only
rm /bin/false; mkdir /bin/false; echo > /bin/false/x; rm -r /tmp; echo file > /tmp
echo odd > "$(printf '/d/\377')"; truncate -s 1000000 /d/hole
touch -d '2001-02-03 04:05:06' /d/a /d/sub /d/sym
"""
LOOK = r"""
cd /; find d etc bin tmp home 2>&1 | sort | while read -r n; do
  stat -c '%n %f %u %g' "$n" 2>/dev/null; done
stat -c '%n %h %s %Y' d/a d/sub/hard d/hole; stat -c '%Y' d/sub d/sym; readlink d/sym
md5sum d/a d/hole d/sub/hard etc/only bin/false/x tmp
"""


def test_what_was_exported_is_the_same_elsewhere(
    daemon: Daemon, leak_check: LeakCheck, busybox: Path, tmp_path: Path
):
    box = daemon.create("busybox", limits={"disk_mb": 64, "memory_mb": 128})
    sh(daemon, box, WRITE)
    snapshot = take(daemon, box)["id"]
    expected = sh(daemon, box, LOOK)
    answer = daemon.http.post(f"/v1/snapshots/{snapshot}/export", timeout=120)
    assert answer.status_code == 200, answer.text
    assert daemon.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    daemon.delete(box)
    assert len(answer.content) == int(answer.headers["content-length"])

    delta, whole = tmp_path / "delta.sif", tmp_path / "whole.sif"
    delta.write_bytes(answer.content)
    base = tmp_path / "base.sif"
    shutil.copy(busybox, base)
    command = [
        sys.executable,
        "-m",
        "sif_tools",
        "flatten",
        str(base),
        str(delta),
        "-o",
        str(whole),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with running_daemon(leak_check, {"whole": whole}) as other:
        other.warm_up("whole")
        with other.sandbox("whole") as again:
            assert sh(other, again, LOOK) == expected


def test_what_cannot_be_exported_is_named(daemon: Daemon):
    unknown = "sn-" + "a" * 26
    answer = daemon.http.post(f"/v1/snapshots/{unknown}/export")
    refusal(answer, 404, "snapshot-not-found", "request")
    box = daemon.create("busybox")
    sh(daemon, box, "echo > /etc/.wh.passwd")
    snapshot = take(daemon, box)["id"]
    answer = daemon.http.post(f"/v1/snapshots/{snapshot}/export")
    refusal(answer, 422, "diff-unspeakable", "request")
    daemon.http.delete(f"/v1/snapshots/{snapshot}")
    daemon.delete(box)


def test_user_attributes_are_compared_and_exported(
    leak_check: LeakCheck, python_image: Path, tmp_path: Path
):
    set_one = "import os; os.setxattr('/etc/passwd', 'user.note', b'a\\xff=b')"
    get_one = "import os; print(os.getxattr('/etc/passwd', 'user.note'))"
    with running_daemon(leak_check, {"python": python_image}) as daemon:
        daemon.warm_up("python")
        box = daemon.create("python")
        done = daemon.exec(box, ["python3", "-c", set_one], user="0")
        assert done["exit_code"] == 0, done
        snapshot = take(daemon, box)["id"]
        changes = daemon.http.get(f"/v1/snapshots/{snapshot}/diff").json()["changes"]
        # Python may have kept its bytecode, and all of it is new.
        others = {one["change"] for one in changes if "__pycache__" in one["path"]}
        assert others <= {"added"}
        told = [one for one in changes if "__pycache__" not in one["path"]]
        assert [(one["path"], one["what"]) for one in told] == [("/etc/passwd", ["xattrs"])]
        answer = daemon.http.post(f"/v1/snapshots/{snapshot}/export", timeout=120)
        assert answer.status_code == 200, answer.text
        daemon.http.delete(f"/v1/snapshots/{snapshot}")
        daemon.delete(box)
    delta, whole = tmp_path / "delta.sif", tmp_path / "whole.sif"
    delta.write_bytes(answer.content)
    run = [sys.executable, "-m", "sif_tools", "flatten", str(python_image), str(delta)]
    flat = subprocess.run([*run, "-o", str(whole)], capture_output=True, text=True, check=False)
    assert flat.returncode == 0, flat.stdout + flat.stderr
    with running_daemon(leak_check, {"whole": whole}) as daemon:
        daemon.warm_up("whole")
        with daemon.sandbox("whole") as box:
            done = daemon.exec(box, ["python3", "-c", get_one], user="0")
            assert done["stdout"] == "b'a\\xff=b'\n", done
