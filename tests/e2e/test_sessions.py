"""Sessions: what lasts between commands, where each ends, and that none lasts for ever."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e import frames as framing
from tests.e2e.at_once import at_once, client_of, in_background
from tests.e2e.host_processes import new_marker, pids_with, status_of, wait_for
from tests.e2e.refusals import refusal
from tests.e2e.shell_sessions import Shell, session
from tests.framework.daemon import Daemon


@pytest.fixture
def shell(daemon: Daemon, sandbox: str) -> Iterator[Shell]:
    with session(daemon.http, sandbox) as opened:
        yield opened


def test_directory_variables_and_functions_last(shell: Shell):
    assert shell.out("cd /tmp; X=5; export Y=6; f() { echo f$X; }") == ""
    assert shell.out("pwd; f; env | grep ^Y=") == "/tmp\nf5\nY=6\n"
    assert shell.get()["state"] == "open"


def test_each_command_has_its_own_status_and_streams(shell: Shell):
    result = shell.run("echo out; echo err >&2; (exit 3)")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 3)
    assert shell.out("echo $?") == "3\n"
    assert shell.run("sh -c 'kill -9 $$'")["exit_code"] == 137
    assert shell.run("nothing-of-that-name")["exit_code"] == 127


def test_what_spans_lines_is_one_command(shell: Shell):
    assert shell.out("for i in 1 2\ndo\n  echo $i\ndone\n") == "1\n2\n"
    assert shell.out("cat <<'END'\nheredoc $X\n'quote\nEND") == "heredoc $X\n'quote\n"
    assert shell.out("echo 'a\nb'") == "a\nb\n"


@pytest.mark.parametrize("command", ["echo 'unterminated", "if true", "echo )", "for", 'echo "'])
def test_what_is_no_command_is_told_by_the_shell(shell: Shell, command: str):
    result = shell.run(command)
    assert result["exit_code"] != 0
    assert "yntax error" in result["stderr"] or "unexpected" in result["stderr"]
    assert shell.out("echo ok") == "ok\n"


def test_exit_ends_the_session_with_its_code(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        result = shell.run("echo before; exit 7; echo after")
        assert (result["exit_code"], result["stdout"], result["stderr"]) == (7, "before\n", "")
        assert result["session_state"] == "ended"
        error = refusal(shell.post("echo x"), 409, "session-ended", "workload")
        assert error["detail"]["exit_code"] == 7
        assert (shell.get()["state"], shell.get()["exit_code"]) == ("ended", 7)


def test_exec_replaces_the_interpreter(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        result = shell.run("exec sh -c 'echo replaced; exit 4'")
        assert (result["stdout"], result["exit_code"]) == ("replaced\n", 4)
        assert result["session_state"] == "ended"
    with session(daemon.http, sandbox) as shell:
        result = shell.run("exec sleep 600", timeout_s=0.5)
        assert (result["timed_out"], result["exit_code"]) == (True, 124)
        assert result["session_state"] == "ended"


def test_an_interpreter_that_kills_itself(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        result = shell.run("echo a; kill -9 $$")
        assert (result["exit_code"], result["signal"]) == (137, 9)
        assert (result["stdout"], result["session_state"]) == ("a\n", "ended")


def test_options_of_the_shell(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        assert shell.run("set -u; echo $NOPE; echo not")["exit_code"] != 0
        assert shell.out("echo alive") == "alive\n"
        result = shell.run("set -e; false; echo not")
        assert (result["exit_code"], result["stdout"]) == (1, "")
        assert result["session_state"] == "ended"


@pytest.mark.parametrize("size", [(100, 40), (65535, 1)])
def test_the_size_that_programs_go_by(shell: Shell, size: tuple[int, int]):
    shell.run("false")
    answer = shell.http.post(f"{shell.url}/resize", json={"cols": size[0], "rows": size[1]})
    assert answer.status_code == httpx.codes.NO_CONTENT
    # Told before the next command, whose $? is still that of the last one.
    assert shell.out("echo $? $COLUMNS $LINES") == f"1 {size[0]} {size[1]}\n"
    shell.run("readonly COLUMNS")
    assert shell.http.post(f"{shell.url}/resize", json={"cols": 7, "rows": 7}).is_success
    assert shell.out("echo on") == "on\n", "a shell that refuses the size lives on"
    assert shell.http.post(f"{shell.url}/resize", json={"cols": 0, "rows": 7}).status_code == 422


def test_traps_are_kept_and_run(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        assert shell.out("trap 'echo bye' EXIT; trap 'echo usr1' USR1") == ""
        assert shell.out("kill -USR1 $$; echo on") == "usr1\non\n"
        assert shell.run("exit 0")["stdout"] == "bye\n"


def test_stdin_is_empty_or_what_is_given(shell: Shell):
    assert shell.out("cat; read x; echo $?") == "1\n"
    assert shell.out("cat", stdin="grüße\n") == "grüße\n"
    every_byte = bytes(range(256)) * 1000
    given = base64.b64encode(every_byte).decode()
    result = shell.run("cat", stdin_base64=given, encoding="base64")
    assert base64.b64decode(result["stdout"]) == every_byte
    assert shell.out("read a; read b; echo $b$a", stdin="1\n2\n") == "21\n"
    assert shell.out("true", stdin="x" * 1_000_000) == ""
    assert shell.out("echo $b") == "2\n"


def test_output_is_exact_and_bounded(shell: Shell):
    result = shell.run("head -c 3000000 /dev/zero", encoding="base64")
    assert base64.b64decode(result["stdout"]) == bytes(3_000_000)
    result = shell.run("yes | head -c 50000000", max_output_bytes=1000, truncate="tail")
    assert result["stdout_total_bytes"] == 50_000_000
    assert result["stdout"] == "y\n" * 500


def test_nothing_that_is_printed_is_taken_for_the_end(shell: Shell):
    """Whatever the descriptors are: the command does not have the one that tells its end."""
    lines = "for fd in 3 4 5 6 7 8 9; do echo '0 '$fd >&$fd; done 2>/dev/null; "
    lines += "printf '0 %032d\\n' 0; printf '\\0\\377\\n$? 0'; sleep 0.2; echo end"
    result = shell.run(lines, encoding="base64")
    expected = b"0 " + b"0" * 32 + b"\n\0\xff\n$? 0end\n"
    assert base64.b64decode(result["stdout"]) == expected
    assert shell.run("ls /proc/self/fd")["stdout"].split()[:3] == ["0", "1", "2"]


def test_a_background_job_does_not_hold_up_the_answer(shell: Shell):
    started = time.monotonic()
    result = shell.run("(while :; do echo job; sleep 0.05; done) & echo started")
    assert time.monotonic() - started < 20
    assert "started\n" in result["stdout"]
    time.sleep(0.3)
    assert "mine\n" in shell.run("echo mine")["stdout"]
    shell.run("kill $!")


def test_a_background_job_that_floods_does_no_harm(shell: Shell):
    shell.run("yes & echo on")
    assert "two\n" in shell.run("echo two")["stdout"]
    assert shell.run("kill $!; wait; true", timeout_s=30)["timed_out"] is False
    assert shell.out("echo quiet") == "quiet\n"


def test_the_time_is_up_and_the_session_goes_on(shell: Shell):
    shell.out("X=kept; sleep 601 & true")
    result = shell.run("echo a; sleep 600; echo b", timeout_s=0.5)
    assert (result["exit_code"], result["timed_out"], result["stdout"]) == (124, True, "a\n")
    assert result["session_state"] == "open"
    assert shell.out("echo $X; kill -0 $! && echo lives") == "kept\nlives\n"
    assert shell.run("while :; do :; done", timeout_s=0.5)["timed_out"] is True
    assert shell.out("echo $X") == "kept\n"


def test_a_command_that_ignores_an_interrupt_is_killed(shell: Shell):
    shell.out("X=kept")
    result = shell.run("sh -c 'trap \"\" INT; echo deaf; sleep 600'", timeout_s=0.5)
    assert (result["timed_out"], result["stdout"]) == (True, "deaf\n")
    assert shell.out("echo $X") == "kept\n"


def test_an_interpreter_that_ignores_everything_is_ended(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        result = shell.run("trap '' INT; while :; do :; done", timeout_s=0.5)
        assert (result["exit_code"], result["timed_out"]) == (124, True)
        assert result["session_state"] == "ended"


def test_an_interrupt_ends_the_command_only(daemon: Daemon, sandbox: str, shell: Shell):
    def interrupted() -> dict[str, object]:
        with client_of(daemon) as client:
            return Shell(client, shell.url).run("echo a; sleep 600; echo b")

    assert daemon.http.post(f"{shell.url}/interrupt").json() == {"interrupted": False}
    with in_background(interrupted) as running:
        while not shell.get()["busy"]:
            time.sleep(0.02)
        refusal(shell.post("echo x"), 409, "session-busy", "request")
        time.sleep(0.3)
        assert daemon.http.post(f"{shell.url}/interrupt").json() == {"interrupted": True}
        result = running.result()
    assert (result["exit_code"], result["stdout"], result["timed_out"]) == (130, "a\n", False)
    assert shell.out("echo on") == "on\n"


def test_a_client_that_goes_interrupts_its_command(daemon: Daemon, shell: Shell):
    with client_of(daemon, timeout_s=0.5) as client:
        with pytest.raises(Exception, match="timed out"):
            Shell(client, shell.url).run("sleep 600")
    deadline = time.monotonic() + 20
    while shell.get()["busy"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert shell.out("echo on") == "on\n"


def test_a_command_in_frames(daemon: Daemon, shell: Shell):
    with client_of(daemon) as client:
        body = {"command": "echo a; echo b >&2; (exit 3)"}
        seen = framing.run(client, f"{shell.url}/exec", body)
    assert seen[0]["type"] == "started"
    assert framing.output(seen, "stdout") == b"a\n"
    assert framing.output(seen, "stderr") == b"b\n"
    assert (seen[-1]["exit_code"], seen[-1]["session_state"]) == (3, "open")


def test_sessions_do_not_know_of_each_other(daemon: Daemon, sandbox: str):
    def talk(number: int) -> None:
        with client_of(daemon) as client, session(client, sandbox) as shell:
            shell.out(f"X={number}; cd /proc")
            for turn in range(10):
                assert shell.out(f"echo $X.{turn} $(pwd)") == f"{number}.{turn} /proc\n"

    at_once(talk, range(8), threads=4)
    assert daemon.http.get(f"/v1/sandboxes/{sandbox}/sessions").json() == {"sessions": []}


def test_sessions_are_the_users(daemon: Daemon, sandbox: str):
    options = {"user": "agent", "cwd": "/work", "env": {"FROM": "session"}}
    with session(daemon.http, sandbox, **options) as shell:
        assert shell.out("id -un; pwd; echo $FROM") == "agent\n/work\nsession\n"
        assert shell.out("cat", stdin="mine") == "mine"
        listed = daemon.http.get(f"/v1/sandboxes/{sandbox}/sessions").json()["sessions"]
        assert [one["user"] for one in listed] == ["agent"]
        assert daemon.http.get(f"/v1/sandboxes/{sandbox}/processes").json() == {"processes": []}
    url = f"/v1/sandboxes/{sandbox}/sessions"
    refusal(daemon.http.post(url, json={"user": "nobody-here"}), 422, "user-not-found", "request")
    answer = daemon.http.post(url, json={"cwd": "/nowhere"})
    refusal(answer, 422, "cwd-not-found", "request")
    refusal(daemon.http.get(f"{url}/ss-none"), 404, "session-not-found", "request")
    answer = daemon.http.post(url, json={"kind": "python"})  # busybox has none
    refusal(answer, 409, "session-ended", "workload")


def test_closing_ends_all_it_started(daemon: Daemon, sandbox: str):
    with session(daemon.http, sandbox) as shell:
        shell.run("(trap '' HUP INT TERM; sleep 602) & sleep 603 & true")
    assert "sleep 60" not in daemon.exec(sandbox, "ps")["stdout"]


def test_commands_of_any_length(shell: Shell):
    for size in (900, 1000, 1001, 4096, 5000, 100_000):
        text = "x" * size
        assert shell.out(f"echo {text} | wc -c") == f"{size + 1}\n"
    assert shell.out("".join(f"A{i}={i}\n" for i in range(5000)) + "echo $A4999") == "4999\n"


def test_a_pipeline_reads_what_it_is_given(shell: Shell):
    """Busybox's own programs share the shell's buffers."""
    assert shell.out("cat /etc/passwd | head -c 4; yes | head -c 4; wc -c") == "rooty\ny\n0\n"


def test_an_interrupt_that_comes_late_hits_no_later_command(daemon: Daemon, sandbox: str):
    """PID 1, which sends it, stands still until the command has ended by itself."""
    marker = new_marker()
    url = f"/v1/sandboxes/{sandbox}"
    with session(daemon.http, sandbox) as shell, client_of(daemon) as client:
        other = Shell(client, shell.url)
        body = {"command": f"read x; : > /tmp/end # {marker}", "stdin": True}
        ender = client.post(f"{url}/processes", json=body).json()["id"]
        (pid,) = pids_with(marker)
        init = int(status_of(pid)["PPid"])
        waits = "until [ -e /tmp/end ]; do sleep 0.05; done; echo itself"
        with in_background(lambda: other.run(waits)) as first:
            wait_for(lambda: bool(shell.get()["busy"]), "a command that runs")
            os.kill(init, signal.SIGSTOP)
            try:
                assert client.post(f"{shell.url}/interrupt").json() == {"interrupted": True}
                client.post(f"{url}/processes/{ender}/stdin", json={"data": "x\n"})
                ended = first.result()
                assert (ended["exit_code"], ended["stdout"]) == (0, "itself\n")
                with in_background(lambda: other.run("sleep 1.5; echo whole")) as second:
                    # Long enough for it to begin, if it does not wait for the interrupt's end.
                    threading.Event().wait(0.7)
                    os.kill(init, signal.SIGCONT)
                    result = second.result()
            finally:
                os.kill(init, signal.SIGCONT)
        assert (result["exit_code"], result["stdout"]) == (0, "whole\n")
