"""Killing a command that runs, by its id: at once, its whole tree, and told as it was."""

from __future__ import annotations

import asyncio
import base64

import httpx
import pytest

from sandboxd.client import AsyncClient, Client
from tests.e2e.at_once import client_of, in_background
from tests.e2e.frames import open_stream, run, whole
from tests.e2e.host_processes import new_marker, pids_with, wait_for_marker
from tests.e2e.refusals import refusal
from tests.e2e.shell_sessions import session
from tests.framework.daemon import Daemon

STUBBORN = "trap '' TERM INT HUP; setsid sleep {0} & echo on; while :; do sleep 1; done; : {0}"


def exec_url(sandbox: str) -> str:
    return f"/v1/sandboxes/{sandbox}/exec"


def kill(daemon: Daemon, sandbox: str, exec_id: str) -> None:
    answer = daemon.http.delete(f"/v1/sandboxes/{sandbox}/execs/{exec_id}")
    assert (answer.status_code, answer.content) == (204, b"")


def test_one_that_is_waited_for(daemon: Daemon, sandbox: str):
    marker = new_marker()
    body = {"command": STUBBORN.format(marker), "exec_id": "mine.1"}
    with client_of(daemon) as client:
        with in_background(lambda: client.post(exec_url(sandbox), json=body)) as answer:
            wait_for_marker(marker, 2)
            kill(daemon, sandbox, "mine.1")
            # Its double-forked part too, before the kill was answered.
            assert not pids_with(marker)
            result = answer.result(30).json()
    assert (result["exit_code"], result["signal"], result["stdout"]) == (137, 9, "on\n")
    assert (result["timed_out"], result["oom_killed"]) == (False, False)
    assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


@pytest.mark.parametrize("detach", [False, True])
def test_one_that_is_streamed(daemon: Daemon, sandbox: str, detach: bool):
    marker = new_marker()
    body = {"command": STUBBORN.format(marker), "detach": detach}
    with client_of(daemon) as client, open_stream(client, exec_url(sandbox), body) as frames:
        seen = [next(frames)]
        wait_for_marker(marker, 2)
        kill(daemon, sandbox, seen[0]["exec_id"])
        assert not pids_with(marker)
        seen += frames
    end = whole(seen)[-1]
    assert (end["type"], end["exit_code"], end["signal"]) == ("exit", 137, 9)
    assert (end["timed_out"], end["oom_killed"]) == (False, False)


def test_one_that_nobody_listens_to_any_more(daemon: Daemon, sandbox: str):
    marker = new_marker()
    body = {"command": f"sleep {marker}", "exec_id": "left"}
    with client_of(daemon) as client:
        with open_stream(client, exec_url(sandbox), body) as frames:
            next(frames)
        kill(daemon, sandbox, "left")
        assert not pids_with(marker)
        with open_stream(client, f"/v1/sandboxes/{sandbox}/execs/left") as frames:
            assert whole(list(frames))[-1]["exit_code"] == 137


def test_one_that_writes_without_end(daemon: Daemon, sandbox: str):
    """Its reader is behind: the stream stands still, and the kill does not wait for it."""
    with client_of(daemon) as client:
        with open_stream(client, exec_url(sandbox), {"command": ["yes"]}) as frames:
            exec_id = next(frames)["exec_id"]
            next(frames)
            kill(daemon, sandbox, exec_id)
            seen = list(frames)
    assert seen[-1]["type"] == "exit"
    told = sum(len(frame["data"]) for frame in seen if frame["type"] == "stdout")
    assert told <= seen[-1]["stdout_total_bytes"]
    # The signal is what ended it, not a pipe that was closed on it (SIGPIPE, 141).
    assert seen[-1]["signal"] == 9


def test_one_of_a_paused_sandbox(daemon: Daemon, sandbox: str):
    with client_of(daemon) as client:
        with open_stream(client, exec_url(sandbox), {"command": "sleep 600"}) as frames:
            exec_id = next(frames)["exec_id"]
            assert daemon.http.post(f"/v1/sandboxes/{sandbox}/pause").is_success
            kill(daemon, sandbox, exec_id)
            assert whole(list(frames), 1)[-1]["signal"] == 9
            assert daemon.http.post(f"/v1/sandboxes/{sandbox}/resume").is_success
    assert daemon.exec(sandbox, ["true"])["exit_code"] == 0


def test_one_of_a_session_is_interrupted_and_the_session_stays(daemon: Daemon, sandbox: str):
    with client_of(daemon) as client, session(client, sandbox) as shell:
        shell.run("x=5")
        with open_stream(client, f"{shell.url}/exec", {"command": "sleep 600"}) as frames:
            kill(daemon, sandbox, next(frames)["exec_id"])
            end = whole(list(frames), 1)[-1]
        assert (end["exit_code"], end["session_state"]) == (130, "open")
        assert shell.out("echo $x") == "5\n"


def test_what_has_ended_or_never_was_is_killed_already(daemon: Daemon, sandbox: str):
    for exec_id in ("none", "ex-w5t3d6c2nq4mzk7xq3v4y2a5pe", "%2e%2e", "a" * 200):
        kill(daemon, sandbox, exec_id)
    body = {"command": "exit 3", "exec_id": "over"}
    assert daemon.exec(sandbox, "exit 3", exec_id="over")["exit_code"] == 3
    kill(daemon, sandbox, "over")
    with client_of(daemon) as client:
        assert run(client, exec_url(sandbox), body)[-1]["exit_code"] == 3
        kill(daemon, sandbox, "over")
    refusal(
        daemon.http.delete("/v1/sandboxes/sb-none/execs/x"), 404, "sandbox-not-found", "request"
    )


def test_an_id_is_of_one_command_at_a_time(daemon: Daemon, sandbox: str):
    twice = {"command": ["true"], "exec_id": "one"}
    with client_of(daemon) as client:
        with open_stream(client, exec_url(sandbox), {**twice, "command": "sleep 600"}) as frames:
            next(frames)
            for headers in ({}, {"Accept": "application/x-ndjson"}):
                answer = daemon.http.post(exec_url(sandbox), json=twice, headers=headers)
                refusal(answer, 409, "exec-id-taken", "request")
            batch = {"execs": [{"sandbox": sandbox, **twice}]}
            [item] = daemon.http.post("/v1/execs:batch", json=batch).json()["items"]
            assert item["error"]["code"] == "exec-id-taken"
            with daemon.sandbox("busybox") as other:
                assert daemon.exec(other, ["true"], exec_id="one")["exit_code"] == 0
            kill(daemon, sandbox, "one")
            list(frames)
    # One that was not streamed leaves nothing that its id would be of.
    for _ in range(2):
        assert daemon.exec(sandbox, ["true"], exec_id="two")["exit_code"] == 0
    for bad in ("", "a b", "../x", "-x", "a" * 65):
        answer = daemon.http.post(exec_url(sandbox), json={**twice, "exec_id": bad})
        refusal(answer, 422, "request-invalid", "request")


def test_a_kill_from_either_client(daemon: Daemon):
    with Client(daemon.base_url, daemon.token) as client, client.create("busybox") as box:
        with box.exec_stream("echo a; sleep 600") as stream:
            assert next(iter(stream)).data == b"a\n"
            stream.kill()
            assert stream.exit.signal == 9

        async def main() -> None:
            async with AsyncClient(daemon.base_url, daemon.token) as other:
                there = await other.connect(box.id)
                waiting = asyncio.create_task(there.exec("cat /tmp/fifo", exec_id="k"))
                await there.exec("mkfifo /tmp/fifo 2>/dev/null; true")
                async with there.exec_stream("sleep 600") as stream:
                    await stream.kill()
                    assert (await stream.exit()).signal == 9
                while not waiting.done():
                    await there.kill_exec("k")
                    await asyncio.sleep(0.01)
                assert (await waiting).exit_code in (1, 137)

        asyncio.run(main())


def test_a_batch_is_killed_one_by_one(daemon: Daemon, sandbox: str):
    marker = new_marker()
    execs = [
        {"sandbox": sandbox, "command": f"sleep {marker}", "exec_id": "b0"},
        {"sandbox": sandbox, "command": ["echo", "b"], "exec_id": "b1", "encoding": "base64"},
    ]
    with client_of(daemon) as client:

        def ask() -> httpx.Response:
            return client.post("/v1/execs:batch", json={"execs": execs})

        with in_background(ask) as answer:
            wait_for_marker(marker)
            kill(daemon, sandbox, "b0")
            first, second = answer.result(30).json()["items"]
    assert first["result"]["signal"] == 9
    assert base64.b64decode(second["result"]["stdout"]) == b"b\n"


def test_there_is_room_for_the_next_command_at_once(daemon: Daemon):
    """In a sandbox that was as full as it may be: what is killed counts until it is reaped."""
    fill = "for n in $(seq 1499); do sleep 600 & done; echo full; wait"  # the shell is one more
    left = "for n in $(seq 1499); do sleep 600 & done; echo full"
    with daemon.sandbox("busybox", limits={"pids": 1500}) as sandbox:
        for _ in range(3):
            killed = daemon.exec(sandbox, fill, timeout_s=5, grace_s=0)
            assert (killed["timed_out"], killed["stdout"]) == (True, "full\n"), killed["stderr"]
            assert daemon.exec(sandbox, ["true"])["exit_code"] == 0
            assert daemon.exec(sandbox, left)["stdout"] == "full\n"
            assert daemon.exec(sandbox, ["true"], exclusive="kill")["exit_code"] == 0
