"""The log's lines: their form, and what is never in them."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxd import logs
from sandboxd.config import load_config
from sandboxd.log_lines import VARIABLE, JsonLines, common_fields

TOKEN = 'token-0123456789-\\"x'
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NODEID": "3", "HOME": "/h"}
SANDBOX = "sb-" + "a" * 26


@pytest.fixture
def told(monkeypatch):
    """Configures the log and gives what it told; the loggers are as before afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    # Other tests of the run start servers, which set their loggers up.
    for name in ("uvicorn", "uvicorn.error", "websockets.server", "asyncio"):
        logger = logging.getLogger(name)
        for attribute, value in (("propagate", True), ("disabled", False), ("handlers", [])):
            monkeypatch.setattr(logger, attribute, value)
        monkeypatch.setattr(logger, "level", logging.NOTSET)

    def configure(log_format, level="debug"):
        monkeypatch.setattr(sys, "stderr", stream)
        overrides = {"log_format": log_format, "log_level": level, "node_name": "n1"}
        logs.configure(load_config(env={}, overrides=overrides), TOKEN, SLURM)
        return stream

    yield configure
    logging.captureWarnings(False)
    root.handlers[:], root.level = before
    root.setLevel(before[1])


def test_json_lines_have_the_ids(told):
    stream = told("json")
    log = logging.getLogger("sandboxd.x")
    log.warning("sandbox %s\nis lost", "sb-1", extra={"sandbox": "sb-1", "run": "r", "env": "no"})
    try:
        int("why")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    at = first.pop("at")
    assert len(at) == len("2026-01-02T03:04:05.678Z")
    assert first == {
        "level": "warning", "part": "api", "logger": "sandboxd.x",
        "message": "sandbox sb-1\nis lost",
        "node": "n1", "slurm_job_id": "4711", "slurm_step_id": "0", "slurm_node_id": "3",
        "sandbox": "sb-1", "run": "r",
    }  # fmt: skip
    assert second["exception"].endswith("'why'")
    assert second["level"] == "error"


def test_text_keeps_a_message_on_its_line(told):
    stream = told("text")
    logging.getLogger("sandboxd.x").warning("a\nERROR forged\x1b[2J")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING sandboxd.x: a\\nERROR forged\\x1b[2J")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_token_is_taken_out(told, log_format):
    stream = told(log_format)
    log = logging.getLogger("sandboxd.x")
    log.info("Bearer %s", TOKEN, extra={"run": TOKEN})
    try:
        open(TOKEN)  # noqa: SIM115 - there is none
    except OSError:
        log.exception("failed")
    text = stream.getvalue()
    assert text.count(logs.HIDDEN) >= 2
    assert "0123456789" not in text


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_debug_lines_of_libraries_are_not_told(told, log_format):
    stream = told(log_format)
    for name in ("uvicorn.error", "websockets.server", "asyncio"):
        logging.getLogger(name).debug("< Authorization: Basic c2VjcmV0")
        logging.getLogger(name).info('%s - "WebSocket %s" [accepted]', "1.2.3.4", "/?key=secret")
    logging.getLogger("sandboxd.x").debug("ours")
    logging.getLogger("uvicorn.error").info("Started")
    assert len(stream.getvalue().splitlines()) == 2


def test_lines_of_a_process_without_a_logging_library():
    read, write = os.pipe()
    lines = JsonLines(write, "hostd", common_fields("n1", SLURM))
    print("launcher: swept mount i3", file=lines)
    print(f"cannot: {SANDBOX} ends", file=lines, end="")
    print("", file=lines)
    lines.write("\n  half")
    os.close(write)
    with os.fdopen(read) as told:
        first, second = map(json.loads, told)
    assert (first["part"], first["message"]) == ("launcher", "swept mount i3")
    assert first["slurm_job_id"] == "4711"
    assert second["sandbox"] == SANDBOX
    assert set(first) == {
        *("at", "level", "part", "message", "node"),
        *("slurm_job_id", "slurm_step_id", "slurm_node_id"),
    }


def test_a_log_that_nobody_reads_fails_nothing():
    read, write = os.pipe()
    os.close(read)
    print("gone", file=JsonLines(write, "hostd", {}))
    os.close(write)


@pytest.mark.parametrize("fields", [None, '{"node": "n1"}'])
def test_a_process_and_its_traceback(fields):
    code = "from sandboxd.log_lines import fold_stderr; fold_stderr('x'); 1 / 0"
    env = {**os.environ, **({VARIABLE: fields} if fields else {})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, check=False
    )
    *_, last = done.stderr.decode().splitlines()
    if fields is None:
        assert last == "ZeroDivisionError: division by zero"
        return
    rows = [json.loads(line) for line in done.stderr.splitlines()]
    assert rows[-1]["message"] == "ZeroDivisionError: division by zero"
    assert {row["part"] for row in rows} == {"x"}
    assert {row["node"] for row in rows} == {"n1"}


def test_hostds_own_error_is_a_line(tmp_path: Path):
    command = [sys.executable, "-m", "sandboxd.host", "--account", "no-such-account"]
    command += ["--runtime-dir", str(tmp_path / "x"), "--cgroup-name", "x", "--max-sandboxes", "1"]
    command += ["--layers-dir", str(tmp_path), "--lock-fd", "0"]
    command += ["--log-format", "json", "--node-name", "n1"]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    (row,) = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert (row["part"], row["node"]) == ("hostd", "n1")
    assert "no-such-account" in row["message"]
