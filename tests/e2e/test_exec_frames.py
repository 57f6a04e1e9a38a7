"""Commands told in frames: at once, in order, resumable, and never more than a bounded buffer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.e2e import frames as framing
from tests.e2e.at_once import client_of
from tests.e2e.frames import open_stream, output, whole
from tests.e2e.host_processes import pids_with, wait_for, wait_for_marker
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon
from tests.framework.fixtures import StartDaemon

MIB = 1 << 20


def exec_url(sandbox: str) -> str:
    return f"/v1/sandboxes/{sandbox}/exec"


def test_frames_come_while_the_command_runs(daemon: Daemon, sandbox: str):
    body = {"command": "echo one; read go; echo two >&2; exit 3"}
    with client_of(daemon) as client:
        with open_stream(client, exec_url(sandbox), {**body, "stdin": ""}) as frames:
            seen = whole(list(frames))
    assert [frame["type"] for frame in seen] == ["started", "stdout", "stderr", "exit"]
    assert seen[0]["exec_id"].startswith("ex-")
    assert seen[1]["data"] == "one\n"
    end = seen[-1]
    assert (end["exit_code"], end["signal"], end["timed_out"]) == (3, None, False)
    assert (end["stdout_total_bytes"], end["stderr_total_bytes"]) == (4, 4)
    assert 0 < end["wall_s"] < 10


def test_output_is_told_before_the_end(daemon: Daemon, sandbox: str):
    with client_of(daemon) as client:
        body = {"command": "echo first; sleep 60"}
        with open_stream(client, exec_url(sandbox), body) as frames:
            started = time.monotonic()
            assert next(frames)["type"] == "started"
            assert next(frames)["data"] == "first\n"
            assert time.monotonic() - started < 30
    # Not taken up again: the command goes, and with it the sandbox can be deleted at once.


def test_refused_before_it_begins_and_failing_midway(daemon: Daemon, sandbox: str):
    headers = framing.NDJSON
    answer = daemon.http.post("/v1/sandboxes/sb-none/exec", json={"command": "x"}, headers=headers)
    refusal(answer, 404, "sandbox-not-found", "request")
    with client_of(daemon) as client:
        seen = framing.run(client, exec_url(sandbox), {"command": "true", "cwd": "/nowhere"})
        assert seen[-1]["error"]["code"] == "cwd-not-found"
        seen = framing.run(client, exec_url(sandbox), {"command": ["nothing-of-that-name"]})
        assert seen[-1]["exit_code"] == 127


def test_binary_output_is_exact(daemon: Daemon, sandbox: str):
    body = {"command": ["head", "-c", "3000000", "/dev/urandom"], "encoding": "base64"}
    with client_of(daemon) as client:
        body["command"] = "head -c 3000000 /dev/urandom > /tmp/x; sha256sum /tmp/x >&2; cat /tmp/x"
        seen = framing.run(client, exec_url(sandbox), body)
    data = output(seen, "stdout")
    digest = output(seen, "stderr").split()[0].decode()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (3_000_000, digest)


def test_a_stream_cut_at_any_frame_is_resumed_without_loss(daemon: Daemon, sandbox: str):
    rng = random.Random(7)
    command = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done"
    expected = "".join(f"line {i}\n" for i in range(3000)).encode()
    for _ in range(5):
        with client_of(daemon) as client:
            seen: list[framing.Frame] = []
            url, body = exec_url(sandbox), {"command": command}
            query: dict[str, int] = {}
            while not seen or seen[-1]["type"] != "exit":
                stop_after = rng.randint(1, 40)
                with open_stream(client, url, body, **query) as frames:
                    for frame in frames:
                        if frame["type"] != "heartbeat":
                            seen.append(frame)
                            stop_after -= 1
                        if stop_after == 0:
                            break
                url, body = f"/v1/sandboxes/{sandbox}/execs/{seen[0]['exec_id']}", None
                query = {"from_seq": len(seen)}
        assert output(whole(seen), "stdout") == expected


def test_a_client_that_never_comes_back_ends_its_command(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_STREAM_RESUME_S": "0.5"})
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    with daemon.sandbox("busybox") as name, client_of(daemon) as client:
        body = {"command": ["sh", "-c", f"sleep 600; echo {marker}"]}
        with open_stream(client, exec_url(name), body) as frames:
            exec_id = next(frames)["exec_id"]
            wait_for_marker(marker)
        wait_for(lambda: not pids_with(marker), "the end of the command")
        url = f"/v1/sandboxes/{name}/execs/{exec_id}"
        time.sleep(1.5)  # to look would be to take it up again
        refusal(daemon.http.get(url), 404, "exec-not-found", "request")


def test_a_detached_command_goes_on_without_its_client(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_STREAM_RESUME_S": "0.3"})
    with daemon.sandbox("busybox") as name, client_of(daemon) as client:
        script = "echo on; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo off"
        body = {"command": script, "detach": True}
        with open_stream(client, exec_url(name), body) as frames:
            exec_id = next(frames)["exec_id"]
        time.sleep(1.0)  # what is waited for is that nothing happens
        daemon.exec(name, "touch /tmp/go")
        url = f"/v1/sandboxes/{name}/execs/{exec_id}"
        with open_stream(client, url, from_seq=0) as frames:
            seen = whole(list(frames))
    assert output(seen, "stdout") == b"on\noff\n"


def test_a_position_that_is_not_kept_is_named(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_STREAM_REPLAY_BYTES": "1000"})
    with daemon.sandbox("busybox") as name, client_of(daemon) as client:
        command = "i=0; while [ $i -lt 200 ]; do echo $i; i=$((i+1)); sleep 0.001; done; sleep 60"
        with open_stream(client, exec_url(name), {"command": command}) as frames:
            first = next(frames)
            for frame in frames:
                if "199" in frame.get("data", ""):
                    break
        url = f"/v1/sandboxes/{name}/execs/{first['exec_id']}"
        answer = daemon.http.get(url, params={"from_seq": 0})
        error = refusal(answer, 410, "stream-position-lost", "request")
        assert error["detail"]["first_seq"] > 0


def test_a_slow_reader_slows_the_command_and_costs_no_memory(daemon: Daemon, sandbox: str):
    def resident_kb() -> int:
        status = Path(f"/proc/{daemon.api_pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    with client_of(daemon) as client:
        body = {"command": "yes | head -c 1000000000", "timeout_s": 100}
        with open_stream(client, exec_url(sandbox), body) as frames:
            next(frames)
            before = resident_kb()
            time.sleep(2)  # what is waited for is that nothing grows
            grown_mib = (resident_kb() - before) / 1024
            total = sum(len(next(frames)["data"]) for _ in range(200))
    assert grown_mib < 40
    assert total > 0


def test_a_gigabyte_at_a_small_cap_is_counted_and_costs_no_memory(daemon: Daemon, sandbox: str):
    status = Path(f"/proc/{daemon.api_pid}/status")
    Path(f"/proc/{daemon.api_pid}/clear_refs").write_text("5")  # VmHWM anew, proc(5)
    before = int(status.read_text().split("VmHWM:")[1].split()[0])
    result = daemon.exec(
        sandbox, "yes | head -c 1000000000", max_output_bytes=MIB, truncate="tail", timeout_s=100
    )
    after = int(status.read_text().split("VmHWM:")[1].split()[0])
    assert result["exit_code"] == 0
    assert result["stdout_total_bytes"] == 1_000_000_000
    assert result["stdout"] == "y\n" * (MIB // 2)
    assert after - before < 20 * 1024


def test_a_stream_ends_with_its_sandbox(daemon: Daemon):
    name = daemon.create("busybox")
    with client_of(daemon) as client:
        with open_stream(client, exec_url(name), {"command": ["sleep", "600"]}) as frames:
            next(frames)
            daemon.delete(name)
            seen = list(frames)
    assert seen[-1]["error"]["code"] == "sandbox-dead"


def test_time_is_up_in_a_stream(daemon: Daemon, sandbox: str):
    with client_of(daemon) as client:
        body = {"command": "echo a; sleep 600", "timeout_s": 0.5, "grace_s": 0}
        end = framing.run(client, exec_url(sandbox), body)[-1]
    assert (end["exit_code"], end["timed_out"], end["timeout_reason"]) == (124, True, "wall")


def test_a_silent_stream_has_heartbeats(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_STREAM_HEARTBEAT_S": "0.1"})
    with daemon.sandbox("busybox") as name, client_of(daemon) as client:
        with open_stream(client, exec_url(name), {"command": "sleep 1"}) as frames:
            seen = list(frames)
    beats = [frame for frame in seen if frame["type"] == "heartbeat"]
    assert len(beats) >= 3
    assert {beat["seq"] for beat in beats} == {0}
    assert whole(seen)[-1]["exit_code"] == 0


# --- options of every exec ---------------------------------------------------------------------


def test_merged_streams_keep_their_order(daemon: Daemon, sandbox: str):
    command = "i=0; while [ $i -lt 50 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done"
    expected = "".join(f"o{i}\ne{i}\n" for i in range(50))
    result = daemon.exec(sandbox, command, merge_stderr=True)
    assert (result["stdout"], result["stderr"]) == (expected, "")
    with client_of(daemon) as client:
        body = {"command": command, "merge_stderr": True}
        seen = framing.run(client, exec_url(sandbox), body)
    assert output(seen, "stdout").decode() == expected


def test_a_command_that_says_nothing_for_long_is_ended(daemon: Daemon, sandbox: str):
    command = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done; sleep 600"
    result = daemon.exec(sandbox, command, idle_output_timeout_s=0.8, grace_s=0, timeout_s=60)
    assert (result["exit_code"], result["timed_out"]) == (124, True)
    assert result["timeout_reason"] == "idle-output"
    assert result["stdout"] == "1\n2\n3\n4\n5\n6\n"
    assert daemon.exec(sandbox, "echo x", idle_output_timeout_s=5)["timeout_reason"] is None


def test_a_login_shell_reads_the_profile(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "echo 'export FROM_PROFILE=yes' > /etc/profile")
    assert daemon.exec(sandbox, "echo $FROM_PROFILE", login=True)["stdout"] == "yes\n"
    assert daemon.exec(sandbox, "echo $FROM_PROFILE")["stdout"] == "\n"
    body = {"command": ["true"], "login": True}
    answer = daemon.http.post(exec_url(sandbox), json=body)
    refusal(answer, 422, "request-invalid", "request")


@pytest.mark.parametrize("encoding", ["utf-8", "base64"])
def test_the_frames_are_what_the_document_says(daemon: Daemon, sandbox: str, encoding: str):
    from sandboxd.api.schemas.stream import Frame

    with client_of(daemon) as client:
        body = {"command": "echo a; echo b >&2", "encoding": encoding}
        for frame in framing.run(client, exec_url(sandbox), body):
            Frame.model_validate(json.loads(json.dumps(frame)))
