"""The systemd units: what systemd makes of them, and what must never be in them."""

import configparser
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandboxd.config import Config

UNITS = Path(__file__).parents[2] / "deploy/systemd"
NAMES = ("sandboxd-node.service", "sandboxd.service", "sandboxd.socket")

# systemd.exec(5): each gives the unit a mount namespace, or takes something from all it starts.
HIDES_OR_FORBIDS = (
    "Protect", "Private", "ReadOnly", "ReadWrite", "Inaccessible", "TemporaryFileSystem", "Bind",
    "Root", "MountFlags", "SystemCall", "Restrict", "NoNewPrivileges", "CapabilityBounding",
    "NoExec", "ExecPaths", "LockPersonality", "MemoryDenyWriteExecute", "DynamicUser", "User",
    "DevicePolicy", "DeviceAllow", "IPAddress", "SocketBind", "NetworkNamespace", "SecureBits",
)  # fmt: skip


def unit(name):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string((UNITS / name).read_text())
    return parser


def test_systemd_takes_them_without_a_word(tmp_path):
    """It looks for the programs too, so they are those of this installation."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze (package systemd) is not here")
    here = Path(sys.executable).parent / "sandboxd"
    for name in NAMES:
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(text.replace("/usr/local/bin/sandboxd", str(here)))
    paths = [str(tmp_path / name) for name in NAMES]
    done = subprocess.run(
        [program, "--man=no", "verify", *paths], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "sandboxd" in line]
    assert ours == []
    # What it would say of one that is wrong.
    bad = tmp_path / "sandboxd.socket"
    bad.write_text(bad.read_text() + "\nNoSuchSetting=1\n")
    done = subprocess.run(
        [program, "--man=no", "verify", str(bad)], capture_output=True, text=True, check=False
    )
    assert "NoSuchSetting" in done.stderr


@pytest.mark.parametrize(
    ("where", "why"),
    # What is wrong with the last is found next: it holds the script and no more.
    [("/tmp", "PrivateTmp="), ("/var/tmp", "PrivateTmp="), ("/dev/shm", "scripts/install")],
)
def test_a_clone_that_the_api_would_not_see_is_refused(where, why):
    with (
        tempfile.TemporaryDirectory(dir=where) as clone,
        tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere,
    ):
        units = Path(clone, "deploy/systemd")
        units.mkdir(parents=True)
        shutil.copyfile(UNITS / "install", units / "install")
        # By another name too: what counts is where the directory really is.
        link = Path(elsewhere, "link")
        link.symlink_to(units)
        for script in (units / "install", link / "install"):
            done = subprocess.run(
                ["bash", script], capture_output=True, text=True, check=False, cwd="/"
            )
            assert done.returncode == 1
            assert why in done.stderr
        assert os.listdir(units) == ["install"]


def test_the_socket_is_where_the_configuration_says():
    assert unit("sandboxd.socket")["Socket"]["ListenStream"] == Config().listen


def test_nothing_stands_between_the_node_and_the_host():
    service = unit("sandboxd-node.service")["Service"]
    assert [key for key in service if key.startswith(HIDES_OR_FORBIDS)] == []
    assert service["Delegate"] == "yes"
    assert service["OOMPolicy"] == "continue"
    assert "WatchdogSec" not in service


def test_the_api_is_never_root_and_ends_without_the_node():
    api = unit("sandboxd.service")
    assert api["Service"]["User"] == Config().user
    assert api["Service"]["CapabilityBoundingSet"] == ""
    assert "--node unit" in api["Service"]["ExecStart"]
    needed = " ".join(api["Unit"].get(key, "") for key in ("Requires", "BindsTo", "PartOf"))
    assert "sandboxd-node" not in needed
    # Enough for what is under way and for what is told then.
    assert float(api["Service"]["TimeoutStopSec"]) > Config().stop_grace_s + 10
