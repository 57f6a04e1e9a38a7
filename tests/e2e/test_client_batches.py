"""Many at once by the client: made, forked, run, each with its own result or error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sandboxd import errors
from sandboxd.client import AsyncClient, AsyncSandbox, Client, ExecResult, Sandbox
from tests.framework.daemon import Daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.base_url, daemon.token) as one:
        yield one
        one.delete_many(run="batches")


def test_forks_of_one_snapshot_go_their_own_ways(client: Client):
    with client.create("busybox", run="batches") as box:
        box.write_file("/work/f", "common")
        kept = box.snapshot("start")
        assert client.get_snapshot(kept.id).name == "start"
        assert [one.id for one in client.snapshots(sandbox=box.id)] == [kept.id]
        forks = client.fork_many(kept, 4, run="batches")
        boxes = [one for one in forks if isinstance(one, Sandbox)]
        assert len(boxes) == 4
        for number, fork in enumerate(boxes):
            fork.exec(f"echo -n .{number} >> /work/f")
        assert [one.read_text("/work/f") for one in boxes] == [f"common.{n}" for n in range(4)]
        assert box.read_text("/work/f") == "common"
        client.delete_snapshot(kept)
        with pytest.raises(errors.SnapshotNotFound):
            client.get_snapshot(kept.id)


def test_each_command_has_its_result_or_its_error(client: Client):
    with client.create("busybox") as box:
        told = client.exec_many(
            [
                {"sandbox": box.id, "command": "cat; exit 3", "stdin": b"\xff\0"},
                {"sandbox": "sb-none", "command": ["true"]},
                {"sandbox": box.id, "command": ["sleep", "60"], "timeout_s": 0.2, "grace_s": 0},
                {"sandbox": box.id, "command": ["true"], "cwd": "/nowhere"},
            ]
        )
        first, unknown, late, nowhere = told
        assert isinstance(first, ExecResult)
        assert (first.exit_code, first.stdout_bytes) == (3, b"\xff\0")
        assert isinstance(unknown, errors.SandboxNotFound)
        assert isinstance(late, ExecResult)
        assert late.timed_out
        assert isinstance(nowhere, errors.CwdNotFound)
    assert [type(one) for one in client.create_many("none-such", 2)] == [errors.ImageNotFound] * 2


def test_images_are_made_ready(client: Client):
    ready = client.prepare_image("busybox")
    assert (ready.name, ready.mounted) == ("busybox", True)
    assert "busybox" in [one.name for one in client.images() if one.mounted]
    with pytest.raises(errors.ImageNotFound):
        client.prepare_image("none-such")


def test_many_in_asyncio(daemon: Daemon):
    async def main() -> None:
        async with AsyncClient(daemon.base_url, daemon.token) as client:
            made = await client.create_many("busybox", 3, run="batches")
            boxes = [one for one in made if isinstance(one, AsyncSandbox)]
            assert len(boxes) == 3
            told = await client.exec_many({"sandbox": b.id, "command": "echo on"} for b in boxes)
            assert [one.stdout for one in told if isinstance(one, ExecResult)] == ["on\n"] * 3
            assert len((await client.delete_many(run="batches")).deleted) == 3

    asyncio.run(main())


def test_a_command_in_a_terminal(client: Client):
    with client.create("busybox") as box:
        result = box.exec("stty size; tty", tty={"cols": 91, "rows": 17})
        assert result.stdout.split()[:2] == ["17", "91"]
        assert "/dev/pts/" in result.stdout
