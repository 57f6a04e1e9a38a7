"""A configuration that changed while the daemon runs."""

import asyncio
import dataclasses
import logging

import pytest

from sandboxd.config import Config, load_config
from sandboxd.errors import ConfigError, NodeOverloaded
from sandboxd.launcher.client import LauncherClient
from sandboxd.model import SandboxSpec
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.reloading import RELOADABLE, Change, Reloader
from tests.unit.fakes_launcher import FakeLauncher, default_store


@pytest.fixture
def log_level():
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_what_can_be_reloaded_is_a_setting():
    assert {field.name for field in dataclasses.fields(Config)} >= RELOADABLE


def test_a_change_is_in_force_or_told(tmp_path, log_level):
    (tmp_path / "root").mkdir()
    file = tmp_path / "sandboxd.toml"
    flags = {"state_dir": str(tmp_path), "runtime_dir": str(tmp_path)}

    def load():
        return load_config(file, {}, flags)

    file.write_text("max_sandboxes = 1\nlisten = '127.0.0.1:1'\n")
    launcher = FakeLauncher(load().launcher_socket, tmp_path / "root")
    spec = SandboxSpec(image="debian")

    async def play():
        runtime = Runtime(load(), LauncherClient(load().launcher_socket), default_store())
        reloader = Reloader(runtime, load)
        await runtime.start()
        await runtime.wait_ready(10)
        await runtime.create(spec)
        with pytest.raises(NodeOverloaded, match="its 1 sandboxes"):
            await runtime.create(spec)
        waits = asyncio.create_task(runtime.create(spec, wait_s=30))
        await asyncio.sleep(0)

        file.write_text(
            "max_sandboxes = 2\nlisten = '127.0.0.1:2'\nimage_idle_s = 7\nlog_level = 'debug'\n"
            "stream_resume_s = 3\nmax_processes = 5\n[max_limits]\npids = 9999\n"
        )
        done = reloader.take_over(reloader.read())
        assert {one.setting for one in done.changed} == {
            "max_sandboxes", "image_idle_s", "log_level", "stream_resume_s", "max_processes",
            "max_limits.pids",
        }  # fmt: skip
        assert done.needs_restart == [Change("listen", "127.0.0.1:1", "127.0.0.1:2")]
        assert runtime.config.listen == "127.0.0.1:1"
        assert (await waits).id  # who waited for room has it
        with pytest.raises(NodeOverloaded, match="its 2 sandboxes"):
            await runtime.create(spec)
        assert runtime.images.idle_s == 7
        assert runtime.streams.limits.resume_s == 3
        assert logging.getLogger().level == logging.DEBUG
        # What is wrong changes nothing.
        before = runtime.config
        file.write_text("max_sandboxes = 3\n\nmax_sandbox = 9\n")
        with pytest.raises(ConfigError, match=r"sandboxd\.toml:3: unknown key 'max_sandbox'"):
            reloader.take_over(reloader.read())
        assert runtime.config is before
        await runtime.close()

    try:
        asyncio.run(play())
    finally:
        launcher.close()
