"""The units of `deploy/systemd`, installed and running: for a machine that is there for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.framework import internet, times
from tests.framework.images import REPOSITORY
from tests.framework.internet import Internet
from tests.vm.guest.units import (
    API,
    CONFIG,
    NODE,
    SOCKET,
    STATE,
    client,
    host_now,
    shown,
    systemctl,
)

CLONE = Path("/opt/clone")
DROP_INS = Path("/run/systemd/system")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    absent = pytest.mark.skipif(
        not Path("/run/systemd/system").is_dir(), reason="systemd is not PID 1 here"
    )
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(absent)


@pytest.fixture(scope="module")
def world() -> Iterator[Internet]:
    """An internet that the host is connected to, which forwards as a node's host does."""
    with internet.running(host_pid=os.getpid()) as found:
        yield found


@pytest.fixture(scope="module")
def host_before(world: Internet) -> dict[str, set[str]]:
    """What there was on the host before anything of ours."""
    return host_now()


@pytest.fixture(scope="module")
def installed(busybox: Path, host_before: dict[str, set[str]]) -> Iterator[None]:
    """By the script that an operator runs; with time-outs for an emulated CPU."""
    scripts = REPOSITORY
    if any(REPOSITORY.is_relative_to(place) for place in ("/tmp", "/var/tmp")):
        # Refused there, as the API has a /tmp of its own: give it another name.
        scripts = CLONE
        scripts.mkdir()
        subprocess.run(["mount", "--bind", REPOSITORY, scripts], check=True)
    subprocess.run([scripts / "deploy/systemd/install"], check=True)
    start_s, watchdog_s = times.scaled(90), times.scaled(30)
    settings = {
        NODE: f"TimeoutStartSec={start_s}\nEnvironment=SANDBOXD_DNS_UPSTREAMS={internet.DNS}\n",
        API: f"TimeoutStartSec={start_s}\nWatchdogSec={watchdog_s}\n"
        f"BindReadOnlyPaths={REPOSITORY}\n",
    }
    for unit, text in settings.items():
        drop_in = DROP_INS / f"{unit}.d/test.conf"
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(f"[Service]\n{text}")
    systemctl("daemon-reload")
    (STATE / "images").mkdir(parents=True)
    for directory in (STATE, STATE / "images"):
        shutil.chown(directory, "sandboxd", "sandboxd")
        directory.chmod(0o755)
    shutil.copyfile(busybox, STATE / "images/busybox.sif")
    (STATE / "images/busybox.sif").chmod(0o444)
    yield
    units = (SOCKET, API, NODE)
    systemctl("stop", *units, check=False)
    systemctl("reset-failed", *units, check=False)
    for unit in units:
        Path("/etc/systemd/system", unit).unlink()
        shutil.rmtree(DROP_INS / f"{unit}.d", ignore_errors=True)
    Path("/usr/local/bin/sandboxd").unlink()
    shutil.rmtree(CONFIG.parent)
    shutil.rmtree(STATE)
    shutil.rmtree("/run/sandboxd", ignore_errors=True)
    if scripts == CLONE:
        subprocess.run(["umount", CLONE], check=True)
        CLONE.rmdir()
    systemctl("daemon-reload")


@pytest.fixture
def api(installed: None) -> Iterator[httpx.Client]:
    """Both services, started; a client of the API. All sandboxes are deleted afterwards, unless
    the test has stopped the node, and with it them."""
    systemctl("start", NODE, SOCKET, API)
    with client() as started:
        yield started
    if shown(NODE, "ActiveState") == "inactive":
        return
    # Another connection: the test may have broken that one's other end.
    systemctl("start", NODE, SOCKET, API)
    with client() as again:
        for sandbox in again.get("/v1/sandboxes").json()["sandboxes"]:
            assert again.delete(f"/v1/sandboxes/{sandbox['id']}").is_success
