"""The administration verbs against a stand-in daemon that speaks the documented HTTP."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import sandboxd
from sandboxd import cli
from sandboxd.cli import output
from sandboxd.model import Limits

TOKEN = "the-token-of-the-tests"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def exec_answer(**changes):
    return {
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "timeout_reason": None,
        "oom_killed": False,
        "encoding": "base64",
        "stdout": encoded(b"out\n"),
        "stderr": encoded(b"err\n"),
        "stdout_total_bytes": 4,
        "stderr_total_bytes": 4,
        "stdout_truncated": False,
        "stderr_truncated": False,
        "wall_s": 0.5,
        "cpu_user_s": 0.1,
        "cpu_system_s": 0.1,
        "peak_memory_bytes": 4096,
        **changes,
    }


def frames(answer):
    """The same as a stream."""
    yield {"seq": 0, "type": "started", "exec_id": "ex-1", "pid": 7}
    for seq, name in enumerate(("stdout", "stderr"), 1):
        yield {"seq": seq, "type": name, "data": answer[name], "encoding": answer["encoding"]}
    yield {"seq": 3, "type": "exit", **answer}


def error_body(code, message, hint=None):
    return {
        "error": {
            "code": code,
            "message": message,
            "cause": "request",
            "retryable": False,
            "hint": hint,
            "detail": {},
        }
    }


CREATED = {
    "id": "sb-1",
    "state": "running",
    "image": "img",
    "image_key": "key",
    "snapshot": None,
    "copy_from": None,
    "seccomp": None,
    "run": "",
    "name": "",
    "labels": {},
    "node": "node",
    "limits": dataclasses.asdict(Limits()),
    "enforcement": {"memory_mb": "enforced"},
    "user": "0",
    "workdir": "/",
    "hostname": "sandbox",
    "network": "none",
    "mounts": [],
    "ttl_s": 60.0,
    "idle_timeout_s": None,
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": "2026-01-01T00:01:00Z",
    "phases_ms": {"total": 2.5},
    "failure": None,
}
LIST = "/v1/sandboxes?limit=1000"


class StandIn(ThreadingHTTPServer):
    """Answers by (method, path); records (method, path with query, body)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {}
        self.requests = []
        self.exec_blocks = threading.Event()
        self.exec_blocks.set()
        self.exec_began = threading.Event()
        self.deleted = threading.Event()
        self.headers_seen = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def calls(self):
        return [(method, path) for method, path, _ in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        server = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        server.requests.append((self.command, self.path, body))
        server.headers_seen.append(self.headers)
        if self.path.endswith("/exec"):
            server.exec_began.set()
            server.exec_blocks.wait(20)
        status, value = server.answers.get(
            (self.command, self.path), (404, error_body("sandbox-not-found", "there is none"))
        )
        if status == 200 and self.headers["Accept"] == "application/x-ndjson":
            value = b"".join(json.dumps(frame).encode() + b"\n" for frame in frames(value))
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        if status == 204:
            data = b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        if self.command == "DELETE":
            server.deleted.set()

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Settings of whoever runs the tests are not those of the program under test."""
    for name in [name for name in os.environ if name.startswith("SANDBOXD_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def server():
    with StandIn() as stand_in:
        stand_in.answers = {
            ("POST", "/v1/sandboxes"): (201, CREATED),
            ("POST", "/v1/sandboxes/sb-1/exec"): (200, exec_answer()),
            ("DELETE", "/v1/sandboxes/sb-1"): (204, b""),
        }
        thread = threading.Thread(target=stand_in.serve_forever, args=(0.01,))
        thread.start()
        yield stand_in
        stand_in.exec_blocks.set()
        stand_in.shutdown()
        thread.join()


@pytest.fixture
def invoke(server):
    runner = CliRunner(env={"SANDBOXD_URL": server.url, "SANDBOXD_TOKEN": TOKEN})

    def call(*arguments, stdin=None):
        return runner.invoke(cli.build(), list(arguments), input=stdin)

    return call


class TestExec:
    def test_output_is_byte_for_byte_and_status_passes_through(self, server, invoke):
        raw = bytes(range(256))
        answer = exec_answer(exit_code=3, stdout=encoded(raw), stderr=encoded(b"\xff"))
        server.answers["POST", "/v1/sandboxes/sb-1/exec"] = (200, answer)
        result = invoke("exec", "sb-1", "--", "cat", "--show-all")
        assert result.stdout_bytes == raw
        assert result.stderr_bytes == b"\xff"
        assert result.exit_code == 3
        ((_, _, body),) = server.requests
        assert body.pop("exec_id")
        assert body == {"command": ["cat", "--show-all"], "encoding": "base64"}
        assert server.headers_seen[0]["Authorization"] == f"Bearer {TOKEN}"

    @pytest.mark.parametrize(
        ("arguments", "command"),
        [
            (["--", "ls", "-l"], ["ls", "-l"]),
            (["ls", "-l"], ["ls", "-l"]),
            (["ls", "--json", "--", "x"], ["ls", "--json", "--", "x"]),
            (["--", "--", "x"], ["--", "x"]),
            (["--", "echo", ""], ["echo", ""]),
        ],
    )
    def test_everything_behind_the_id_is_the_commands(self, server, invoke, arguments, command):
        invoke("exec", "sb-1", *arguments)
        assert server.requests[0][2]["command"] == command

    def test_options_become_fields(self, server, invoke):
        options = ["--timeout", "5", "--cwd", "/w", "--user", "me", "-e", "A=b=c", "-e", "D="]
        result = invoke("exec", *options, "sb-1", "--", "true")
        assert result.exit_code == 0
        assert server.requests[0][2].pop("exec_id").startswith("ex-")
        assert server.requests[0][2] == {
            "command": ["true"],
            "encoding": "base64",
            "timeout_s": 5.0,
            "cwd": "/w",
            "user": "me",
            "env": {"A": "b=c", "D": ""},
        }

    def test_stdin_only_when_asked_for(self, server, invoke):
        invoke("exec", "sb-1", "--", "cat", stdin=b"\xff\0")
        invoke("exec", "-i", "sb-1", "--", "cat", stdin=b"\xff\0")
        assert "stdin_base64" not in server.requests[0][2]
        assert server.requests[1][2]["stdin_base64"] == encoded(b"\xff\0")

    def test_json_is_the_answer_itself(self, invoke):
        result = invoke("exec", "--json", "sb-1", "--", "true")
        assert json.loads(result.stdout) == exec_answer()

    def test_a_time_out_is_said(self, server, invoke):
        answer = exec_answer(exit_code=124, timed_out=True, oom_killed=True)
        server.answers["POST", "/v1/sandboxes/sb-1/exec"] = (200, answer)
        result = invoke("exec", "sb-1", "--", "yes")
        assert result.exit_code == 124
        assert "time was up" in result.stderr
        assert "out of memory" in result.stderr
        assert result.stdout == "out\n"

    def test_an_error_is_one_line_with_code_and_hint(self, server, invoke):
        answer = error_body("cwd-not-found", "no directory\n/w", "make it first")
        server.answers["POST", "/v1/sandboxes/sb-1/exec"] = (400, answer)
        result = invoke("exec", "sb-1", "--", "true")
        expected = "sandboxd: cwd-not-found: no directory /w (hint: make it first)\n"
        assert result.stderr == expected
        assert result.stdout == ""
        assert result.exit_code == 125

    def test_ids_cannot_reach_another_route(self, server, invoke):
        invoke("exec", "../node?x=", "--", "true")
        assert server.calls == [("POST", "/v1/sandboxes/..%2Fnode%3Fx%3D/exec")]

    @pytest.mark.parametrize("arguments", [["sb-1"], ["sb-1", "--"], ["-e", "x", "sb-1", "true"]])
    def test_wrong_usage_sends_nothing(self, server, invoke, arguments):
        assert invoke("exec", *arguments).exit_code == 2
        assert server.requests == []


class TestRun:
    def test_creates_executes_and_deletes(self, server, invoke):
        server.answers["POST", "/v1/sandboxes/sb-1/exec"] = (200, exec_answer(exit_code=9))
        result = invoke("run", "--memory-mb", "64", "--cpus", "0.5", "img", "--", "ls", "-l")
        assert result.exit_code == 9
        assert result.stdout == "out\n"
        assert server.calls == [
            ("POST", "/v1/sandboxes"),
            ("POST", "/v1/sandboxes/sb-1/exec"),
            ("DELETE", "/v1/sandboxes/sb-1"),
        ]
        limits = {"memory_mb": 64, "cpus": 0.5}
        assert server.requests[0][2] == {"image": "img", "limits": limits}
        assert server.requests[1][2]["command"] == ["ls", "-l"]

    def test_deletes_when_the_exec_fails(self, server, invoke):
        answer = error_body("sandbox-dead", "its PID 1 is gone")
        server.answers["POST", "/v1/sandboxes/sb-1/exec"] = (409, answer)
        result = invoke("run", "img", "--", "true")
        assert result.exit_code == 125
        assert result.stderr == "sandboxd: sandbox-dead: its PID 1 is gone\n"
        assert server.calls[-1] == ("DELETE", "/v1/sandboxes/sb-1")

    def test_a_failed_delete_is_not_hidden_by_a_good_command(self, server, invoke):
        answer = error_body("node-error", "cannot")
        server.answers["DELETE", "/v1/sandboxes/sb-1"] = (500, answer)
        result = invoke("run", "img", "--", "true")
        assert result.exit_code == 125
        assert result.stdout == "out\n"
        assert "node-error" in result.stderr

    def test_nothing_to_delete_when_there_was_no_sandbox(self, server, invoke):
        answer = error_body("image-not-found", "no image img")
        server.answers["POST", "/v1/sandboxes"] = (404, answer)
        assert invoke("run", "img", "--", "true").exit_code == 125
        assert server.calls == [("POST", "/v1/sandboxes")]

    def test_keep(self, server, invoke):
        result = invoke("run", "--keep", "img", "--", "true")
        assert "kept sb-1" in result.stderr
        assert all(method != "DELETE" for method, _ in server.calls)

    def test_json_has_both_answers(self, invoke):
        result = invoke("run", "--json", "img", "--", "true")
        assert json.loads(result.stdout) == {"sandbox": CREATED, "result": exec_answer()}

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_deletes_the_sandbox(self, server, number, status):
        server.exec_blocks.clear()
        environment = os.environ | {"SANDBOXD_URL": server.url, "SANDBOXD_TOKEN": TOKEN}
        command = [sys.executable, "-m", "sandboxd", "run", "img", "--", "sleep", "60"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            assert server.exec_began.wait(20)
            process.send_signal(number)
            assert server.deleted.wait(20)
            assert process.wait(20) == status
            assert process.stderr is not None
            assert process.stderr.read() == b""


class TestLs:
    def rows(self, server, *pages):
        following = [page[0]["id"] for page in pages[1:]] + [None]
        path = LIST
        for page, after in zip(pages, following, strict=True):
            server.answers["GET", path] = (200, {"sandboxes": page, "next": after})
            path = f"{LIST}&after={after}"

    def test_all_pages_in_a_table(self, server, invoke):
        first = {**CREATED, "name": "a[b]c", "run": "r" * 200}
        self.rows(server, [first], [{**CREATED, "id": "sb-2"}])
        result = invoke("ls")
        lines = result.stdout.splitlines()
        assert result.exit_code == 0
        assert lines[0].split() == ["ID", "STATE", "AGE", "RUN", "NAME", "IMAGE"]
        assert [line.split()[0] for line in lines[1:]] == ["sb-1", "sb-2"]
        assert "a[b]c" in lines[1]
        assert "r" * 200 in lines[1], "cut short or wrapped"

    def test_json(self, server, invoke):
        self.rows(server, [CREATED])
        assert json.loads(invoke("ls", "--json").stdout) == {"sandboxes": [CREATED]}

    def test_no_sandboxes(self, server, invoke):
        self.rows(server, [])
        assert invoke("ls").stdout.split() == ["ID", "STATE", "AGE", "RUN", "NAME", "IMAGE"]

    @pytest.mark.parametrize(
        ("created_at", "shown"),
        [
            ("2026-01-01T00:00:00+00:00", "2d3h"),
            ("2026-01-03T02:59:15+00:00", "45s"),
            ("2026-01-03T02:15:10+00:00", "44m50s"),
            ("2026-01-03T01:30:00+00:00", "1h30m"),
            ("2026-01-03T04:00:00+01:30", "30m0s"),
            ("2027-01-01T00:00:00+00:00", "0s"),
        ],
    )
    def test_age(self, created_at, shown):
        now = datetime.datetime(2026, 1, 3, 3, 0, 0, tzinfo=datetime.UTC)
        assert output.age(datetime.datetime.fromisoformat(created_at), now) == shown


class TestRm:
    def test_several(self, server, invoke):
        server.answers["DELETE", "/v1/sandboxes/sb-3"] = (204, b"")
        result = invoke("rm", "sb-1", "sb-2", "sb-3")
        assert result.stdout.split() == ["sb-1", "sb-3"]
        assert "sandbox-not-found" in result.stderr
        assert result.exit_code == 1

    def test_all(self, server, invoke):
        server.answers["GET", LIST] = (200, {"sandboxes": [CREATED], "next": None})
        result = invoke("rm", "--all")
        assert (result.stdout, result.exit_code) == ("sb-1\n", 0)

    @pytest.mark.parametrize("arguments", [[], ["--all", "sb-1"]])
    def test_all_or_ids_and_not_both(self, server, invoke, arguments):
        assert invoke("rm", *arguments).exit_code == 2
        assert server.requests == []


class TestConnection:
    def test_no_daemon(self):
        environment = {"SANDBOXD_URL": "http://127.0.0.1:1", "SANDBOXD_TOKEN": TOKEN}
        result = CliRunner(env=environment).invoke(cli.build(), ["ls"])
        assert result.exit_code == 1
        assert result.stderr.startswith("sandboxd: node-unreachable: http://127.0.0.1:1: ")
        assert "sandboxd serve" in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_something_else_answers(self, server, invoke):
        server.answers["GET", LIST] = (502, b"<html>Bad Gateway</html>")
        result = invoke("ls")
        assert result.exit_code == 1
        assert "not-sandboxd" in result.stderr

    def test_a_proxy_of_the_environment_is_not_asked(self, server, invoke, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("no_proxy", "")
        server.answers["GET", LIST] = (200, {"sandboxes": [], "next": None})
        assert invoke("ls").exit_code == 0

    def test_token_and_address_from_the_configuration(self, server, tmp_path):
        token = tmp_path / "token"
        token.write_text(f"{TOKEN}\n")
        file = tmp_path / "sandboxd.toml"
        port = server.server_address[1]
        file.write_text(f'listen = "0.0.0.0:{port}"\nstate_dir = "{tmp_path}"\n')
        server.answers["GET", LIST] = (200, {"sandboxes": [], "next": None})
        result = CliRunner().invoke(cli.build(), ["ls", "--config", str(file)])
        assert result.exit_code == 0, result.stderr
        assert server.headers_seen[0]["Authorization"] == f"Bearer {TOKEN}"

    def test_a_token_file_that_is_given_wins(self, server, invoke, tmp_path):
        token = tmp_path / "other"
        token.write_text("another-token")
        invoke("ls", "--token-file", str(token))
        assert server.headers_seen[0]["Authorization"] == "Bearer another-token"

    def test_an_unreadable_token_is_named(self, server, invoke, tmp_path):
        result = invoke("ls", "--token-file", str(tmp_path / "missing"))
        assert result.exit_code == 1
        assert result.stderr.startswith(f"sandboxd: token-unreadable: {tmp_path}/missing: ")
        assert server.requests == []


def test_version():
    result = CliRunner().invoke(cli.build(), ["--version"])
    assert result.stdout == f"sandboxd {sandboxd.__version__}\n"


def test_serve_turns_flags_into_configuration(monkeypatch, tmp_path):
    seen = []
    module = type(sys)("sandboxd.serve")
    module.run = seen.append
    monkeypatch.setitem(sys.modules, "sandboxd.serve", module)
    monkeypatch.setattr(sandboxd, "serve", module, raising=False)
    file = tmp_path / "sandboxd.toml"
    file.write_text('user = "someone"\nlisten = "127.0.0.1:1"\n')
    arguments = ["serve", "--config", str(file), "--listen", "127.0.0.1:9", "--max-sandboxes", "7"]
    result = CliRunner().invoke(cli.build(), [*arguments, "--state-dir", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    (load,) = seen
    config = load()
    assert (config.listen, config.max_sandboxes, config.user) == ("127.0.0.1:9", 7, "someone")
    assert config.images_dir == f"{tmp_path}/images"


def test_serve_with_an_impossible_flag():
    result = CliRunner().invoke(cli.build(), ["serve", "--log-level", "loud"])
    assert result.exit_code == 1
    assert result.stderr.startswith("sandboxd: config-invalid: flag --log-level: ")
