"""The Python client against a real daemon: the same rules in both, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxd import errors
from sandboxd.client import AsyncClient, Client, ConnectionFailed, Sandbox
from tests.framework.daemon import Daemon, free_port

MEBIBYTE = 1 << 20


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.base_url, daemon.token) as one:
        yield one


def async_client(daemon: Daemon) -> AsyncClient:
    return AsyncClient(daemon.base_url, daemon.token)


def wait_until(true: Any, what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_the_whole_of_it(client: Client, tmp_path: Path):
    with client.create("busybox", run="r", labels={"a": "1"}, files={"/work/in": b"\xff"}) as box:
        assert box.info.state == "running"
        result = box.exec("cat /work/in; echo err >&2; exit 3", timeout_s=20)
        assert (result.exit_code, result.stdout_bytes, result.stderr) == (3, b"\xff", "err\n")
        assert not result.ok
        assert box.exec(["cat"], stdin="grüße").stdout == "grüße"
        assert box.exec(["id", "-u"], user="agent", cwd="/tmp", env={"A": "b"}).stdout == "1000\n"
        info = box.write_file("/work/deep/er", "text", mode=0o600)
        assert (info.size_bytes, info.mode) == (4, 0o600)
        assert box.read_text("/work/deep/er") == "text"
        (tmp_path / "up").write_bytes(os.urandom(3 * MEBIBYTE))
        assert box.upload_file(tmp_path / "up", "/work/up").size_bytes == 3 * MEBIBYTE
        assert box.download_file("/work/up", tmp_path / "down") == 3 * MEBIBYTE
        assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
        assert [info.id for info in client.list(run="r", labels={"a": None})] == [box.id]
        assert client.connect(box.id).exec(["true"]).ok
        assert box.renew(100).expires_at > box.info.created_at
        assert box.stats().disk_used_bytes
        assert box.pause().state == "paused"
        with pytest.raises(errors.SandboxPaused):
            box.exec(["true"])
        assert box.resume().state == "running"
        kinds = [event.kind for event in box.events()]
        assert kinds == ["created", "renewed", "paused", "resumed"]
    with pytest.raises(errors.SandboxNotFound):
        client.connect(box.id)


def test_the_whole_of_it_in_asyncio(daemon: Daemon, tmp_path: Path):
    async def main() -> None:
        async with async_client(daemon) as client, client.create("busybox", run="r") as box:
            result = await box.exec("echo out; exit 4")
            assert (result.exit_code, result.stdout) == (4, "out\n")
            (tmp_path / "up").write_bytes(os.urandom(3 * MEBIBYTE))
            await box.upload_file(tmp_path / "up", "/work/up")
            assert await box.download_file("/work/up", tmp_path / "down") == 3 * MEBIBYTE
            assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
            assert [info.id async for info in client.list(run="r")] == [box.id]
            assert (await box.stats()).pids_limit == box.info.limits.pids
            async with box.exec_stream("echo a; echo b >&2; exit 5") as stream:
                found = {one.stream: one.data async for one in stream}
                assert found == {"stdout": b"a\n", "stderr": b"b\n"}
                assert (await stream.exit()).exit_code == 5
            node = await client.node()
            assert node.sandboxes["running"] >= 1
            assert "busybox" in [image.name for image in await client.images() if image.mounted]

    asyncio.run(main())


def make_tree(root: Path) -> None:
    (root / "sub/empty").mkdir(parents=True)
    (root / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "run.sh").chmod(0o755)
    (root / ("n" * 200)).write_bytes(os.urandom(2 * MEBIBYTE))
    (root / os.fsdecode(b"no-\xff-utf8")).write_text("bytes")
    (root / "link").symlink_to("run.sh")


def same(one: Path, other: Path) -> bool:
    command = ["diff", "-r", "--no-dereference", one, other]
    return subprocess.run(command, check=False).returncode == 0


def test_directories_go_in_and_out(client: Client, daemon: Daemon, tmp_path: Path):
    make_tree(tmp_path / "in")
    with client.create("busybox") as box:
        members = box.upload_dir(tmp_path / "in", "/work/tree", owner="agent")
        assert members == sum(1 for _ in (tmp_path / "in").rglob("*"))
        assert box.exec(["/work/tree/run.sh"]).stdout == "ran\n"
        back = box.download_dir("/work/tree", tmp_path / "out")
        assert (back.members, back.skipped) == (members, [])
        assert same(tmp_path / "in", tmp_path / "out")

        async def again() -> None:
            async with async_client(daemon) as other:
                same_box = await other.connect(box.id)
                await same_box.upload_dir(tmp_path / "out", "/work/again")
                await same_box.download_dir("/work/again", tmp_path / "out2", exclude=["n*"])

        asyncio.run(again())
        assert sorted(os.listdir(tmp_path / "out2")) == ["link", "run.sh", "sub"]


def test_what_would_lead_out_of_the_target_does_not(client: Client, tmp_path: Path):
    with client.create("busybox") as box:
        box.exec("mkdir /work/t; cd /work/t; ln -s /etc/shadow a; ln -s ../../x b; echo c > c")
        back = box.download_dir("/work/t", tmp_path / "out")
        assert sorted(back.skipped) == ["a", "b"]
        assert os.listdir(tmp_path / "out") == ["c"]


def test_snapshots_forks_and_resets(client: Client):
    with client.create("busybox", run="snap") as box:
        box.write_file("/work/f", "one")
        kept = box.snapshot("first")
        assert (kept.sandbox, kept.name) == (box.id, "first")
        box.write_file("/work/f", "two")
        with client.fork(kept) as fork:
            assert fork.read_text("/work/f") == "one"
        assert box.rollback(kept).state == "running"
        assert box.read_text("/work/f") == "one"
        box.reset()
        with pytest.raises(errors.FileNotFound):
            box.read_file("/work/f")
        assert [one.id for one in client.snapshots() if one.run == "snap"] == [kept.id]
        client.delete_snapshot(kept)


def test_diffs(client: Client, tmp_path: Path):
    with client.create("busybox") as box:
        odd = os.fsdecode(b"/work/\xff")
        box.write_file(odd, "x")
        kept = box.snapshot()
        box.write_file("/work/f", "two")
        assert [one.path for one in box.diff().changes if one.path > "/work"] == ["/work/f", odd]
        page = box.diff(since=kept, limit=1)
        assert [(one.path, one.change) for one in page.changes] == [("/work/f", "added")]
        assert (page.more, page.next) == (False, None)
        assert odd in [one.path for one in client.snapshot_diff(kept).changes]
        size = box.download_diff(tmp_path / "box.tar", since=kept)
        with tarfile.open(tmp_path / "box.tar") as tar:
            assert tar.getnames() == [".", "work", "work/f"]
        assert os.stat(tmp_path / "box.tar").st_size == size
        client.download_snapshot_diff(kept, tmp_path / "kept.tar")
        with tarfile.open(tmp_path / "kept.tar") as tar:
            assert "work/\udcff" in tar.getnames()
        client.delete_snapshot(kept)
        with pytest.raises(errors.SnapshotNotFound):
            box.download_diff(tmp_path / "none.tar", since=kept)
        assert not (tmp_path / "none.tar").exists()


def test_names_in_a_sandbox(client: Client):
    with client.create("busybox") as box:
        made = box.mkdir("/work/a/b", mode=0o750)
        assert (made.is_dir, made.mode, made.name) == (True, 0o750, "b")
        odd = os.fsdecode(b"/work/a/\xff")
        box.write_file(odd, "x")
        assert box.read_file(odd) == b"x"
        listing = box.list_dir("/work/a")
        assert [entry.path for entry in listing.entries] == ["/work/a/b", odd]
        assert not listing.truncated
        box.move(odd, "/work/a/plain")
        assert box.chmod("/work/a", 0o700, recursive=True) == 3
        assert box.chown("/work/a/plain", "agent:agent") == 1
        entry = box.stat("/work/a/plain")
        assert (entry.uid, entry.gid, entry.mode, entry.size_bytes) == (1000, 1000, 0o700, 1)
        assert box.remove("/work/a", recursive=True) == 3
        assert box.remove("/work/a", missing_ok=True) == 0
        with pytest.raises(errors.FileNotFound):
            box.stat("/work/a")


def test_many_at_once_are_not_mixed_up(daemon: Daemon):
    async def main() -> None:
        async with async_client(daemon) as client:
            boxes = await asyncio.gather(*(client.create("busybox", run="many") for _ in range(4)))

            async def one(number: int) -> None:
                box = boxes[number % 4]
                result = await box.exec(f"echo {number}; exit {number % 100}")
                assert (result.stdout, result.exit_code) == (f"{number}\n", number % 100)

            await asyncio.gather(*(one(number) for number in range(300)))
            deleted = await client.delete_many(run="many")
            assert len(deleted.deleted) == 4

    asyncio.run(main())


def test_errors_are_by_class_and_say_whose_fault(client: Client):
    with pytest.raises(errors.ImageNotFound) as raised:
        client.create("no-such-image")
    assert (raised.value.cause, raised.value.retryable) == ("request", False)
    with client.create("busybox") as box:
        with pytest.raises(errors.CwdNotFound):
            box.exec(["true"], cwd="/nowhere")
        with pytest.raises(errors.FileNotFound):
            box.read_file("/nowhere")
        with pytest.raises(errors.UserNotFound):
            box.exec_stream(["true"], user="nobody-here").exit
    with pytest.raises(errors.Unauthorized):
        Client(client.url, "another-token-than-the-node's").node()


def test_no_daemon():
    with Client(f"http://127.0.0.1:{free_port()}", "t", retry_s=0.3) as client:
        with pytest.raises(ConnectionFailed) as raised:
            client.node()
    assert (raised.value.cause, raised.value.retryable) == ("node", True)


def test_a_sandbox_by_the_environment_alone(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SANDBOXD_URL", daemon.base_url)
    monkeypatch.setenv("SANDBOXD_TOKEN", daemon.token)
    with Sandbox.create("busybox") as box:
        assert box.exec(["echo", "hello"]).stdout == "hello\n"
        assert box.id in [info.id for info in Sandbox.list()]
        with Sandbox.connect(box.id) as again:
            assert again.exec(["true"]).ok


def test_output_while_it_runs(client: Client):
    with client.create("busybox") as box:
        box.exec(["mkfifo", "/tmp/gate"])
        with box.exec_stream("echo first; read x < /tmp/gate; echo second", timeout_s=30) as stream:
            pieces = iter(stream)
            first = next(pieces)
            assert (first.stream, first.data) == ("stdout", b"first\n")
            box.exec("echo go > /tmp/gate")
            assert b"".join(piece.data for piece in pieces) == b"second\n"
            assert stream.exit.exit_code == 0


def test_a_background_process(client: Client, daemon: Daemon):
    with client.create("busybox") as box:
        process = box.start_process("read x; echo got $x; echo err >&2; exit 6", name="p")
        with pytest.raises(TimeoutError):
            process.wait(0.1)
        assert process.write("word\n", eof=True) == 5
        with Client(daemon.base_url, daemon.token) as other:
            again = other.connect(box.id).process(process.id)
            found = sorted((one.stream, one.data) for one in again.output())
        assert found == [("stderr", b"err\n"), ("stdout", b"got word\n")]
        info = process.wait(20)
        assert (info.state, info.exit_code) == ("exited", 6)
        assert [one.id for one in box.processes()] == [process.id]
        process.remove()
        assert box.processes() == []
        endless = box.start_process(["sleep", "4321"])
        endless.signal("KILL", tree=True)
        assert endless.wait(20).signal == signal.SIGKILL


def test_a_session_keeps_its_state(client: Client, daemon: Daemon):
    with client.create("busybox") as box:
        with box.open_session(cwd="/tmp", env={"A": "b"}) as session:
            assert session.exec("x=1; cd /work").ok
            assert session.exec("echo $x $A $PWD").stdout == "1 b /work\n"
            assert session.exec("cat", stdin="in\xff".encode("latin-1")).stdout_bytes == b"in\xff"
            assert session.exec("sleep 60", timeout_s=0.2).timed_out
            assert session.exec("echo $x").stdout == "1\n"
            assert [one.id for one in box.sessions()] == [session.id]
        assert box.sessions() == []

        async def again() -> None:
            async with async_client(daemon) as other:
                box_there = await other.connect(box.id)
                async with await box_there.open_session() as session:
                    assert (await session.exec("exit 5")).session_state == "ended"

        asyncio.run(again())


def test_a_cancelled_worker_leaves_no_command(daemon: Daemon):
    async def main() -> None:
        async with async_client(daemon) as client, client.create("busybox") as box:
            running = asyncio.create_task(box.exec(["sleep", "4321"]))
            while not (await box.exec(["pidof", "sleep"])).ok:
                await asyncio.sleep(0.02)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while (await box.exec(["pidof", "sleep"])).ok:
                await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_killed_worker_leaves_no_command(daemon: Daemon, client: Client):
    with client.create("busybox") as box:
        script = f"from sandboxd.client import Client\nClient({daemon.base_url!r}, "
        script += f"{daemon.token!r}).connect({box.id!r}).exec(['sleep', '4321'])"
        with subprocess.Popen([sys.executable, "-c", script]) as worker:
            wait_until(lambda: box.exec(["pidof", "sleep"]).ok, "it started")
            worker.send_signal(signal.SIGKILL)
        wait_until(lambda: not box.exec(["pidof", "sleep"]).ok, "it was killed")


def test_a_forked_child_does_not_take_its_parents_answers(client: Client):
    with client.create("busybox") as box:
        assert box.exec(["true"]).ok
        pid = os.fork()
        if pid == 0:
            good = all(box.exec(["echo", "child"]).stdout == "child\n" for _ in range(20))
            os._exit(0 if good else 1)
        for _ in range(20):
            assert box.exec(["echo", "parent"]).stdout == "parent\n"
        assert os.waitpid(pid, 0)[1] == 0


def test_one_client_for_many_threads(client: Client):
    wrong = []
    with client.create("busybox") as box:

        def work(number: int) -> None:
            for n in range(10):
                word = f"{number}-{n}"
                if box.exec(["echo", word]).stdout != f"{word}\n":
                    wrong.append(word)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_create_waits_out_a_full_node(start_daemon: Any):
    daemon = start_daemon(arguments=("--max-sandboxes", "1"))
    with Client(daemon.base_url, daemon.token, retry_s=30) as client:
        first = client.create("busybox")
        timer = threading.Timer(0.5, first.delete)
        timer.start()
        with client.create("busybox"):
            timer.join()
        with client.create("busybox"), pytest.raises(errors.NodeOverloaded):
            Client(daemon.base_url, daemon.token, retry_s=0.2).create("busybox")
