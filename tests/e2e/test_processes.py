"""Background processes: bytes in and out, signals, their end, and what outlives the daemon."""

from __future__ import annotations

import base64
import hashlib
import random
import time

from tests.e2e.at_once import at_once, client_of
from tests.e2e.background import Background
from tests.e2e.host_processes import pids_with, wait_for, wait_for_marker
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon
from tests.framework.fixtures import StartDaemon

MIB = 1 << 20


def test_a_process_runs_beside_and_tells_its_end(daemon: Daemon, sandbox: str):
    process = Background.start(
        daemon.http,
        sandbox,
        "echo out; echo err >&2; read line; echo got $line; exit 5",
        name="one",
    )
    assert process.read(until=b"out\n") == b"out\n"
    seen = process.get()
    assert (seen["state"], seen["exit_code"], seen["name"]) == ("running", None, "one")
    assert seen["stdout"] is None
    assert process.write(b"hello\n").json() == {"written_bytes": 6}
    end = process.wait()
    assert (end["state"], end["exit_code"], end["signal"]) == ("exited", 5, None)
    assert process.read() == b"out\ngot hello\n"
    assert process.read("stderr") == b"err\n"
    assert process.get(stdout_offset=0)["stdout"]["closed"] is True
    process.remove()
    refusal(daemon.http.get(process.url), 404, "process-not-found", "request")


def test_every_byte_goes_both_ways(daemon: Daemon, sandbox: str):
    data = random.Random(3).randbytes(7 * MIB)
    process = Background.start(daemon.http, sandbox, ["cat"])
    assert process.write(data, eof=True).json() == {"written_bytes": len(data)}
    end = process.wait()
    assert end["exit_code"] == 0
    assert hashlib.sha256(process.read()).digest() == hashlib.sha256(data).digest()
    process.remove()


def test_stdin_as_json_and_its_end(daemon: Daemon, sandbox: str):
    process = Background.start(daemon.http, sandbox, ["cat"])
    url = f"{process.url}/stdin"
    every_byte = base64.b64encode(bytes(range(256))).decode()
    daemon.http.post(url, json={"data": "grüße\n"}).raise_for_status()
    daemon.http.post(url, json={"data_base64": every_byte, "eof": True}).raise_for_status()
    process.wait()
    assert process.read() == "grüße\n".encode() + bytes(range(256))
    refusal(process.write(b"x"), 409, "stdin-closed", "request")
    assert daemon.http.delete(url).status_code == 204
    refusal(daemon.http.post(url, json={"data_base64": "!"}), 422, "request-invalid", "request")
    process.remove()
    silent = Background.start(daemon.http, sandbox, "readlink /proc/self/fd/0", stdin=False)
    assert silent.read() == b"/dev/null\n"
    refusal(silent.write(b"x"), 409, "stdin-closed", "request")
    refusal(daemon.http.delete(f"{silent.url}/stdin"), 409, "stdin-closed", "request")
    silent.remove()


def test_who_does_not_read_its_stdin_is_named(daemon: Daemon, sandbox: str):
    process = Background.start(daemon.http, sandbox, ["sleep", "600"])
    error = refusal(process.write(b"x" * MIB, timeout_s=0.3), 409, "stdin-blocked", "workload")
    assert error["detail"]["written_bytes"] == 65_536  # pipe(7)
    process.remove()


def test_waiting_answers_at_output_at_the_end_and_in_time(daemon: Daemon, sandbox: str):
    process = Background.start(daemon.http, sandbox, "read a; echo $a; read b; exit 0")
    started = time.monotonic()
    process.get(wait_s=0.3, stdout_offset=0)
    assert time.monotonic() - started >= 0.3
    process.write(b"x\n")
    assert process.get(wait_s=30, stdout_offset=0)["stdout"]["data"] == "x\n"
    process.write(b"y\n")
    assert process.get(wait_s=30, stdout_offset=2)["state"] == "exited"
    assert time.monotonic() - started < 25
    process.remove()


def test_a_character_that_is_not_complete_waits_for_the_rest(daemon: Daemon, sandbox: str):
    process = Background.start(daemon.http, sandbox, r"printf 'a\303'; read x; printf '\274b\377'")
    process.read(until=b"a")
    piece = process.get(stdout_offset=0)["stdout"]
    assert (piece["data"], piece["next_offset"]) == ("a", 1)
    process.write(b"\n")
    process.wait()
    assert process.get(stdout_offset=1)["stdout"]["data"] == "üb\ufffd"
    process.remove()


def test_signals_to_the_process_and_to_its_tree(daemon: Daemon, sandbox: str):
    script = "trap 'echo term' TERM; sleep 600 & echo ready; wait; echo woken; wait"
    process = Background.start(daemon.http, sandbox, ["sh", "-c", script])
    process.read(until=b"ready")
    assert process.signal("TERM").status_code == 204
    process.read(until=b"woken")
    assert process.signal("SIGKILL", "tree").status_code == 204
    assert process.wait()["signal"] == 9
    refusal(process.signal("TERM"), 409, "process-ended", "request")
    refusal(process.signal("NOPE"), 422, "request-invalid", "request")
    assert process.signal(15, "tree").status_code == 204
    process.remove()


def test_what_a_process_left_behind_is_its_own_until_it_is_removed(daemon: Daemon, sandbox: str):
    marker = f"marker-{time.monotonic_ns()}"
    script = f"(sh -c 'echo left; sleep 600; echo {marker}' &); echo main"
    process = Background.start(daemon.http, sandbox, ["sh", "-c", script])
    assert process.wait()["exit_code"] == 0
    wait_for_marker(marker)
    assert sorted(process.read(until=b"left").split()) == [b"left", b"main"]
    assert process.get(stdout_offset=0)["stdout"]["closed"] is False
    process.remove()
    assert pids_with(marker) == []


def test_what_cannot_be_started_is_named(daemon: Daemon, sandbox: str):
    url = f"/v1/sandboxes/{sandbox}/processes"
    answer = daemon.http.post(url, json={"command": "x", "user": "nobody-here"})
    refusal(answer, 422, "user-not-found", "request")
    process = Background.start(daemon.http, sandbox, ["pwd"], cwd="/nowhere")
    end = process.wait()
    assert (end["state"], end["exit_code"], end["error"]["code"]) == (
        "failed", None, "cwd-not-found",
    )  # fmt: skip
    process.remove()
    process = Background.start(daemon.http, sandbox, ["nothing-of-that-name"])
    assert (process.wait()["state"], process.get()["exit_code"]) == ("exited", 127)
    process.remove()
    refusal(daemon.http.get("/v1/sandboxes/sb-x/processes"), 404, "sandbox-not-found", "request")


def test_only_the_newest_output_is_kept(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_PROCESS_SPOOL_BYTES": "100000"})
    with daemon.sandbox("busybox") as name:
        process = Background.start(
            daemon.http, name, "i=0; while [ $i -lt 60000 ]; do echo $i; i=$((i+1)); done"
        )
        expected = "".join(f"{i}\n" for i in range(60_000))
        assert process.wait()["exit_code"] == 0
        piece = process.get(stdout_offset=7, max_bytes=8 * MIB)["stdout"]
        assert piece["total_bytes"] == len(expected)
        assert piece["offset"] == len(expected) - 100_000
        assert piece["lost_bytes"] == piece["offset"] - 7
        assert piece["data"] == expected[-100_000:]


def test_the_number_of_processes_is_bounded(start_daemon: StartDaemon):
    daemon = start_daemon(environment={"SANDBOXD_MAX_PROCESSES": "2"})
    with daemon.sandbox("busybox") as name:
        first, second = (Background.start(daemon.http, name, ["true"]) for _ in range(2))
        url = f"/v1/sandboxes/{name}/processes"
        answer = daemon.http.post(url, json={"command": ["true"]})
        refusal(answer, 409, "too-many-processes", "workload")
        listed = daemon.http.get(url).json()["processes"]
        assert [one["id"] for one in listed] == [first.id, second.id]
        first.remove()
        Background.start(daemon.http, name, ["true"])


def test_many_processes_keep_their_bytes_apart(daemon: Daemon, sandbox: str):
    def run(number: int) -> None:
        with client_of(daemon) as client:
            process = Background.start(
                client, sandbox, f"i=0; while [ $i -lt 500 ]; do echo {number}.$i; i=$((i+1)); done"
            )
            expected = "".join(f"{number}.{i}\n" for i in range(500)).encode()
            assert process.wait()["exit_code"] == 0
            assert process.read() == expected
            process.remove()

    at_once(run, range(40), threads=8)


def test_a_process_goes_with_its_sandbox(daemon: Daemon):
    name = daemon.create("busybox")
    marker = f"marker-{time.monotonic_ns()}"
    process = Background.start(daemon.http, name, ["sh", "-c", f"sleep 600; echo {marker}"])
    wait_for_marker(marker)
    daemon.delete(name)
    assert pids_with(marker) == []
    refusal(daemon.http.get(process.url), 404, "sandbox-not-found", "request")


def test_writing_without_end_does_not_grow_anything(daemon: Daemon, sandbox: str):
    process = Background.start(daemon.http, sandbox, ["yes"])
    process.read(until=b"y\n" * 1000, offset=0)
    wait_for(lambda: process.get(stdout_offset=0)["stdout"]["lost_bytes"] > 0, "bytes to be lost")
    piece = process.get(stdout_offset=0, max_bytes=8 * MIB)["stdout"]
    assert set(piece["data"]) <= {"y", "\n"}
    assert len(piece["data"]) <= 8 * MIB
    process.remove()
