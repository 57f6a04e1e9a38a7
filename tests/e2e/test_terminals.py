"""Terminals: what a program sees of its own, as root and as a user; typing, sizes, interrupts."""

from __future__ import annotations

import time

import pytest

from tests.e2e import frames as framing
from tests.e2e.at_once import client_of
from tests.e2e.background import Background
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

READY = b"\x1b[6n"
"""Busybox's shell asks where the cursor is once it takes what is typed; earlier it is flushed."""
TTY = {"cols": 132, "rows": 43}


@pytest.mark.parametrize("user", ["root", "agent"])
def test_a_command_has_a_terminal_of_its_own(daemon: Daemon, sandbox: str, user: str):
    script = "tty; stty size; stat -c '%U %a' $(tty); test -t 0 -a -t 1 -a -t 2 && echo all; "
    script += "echo $TERM; echo to-err >&2; echo controlling > /dev/tty"
    result = daemon.exec(sandbox, script, tty=TTY, user=user)
    assert result["stdout"].splitlines() == [
        "/dev/pts/0", "43 132", f"{user} 620", "all", "xterm-256color", "to-err", "controlling",
    ]  # fmt: skip
    assert (result["stderr"], result["exit_code"]) == ("", 0)
    assert "\r\n" in result["stdout"]  # ONLCR, as a terminal does


def test_without_one_there_is_none(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "tty; test -t 1 || echo none; echo x > /dev/tty")
    assert result["stdout"] == "not a tty\nnone\n"
    assert result["exit_code"] != 0


def test_all_output_of_a_terminal_arrives(daemon: Daemon, sandbox: str):
    result = daemon.exec(
        sandbox, "i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done", tty=TTY
    )
    assert result["stdout"] == "".join(f"{i}\r\n" for i in range(20_000))


def test_terminals_in_frames(daemon: Daemon, sandbox: str):
    with client_of(daemon) as client:
        body = {"command": "stty size; exit 3", "tty": TTY}
        seen = framing.run(client, f"/v1/sandboxes/{sandbox}/exec", body)
    assert framing.output(seen, "stdout") == b"43 132\r\n"
    assert seen[-1]["exit_code"] == 3


def test_what_is_given_is_typed_in(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "read line; echo got $line", tty=TTY, stdin="hello\n")
    assert result["stdout"] == "hello\r\ngot hello\r\n"


def test_a_shell_to_talk_to(daemon: Daemon, sandbox: str):
    shell = Background.start(daemon.http, sandbox, ["sh", "-i"], tty=TTY, user="agent")
    assert shell.get()["tty"] is True
    seen = 0

    def until(mark: bytes) -> None:
        nonlocal seen
        seen += shell.read(offset=seen, until=mark).index(mark) + len(mark)

    until(READY)
    shell.write(b"echo $((6*7))\n")
    until(b"\n42\r\n")
    until(READY)
    shell.write(b"echo begun; sleep 600\n")
    until(b"\r\nbegun\r\n")
    shell.write(b"\x03")
    until(READY)
    shell.write(b"stty size\n")
    until(b"43 132")
    until(READY)
    size = {"cols": 100, "rows": 50}
    assert daemon.http.post(f"{shell.url}/resize", json=size).status_code == 204
    shell.write(b"stty size\n")
    until(b"50 100")
    until(READY)
    assert daemon.http.delete(f"{shell.url}/stdin").status_code == 204  # types ^D
    assert shell.wait()["exit_code"] == 0
    shell.remove()


def test_a_full_screen_editor(daemon: Daemon, sandbox: str):
    editor = Background.start(daemon.http, sandbox, ["vi", "/tmp/file"], tty=TTY)
    editor.read(until=b"/tmp/file")
    editor.write(b"ihello from vi\x1b")
    time.sleep(0.5)  # an escape that is followed at once is one half of a key's code
    editor.write(b":wq\r")
    assert editor.wait()["exit_code"] == 0
    assert daemon.exec(sandbox, ["cat", "/tmp/file"])["stdout"] == "hello from vi\n"
    editor.remove()


def test_pipes_have_no_size(daemon: Daemon, sandbox: str):
    process = Background.start(daemon.http, sandbox, ["cat"])
    answer = daemon.http.post(f"{process.url}/resize", json=TTY)
    refusal(answer, 409, "not-a-terminal", "request")
    answer = daemon.http.post(f"{process.url}/resize", json={"cols": 0})
    refusal(answer, 422, "request-invalid", "request")
    process.remove()


def test_removing_a_terminal_ends_what_runs_in_it(daemon: Daemon, sandbox: str):
    shell = Background.start(daemon.http, sandbox, ["sh", "-i"], tty=TTY)
    shell.write(b"(trap '' HUP; sleep 600) & echo begun; sleep 601\n")
    shell.read(until=b"\r\nbegun\r\n")
    shell.remove()
    assert "sleep 60" not in daemon.exec(sandbox, "ps")["stdout"]
