"""The application over a fake launcher, for tests of routes."""

import shutil

import pytest

from sandboxd.config import load_config
from tests.unit.fakes_api import make_client, wait_ready
from tests.unit.fakes_launcher import FakeLauncher
from tests.unit.init.file_driver import build_driver


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


@pytest.fixture(scope="session")
def file_program(tmp_path_factory):
    """The C file operations on a directory, for a FakePid1."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    return build_driver(tmp_path_factory.mktemp("driver") / "file_driver")
