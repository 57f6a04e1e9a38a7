"""How a command ended is told exactly: statuses, signals, 126 and 127, and what is no exit code."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon


@pytest.mark.parametrize("status", [0, 1, 3, 124, 127, 128, 137, 255])
def test_the_exit_status_is_the_programs_own(daemon: Daemon, sandbox: str, status: int):
    result = daemon.exec(sandbox, ["sh", "-c", f"exit {status}"])
    assert (result["exit_code"], result["signal"]) == (status, None)
    assert result["timed_out"] is False
    assert result["oom_killed"] is False


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGPIPE]
)
def test_death_by_a_signal_is_128_plus_its_number(daemon: Daemon, sandbox: str, number: int):
    result = daemon.exec(sandbox, ["sh", "-c", f"kill -{int(number)} $$"])
    assert (result["exit_code"], result["signal"]) == (128 + number, number)
    assert result["oom_killed"] is False


def test_a_program_that_is_not_there_is_127(daemon: Daemon, sandbox: str):
    for command in (["no-such-program"], ["/no/such/program"], ["/etc/passwd/x"]):
        result = daemon.exec(sandbox, command)
        assert result["exit_code"] == 127, command
        assert command[0] in result["stderr"]
        assert "not found" in result["stderr"]


def test_a_script_without_its_interpreter_is_127(daemon: Daemon, sandbox: str):
    made = "printf '#!/no/interpreter\\n' > /tmp/s; chmod 755 /tmp/s"
    assert daemon.exec(sandbox, made)["exit_code"] == 0
    assert daemon.exec(sandbox, ["/tmp/s"])["exit_code"] == 127


def test_what_cannot_be_executed_is_126(daemon: Daemon, sandbox: str):
    made = "printf 'no program' > /tmp/text; cp /tmp/text /tmp/open; chmod 755 /tmp/open"
    assert daemon.exec(sandbox, made)["exit_code"] == 0
    for path in ("/tmp/text", "/tmp", "/tmp/open"):
        result = daemon.exec(sandbox, [path])
        assert result["exit_code"] == 126, path
        assert path in result["stderr"]


def test_path_decides_in_order_and_goes_on_past_what_it_may_not_run(daemon: Daemon, sandbox: str):
    made = r"""
        mkdir /a /b /c; touch /a/tool
        printf '#!/bin/sh\necho b' > /b/tool; printf '#!/bin/sh\necho c' > /c/tool
        chmod 755 /b/tool /c/tool
    """
    assert daemon.exec(sandbox, made)["exit_code"] == 0
    result = daemon.exec(sandbox, ["tool"], env={"PATH": "/none:/a:/b:/c"})
    assert (result["exit_code"], result["stdout"]) == (0, "b\n")
    assert daemon.exec(sandbox, ["tool"], env={"PATH": "/none:/a"})["exit_code"] == 126


def test_a_list_is_run_as_it_is(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, ["echo", "$HOME", "*", ";", "a  b", "", "'x'"])
    assert result["stdout"] == "$HOME * ; a  b  'x'\n"


def test_a_string_is_the_shells(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "x=2; echo $((x * 21)) | cat; exit 5")
    assert (result["stdout"], result["exit_code"]) == ("42\n", 5)


def test_bash_is_preferred_and_sh_does_where_there_is_none(daemon: Daemon, sandbox: str):
    assert daemon.exec(sandbox, "echo $0")["stdout"] == "sh\n"
    bash = '#!/bin/sh\necho bash "$@"\n'
    written = daemon.http.put(
        f"/v1/sandboxes/{sandbox}/files",
        params={"path": "/bin/bash", "mode": "0755"},
        content=bash.encode(),
    )
    assert written.is_success, written.text
    assert daemon.exec(sandbox, "echo $0")["stdout"] == "bash -c echo $0\n"


def test_without_any_shell_a_string_is_127_and_says_which_is_missing(daemon: Daemon, sandbox: str):
    assert daemon.exec(sandbox, ["/bin/busybox", "rm", "/bin/sh"])["exit_code"] == 0
    result = daemon.exec(sandbox, "echo here")
    assert result["exit_code"] == 127
    assert "/bin/sh" in result["stderr"]


def test_arguments_keep_every_byte_that_utf_8_has(daemon: Daemon, sandbox: str):
    odd = 'tab\t newline\n quote" backslash\\ ünïcödé 漢字 \U0001f600 \x7f\x01'
    assert daemon.exec(sandbox, ["printf", "%s", odd])["stdout"] == odd


def test_stopping_itself_does_not_end_a_command(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "echo before; kill -STOP $$; echo after", timeout_s=1, grace_s=0)
    assert (result["exit_code"], result["timed_out"]) == (124, True)
    assert result["stdout"] == "before\n"


def test_a_command_that_kills_all_it_can_leaves_a_sandbox_that_works(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "kill -9 1; kill -9 -1; kill -9 $$")
    assert (result["exit_code"], result["signal"]) == (137, 9)
    assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


def test_usage_is_that_of_the_command(daemon: Daemon, sandbox: str):
    busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"
    result = daemon.exec(sandbox, busy)
    assert result["cpu_user_s"] > 0.02
    assert 0 < result["cpu_user_s"] + result["cpu_system_s"] < result["wall_s"] * 4
    large = daemon.exec(sandbox, ["dd", "if=/dev/zero", "of=/dev/null", "bs=64M", "count=1"])
    assert 64 << 20 < large["peak_memory_bytes"] < 96 << 20


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": []},
        {"command": ""},
        {"command": [""]},
        {"command": ["a\0b"]},
        {"command": "a\0b"},
        {"command": 7},
        {"command": ["true"], "timeout_s": 0},
        {"command": ["true"], "timeout_s": -1},
        {"command": ["true"], "timeout_s": 10**9},
        {"command": ["true"], "timeout_s": "5"},
        {"command": ["true"], "max_output_bytes": -1},
        {"command": ["true"], "max_output_bytes": 1 << 40},
        {"command": ["true"], "truncate": "middle"},
        {"command": ["true"], "encoding": "latin-1"},
        {"command": ["true"], "cwd": "relative"},
        {"command": ["true"], "env": {"A=B": "c"}},
        {"command": ["true"], "env": {"": "c"}},
        {"command": ["true"], "env": {"A": "c\0d"}},
        {"command": ["true"], "user": "a b"},
        {"command": ["true"], "stdin": "x", "stdin_base64": "eA=="},
        {"command": ["true"], "stdin_base64": "not base64!"},
        {"command": ["true"], "unknown": 1},
    ],
)
def test_a_request_that_says_nothing_sensible_is_refused(
    daemon: Daemon, sandbox: str, body: dict[str, object]
):
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json=body)
    refusal(answer, 422, "request-invalid", "request")
