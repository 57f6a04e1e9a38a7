"""Two thousand creates at once on a node with room for three hundred."""

from __future__ import annotations

import pytest

from tests.e2e import storm
from tests.framework.fixtures import StartDaemon

ROOM = 300
ASKED = 2000

pytestmark = pytest.mark.needs(
    "root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits"
)


@pytest.mark.timeout(600)
def test_three_hundred_of_two_thousand(
    start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
):
    daemon = start_daemon(environment={"SANDBOXD_MAX_SANDBOXES": str(ROOM)})
    probed = [daemon.create("busybox", limits=storm.SMALL) for _ in range(8)]
    found = storm.rage(daemon, ASKED, probed)
    with capsys.disabled():
        print(f"\n{storm.report(found)}")
    assert len(found.answers) == ASKED
    assert found.served == ROOM - len(probed)
    refused = [answer for answer in found.answers if answer[0] != 201]
    assert {answer[:2] for answer in refused} == {(429, "node-overloaded")}
    assert all(answer[2] and 1 <= int(answer[2]) <= 60 for answer in refused)
    done = daemon.http.get("/v1/sandboxes", params={"limit": 1000}).json()["sandboxes"]
    assert len(done) == ROOM
    for row in done:
        daemon.delete(row["id"])
