"""Runs of the client against the application: leases kept, lost and ended, in both clients."""

import asyncio
import contextlib
import os
import socket
import threading
import time

import pytest
import uvicorn

from sandboxd.api.app import create_app
from sandboxd.cli import build
from sandboxd.client import AsyncClient, Client
from sandboxd.errors import NodeDraining, QuotaExceeded, RunEnded
from sandboxd.launcher.client import LauncherClient
from sandboxd.runtime.manager import Runtime
from tests.unit.fakes_api import TOKEN
from tests.unit.fakes_launcher import default_store


@pytest.fixture
def url(config, launcher):
    """A daemon over the fake launcher, on a real port: the heartbeat is a thread of its own."""
    runtime = Runtime(config, LauncherClient(config.launcher_socket), default_store())
    app = create_app(config, runtime, token=TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            port = listener.getsockname()[1]
            with Client(f"http://127.0.0.1:{port}", TOKEN) as client:
                until(lambda: ready(client))
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


def ready(client):
    with contextlib.suppress(Exception):
        return client.node().ready
    return False


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def beats(launcher):
    return sum(m["verb"] == "keep" and m["name"] == "run:r" for m in launcher.seen)


class TestSync:
    def test_it_lives_as_long_as_its_block(self, url, launcher):
        threads = threading.active_count()
        with Client(url, TOKEN) as client:
            with client.run("r", lease_s=1) as run:
                made = run.create("debian")
                assert made.info.run == "r"
                until(lambda: beats(launcher) > 4)  # a second and more
                assert run.refresh().sandboxes == 1
                assert [one.name for one in client.runs()] == ["r"]
            assert launcher.rows == {}
            with pytest.raises(RunEnded):
                client.create("debian", run="r")
        until(lambda: threading.active_count() <= threads + 1)
        assert not [one for one in threading.enumerate() if "heartbeat" in one.name]

    def test_an_error_of_the_block_is_the_one_that_is_raised(self, url, launcher):
        with Client(url, TOKEN) as client:
            with pytest.raises(ZeroDivisionError), client.run("r") as run:
                run.create("debian")
                raise ZeroDivisionError
        assert launcher.rows == {}

    def test_one_that_is_ended_by_another(self, url):
        with Client(url, TOKEN) as client, client.run("r", lease_s=1) as run:
            assert client.delete_run("r").deleted == ()
            until(lambda: run.lost is not None)
            assert isinstance(run.lost, RunEnded)

    def test_a_node_that_has_begun_anew_is_told_again(self, url, launcher):
        with Client(url, TOKEN) as client, client.run("r", lease_s=1) as run:
            launcher.fail["keep"] = [{"code": "run-not-found", "message": "as if"}]
            until(lambda: not launcher.fail["keep"])
            assert run.refresh().lease_s == 1

    def test_a_forked_child_ends_nothing(self, url, launcher):
        with Client(url, TOKEN) as client:
            run = client.run("r")
            run.__enter__()
            run.create("debian")
            if (pid := os.fork()) == 0:
                run.__exit__(None, None, None)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert len(launcher.rows) == 1
            run.__exit__(None, None, None)
        assert launcher.rows == {}

    def test_quotas_and_draining(self, url):
        with Client(url, TOKEN, retry_s=0) as client, client.run("r", max_sandboxes=1) as run:
            run.create("debian")
            with pytest.raises(QuotaExceeded):
                run.create("debian")
            assert client.drain(60).deadline is not None
            with pytest.raises(NodeDraining):
                client.create("debian")
            assert client.undrain().draining is False


class TestAsync:
    def test_it_lives_as_long_as_its_block(self, url, launcher):
        async def main():
            async with AsyncClient(url, TOKEN) as client:
                async with client.run("r", lease_s=1) as run:
                    await run.create("debian")
                    async with asyncio.timeout(10):
                        while beats(launcher) < 5:
                            await asyncio.sleep(0.01)
                    assert (await run.refresh()).sandboxes == 1
                    assert [one.name async for one in client.runs()] == ["r"]
                assert launcher.rows == {}
                assert (await client.delete_run("r")).deleted == ()
                assert (await client.drain()).draining
                assert not (await client.undrain()).draining
                assert len(asyncio.all_tasks()) == 1

        asyncio.run(main())

    def test_one_that_is_cancelled_ends_its_run(self, url, launcher):
        async def work(client):
            async with client.run("r") as run:
                await run.create("debian")
                await asyncio.sleep(60)

        async def main():
            async with AsyncClient(url, TOKEN) as client:
                task = asyncio.create_task(work(client))
                async with asyncio.timeout(10):
                    while not launcher.rows:
                        await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait({task})
            assert launcher.rows == {}

        asyncio.run(main())


class TestCommandLine:
    def call(self, url, *arguments):
        from typer.testing import CliRunner

        environment = {"SANDBOXD_URL": url, "SANDBOXD_TOKEN": TOKEN, "COLUMNS": "200"}
        return CliRunner().invoke(build(), list(arguments), env=environment)

    def test_runs(self, url, launcher):
        with Client(url, TOKEN) as client:
            made = client.create("debian", run="grpo/17")
        listed = self.call(url, "runs", "ls")
        assert listed.exit_code == 0, listed.output
        assert "grpo/17" in listed.output
        assert '"sandboxes": 1' in self.call(url, "runs", "ls", "--json").output
        ended = self.call(url, "runs", "rm", "grpo/17")
        assert (ended.exit_code, ended.output) == (0, f"{made.id}\n")
        assert launcher.rows == {}
        assert "ended" in self.call(url, "runs", "ls").output

    def test_drain(self, url):
        told = self.call(url, "drain", "--deadline", "60")
        assert told.exit_code == 0, told.output
        assert told.output.startswith("draining: 0 sandboxes are there, to be deleted at 2")
        assert self.call(url, "undrain").output == "not draining\n"
        assert '"draining": false' in self.call(url, "undrain", "--json").output
