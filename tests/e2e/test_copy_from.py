"""A fresh sandbox with some files of another: exactly those, exactly as they are, and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandboxd.client import Client
from tests.framework.daemon import Daemon

LOOK = (
    "cd {0} && find . | sort | while read f; do stat -c '%n %F %a %u %g %s %Y %h' \"$f\";"
    ' [ -h "$f" ] && readlink "$f"; [ -f "$f" ] && [ ! -h "$f" ] && md5sum "$f"; done; true'
)
FILL = """
umask 022; mkdir -p /work/deep/er; cd /work
echo text > plain; chmod 640 plain; chown 1000:1000 plain; touch -d '2001-02-03 04:05:06' plain
echo shared > one; ln one two; ln one deep/three
ln -s /etc/passwd out; ln -s nowhere broken
printf '#!/bin/sh\\nid -u\\n' > tool; chown 1000 tool; chmod 4755 tool
head -c 3000000 /dev/urandom > bulk
truncate -s 50000000 hole; mkfifo pipe; mkdir -m 1777 sticky; mkdir empty
touch "$(printf 'odd\\nname')" "$(printf 'not-utf8-\\377')"
chown -R 1000 deep; touch -d '2002-02-03 04:05:06' deep
"""


def copy(daemon: Daemon, source: str, *paths: str, **spec: Any) -> httpx.Response:
    body = {"copy_from": {"sandbox": source, "paths": list(paths)}, **spec}
    return daemon.http.post("/v1/sandboxes", json=body)


@pytest.fixture
def copied(daemon: Daemon) -> Iterator[Any]:
    """Makes copies that are deleted at the end."""
    made: list[str] = []

    def make(source: str, *paths: str, **spec: Any) -> str:
        answer = copy(daemon, source, *paths, **spec)
        assert answer.status_code == 201, answer.text
        made.append(str(answer.json()["id"]))
        return made[-1]

    yield make
    for one in made:
        daemon.delete(one)


def shell(daemon: Daemon, sandbox: str, script: str) -> str:
    answer = daemon.exec(sandbox, script)
    assert answer["exit_code"] == 0, answer
    return str(answer["stdout"])


def test_a_tree_is_the_same_in_all_that_counts(daemon: Daemon, sandbox: str, copied: Any) -> None:
    shell(daemon, sandbox, FILL)
    twin = copied(sandbox, "/work")
    there, here = (shell(daemon, one, LOOK.format("/work")) for one in (sandbox, twin))
    assert there == here
    assert there.count("fifo") == 1
    assert re.search(r"/plain regular file 640 1000 1000 5 981173106 1$", there, re.MULTILINE)
    assert (
        len(re.findall(r"/(?:one|two|three) regular file \d+ \d+ \d+ 7 \d+ 3$", there, re.M)) == 3
    )
    # And a hole is one still, a link a link, a setuid program one.
    assert int(shell(daemon, twin, "du -k /work/hole | cut -f1")) < 100
    assert shell(daemon, twin, "echo more >> /work/one; cat /work/deep/three") == "shared\nmore\n"
    answer = daemon.http.get(f"/v1/sandboxes/{twin}").json()
    assert answer["copy_from"] == {"sandbox": sandbox, "paths": ["/work"]}
    kinds = {e["kind"]: e for e in daemon.http.get(f"/v1/sandboxes/{twin}/events").json()["events"]}
    assert kinds["copied"]["detail"]["entries"] == 17
    assert kinds["copied"]["detail"]["left_out"] == 0


def test_nothing_else_comes_along(daemon: Daemon, sandbox: str, copied: Any) -> None:
    """The policy has replaced the interpreter and what every program loads; the verdict is taken
    without either."""
    shell(daemon, sandbox, "mkdir -p /work/repo; echo 42 > /work/repo/answer")
    shell(
        daemon,
        sandbox,
        "echo /evil.so > /etc/ld.so.preload; echo root::0:0:::/evil > /etc/passwd;"
        "printf '#!/bin/sh\\necho all tests passed\\n' > /evil; chmod +x /evil;"
        "rm /bin/cat; cp /evil /bin/cat; echo 'PATH=/evil' > /root/.profile",
    )
    read = ["/bin/cat", "/work/repo/answer"]
    assert daemon.exec(sandbox, read)["stdout"] == "all tests passed\n"  # the control
    twin = copied(sandbox, "/work/repo")
    assert daemon.exec(twin, read)["stdout"] == "42\n"
    assert shell(daemon, twin, "ls /etc/ld.so.preload /evil /root/.profile 2>&1 | grep -c No") == (
        "3\n"
    )
    assert "agent" in shell(daemon, twin, "cat /etc/passwd")
    assert shell(daemon, twin, "ls -A /work; ls -A /tmp") == "repo\n"


def test_what_was_removed_or_is_another_kind_is_so_there_too(
    daemon: Daemon, sandbox: str, copied: Any
) -> None:
    script = "rm -r /usr /bin/ls; mkdir /usr; rm -r /home/agent; echo x > /home/agent"
    shell(daemon, sandbox, script)
    twin = copied(sandbox, "/home", "/usr")
    assert shell(daemon, twin, "cat /home/agent; ls -A /usr | wc -l; stat -c %F /bin/ls") == (
        "x\n0\nsymbolic link\n"
    )


@pytest.mark.parametrize(
    ("made", "path", "status", "code"),
    [
        ("true", "/none", 404, "file-not-found"),
        ("true", "/etc/passwd/x", 404, "file-not-found"),
        ("true", "/proc/self", 404, "file-not-found"),
        ("ln -s /etc /work/etc", "/work/etc", 409, "symlink-in-path"),
        ("ln -s /etc /work/etc", "/work/etc/passwd", 409, "symlink-in-path"),
        ("ln -s / /work/up", "/work/up/etc", 409, "symlink-in-path"),
        ("mkdir -p /proc.d; ln -s /proc/1/root /work/r", "/work/r/etc", 409, "symlink-in-path"),
        ("cd /work; i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done",
         "/work", 422, "tree-too-large"),
    ],
)  # fmt: skip
def test_what_cannot_be_copied_is_said(
    *, daemon: Daemon, sandbox: str, made: str, path: str, status: int, code: str
) -> None:
    shell(daemon, sandbox, made)
    answer = copy(daemon, sandbox, path)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["cause"], error["retryable"]) == (code, "request", False)
    assert daemon.http.get("/v1/sandboxes").json()["sandboxes"][1:] == []


def test_a_copy_that_does_not_fit_is_refused(daemon: Daemon, sandbox: str) -> None:
    shell(daemon, sandbox, "head -c 20000000 /dev/zero | tr '\\0' x > /work/large")
    answer = copy(daemon, sandbox, "/work", limits={"disk_mb": 8})
    error = answer.json()["error"]
    assert (error["code"], error["cause"], error["retryable"]) == ("disk-full", "workload", False)


def test_requests_that_are_wrong(daemon: Daemon, sandbox: str) -> None:
    for body in (
        {"copy_from": {"sandbox": sandbox, "paths": ["/"]}},
        {"copy_from": {"sandbox": sandbox, "paths": ["/work/../etc"]}},
        {"copy_from": {"sandbox": sandbox, "paths": []}},
        {"image": "other", "copy_from": {"sandbox": sandbox, "paths": ["/work"]}},
    ):
        answer = daemon.http.post("/v1/sandboxes", json=body)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["code"] == "request-invalid"
    assert copy(daemon, "sb-none", "/work").json()["error"]["code"] == "sandbox-not-found"


def test_files_that_are_being_written_are_copied_at_one_moment(
    daemon: Daemon, sandbox: str, copied: Any
) -> None:
    """Two files that a process keeps the same but for the one it is about to write."""
    loop = "i=0; while :; do i=$((i+1)); echo $i > /work/a; echo $i > /work/b; done"
    daemon.exec(sandbox, f"({loop}) > /dev/null 2>&1 &")
    for _ in range(5):
        twin = copied(sandbox, "/work")
        a, b = shell(daemon, twin, "cat /work/a; echo ,; cat /work/b").split(",")
        if a.strip() and b.strip():  # neither is cut short just then
            assert int(a) - int(b) in (0, 1)
    before = shell(daemon, sandbox, "cat /work/a")
    while shell(daemon, sandbox, "cat /work/a") in (before, ""):
        pass  # it goes on: the test's own time is the bound


def test_of_a_paused_one_and_it_stays_paused(daemon: Daemon, sandbox: str, copied: Any) -> None:
    daemon.exec(sandbox, "echo 1 > /work/a; (while :; do date +%s%N > /work/b; done) >/dev/null &")
    assert daemon.http.post(f"/v1/sandboxes/{sandbox}/pause").is_success
    before = daemon.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/work/b"}).content
    twin = copied(sandbox, "/work")
    assert shell(daemon, twin, "cat /work/a") == "1\n"
    assert daemon.http.get(f"/v1/sandboxes/{sandbox}").json()["state"] == "paused"
    after = daemon.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": "/work/b"}).content
    assert before == after


def test_of_one_with_snapshots(daemon: Daemon, sandbox: str, copied: Any) -> None:
    shell(daemon, sandbox, "echo below > /work/below; echo old > /work/changed")
    url = f"/v1/sandboxes/{sandbox}/snapshots"
    taken = daemon.http.post(url, json={"on_running": "kill"})
    assert taken.is_success, taken.text
    shell(daemon, sandbox, "echo new > /work/changed; echo above > /work/above")
    twin = copied(sandbox, "/work")
    assert shell(daemon, twin, "cat /work/below /work/changed /work/above") == "below\nnew\nabove\n"
    again = copied(twin, "/work/below")
    assert shell(daemon, again, "ls /work") == "below\n"
    snapshot = taken.json()["id"]
    assert daemon.http.delete(f"/v1/snapshots/{snapshot}").is_success


def test_by_the_client_and_the_command_line(daemon: Daemon, sandbox: str) -> None:
    shell(daemon, sandbox, "echo 42 > /work/answer; echo no > /tmp/other")
    with Client(daemon.base_url, token=daemon.token) as node:
        with node.connect(sandbox).copy("/work", ttl_s=60) as twin:
            assert twin.exec("cat /work/answer; ls -A /tmp", exclusive="freeze").stdout == "42\n"
    environment = {key: value for key, value in os.environ.items() if "SANDBOXD_" not in key}
    where = {"SANDBOXD_URL": daemon.base_url, "SANDBOXD_TOKEN": daemon.token}
    run = ("run", "--copy-from", f"{sandbox}:/work", "busybox", "--", "cat", "/work/answer")
    alone = ("exec", "--exclusive", "kill", sandbox, "--", "cat", "/work/answer")
    for words in (run, alone):
        done = subprocess.run(
            [sys.executable, "-m", "sandboxd", *words],
            env=environment | where,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
