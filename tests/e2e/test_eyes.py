"""A real node seen by its metrics and its events: what happened is what is told."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sandboxd.client import Client, ConnectionFailed, ConnectionLost
from sandboxd.client.eyes_calls import NodeEvent
from tests.e2e.host_processes import wait_for
from tests.e2e.restarts import running_node
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck

SMALL = {"memory_mb": 32, "disk_mb": 8, "pids": 16}
EATER = "x=$(head -c 200000000 /dev/zero | tr '\\0' a)"


def samples(daemon: Daemon) -> dict[tuple[object, ...], float]:
    text = daemon.http.get("/metrics").text
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_the_launchers_figures_are_those_of_the_machine(daemon: Daemon):
    box = daemon.create("busybox", limits=SMALL)
    told = samples(daemon)
    assert told[("sandboxd_node_up",)] == 1
    assert told[("sandboxd_fuse_processes",)] >= 1
    assert told[("sandboxd_mounts",)] >= 1
    assert told[("sandboxd_sandboxes_memory_bytes",)] > 0
    assert told[("sandboxd_launcher_memory_bytes",)] > 1 << 20
    assert told[("sandboxd_slots", ("kind", "ready"))] >= 0
    assert told[("sandboxd_orphans_swept_total",)] == 0
    assert told[("sandboxd_image_acquires_total", ("cache", "hit"))] >= 1
    # Not readable by others, but by the daemon itself, which is not dumpable.
    assert told[("process_open_fds",)] > 10
    phases = {dict(key[1:])["phase"] for key in told if key[0] == "sandboxd_create_seconds_count"}
    assert {"total", "image", "launcher"} <= phases
    daemon.http.delete(f"/v1/sandboxes/{box}")


def test_kills_for_memory_are_counted_once_each(daemon: Daemon):
    key = ("sandboxd_oom_kills_total",)
    before = samples(daemon)[key]
    box = daemon.create("busybox", limits=SMALL)
    assert daemon.exec(box, ["sh", "-c", EATER])["oom_killed"]
    once = samples(daemon)[key] - before
    assert once >= 1
    assert samples(daemon)[key] - before == once
    assert daemon.http.post(f"/v1/sandboxes/{box}/reset", json={}).status_code == 200
    daemon.http.delete(f"/v1/sandboxes/{box}")
    assert samples(daemon)[key] - before == once
    ends = samples(daemon)[("sandboxd_execs_total", ("end", "oom-killed"))]
    assert ends >= 1


def test_a_follower_takes_up_at_the_next_daemon(leak_check: LeakCheck, busybox: Path):
    with running_node(leak_check, {"busybox": busybox}) as node:
        daemon = node.serve()
        with Client(daemon.base_url, daemon.token, retry_s=0) as client:
            seen: list[NodeEvent] = []
            thread = threading.Thread(target=collect, args=(client, 0, seen), daemon=True)
            thread.start()
            box = daemon.create("busybox", limits=SMALL)
            wait_for(lambda: (box, "created") in known(seen), "the first event")
            node.kill_daemon(daemon)
            thread.join(30)
        again = node.serve()
        with Client(again.base_url, again.token) as client:
            after = seen[-1].seq
            thread = threading.Thread(target=collect, args=(client, after, seen), daemon=True)
            thread.start()
            wait_for(lambda: (box, "adopted") in known(seen), "what the next daemon tells")
            again.http.delete(f"/v1/sandboxes/{box}")
            thread.join(30)
    assert not thread.is_alive()
    assert (box, "deleted") in known(seen)
    numbers = [one.seq for one in seen]
    assert numbers == sorted(set(numbers))
    assert (None, "gap") in known(seen)


def collect(client: Client, after: int, seen: list[NodeEvent]) -> None:
    """Until a deletion, or until the daemon has gone."""
    with contextlib.suppress(ConnectionFailed, ConnectionLost):
        for one in client.events(after, follow=True):
            seen.append(one)
            if one.kind == "deleted":
                return


def known(seen: list[NodeEvent]) -> set[tuple[str | None, str]]:
    return {(one.sandbox, one.kind) for one in seen}
