"""Bytes in and out of a command: stdin, caps and totals, encodings, long arguments."""

from __future__ import annotations

import base64
import hashlib
import random

import pytest

from tests.e2e import host_processes
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

MIB = 1 << 20
ARGUMENT_MAX = 131_071
"""MAX_ARG_STRLEN of binfmts.h, 32 pages, without the NUL."""


def test_stdin_is_empty_unless_given(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "readlink /proc/self/fd/0; cat; echo end")
    assert result["stdout"] == "/dev/null\nend\n"


def test_stdin_is_given_as_text_or_base64(daemon: Daemon, sandbox: str):
    assert daemon.exec(sandbox, ["cat"], stdin="grüße\n")["stdout"] == "grüße\n"
    assert daemon.exec(sandbox, ["cat"], stdin="")["stdout"] == ""
    every_byte = bytes(range(256))
    given = base64.b64encode(every_byte).decode()
    result = daemon.exec(sandbox, ["cat"], stdin_base64=given, encoding="base64")
    assert base64.b64decode(result["stdout"]) == every_byte


def test_ten_mebibytes_of_stdin_arrive_whole(daemon: Daemon, sandbox: str):
    data = random.Random(1).randbytes(10 * MIB)
    result = daemon.exec(
        sandbox, ["sha256sum"], stdin_base64=base64.b64encode(data).decode(), timeout_s=60
    )
    assert result["stdout"].split()[0] == hashlib.sha256(data).hexdigest()


def test_a_command_need_not_read_its_stdin(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "exec 0<&-; echo done", stdin="x" * MIB)
    assert (result["exit_code"], result["stdout"]) == (0, "done\n")
    assert daemon.exec(sandbox, ["true"], stdin="x" * MIB)["exit_code"] == 0


def test_the_two_streams_are_kept_apart(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, "echo out; echo err >&2; echo out2")
    assert (result["stdout"], result["stderr"]) == ("out\nout2\n", "err\n")
    assert (result["stdout_total_bytes"], result["stderr_total_bytes"]) == (9, 4)
    assert (result["stdout_truncated"], result["stderr_truncated"]) == (False, False)


@pytest.mark.parametrize("size", [0, 1, 4096, 65_535, 65_536, 65_537, 1_048_576, 5_000_000])
def test_output_is_whole_to_the_last_byte(daemon: Daemon, sandbox: str, size: int):
    made = f"head -c {size} /dev/urandom > /tmp/data; sha256sum < /tmp/data; "
    digest = daemon.exec(sandbox, made)["stdout"].split()[0]
    result = daemon.exec(sandbox, ["cat", "/tmp/data"], encoding="base64")
    data = base64.b64decode(result["stdout"])
    assert len(data) == result["stdout_total_bytes"] == size
    assert hashlib.sha256(data).hexdigest() == digest
    assert result["stdout_truncated"] is False


def test_what_was_written_just_before_the_end_is_there(daemon: Daemon, sandbox: str):
    # The pipe is full when the process ends; nothing of it may be lost.
    for _ in range(20):
        result = daemon.exec(sandbox, "head -c 65536 /dev/zero; head -c 5000 /dev/zero >&2")
        assert (result["stdout_total_bytes"], result["stderr_total_bytes"]) == (65_536, 5000)


NUMBERS = "".join(f"{n}\n" for n in range(1, 100_001))


@pytest.mark.parametrize("cap", [0, 1, 10, 999, 65_536, 200_000])
@pytest.mark.parametrize("which", ["head", "tail", "both"])
def test_a_longer_stream_is_cut_where_it_was_asked(
    daemon: Daemon, sandbox: str, which: str, cap: int
):
    result = daemon.exec(
        sandbox, ["seq", "100000"], max_output_bytes=cap, truncate=which, encoding="base64"
    )
    whole = NUMBERS.encode()
    tail = {"head": 0, "tail": cap, "both": cap // 2}[which]
    head = cap - tail
    kept = base64.b64decode(result["stdout"])
    assert kept == whole[:head] + (whole[-tail:] if tail else b"")
    assert result["stdout_total_bytes"] == len(whole)
    assert result["stdout_truncated"] is True


def test_a_stream_as_long_as_the_cap_is_not_truncated(daemon: Daemon, sandbox: str):
    for which in ("head", "tail", "both"):
        result = daemon.exec(sandbox, ["printf", "12345678"], max_output_bytes=8, truncate=which)
        assert (result["stdout"], result["stdout_truncated"]) == ("12345678", False)
        assert result["stdout_total_bytes"] == 8


def test_the_cap_is_for_each_stream(daemon: Daemon, sandbox: str):
    result = daemon.exec(
        sandbox, "printf aaaaaa; printf bbb >&2", max_output_bytes=3, truncate="head"
    )
    assert (result["stdout"], result["stdout_truncated"]) == ("aaa", True)
    assert (result["stderr"], result["stderr_truncated"]) == ("bbb", False)


def test_what_is_no_utf_8_is_replaced(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, ["printf", r"ok\303\050\377\342\202end"])
    # Unicode 15, 3.9: one U+FFFD for each maximal part that cannot be continued.
    assert result["stdout"] == "ok\ufffd(\ufffd\ufffdend"
    assert result["stdout_total_bytes"] == 10


def test_nul_bytes_survive(daemon: Daemon, sandbox: str):
    assert daemon.exec(sandbox, ["printf", r"a\000b"])["stdout"] == "a\0b"


def test_binary_output_comes_as_base64(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, ["printf", r"\377\000\201"], encoding="base64")
    assert base64.b64decode(result["stdout"]) == b"\xff\x00\x81"
    assert result["encoding"] == "base64"


@pytest.mark.parametrize("total", [60_000, 70_000, 1_000_000, 1_900_000])
def test_long_arguments_arrive_whole(daemon: Daemon, sandbox: str, total: int):
    arguments = [f"{n:05d}" + "x" * 990 for n in range(total // 1000)]
    # A builtin: it makes no second process that would need the same room.
    command = ["sh", "-c", 'echo $#; printf %s "$@" | sha256sum', "sh", *arguments]
    result = daemon.exec(sandbox, command)
    digest = hashlib.sha256("".join(arguments).encode()).hexdigest()
    assert result["stdout"].split()[:2] == [str(len(arguments)), digest]


def test_a_long_environment_arrives_whole(daemon: Daemon, sandbox: str):
    given = {f"VARIABLE_{n}": "y" * 1000 for n in range(500)}
    out = daemon.exec(sandbox, ["env"], env=given)["stdout"]
    found = dict(line.split("=", 1) for line in out.splitlines())
    assert {key: found[key] for key in given} == given


def test_one_argument_may_be_as_long_as_the_kernel_takes(daemon: Daemon, sandbox: str):
    result = daemon.exec(sandbox, ["sh", "-c", "echo ${#1}", "sh", "z" * ARGUMENT_MAX])
    assert result["stdout"] == f"{ARGUMENT_MAX}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["true", "z" * (ARGUMENT_MAX + 1)],
        ["true", *["z" * 100_000 for _ in range(25)]],
        ["true", *["z" * 100_000 for _ in range(60)]],
        ["true", *["z" for _ in range(70_000)]],
        "true " + "z" * (ARGUMENT_MAX + 1),
    ],
    ids=["one-argument", "past-2-MiB", "past-the-protocol", "too-many", "script"],
)
def test_a_command_that_is_too_long_is_refused_by_name(
    daemon: Daemon, sandbox: str, command: list[str] | str
):
    answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command})
    refusal(answer, 422, "command-too-long", "request")
    assert daemon.exec(sandbox, ["true"])["exit_code"] == 0


def resident_kib(pid: int) -> int:
    return int(host_processes.status_of(pid)["VmRSS"].split()[0])


def test_a_flood_of_output_costs_the_daemon_no_memory(daemon: Daemon, sandbox: str):
    flood = {"timeout_s": 3, "grace_s": 0, "max_output_bytes": 65_536}
    daemon.exec(sandbox, "yes", **flood)
    before = resident_kib(daemon.api_pid)
    result = daemon.exec(sandbox, "yes & yes >&2", **flood)
    grown = resident_kib(daemon.api_pid) - before
    assert result["timed_out"] is True
    assert result["stdout_truncated"] is True
    for stream in ("stdout", "stderr"):
        assert len(result[stream]) == 65_536
        assert result[f"{stream}_total_bytes"] > 50 * MIB
    assert grown < 8 * 1024
