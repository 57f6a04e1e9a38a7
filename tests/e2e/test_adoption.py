"""What a restarted daemon takes over from a node that is a unit of its own: sessions, background
processes, and ports of the programs in a sandbox."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.background import Background
from tests.e2e.host_processes import wait_for
from tests.e2e.restarts import started_again
from tests.e2e.shell_sessions import Shell
from tests.framework import host_state
from tests.framework.daemon import SLOTS, Daemon, start
from tests.framework.leaks import LeakCheck


@contextlib.contextmanager
def node(home: Path, settings: dict[str, str] | None = None) -> Iterator[None]:
    """`sandboxd node` for the daemons that are started with this home."""
    for name in ("images", "state", "run"):
        (home / name).mkdir(exist_ok=True)
    ours = {key: value for key, value in os.environ.items() if not key.startswith("SANDBOXD_")}
    ours |= {
        "SANDBOXD_CGROUP_ROOT": home.name,
        "SANDBOXD_STATE_DIR": str(home / "state"),
        "SANDBOXD_SLOTS_MIN": str(SLOTS),
        "SANDBOXD_SLOTS_MAX": str(SLOTS),
        **(settings or {}),
    }
    command = [sys.executable, "-m", "sandboxd", "node", "--runtime-dir", str(home / "run")]
    with (home / "node-log").open("wb") as log:
        process = subprocess.Popen(command, env=ours, stdout=log, stderr=log)
    try:
        wait_for((home / "run/launcher.sock").exists, "the node's socket")
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0, (home / "node-log").read_text()


@contextlib.contextmanager
def two_daemons(check: LeakCheck, busybox: Path) -> Iterator[tuple[Daemon, Path]]:
    """The first of them, running; a second one is to be started with the same home."""
    with check.around("the node"), contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
        stack.callback(shutil.rmtree, home)
        home.chmod(0o755)
        stack.enter_context(node(home))
        shutil.copyfile(busybox, home / "images/busybox.sif")
        (home / "images/busybox.sif").chmod(0o444)
        daemon = start(home)
        stack.callback(daemon.stop)
        daemon.wait_ready()
        yield daemon, home


def test_a_session_a_process_and_a_port_outlive_the_daemon(leak_check: LeakCheck, busybox: Path):
    with two_daemons(leak_check, busybox) as (daemon, _):
        box = daemon.create("busybox")
        answer = daemon.http.post(f"/v1/sandboxes/{box}/sessions", json={})
        assert answer.status_code == 201, answer.text
        shell = Shell(daemon.http, f"/v1/sandboxes/{box}/sessions/{answer.json()['id']}")
        assert shell.out("cd /tmp; kept=variable; f() { echo function $1; }") == ""
        counting = (
            "i=0; while read line; do i=$((i + 1)); echo $i $line; done; echo end >&2; exit 7"
        )
        process = Background.start(daemon.http, box, counting, stdin=True)
        process.write(b"one\n")
        assert process.read(until=b"1 one\n") == b"1 one\n"
        serving = "while :; do echo hello | nc -l -p 7000; done"
        Background.start(daemon.http, box, serving)
        daemon.kill()
        with started_again(daemon) as again:
            assert [row["id"] for row in again.http.get("/v1/sandboxes").json()["sandboxes"]] == [
                box
            ]
            after = Shell(again.http, shell.url)
            assert after.get()["state"] == "open"
            assert after.out("pwd; echo $kept; f again") == "/tmp\nvariable\nfunction again\n"
            assert after.run("sleep 60", timeout_s=0.5)["timed_out"]
            assert after.out("echo $kept") == "variable\n"
            adopted = Background(again.http, process.url)
            # Its place in the output is kept, and what is written goes to the same stdin.
            adopted.write(b"two\n", eof=True)
            end = adopted.wait()
            assert (end["state"], end["exit_code"]) == ("exited", 7)
            assert adopted.read() == b"1 one\n2 two\n"
            assert adopted.read("stderr") == b"end\n"
            url = f"/v1/sandboxes/{box}/ports/7000/http/"
            wait_for(
                lambda: again.http.get(url).json()["error"]["code"] == "port-broken",
                "an answer of a program that speaks no HTTP",
            )
            assert again.http.delete(after.url).status_code == 204
            again.delete(box)
