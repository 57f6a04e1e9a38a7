"""The command line against a real daemon: what it prints, how it ends, what it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.framework.daemon import Daemon

Sandboxd = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def sandboxd(daemon: Daemon, tmp_path: Path) -> Sandboxd:
    environment = {key: value for key, value in os.environ.items() if "SANDBOXD_" not in key}
    environment |= {"SANDBOXD_URL": daemon.base_url, "SANDBOXD_TOKEN": daemon.token}

    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "sandboxd", *arguments]
        return subprocess.run(
            command, input=stdin, capture_output=True, env=environment, check=False, timeout=60
        )

    return run


def good(done: subprocess.CompletedProcess[bytes]) -> Any:
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout) if done.stdout.startswith((b"{", b"[")) else done.stdout.decode()


def test_run_passes_output_and_status_through(sandboxd: Sandboxd):
    script = "cat; printf '\\377' >&2; exit 7"
    done = sandboxd("run", "-i", "busybox", "--", "sh", "-c", script, stdin=b"\0in")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"\0in", b"\xff")
    assert good(sandboxd("ls", "--json")) == {"sandboxes": []}


def test_looking_at_a_sandbox(sandboxd: Sandboxd, daemon: Daemon):
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


def test_pausing(sandboxd: Sandboxd, sandbox: str):
    assert good(sandboxd("pause", sandbox)) == "paused\n"
    refused = sandboxd("exec", sandbox, "true")
    assert refused.returncode == 125
    assert refused.stderr.startswith(b"sandboxd: sandbox-paused: ")
    assert good(sandboxd("resume", sandbox)) == "running\n"
    assert sandboxd("exec", sandbox, "true").returncode == 0
    good(sandboxd("renew", "--ttl", "100", sandbox))


def test_a_process_in_the_background(sandboxd: Sandboxd, sandbox: str):
    script = "echo out; echo err >&2; exit 5"
    process = good(sandboxd("exec", "-d", sandbox, "--", "sh", "-c", script)).strip()
    told = sandboxd("logs", "-f", sandbox, process)
    assert (told.stdout, told.stderr) == (b"out\n", b"err\n")
    line = good(sandboxd("ps", sandbox)).splitlines()[1].split()
    assert line[:3] == [process, "exited", "5"]
    assert good(sandboxd("ps", "--json", sandbox))["processes"][0]["exit_code"] == 5


def test_a_terminal(daemon: Daemon, sandbox: str):
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if "SANDBOXD_" not in key}
    environment |= {"SANDBOXD_URL": daemon.base_url, "SANDBOXD_TOKEN": daemon.token}
    command = [sys.executable, "-m", "sandboxd", "shell", sandbox]
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(theirs)
        try:
            seen = b""
            while b"# " not in seen:  # the shell's prompt: from now on keys are its own
                seen += os.read(ours, 65536)
            os.write(ours, b"stty size; tty; exit $((40 + 2))\r")
            while True:
                try:
                    seen += os.read(ours, 65536)
                except OSError:  # EIO: nobody has the other end any more
                    break
            assert process.wait(30) == 42, (seen, process.stderr and process.stderr.read())
        finally:
            process.kill()
            os.close(ours)
    assert b"40 100" in seen
    assert b"/dev/pts/" in seen
    assert daemon.http.get(f"/v1/sandboxes/{sandbox}/processes").json() == {"processes": []}


def test_copying(sandboxd: Sandboxd, sandbox: str, tmp_path: Path):
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


def test_deleting_by_run(sandboxd: Sandboxd, daemon: Daemon):
    mine = {daemon.create("busybox", run="cli-rm") for _ in range(3)}
    assert set(good(sandboxd("rm", "--run", "cli-rm")).split()) == mine


def test_images(sandboxd: Sandboxd):
    assert good(sandboxd("images", "prefetch", "busybox")) == "busybox\n"
    assert good(sandboxd("images", "ls")).splitlines()[1].split()[0] == "busybox"
    failed = sandboxd("images", "prefetch", "busybox", "none")
    assert (failed.returncode, failed.stdout) == (1, b"busybox\n")
    assert b"image-not-found" in failed.stderr


def test_settings_and_where_they_are_from(sandboxd: Sandboxd, tmp_path: Path):
    file = tmp_path / "sandboxd.toml"
    file.write_text("slots_min = 9\n[max_limits]\ncpus = 3.5\n")
    shown = good(sandboxd("config", "show", "--origin", "--json", "--config", str(file)))
    assert shown["slots_min"] == {"value": 9, "origin": str(file)}
    assert shown["max_limits.cpus"] == {"value": 3.5, "origin": str(file)}
    assert shown["slots_max"]["origin"] == "default"
    lines = good(sandboxd("config", "show")).splitlines()
    assert lines[0].split() == ["SETTING", "VALUE"]


def test_the_shell_is_told_what_can_be_completed(daemon: Daemon, sandbox: str):
    environment = os.environ | {
        "SANDBOXD_URL": daemon.base_url,
        "SANDBOXD_TOKEN": daemon.token,
        "_SANDBOXD_COMPLETE": "complete_bash",
        "COMP_WORDS": "sandboxd inspect sb-",
        "COMP_CWORD": "2",
    }
    command = [sys.executable, "-m", "sandboxd"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    assert sandbox in done.stdout.decode().split()
