"""apt and dpkg: from a repository on the sandbox's own loopback, and from a directory.

No network is asked for. apt fetches as its user `_apt`, of group 65534, for which it sets ids and
groups; dpkg changes owners, makes users and sets modes as maintainer scripts say.
"""

from __future__ import annotations

import pytest

from tests.e2e.workloads.conftest import MakeMachine
from tests.e2e.workloads.machine import Machine

pytestmark = pytest.mark.e2e

CONTROL = """Package: {name}
Version: {version}
Architecture: all
Maintainer: nobody <nobody@example.org>
Depends: {needs}
Description: a package
"""
POSTINST = """#!/bin/sh
set -e
useradd --system --home-dir /var/lib/served --shell /usr/sbin/nologin served
install -d -o served -g served -m 2750 /var/lib/served
install -o nobody -g nogroup -m 4755 /usr/bin/served /usr/bin/served-as-nobody
"""
INDEX = """
cd repository
for deb in *.deb; do
    dpkg-deb -f $deb
    echo "Filename: ./$deb"
    echo "Size: $(stat -c %s $deb)"
    echo "SHA256: $(sha256sum $deb | cut -d' ' -f1)"
    echo
done > Packages
"""


def make_package(box: Machine, name: str, needs: str, files: dict[str, str]) -> None:
    control = CONTROL.format(name=name, version="1.0", needs=needs)
    box.put(f"{name}/DEBIAN/control", control)
    for path, text in files.items():
        box.put(f"{name}/{path}", text, mode="0755")
    box.run(f"mkdir -p repository; dpkg-deb --root-owner-group -b {name} repository/{name}.deb")


@pytest.mark.parametrize("way", ["http", "file"])
def test_apt_installs_and_removes(tools: MakeMachine, way: str) -> None:
    with tools() as box:
        make_package(box, "library", "bash", {"usr/share/library/answer": "42\n"})
        program = "#!/bin/sh\ncat /usr/share/library/answer\n"
        files = {"usr/bin/served": program, "DEBIAN/postinst": POSTINST}
        make_package(box, "served", "library (>= 1.0), passwd", files)
        box.run(INDEX)
        # _apt may not look into /root.
        box.run("mv repository /srv/repository; rm -rf /etc/apt/sources.list*")
        if way == "http":
            serve = "cd /srv; python3 -m http.server -b 127.0.0.1 8000 >log 2>&1 </dev/null &"
            box.run(serve)
            wait = "timeout 30 bash -c 'until : >/dev/tcp/127.0.0.1/8000; do :; done' 2>/dev/null"
            box.run(wait)
        address = "http://127.0.0.1:8000" if way == "http" else "file:/srv"
        line = f"deb [trusted=yes] {address}/repository ./\n"
        box.run(["sh", "-c", f"echo '{line.strip()}' > /etc/apt/sources.list"])
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        update = box.try_to("apt-get update", env=quiet)
        assert (update["exit_code"], "W:" in update["stderr"]) == (0, False), update
        out = box.try_to("apt-get install -y --no-install-recommends served", env=quiet)
        assert out["exit_code"] == 0, out
        assert "unsandboxed" not in out["stderr"]
        assert "The following NEW packages will be installed:\n  library served" in out["stdout"]
        assert box.run(["served"]) == "42\n"
        listed = box.run("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n' library served")
        assert listed.split() == ["library", "ii", "served", "ii"]
        owners = "stat -c '%U %G %a' /var/lib/served /usr/bin/served-as-nobody"
        assert box.run(owners).splitlines() == ["served served 2750", "nobody nogroup 4755"]
        if way == "http":
            assert "GET /repository/./served.deb HTTP/1.1" in box.run("cat /srv/log")
        assert box.run("dpkg --verify served library") == ""
        box.run("apt-get purge -y served library", env=quiet)
        assert box.try_to("command -v served")["exit_code"] != 0


def test_all_ids_of_a_distribution(tools: MakeMachine) -> None:
    """Owners up to 65534, groups by the dozen, and set-id programs that take them."""
    with tools() as box:
        box.run("for id in 1 100 999 1000 60000 65533 65534; do touch $id; chown $id:$id $id; done")
        assert box.run("stat -c %u:%g 1 65533 65534").split() == [
            "1:1",
            "65533:65533",
            "65534:65534",
        ]
        groups = ",".join(str(n) for n in range(2000, 2064))
        setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--groups", groups, "id", "-G"]
        assert box.run(setpriv).split() == ["65534", *groups.split(",")]
        assert box.run(["su", "agent", "-c", "id -un; id -Gn"]).split() == ["agent", "agent"]
        assert box.run(["runuser", "-u", "nobody", "--", "id", "-u"]).split() == ["65534"]


def test_an_ordinary_user_may_not_install(tools: MakeMachine) -> None:
    with tools("agent") as box:
        result = box.try_to("apt-get install -y bash")
        assert result["exit_code"] == 100
        assert "are you root?" in result["stderr"]
