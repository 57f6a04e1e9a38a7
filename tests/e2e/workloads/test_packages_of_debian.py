"""A real package of the distribution, as apt installs it from files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.workloads.conftest import MakeMachine

PACKAGES = ("cron", "cron-daemon-common")


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """What this machine's package sources have; as the images, it is of this machine's release."""
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *PACKAGES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"apt-get download: {done.stderr.strip()[-200:]} (apt-get update?)")
    return sorted(tmp_path.glob("*.deb"))


def test_a_daemon_is_installed_with_its_group(servers: MakeMachine, packages: list[Path]) -> None:
    assert len(packages) == len(PACKAGES)
    with servers("root") as box:
        for file in packages:
            box.put(file.name, file.read_bytes())
        install = "apt-get install -y --no-install-recommends ./cron*.deb"
        result = box.try_to(install, env={"DEBIAN_FRONTEND": "noninteractive"})
        assert result["exit_code"] == 0, result
        states = box.run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", *PACKAGES])
        assert states == "ii ii "
        # What the package's own list of owners and modes says, with the group it made.
        box.run("getent group crontab")
        assert box.run(["stat", "-c", "%G %a", "/usr/bin/crontab"]) == "crontab 2755\n"
        assert box.run(["stat", "-c", "%U:%G %a", "/var/spool/cron/crontabs"]) == (
            "root:crontab 1730\n"
        )
        # The image leaves documentation out; of the rest, every digest is right.
        wrong = box.try_to(["dpkg", "--verify", *PACKAGES])["stdout"].splitlines()
        left_out = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/")
        assert [line for line in wrong if not line.split()[-1].startswith(left_out)] == []
