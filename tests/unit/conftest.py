"""The application over a fake launcher, for tests of routes."""

import pytest

from sandboxd.config import load_config
from tests.unit.fakes_api import make_client, wait_ready
from tests.unit.fakes_launcher import FakeLauncher


@pytest.fixture
def config(tmp_path):
    return load_config(
        env={},
        overrides={
            "state_dir": str(tmp_path),
            "runtime_dir": str(tmp_path),
            "node_name": "node-1",
            "max_sandboxes": 4,
        },
    )


@pytest.fixture
def launcher(config, tmp_path):
    (tmp_path / "root").mkdir()
    fake = FakeLauncher(config.launcher_socket, tmp_path / "root")
    yield fake
    fake.close()


@pytest.fixture
def client(config, launcher):
    with make_client(config) as client:
        wait_ready(client)
        yield client
