"""redis: a server that forks to save, with its clients, on loopback and on a Unix socket."""

from __future__ import annotations

import pytest

from tests.e2e.background import Background
from tests.e2e.workloads.conftest import MakeMachine

pytestmark = pytest.mark.e2e


def test_a_server_saves_and_comes_back(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        start = ["redis-server", "--save", "", "--dir", box.home, "--unixsocket", "/tmp/redis.sock"]

        def started() -> Background:
            server = Background.start(box.daemon.http, box.sandbox, start, user=user, cwd=box.home)
            server.read(until=b"ready to accept connections at /tmp/redis.sock")
            return server

        server = started()
        assert box.run(["redis-cli", "set", "greeting", "hello"]) == "OK\n"
        box.run("seq 2000 | sed 's/.*/INCR counter/' | redis-cli --pipe")
        assert box.run(["redis-cli", "-s", "/tmp/redis.sock", "get", "counter"]) == "2000\n"
        script = "return redis.call('incrby', KEYS[1], 22)"
        assert box.run(["redis-cli", "eval", script, "1", "counter"]) == "2022\n"
        # Copy on write, in a child.
        box.run("redis-cli bgsave")
        wait = "until redis-cli info persistence | grep -q bgsave_in_progress:0; do :; done"
        box.run(wait)
        assert "rdb_last_bgsave_status:ok" in box.run("redis-cli info persistence")
        box.try_to("redis-cli shutdown nosave")
        assert server.wait()["exit_code"] == 0
        again = started()
        assert box.run("redis-cli get greeting; redis-cli get counter") == "hello\n2022\n"
        again.signal("TERM")
        assert again.wait()["exit_code"] == 0
