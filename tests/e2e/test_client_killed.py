"""A worker that is killed in the middle of anything leaves no process, no file and no descriptor.

The worker is a program of its own that gets SIGKILL: nothing of it can tidy up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.host_processes import new_marker, pids_with, wait_for
from tests.framework.daemon import Daemon, running_daemon

BEGIN = """
import asyncio, sys
from sandboxd.client import AsyncClient, Client
url, token, sandbox, marker, directory = sys.argv[1:]
client = Client(url, token)
box = client.connect(sandbox)
def endless(first):
    yield first
    print("going", flush=True)
    while True:
        yield bytes(1 << 16)
def say(output):
    print("going", flush=True)
"""
WORK = {
    "exec": "box.exec(f'echo; trap \"\" TERM INT HUP; setsid sleep {marker} & sleep {marker}')",
    "stream": """
for output in box.exec_stream(f'trap "" HUP; setsid sleep {marker} & echo; sleep {marker}'):
    say(output)
""",
    "stream of much": "for output in box.exec_stream(f'yes; : {marker}'): say(output)",
    "session": "box.open_session().exec(f'(sleep {marker}; true); true')",
    "session stream": """
for output in box.open_session().exec_stream(f'echo; sleep {marker}'): say(output)
""",
    "batch": """
client.exec_many([{"sandbox": sandbox, "command": f"sleep {marker}"} for _ in range(8)])
""",
    "upload": """
from sandboxd.client import file_calls
call = file_calls.write(sandbox, "/work/never", None, 1 << 33,
                        user=None, mode=None, owner=None, parents=True)
client.upload(call, endless(b"x"))
""",
    "directory upload": """
from sandboxd.client import file_calls, local_tree
pieces = list(local_tree.pack(directory))
call = file_calls.unpack(sandbox, "/work/tree", include=(), exclude=(),
                         owner=None, parents=True, user=None)
client.upload(call, endless(b"".join(pieces)[:-1536]))
""",
    "download": """
import time
from sandboxd.client import file_calls
with client.stream(file_calls.read(sandbox, "/work/large", None)) as pieces:
    say(next(pieces))
    time.sleep(1000)
""",
    "many in asyncio": """
async def main():
    async with AsyncClient(url, token) as one:
        there = await one.connect(sandbox)
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(there.exec(f"sleep {marker}"))
asyncio.run(main())
""",
}
SAID_BY_THE_WORKER = {name for name, work in WORK.items() if "say(" in work or "endless(" in work}


@pytest.fixture(scope="module")
def keen(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon that does not wait long for a client that was cut off."""
    check = request.getfixturevalue("leak_check")
    images = {"busybox": request.getfixturevalue("busybox")}
    with running_daemon(check, images, (), {"SANDBOXD_STREAM_RESUME_S": "0.3"}) as daemon:
        daemon.warm_up("busybox")
        yield daemon


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.api_pid}/fd"))


def names_in(daemon: Daemon, sandbox: str) -> list[str]:
    return str(daemon.exec(sandbox, "find /work /tmp | sort")["stdout"]).split()


@pytest.mark.parametrize("what", list(WORK))
def test_killed_in_the_middle_of(keen: Daemon, tmp_path: Path, what: str):
    marker = new_marker()
    (tmp_path / "file").write_bytes(bytes(100_000))
    with keen.sandbox("busybox", limits={"disk_mb": 64}) as sandbox:
        keen.exec(sandbox, "head -c 30000000 /dev/zero > /work/large")
        names, used = names_in(keen, sandbox), disk_used(keen, sandbox)
        keen.settle()
        before = descriptors(keen)
        command = [sys.executable, "-c", BEGIN + WORK[what], keen.base_url, keen.token]
        with subprocess.Popen(
            [*command, sandbox, marker, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        ) as worker:
            assert worker.stdout is not None
            if what in SAID_BY_THE_WORKER:
                assert worker.stdout.readline() == b"going\n"
            else:
                wait_for(lambda: len(pids_with(marker)) > 1, "the worker's command")
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        wait_for(lambda: not pids_with(marker), "the end of the worker's commands")
        for session in keen.http.get(f"/v1/sandboxes/{sandbox}/sessions").json()["sessions"]:
            # It is there for the next worker, and takes commands.
            url = f"/v1/sandboxes/{sandbox}/sessions/{session['id']}"
            wait_for(lambda url=url: not keen.http.get(url).json()["busy"], "a free session")
            done = keen.http.post(f"{url}/exec", json={"command": "echo free"})
            assert done.json()["stdout"] == "free\n"
            assert keen.http.delete(url).status_code == 204
        # What of an archive had been put in place whole may stay: that is what it says.
        wait_for(lambda: disk_used(keen, sandbox) <= used + 200_000, "the room it took")
        left = set(names_in(keen, sandbox)) - set(names)
        assert left <= {"/work/tree", "/work/tree/file"}
        keen.settle()
        wait_for(lambda: descriptors(keen) <= before, "the daemon's descriptors")


def disk_used(daemon: Daemon, sandbox: str) -> int:
    return int(daemon.http.get(f"/v1/sandboxes/{sandbox}/stats").json()["disk"]["used_bytes"])
