"""The client against scripted answers: what is sent, what is made of them, what is tried again."""

import asyncio
import base64
import json
import os
import pickle

import httpx
import pytest

from sandboxd import client, errors
from sandboxd.client import AsyncClient, Client, retries
from sandboxd.client.failures import error_from_body
from sandboxd.client.frames import FrameReader
from sandboxd.client.results import ExecResult
from sandboxd.model import SandboxState

SANDBOX = {
    "id": "sb-1",
    "state": "running",
    "image": "debian",
    "image_key": "k",
    "run": "",
    "name": "",
    "labels": {},
    "node": "n",
    "limits": {"cpus": 1.0, "memory_mb": 64, "a_new_limit": 1},
    "enforcement": {},
    "user": "0",
    "workdir": "/",
    "hostname": "sandbox",
    "ttl_s": 60.0,
    "idle_timeout_s": None,
    "created_at": "2026-01-01T00:00:00.125Z",
    "expires_at": "2026-01-01T00:01:00.125Z",
    "phases_ms": {"total": 1.5},
    "failure": None,
    "a_new_field": 1,
}
RESULT = {
    "exit_code": 3,
    "signal": None,
    "timed_out": False,
    "timeout_reason": None,
    "oom_killed": False,
    "stdout": base64.b64encode(b"out\xff").decode(),
    "stderr": "",
    "encoding": "base64",
    "stdout_total_bytes": 4,
    "stderr_total_bytes": 0,
    "stdout_truncated": False,
    "stderr_truncated": False,
    "wall_s": 0.1,
    "cpu_user_s": 0.0,
    "cpu_system_s": 0.0,
    "peak_memory_bytes": 1,
}
EXIT = {key: value for key, value in RESULT.items() if "_truncated" not in key}
ID = {"exec_id": "ex-1", "pid": 7}


def refusal(code, cause="node", retryable=True, **detail):
    return {
        "error": {
            "code": code,
            "message": "m",
            "cause": cause,
            "retryable": retryable,
            "hint": "h",
            "detail": detail,
        }
    }


class Script:
    """Answers in turn: ``(status, body)``, ``(status, body, headers)`` or an exception."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []

    def __call__(self, request):
        self.seen.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        status, body, *headers = answer
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.Response(status, content=content, headers=headers[0] if headers else None)

    async def asynchronous(self, request):
        await request.aread()
        return self(request)


@pytest.fixture(params=["blocking", "asyncio"])
def talk(request, monkeypatch):
    """``talk(script, lambda client: ...)``: the result of a call of either client."""
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.001)

    def blocking(script, call, **options):
        transport = httpx.MockTransport(script)
        with Client("http://node:1", "t", transport=transport, **options) as one:
            return call(one)

    def asynchronous(script, call, **options):
        async def main():
            transport = httpx.MockTransport(script.asynchronous)
            async with AsyncClient("http://node:1", "t", transport=transport, **options) as one:
                found = call(one)
                return await found if hasattr(found, "__await__") else found

        return asyncio.run(main())

    return blocking if request.param == "blocking" else asynchronous


class TestCreate:
    def test_what_is_sent_and_what_comes_back(self, talk):
        script = Script((201, SANDBOX))
        sandbox = talk(
            script,
            lambda one: one.create("debian", run="r", ttl_s=5, files={"/a": "x", "/b": b"\xff"}),
        )
        request = script.seen[0]
        assert (request.method, str(request.url)) == ("POST", "http://node:1/v1/sandboxes")
        assert request.headers["authorization"] == "Bearer t"
        assert json.loads(request.content) == {
            "image": "debian",
            "run": "r",
            "ttl_s": 5,
            "files": [
                {"path": "/a", "content": "x"},
                {"path": "/b", "content_base64": "/w=="},
            ],
        }
        info = sandbox.info
        assert (sandbox.id, info.state, info.limits.memory_mb) == ("sb-1", SandboxState.RUNNING, 64)
        assert info.created_at.utcoffset().total_seconds() == 0
        assert (info.expires_at - info.created_at).total_seconds() == 60

    def test_tried_again_with_the_same_key(self, talk):
        script = Script(
            httpx.ConnectError("refused"),
            (503, refusal("node-unavailable"), {"Retry-After": "0"}),
            (429, refusal("node-overloaded"), {"Retry-After": "0"}),
            httpx.ReadError("cut"),
            (201, SANDBOX),
        )
        assert talk(script, lambda one: one.create("debian")).id == "sb-1"
        assert len(script.seen) == 5
        keys = {request.headers["idempotency-key"] for request in script.seen}
        assert len(keys) == 1
        assert len({request.content for request in script.seen}) == 1

    def test_a_key_of_ones_own(self, talk):
        script = Script((201, SANDBOX), (201, SANDBOX))
        for _ in range(2):
            talk(script, lambda one: one.create("debian", idempotency_key="mine"))
        assert [one.headers["idempotency-key"] for one in script.seen] == ["mine", "mine"]
        assert "idempotency_key" not in json.loads(script.seen[0].content)

    def test_the_last_error_is_raised_when_time_is_up(self, talk):
        script = Script(*[(429, refusal("node-overloaded"), {"Retry-After": "1"})] * 9)
        with pytest.raises(errors.NodeOverloaded):
            talk(script, lambda one: one.create("debian"), retry_s=0.5)
        assert len(script.seen) == 1


class TestExec:
    def run(self, talk, *answers, command=("pytest",), **options):
        script = Script((200, SANDBOX), *answers)

        def call(one):
            if isinstance(one, Client):
                return one.connect("sb-1").exec(command, **options)

            async def later():
                return await (await one.connect("sb-1")).exec(command, **options)

            return later()

        return script, lambda: talk(script, call)

    def test_bytes_are_exact_and_text_is_readable(self, talk):
        script, run = self.run(talk, (200, RESULT), timeout_s=5, env={"A": "b"}, stdin=b"\0")
        result = run()
        assert isinstance(result, ExecResult)
        assert (result.exit_code, result.ok) == (3, False)
        assert (result.stdout_bytes, result.stdout) == (b"out\xff", "out\ufffd")
        assert json.loads(script.seen[1].content) == {
            "command": ["pytest"],
            "timeout_s": 5,
            "env": {"A": "b"},
            "stdin_base64": "AA==",
            "encoding": "base64",
        }
        assert script.seen[1].extensions["timeout"]["read"] > 5

    def test_refused_before_it_began_it_is_tried_again(self, talk):
        script, run = self.run(
            talk,
            httpx.ConnectError("refused"),
            (429, refusal("node-overloaded"), {"Retry-After": "0"}),
            (200, RESULT),
        )
        assert run().exit_code == 3
        assert len(script.seen) == 4

    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (httpx.ReadError("cut"), client.ConnectionLost),
            (httpx.RemoteProtocolError("cut"), client.ConnectionLost),
            (httpx.ReadTimeout("late"), client.AnswerTimeout),
            ((503, refusal("node-unavailable"), {"Retry-After": "0"}), errors.NodeUnavailable),
        ],
    )
    def test_what_may_have_run_is_not_run_again(self, talk, answer, kind):
        script, run = self.run(talk, answer)
        with pytest.raises(kind) as raised:
            run()
        assert len(script.seen) == 2
        assert raised.value.cause == "node"


class TestErrors:
    def test_the_class_is_that_of_the_code(self):
        for kind in errors.subclasses():
            body = json.dumps(refusal(kind.code, kind.cause, kind.retryable, errno="EIO"))
            error = error_from_body(body.encode(), 400)
            assert error.code == kind.code
            assert isinstance(error, errors.SandboxdError)
            assert (error.message, error.hint, error.detail) == ("m", "h", {"errno": "EIO"})
        body = json.dumps(refusal("disk-full", "workload", False)).encode()
        assert type(error_from_body(body, 409)) is errors.DiskFull

    @pytest.mark.parametrize(
        ("cause", "kind"),
        [
            ("workload", errors.WorkloadError),
            ("request", errors.RequestError),
            ("node", errors.NodeError),
            ("moon", errors.NodeError),
        ],
    )
    def test_an_unknown_code_is_kept(self, cause, kind):
        error = error_from_body(json.dumps(refusal("brand-new", cause, True)).encode(), 418)
        assert type(error) is kind
        assert (error.code, error.retryable) == ("brand-new", True)
        assert kind.code != "brand-new"

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 1}', b'{"error": {}}'])
    def test_what_is_no_error_of_ours(self, body):
        assert error_from_body(body, 502).code == "not-sandboxd"

    def test_they_go_through_pickle_whole(self):
        error = error_from_body(json.dumps(refusal("brand-new", "workload", False)).encode(), 400)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.code, copy.cause) == (type(error), "brand-new", "workload")
        assert (copy.message, copy.hint, copy.detail) == ("m", "h", {})

    def test_no_address_and_no_token(self, monkeypatch, tmp_path):
        for name in ("SANDBOXD_URL", "SANDBOXD_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("SANDBOXD_TOKEN_FILE", str(tmp_path / "none"))
        with pytest.raises(client.ClientMisused):
            Client("http://node")
        with pytest.raises(client.ClientMisused):
            Client("node:8642", "t")
        (tmp_path / "none").write_text("secret\n")
        assert Client("http://node").url == "http://node"

    def test_a_closed_client(self):
        one = Client("http://node", "t", transport=httpx.MockTransport(Script()))
        one.close()
        one.close()
        with pytest.raises(client.ClientMisused):
            one.node()


class TestContext:
    def test_what_was_created_is_deleted(self):
        script = Script((201, SANDBOX), (204, b""))
        with Client("http://n", "t", transport=httpx.MockTransport(script)) as one:
            with one.create("debian"):
                pass
        assert script.seen[1].method == "DELETE"

    def test_what_was_connected_to_is_not(self):
        script = Script((200, SANDBOX))
        with Client("http://n", "t", transport=httpx.MockTransport(script)) as one:
            with one.connect("sb-1"):
                pass
        assert len(script.seen) == 1

    def test_the_first_error_is_told(self):
        script = Script((201, SANDBOX), (500, refusal("internal-error", retryable=False)))
        with Client("http://n", "t", transport=httpx.MockTransport(script)) as one:
            with pytest.raises(ZeroDivisionError):
                with one.create("debian"):
                    1 / 0

    def test_both_ways_to_come_by_one_in_asyncio(self):
        async def main():
            script = Script((201, SANDBOX), (204, b""), (201, SANDBOX))
            transport = httpx.MockTransport(script.asynchronous)
            async with AsyncClient("http://n", "t", transport=transport) as one:
                async with one.create("debian") as sandbox:
                    assert sandbox.id == "sb-1"
                assert script.seen[1].method == "DELETE"
                assert (await one.create("debian")).id == "sb-1"
            assert len(script.seen) == 3

        asyncio.run(main())

    def test_pages(self, talk):
        script = Script(
            (200, {"sandboxes": [SANDBOX], "next": "sb-1"}),
            (200, {"sandboxes": [{**SANDBOX, "id": "sb-2"}], "next": None}),
        )

        def call(one):
            if isinstance(one, Client):
                return [info.id for info in one.list(run="r", labels={"a": "1", "b": None})]

            async def later():
                return [i.id async for i in one.list(run="r", labels={"a": "1", "b": None})]

            return later()

        assert talk(script, call) == ["sb-1", "sb-2"]
        assert script.seen[0].url.params.get_list("label") == ["a=1", "b"]
        assert script.seen[1].url.params["after"] == "sb-1"


def frame(seq, kind, **fields):
    return json.dumps({"seq": seq, "type": kind, **fields}).encode() + b"\n"


def out(seq, data, kind="stdout"):
    return frame(seq, kind, data=base64.b64encode(data).decode(), encoding="base64")


class TestStream:
    WHOLE = (
        frame(0, "started", **ID)
        + out(1, b"a\xff")
        + out(2, b"e", "stderr")
        + frame(2, "heartbeat")
        + frame(3, "of-the-future", x=1)
        + frame(4, "exit", **EXIT)
    )

    @pytest.mark.parametrize("size", [1, 2, 7, 1000])
    def test_pieces_of_any_size(self, size):
        reader = FrameReader("ex-mine")
        found = []
        for at in range(0, len(self.WHOLE), size):
            found += reader.feed(self.WHOLE[at : at + size])
        assert [(one.stream, one.data) for one in found] == [("stdout", b"a\xff"), ("stderr", b"e")]
        assert reader.exec_id == "ex-1"
        assert reader.exit.exit_code == 3

    def collect(self, talk, script):
        def call(one):
            if isinstance(one, Client):
                stream = one.connect("sb-1").exec_stream("x")
                return b"".join(piece.data for piece in stream), stream.exit

            async def later():
                sandbox = await one.connect("sb-1")
                async with sandbox.exec_stream("x") as stream:
                    data = b"".join([piece.data async for piece in stream])
                    return data, await stream.exit()

            return later()

        return talk(script, call)

    def test_whole(self, talk):
        script = Script((200, SANDBOX), (200, self.WHOLE))
        data, end = self.collect(talk, script)
        assert (data, end.exit_code) == (b"a\xffe", 3)
        assert script.seen[1].headers["accept"] == "application/x-ndjson"

    def test_cut_anywhere_it_is_taken_up_where_it_was(self, talk):
        first = frame(0, "started", **ID) + out(1, b"one") + out(2, b"two")[:20]
        script = Script(
            (200, SANDBOX),
            (200, first),
            httpx.ConnectError("refused"),
            (200, out(1, b"one") + out(2, b"two")),
            (200, out(3, b"three") + frame(4, "exit", **EXIT)),
        )
        data, end = self.collect(talk, script)
        assert (data, end.exit_code) == (b"onetwothree", 3)
        paths = [request.url.raw_path.decode() for request in script.seen[2:]]
        assert paths == [f"/v1/sandboxes/sb-1/execs/ex-1?from_seq={n}" for n in (2, 2, 3)]

    @pytest.mark.parametrize("cut", [(200, b""), httpx.ReadError("cut")])
    def test_cut_before_its_first_frame_it_is_taken_up_by_the_id_that_was_sent(self, talk, cut):
        script = Script((200, SANDBOX), cut, (200, self.WHOLE))
        assert self.collect(talk, script)[0] == b"a\xffe"
        chosen = json.loads(script.seen[1].content)["exec_id"]
        path = script.seen[2].url.raw_path.decode()
        assert path == f"/v1/sandboxes/sb-1/execs/{chosen}?from_seq=0"

    @pytest.mark.parametrize("cut", [(200, b""), httpx.ReadError("cut")])
    def test_cut_before_its_first_frame_and_not_known_to_the_node(self, talk, cut):
        unknown = (404, refusal("exec-not-found", "request", False))
        with pytest.raises(client.ConnectionLost):
            self.collect(talk, Script((200, SANDBOX), cut, unknown))

    def test_forgotten_by_the_node_after_its_first_frame(self, talk):
        unknown = (404, refusal("exec-not-found", "request", False))
        script = Script((200, SANDBOX), (200, frame(0, "started", **ID)), unknown)
        with pytest.raises(errors.ExecNotFound):
            self.collect(talk, script)

    def test_given_up_where_nothing_comes(self, talk):
        script = Script((200, SANDBOX), (200, frame(0, "started", **ID)), *[(200, b"")] * 20)
        with pytest.raises(client.ConnectionLost):
            self.collect(talk, script)
        assert len(script.seen) < 12

    def test_an_error_frame_is_raised(self, talk):
        last = frame(1, "error", error=refusal("sandbox-dead", "workload", False)["error"])
        script = Script((200, SANDBOX), (200, frame(0, "started", **ID) + last))
        with pytest.raises(errors.SandboxDead):
            self.collect(talk, script)

    def test_what_is_no_frame(self, talk):
        with pytest.raises(client.NotSandboxd):
            self.collect(talk, Script((200, SANDBOX), (200, b"<html>\n")))


def test_local_files(tmp_path):
    (tmp_path / "in").write_bytes(b"x" * 700_000)
    os.chmod(tmp_path / "in", 0o750)
    info = {"path": "/f", "size_bytes": 700_000, "mode": "0750", "uid": 0, "gid": 0, "mtime_ns": 1}
    script = Script((200, SANDBOX), (200, info), (200, b"y" * 1000))
    with Client("http://n", "t", transport=httpx.MockTransport(script)) as one:
        sandbox = one.connect("sb-1")
        assert sandbox.upload_file(tmp_path / "in", "/f").mode == 0o750
        assert sandbox.download_file("/f", tmp_path / "out") == 1000
    assert script.seen[1].headers["content-length"] == "700000"
    assert script.seen[1].url.params["mode"] == "0750"
    assert (tmp_path / "out").read_bytes() == b"y" * 1000
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_a_download_that_fails_leaves_nothing(tmp_path):
    script = Script((200, SANDBOX), (404, refusal("file-not-found", "request", False)))
    with Client("http://n", "t", transport=httpx.MockTransport(script)) as one:
        with pytest.raises(errors.FileNotFound):
            one.connect("sb-1").download_file("/f", tmp_path / "out")
    assert os.listdir(tmp_path) == []


PROCESS = {
    "id": "ps-1",
    "name": "",
    "state": "running",
    "pid": 7,
    "command": ["x"],
    "user": "0",
    "cwd": "/",
    "stdin": True,
    "tty": False,
    "started_at": "2026-01-01T00:00:00Z",
    "ended_at": None,
    "exit_code": None,
    "signal": None,
    "oom_killed": False,
    "cpu_user_s": 0.0,
    "cpu_system_s": 0.0,
    "peak_memory_bytes": 0,
    "error": None,
}
ENDED = {**PROCESS, "state": "exited", "exit_code": 3, "ended_at": "2026-01-01T00:00:01Z"}


def piece(data, offset, total, lost=0):
    return {
        "data": base64.b64encode(data).decode(),
        "encoding": "base64",
        "offset": offset,
        "next_offset": offset + len(data),
        "lost_bytes": lost,
        "total_bytes": total,
        "closed": False,
    }


class TestProcess:
    def test_output_is_followed_to_its_end(self, talk):
        empty = piece(b"", 0, 0)
        script = Script(
            (200, SANDBOX),
            (201, PROCESS),
            (200, {**PROCESS, "stdout": piece(b"ab", 0, 2), "stderr": empty}),
            httpx.ReadError("cut"),
            # Ended, but not all of it is taken yet.
            (200, {**ENDED, "stdout": piece(b"cd", 2, 6), "stderr": piece(b"e", 0, 1)}),
            (200, {**ENDED, "stdout": piece(b"ef", 4, 6), "stderr": piece(b"", 1, 1)}),
        )

        def call(one):
            if isinstance(one, Client):
                process = one.connect("sb-1").start_process("x", name="n", stdin=False)
                return [(out.stream, out.data) for out in process.output()], process.info

            async def later():
                process = await (await one.connect("sb-1")).start_process(
                    "x", name="n", stdin=False
                )
                return [(o.stream, o.data) async for o in process.output()], process.info

            return later()

        outputs, info = talk(script, call)
        assert b"".join(data for stream, data in outputs if stream == "stdout") == b"abcdef"
        assert b"".join(data for stream, data in outputs if stream == "stderr") == b"e"
        assert (info.running, info.exit_code) == (False, 3)
        assert json.loads(script.seen[1].content) == {"command": "x", "name": "n", "stdin": False}
        asked = [request.url.params["stdout_offset"] for request in script.seen[2:]]
        assert asked == ["0", "2", "2", "4"]

    def test_waiting_ends_when_its_time_is_up(self, talk):
        answer = (200, {**PROCESS, "stdout": None, "stderr": None})
        script = Script((200, SANDBOX), *[answer] * 200_000)

        def call(one):
            if isinstance(one, Client):
                return one.connect("sb-1").process("ps-1").wait(0.05)

            async def later():
                return await (await (await one.connect("sb-1")).process("ps-1")).wait(0.05)

            return later()

        with pytest.raises(TimeoutError):
            talk(script, call)

    def test_stdin_is_written_once(self, talk):
        news = {**PROCESS, "stdout": None, "stderr": None}
        script = Script((200, SANDBOX), (200, news), httpx.ReadError("cut"))

        def call(one):
            if isinstance(one, Client):
                return one.connect("sb-1").process("ps-1").write("text", eof=True)

            async def later():
                return await (await (await one.connect("sb-1")).process("ps-1")).write(
                    "text", eof=True
                )

            return later()

        with pytest.raises(client.ConnectionLost):
            talk(script, call)
        assert script.seen[-1].content == b"text"
        assert script.seen[-1].url.params["eof"] == "true"
