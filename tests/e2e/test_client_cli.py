"""The command line against a real daemon: what it prints, how it ends, what it leaves."""

from __future__ import annotations

import base64
import os
import signal
import tarfile
from pathlib import Path

import pytest

from tests.e2e.command_line import CommandLine, good, rows
from tests.e2e.host_processes import (
    new_marker,
    pids_with,
    status_of,
    wait_for,
    wait_for_marker,
)
from tests.framework.daemon import Daemon


@pytest.fixture
def sandboxd(daemon: Daemon) -> CommandLine:
    return CommandLine(daemon)


def test_run_passes_output_and_status_through(sandboxd: CommandLine):
    script = "cat; printf '\\377' >&2; exit 7"
    done = sandboxd("run", "-i", "busybox", "--", "sh", "-c", script, stdin=b"\0in")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"\0in", b"\xff")
    assert good(sandboxd("ls", "--json")) == {"sandboxes": []}


def test_looking_at_a_sandbox(sandboxd: CommandLine, daemon: Daemon):
    with daemon.sandbox("busybox", run="cli", name="mine") as sandbox:
        lines = good(sandboxd("ls", "--run", "cli")).splitlines()
        assert lines[1].split()[:2] == [sandbox, "running"]
        assert good(sandboxd("ps")).splitlines()[1].split()[0] == sandbox
        assert good(sandboxd("ls", "-q")).split() == [sandbox]
        [known] = good(sandboxd("inspect", sandbox))
        assert known["sandbox"]["name"] == "mine"
        assert known["events"][0]["kind"] == "created"
        assert known["stats"]["disk_size_bytes"] > 0
        assert "created" in good(sandboxd("events", sandbox))
        top = good(sandboxd("top", "--once", "--every", "0.1")).splitlines()
        assert top[0].split()[0] == "ID"
        assert top[1].split()[0] == sandbox
        assert good(sandboxd("top", "--json"))["sandboxes"][0]["info"]["id"] == sandbox


def test_pausing(sandboxd: CommandLine, sandbox: str):
    assert good(sandboxd("pause", sandbox)) == "paused\n"
    refused = sandboxd("exec", sandbox, "true")
    assert refused.returncode == 125
    assert refused.stderr.startswith(b"sandboxd: sandbox-paused: ")
    assert good(sandboxd("resume", sandbox)) == "running\n"
    assert sandboxd("exec", sandbox, "true").returncode == 0
    good(sandboxd("renew", "--ttl", "100", sandbox))


def test_a_process_in_the_background(sandboxd: CommandLine, sandbox: str):
    script = "echo out; echo err >&2; exit 5"
    process = good(sandboxd("exec", "-d", sandbox, "--", "sh", "-c", script)).strip()
    told = sandboxd("logs", "-f", sandbox, process)
    assert (told.stdout, told.stderr) == (b"out\n", b"err\n")
    line = good(sandboxd("ps", sandbox)).splitlines()[1].split()
    assert line[:3] == [process, "exited", "5"]
    assert good(sandboxd("ps", "--json", sandbox))["processes"][0]["exit_code"] == 5


def test_copying(sandboxd: CommandLine, sandbox: str, tmp_path: Path):
    data = bytes(range(256)) * 1000
    (tmp_path / "in").write_bytes(data)
    good(sandboxd("cp", f"{tmp_path}/in", f"{sandbox}:/work/"))
    good(sandboxd("cp", f"{sandbox}:/work/in", f"{tmp_path}/out"))
    assert (tmp_path / "out").read_bytes() == data
    good(sandboxd("cp", "-", f"{sandbox}:/work/text", stdin=b"streamed"))
    assert sandboxd("cp", f"{sandbox}:/work/text", "-").stdout == b"streamed"
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/file").write_text("deep")
    good(sandboxd("cp", f"{tmp_path}/tree", f"{sandbox}:/work/tree"))
    good(sandboxd("cp", f"{sandbox}:/work/tree", f"{tmp_path}/back"))
    assert (tmp_path / "back/sub/file").read_text() == "deep"
    missing = sandboxd("cp", f"{sandbox}:/nowhere", f"{tmp_path}/never")
    assert (missing.returncode, b"file-not-found" in missing.stderr) == (1, True)
    assert not (tmp_path / "never").exists()
    assert sandboxd("cp", "a", "b").returncode == 2
    assert sandboxd("cp", f"{tmp_path}/none", f"{sandbox}:/x").returncode == 2


def test_deleting_by_run(sandboxd: CommandLine, daemon: Daemon):
    mine = {daemon.create("busybox", run="cli-rm") for _ in range(3)}
    assert set(good(sandboxd("rm", "--run", "cli-rm")).split()) == mine


def test_images(sandboxd: CommandLine):
    assert good(sandboxd("images", "prefetch", "busybox")) == "busybox\n"
    assert good(sandboxd("images", "ls")).splitlines()[1].split()[0] == "busybox"
    failed = sandboxd("images", "prefetch", "busybox", "none")
    assert (failed.returncode, failed.stdout) == (1, b"busybox\n")
    assert b"image-not-found" in failed.stderr


def test_settings_and_where_they_are_from(sandboxd: CommandLine, tmp_path: Path):
    file = tmp_path / "sandboxd.toml"
    file.write_text("slots_min = 9\n[max_limits]\ncpus = 3.5\n")
    shown = good(sandboxd("config", "show", "--origin", "--json", "--config", str(file)))
    assert shown["slots_min"] == {"value": 9, "origin": f"{file}:1"}
    assert shown["max_limits.cpus"] == {"value": 3.5, "origin": f"{file}:3"}
    assert shown["slots_max"]["origin"] == "default"
    lines = good(sandboxd("config", "show")).splitlines()
    assert lines[0].split() == ["SETTING", "VALUE"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", [(), ("--json",)], ids=["streamed", "json"])
def test_an_interrupt_kills_the_command_first(
    sandboxd: CommandLine, sandbox: str, sent: signal.Signals, how: tuple[str, ...]
):
    marker = new_marker()
    script = f"trap '' TERM INT HUP; while :; do sleep 1; done; : {marker}"
    with sandboxd.begin("exec", *how, sandbox, "--", "sh", "-c", script) as running:
        wait_for_marker(marker, 2)  # of the command, and of the program's own line
        running.send_signal(sent)
        _, told = running.communicate(timeout=30)
        assert (running.returncode, told) == (128 + sent, b"")
        # At once: nothing of it lives when the program has ended.
        assert not pids_with(marker)


def test_an_interrupted_run_leaves_no_sandbox(sandboxd: CommandLine, daemon: Daemon):
    marker = new_marker()
    with sandboxd.begin("run", "busybox", "--", "sh", "-c", f"sleep 600; : {marker}") as running:
        wait_for_marker(marker, 2)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert daemon.http.get("/v1/sandboxes").json()["sandboxes"] == []


def test_a_reader_that_closes_the_pipe_ends_the_program(sandboxd: CommandLine, sandbox: str):
    marker = new_marker()
    with sandboxd.begin("exec", sandbox, "--", "sh", "-c", f"yes; : {marker}") as running:
        assert running.stdout is not None
        assert running.stdout.read(4) == b"y\ny\n"
        running.stdout.close()
        assert running.wait(30) != 0
        assert running.stderr is not None
        assert b"Traceback" not in running.stderr.read()
    wait_for(lambda: not pids_with(marker), "the end of the command")


def test_diff(sandboxd: CommandLine, sandbox: str, tmp_path: Path):
    good(sandboxd("exec", sandbox, "sh", "-c", "echo > /new; chmod 700 /tmp; rm /bin/true"))
    told = good(sandboxd("diff", sandbox)).splitlines()
    assert told == ["D /bin/true", "A /new", "C /tmp  (mode)"]
    taken = good(sandboxd("snapshots", "take", sandbox)).strip()
    assert good(sandboxd("diff", taken)).splitlines() == told
    good(sandboxd("exec", sandbox, "sh", "-c", "echo > /newer"))
    [only] = good(sandboxd("diff", "--since", taken, "--json", sandbox))["changes"]
    assert (only["path"], only["change"]) == ("/newer", "added")
    good(sandboxd("diff", "--tar", str(tmp_path / "t"), taken))
    with tarfile.open(tmp_path / "t") as tar:
        assert tar.getnames() == [".", "bin", "bin/.wh.true", "new", "tmp"]
    good(sandboxd("snapshots", "rm", taken))


def test_snapshots(sandboxd: CommandLine, daemon: Daemon):
    with daemon.sandbox("busybox", run="cli-snap") as sandbox:
        good(sandboxd("cp", "-", f"{sandbox}:/work/f", stdin=b"one"))
        taken = good(sandboxd("snapshots", "take", "--name", "first", sandbox)).strip()
        good(sandboxd("cp", "-", f"{sandbox}:/work/f", stdin=b"two"))
        assert rows(sandboxd("snapshots", "ls", "--sandbox", sandbox))[1][0] == taken
        [listed] = good(sandboxd("snapshots", "ls", "--run", "cli-snap", "--json"))["snapshots"]
        assert (listed["id"], listed["name"]) == (taken, "first")
        forked = sandboxd("run", taken, "--", "cat", "/work/f")
        assert (forked.returncode, forked.stdout) == (0, b"one")
        assert good(sandboxd("reset", "--to", taken, sandbox)) == f"{sandbox}\n"
        assert sandboxd("cp", f"{sandbox}:/work/f", "-").stdout == b"one"
        assert good(sandboxd("reset", "--json", sandbox))["id"] == sandbox
        assert sandboxd("exec", sandbox, "test", "-e", "/work/f").returncode == 1
        assert taken in sandboxd.complete("snapshots", "rm", "sn-")
        assert good(sandboxd("snapshots", "rm", "--json", taken))["deleted"] == [taken]


def test_every_verb_speaks_json(sandboxd: CommandLine, daemon: Daemon, tmp_path: Path):
    """For programs: one document on stdout, whatever the verb."""
    with daemon.sandbox("busybox", run="cli-json") as sandbox:
        assert good(sandboxd("pause", "--json", sandbox))["state"] == "paused"
        assert good(sandboxd("resume", "--json", sandbox))["state"] == "running"
        assert good(sandboxd("renew", "--json", "--ttl", "50", sandbox))["id"] == sandbox
        assert good(sandboxd("inspect", "--json", sandbox))[0]["sandbox"]["id"] == sandbox
        assert good(sandboxd("events", "--json", sandbox))["events"][0]["kind"] == "created"
        (tmp_path / "in").write_bytes(b"12345")
        copied = good(sandboxd("cp", "--json", f"{tmp_path}/in", f"{sandbox}:/work/"))
        assert (copied["target"], copied["size_bytes"]) == ("/work/in", 5)
        copied = good(sandboxd("cp", "--json", f"{sandbox}:/work", f"{tmp_path}/out"))
        assert copied["members"] == 1
        ran = good(sandboxd("exec", "--json", sandbox, "--", "echo", "a"))
        assert base64.b64decode(ran["stdout"]) == b"a\n"
        begun = good(sandboxd("exec", "-d", "--json", sandbox, "--", "sh", "-c", "echo b; cat"))
        logged = sandboxd("logs", "--json", sandbox, begun["id"])
        assert good(logged)["process"]["id"] == begun["id"]
        assert good(sandboxd("kill", "--json", sandbox, begun["id"]))["signal"] == "KILL"
        logged = sandboxd("logs", "-f", "--json", sandbox, begun["id"])
        assert base64.b64decode(good(logged)["stdout"]) == b"b\n"
        assert good(logged)["process"]["signal"] == signal.SIGKILL
        assert good(sandboxd("images", "ls", "--json"))["images"]
        assert good(sandboxd("prune", "--json"))["failed"] == []
        told = good(sandboxd("rm", "--json", sandbox))
        assert told == {"deleted": [sandbox], "evicted": [], "pending": [], "failed": []}
    refused = sandboxd("images", "evict", "--json", "no/such image")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"request-invalid" in refused.stderr


def test_pruning_takes_what_has_failed(sandboxd: CommandLine, daemon: Daemon):
    marker = new_marker()
    with daemon.sandbox("busybox") as living:
        dead = daemon.create("busybox")
        daemon.exec(dead, f"sleep {marker} & true")
        wait_for_marker(marker)
        assert good(sandboxd("prune")) == ""
        [of_it] = pids_with(marker)
        os.kill(int(status_of(of_it)["PPid"]), signal.SIGKILL)  # its PID 1
        url = f"/v1/sandboxes/{dead}"
        wait_for(lambda: daemon.http.get(url).json()["state"] == "failed", "the sandbox's failure")
        assert rows(sandboxd("ls", "--state", "failed"))[1][0] == dead
        assert good(sandboxd("prune")).split() == [dead]
        assert [row[0] for row in rows(sandboxd("ls"))[1:]] == [living]


def test_the_shell_is_told_what_can_be_completed(
    sandboxd: CommandLine, daemon: Daemon, sandbox: str
):
    assert sandbox in sandboxd.complete("inspect", "sb-")
    assert "busybox" in sandboxd.complete("run", "busy")
    assert {"snapshots", "shell"} <= set(sandboxd.complete("s"))
    process = good(sandboxd("exec", "-d", sandbox, "--", "cat")).strip()
    assert sandboxd.complete("logs", sandbox, "") == [process]
    assert sandboxd.complete("inspect", "sb-none-such") == []


def test_the_verbs_that_people_expect(sandboxd: CommandLine):
    named = good(sandboxd("--help")).split()
    for verb in ("run", "exec", "shell", "cp", "logs", "ps", "top", "inspect", "events", "prune"):
        assert verb in named
