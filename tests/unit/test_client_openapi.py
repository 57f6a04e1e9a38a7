"""The client says all that the API understands, and understands all that it says.

Every method of the client is called with all its arguments; what it would send is compared with the
OpenAPI document, and what it makes of answers with the document's schemas. So neither can get an
operation, a parameter or a field that the other does not have, unless it is named here with a
reason.
"""

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from sandboxd import errors
from sandboxd.api.app import create_app
from sandboxd.client import (
    aio,
    diff_calls,
    eyes_calls,
    failures,
    file_calls,
    process_calls,
    results,
    run_calls,
    session_calls,
    sync,
    sync_run,
)
from sandboxd.client.calls import CreateOptions, ExecOptions
from sandboxd.client.file_calls import FindOptions
from sandboxd.client.frames import FrameReader
from sandboxd.client.process_calls import ProcessOptions
from sandboxd.client.results import SandboxInfo
from sandboxd.client.session_calls import SessionExecOptions, SessionOptions
from sandboxd.config import Config
from tests.unit.test_client import PROCESS, SANDBOX

NO_METHOD = {
    "GET /": "a page, for a browser",
    "GET /healthz": "for a supervisor; whoever has a client asks what it wants to know",
    "GET /readyz": "for a supervisor and a load balancer",
    "HEAD /v1/sandboxes/{sandbox_id}/files": "stat tells the same, of every type of file",
    **{
        f"{method} /v1/sandboxes/{{sandbox_id}}/ports/{{port}}/http/{{path}}": "by an httpx client"
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    },
}
NOT_SAID = {
    "POST /v1/sandboxes/{sandbox_id}/processes/{process_id}/stdin": {
        "data": "bytes go as they are",
        "data_base64": "bytes go as they are",
    },
    "GET /v1/sandboxes/{sandbox_id}/archive": {
        "compression": "between a worker and its node it costs more than it saves",
    },
    "PUT /v1/sandboxes/{sandbox_id}/archive": {
        "compression": "as above",
        "preserve_owner": "the tar that the client makes names no owners",
    },
    "GET /v1/sandboxes": {"after": "said for the second page: the answer to the first names it"},
}
FIELDS = {
    "SandboxAnswer": (results.SandboxInfo, {}),
    "ExecAnswer": (results.ExecResult, {"stdout": "stdout_bytes", "stderr": "stderr_bytes"}),
    "SessionExecAnswer": (
        session_calls.SessionResult,
        {"stdout": "stdout_bytes", "stderr": "stderr_bytes"},
    ),
    "SessionAnswer": (session_calls.SessionInfo, {}),
    "ProcessAnswer": (process_calls.ProcessInfo, {}),
    "OutputAnswer": (process_calls.Piece, {}),
    "FileAnswer": (results.FileInfo, {}),
    "FileEntryAnswer": (file_calls.FileEntry, {"path_base64": "path", "target_base64": "target"}),
    "SnapshotTaken": (results.Snapshot, {}),
    "DiffAnswer": (diff_calls.Diff, {}),
    "DiffEntryAnswer": (
        diff_calls.DiffEntry,
        {"path_base64": "path", "target_base64": "target"},
    ),
    "EventAnswer": (results.Event, {}),
    "EgressAnswer": (results.EgressEntry, {}),
    "EgressList": (results.Egress, {}),
    "ImageAnswer": (results.Image, {}),
    "PreparedImageAnswer": (results.PreparedImage, {}),
    "PrefetchedImage": (results.Prefetched, {}),
    "NodeAnswer": (results.Node, {}),
    "RunAnswer": (run_calls.RunInfo, {}),
    "HistoryPoint": (eyes_calls.HistoryPoint, {}),
}
DECODED = {"encoding", "name"}
"""Fields that are used up in reading the others, or are properties."""
OF_THE_NODE = [one for one in errors.subclasses() if one.__module__ == errors.__name__]


@pytest.fixture(scope="module")
def document():
    return create_app(Config(), object(), token="t" * 20).openapi()


# --- what is sent ----------------------------------------------------------------------------

EXEC = {name: {} if name in ("env", "tty") else "1" for name in ExecOptions.__annotations__}
EXEC |= {"timeout_s": 1.0, "grace_s": 1.0, "stdin": "x"}
SESSION_EXEC = dict.fromkeys(SessionExecOptions.__annotations__, "1") | {"timeout_s": 1.0}
CREATE = dict.fromkeys(CreateOptions.__annotations__, "1")
CREATE |= {"files": {"/f": "x"}, "wait_s": 1.0}
FIND = dict.fromkeys(FindOptions.__annotations__, "1")
PROCESS_OPTIONS = {name: {} if name in ("env", "tty") else "1"
                   for name in ProcessOptions.__annotations__}  # fmt: skip
SESSION = {name: {} if name == "env" else "1" for name in SessionOptions.__annotations__}
WHICH = {"run": "r", "labels": {"a": "1"}}


def every_call(root, sandbox, process, session, here):
    """Every method that asks something, with all arguments that it has."""
    two_ways = ({"stdin": "x"}, {"stdin": b"x"})
    yield lambda: root.create("i", **CREATE)
    yield lambda: root.fork("sn-1", **CREATE)
    yield lambda: root.create_many("i", 2, **CREATE)
    yield lambda: root.fork_many("sn-1", 2, **CREATE)
    yield lambda: root.exec_many(
        {"sandbox": "sb-1", "command": "x", **EXEC, **way} for way in two_ways
    )
    yield lambda: root.connect("sb-1")
    yield lambda: root.list(state="running", **WHICH)
    yield lambda: root.delete("sb-1")
    yield lambda: root.delete_many(within_s=1, **WHICH)
    yield lambda: root.snapshots(run="r", sandbox="sb-1")
    yield lambda: root.get_snapshot("sn-1")
    yield lambda: root.delete_snapshot("sn-1")
    page = {"since": "sn-2", "after": "L2E=", "limit": 5}
    yield lambda: root.snapshot_diff("sn-1", **page)
    yield lambda: root.download_snapshot_diff("sn-1", here / "got", since="sn-2")
    yield lambda: root.export_snapshot("sn-1", here / "got")
    yield lambda: sandbox.diff(**page)
    yield lambda: sandbox.download_diff(here / "got", since="sn-2")
    yield root.images
    yield lambda: root.prepare_image("i")
    yield lambda: root.prefetch(["i"])
    yield lambda: root.evict_image("a/b")
    yield root.node
    yield root.metrics
    yield root.history
    yield lambda: root.events(3, follow=True, run="r", sandbox="sb-1", kinds=["oom"])
    yield root.reload
    yield root.runs
    yield lambda: root.delete_run("r", within_s=1)
    yield lambda: root.drain(5)
    yield root.undrain
    run = root.run("r", lease_s=9, max_sandboxes=1, max_creates_per_s=1)
    yield getattr(run, "__enter__", None) or run.__aenter__
    yield run.refresh
    yield lambda: run.end(within_s=1)
    yield lambda: root.do(run_calls.heartbeat("r", 9))  # what its thread or task sends
    yield sandbox.refresh
    yield lambda: sandbox.renew(5)
    yield sandbox.pause
    yield sandbox.resume
    yield lambda: sandbox.snapshot("n", on_running="kill", ttl_s=1, processes=True)
    yield lambda: sandbox.copy("/work", ttl_s=1)
    yield lambda: sandbox.reset("sn-1")
    yield lambda: sandbox.rollback("sn-1")
    yield sandbox.stats
    yield lambda: sandbox.events(3, limit=5)
    yield lambda: sandbox.egress(3, limit=5)
    yield sandbox.delete
    for way in two_ways:
        yield lambda way=way: sandbox.exec("x", **(EXEC | way))
        yield lambda way=way: session.exec("x", **(SESSION_EXEC | way))
    yield lambda: begun(sandbox.exec_stream("x", **EXEC))
    yield lambda: begun(session.exec_stream("x", **SESSION_EXEC))
    yield lambda: begun(sandbox.resume_stream("ex-1", 4))
    yield lambda: sandbox.kill_exec("ex-1")
    yield lambda: sandbox.start_process("x", **PROCESS_OPTIONS)
    yield lambda: sandbox.process("ps-1")
    yield sandbox.processes
    yield lambda: process.read({"stdout": 1, "stderr": 2}, wait_s=1, max_bytes=10)
    yield process.refresh
    yield lambda: process.write(b"x", eof=True, timeout_s=1)
    yield process.close_stdin
    yield lambda: process.signal("TERM", tree=True)
    yield lambda: process.resize(1, 2)
    yield process.remove
    yield lambda: sandbox.open_session(**SESSION)
    yield lambda: sandbox.session("ss-1")
    yield sandbox.sessions
    yield session.refresh
    yield session.interrupt
    yield lambda: session.resize(100, 40)
    yield session.close
    for path in ("/f", "/\udcff"):
        yield from file_calls_of(sandbox, path, here)


def file_calls_of(sandbox, path, here):
    yield lambda: sandbox.read_file(path, offset=1, length=2, user="u")
    yield lambda: sandbox.write_file(path, b"", user="u", mode=0o600, owner="o", parents=False)
    yield lambda: sandbox.upload_file(
        here / "file", path, user="u", mode=0o600, owner="o", parents=False
    )
    yield lambda: sandbox.download_file(path, here / "got", user="u")
    yield lambda: sandbox.upload_dir(
        here, path, include=["a"], exclude=["b"], owner="o", parents=False, user="u"
    )
    yield lambda: sandbox.download_dir(
        path, here, include=["a"], exclude=["b"], skip_unreadable=True, user="u"
    )
    yield lambda: sandbox.stat(path, follow=True, user="u")
    yield lambda: sandbox.list_dir(path, recursive=True, depth=2, limit=5, user="u")
    yield lambda: sandbox.find(path, **FIND)
    yield lambda: sandbox.mkdir(path, mode=0o700, parents=False, user="u")
    yield lambda: sandbox.move(path, path, overwrite=True, parents=False, user="u")
    yield lambda: sandbox.chmod(path, 0o600, recursive=True, user="u")
    yield lambda: sandbox.chown(path, "o", recursive=True, user="u")
    yield lambda: sandbox.remove(path, recursive=True, missing_ok=True, user="u")


COVERED_BY_OTHERS = {
    *("close", "url", "do", "upload", "stream", "id", "info", "read_text"),
    *("address", "http", "tunnel", "forward"),  # over connections of their own
    *("wait", "output"),  # of a process: read, again and again
    "from_slurm",  # asks nothing: it reads where the daemon is
}


class Sent(Exception):
    """Instead of an answer."""


def recording(kind, asynchronous):
    """A client that notes each call and answers none."""
    seen = []

    class Recorder(kind):
        def _note(self, call, *_):
            seen.append(call)
            raise Sent

        if asynchronous:

            async def do(self, call):
                self._note(call)

            async def upload(self, call, chunks):
                self._note(call)
        else:
            do = upload = _note

        stream = _note

    return Recorder("http://n", "t"), seen


def begun(stream):
    """A blocking stream is sent when it is made, the other when it is started."""
    return stream.start()


def told_by(blocking, tmp_path):
    (tmp_path / "file").write_text("x")
    module, prefix = (sync, "") if blocking else (aio, "Async")
    root, seen = recording(getattr(module, f"{prefix}Client"), not blocking)
    info = SandboxInfo.from_json(SANDBOX)
    sandbox = getattr(module, f"{prefix}Sandbox")(root, info)
    row = process_calls.ProcessInfo.from_json(PROCESS)
    process = getattr(module, f"{prefix}Process")(root, "sb-1", row)
    session = getattr(module, f"{prefix}Session")(root, "sb-1", row)
    called = 0

    async def awaited(value):
        if hasattr(value, "__aiter__"):
            return [one async for one in value]
        return await value

    for ask in every_call(root, sandbox, process, session, tmp_path):
        called += 1
        with pytest.raises(Sent):
            value = ask()
            if blocking:
                list(value)
            else:
                asyncio.run(awaited(value))
    assert len(seen) == called
    return seen


def words_of(call):
    """The parameters that a call gives, and the fields of its body."""
    query = set(parse_qs(urlsplit(call.path).query, keep_blank_values=True))
    headers = {name.lower() for name, _ in call.headers}
    fields = set()
    if ("Content-Type", "application/json") in call.headers:
        body = json.loads(call.body)
        fields = set(body)
        fields |= {f"sandbox.{name}" for name in body["sandbox"]} if "count" in body else set()
        fields |= {f"execs.{name}" for one in body.get("execs", []) for name in one}
    return query | (headers & {"idempotency-key"}) | fields


def words_in(document, operation):
    """What the document has for it."""
    words = {one["name"] for one in operation.get("parameters", []) if one["in"] != "path"}
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return words | fields_in(document, schema.get("schema", {}))


def fields_in(document, schema):
    schemas = document["components"]["schemas"]

    def resolved(one):
        return schemas[one["$ref"].rpartition("/")[2]] if "$ref" in one else one

    found = set()
    for name, one in resolved(schema).get("properties", {}).items():
        found.add(name)
        inner = {"sandbox": one, "execs": one.get("items", {})}.get(name, {})
        found |= {f"{name}.{deep}" for deep in resolved(inner).get("properties", {})}
    return found


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "asyncio"])
def test_every_operation_and_parameter_can_be_said(document, tmp_path, blocking):
    known = dict(operations(document))
    patterns = {
        name: re.compile(re.sub(r"\{name\}", ".+", re.sub(r"\{(?!name)\w+\}", "[^/]+", name)))
        for name in known
    }
    said = {name: set() for name in known}
    for call in told_by(blocking, tmp_path):
        asked = f"{call.method} {urlsplit(call.path).path}"
        # The one with the longest fixed part: ``prefetch`` is no image's name.
        fitting = [name for name, pattern in patterns.items() if pattern.fullmatch(asked)]
        assert fitting, f"no operation of the document: {asked}"
        name = max(fitting, key=lambda one: len(re.sub(r"\{\w+\}", "", one)))
        words = words_of(call)
        assert words <= words_in(document, known[name]), f"{asked}: not in the document"
        said[name] |= words | {"asked"}
    never = {name for name, words in said.items() if "asked" not in words}
    assert never == NO_METHOD.keys()
    for name, operation in known.items():
        if name not in NO_METHOD:
            missing = words_in(document, operation) - said[name]
            assert missing == NOT_SAID.get(name, {}).keys(), f"{name}: what cannot be said"


def test_every_method_was_called():
    """Or the test above would pass over a new one."""
    source = Path(__file__).read_text()
    for kind in (sync.Client, sync.Sandbox, sync.Process, sync.Session, sync_run.Run):
        for name in dir(kind):
            if not name.startswith("_") and name not in COVERED_BY_OTHERS:
                called = re.search(rf"\b(root|sandbox|process|session|run)\.{name}\b", source)
                assert called, f"{kind.__name__}.{name}"


# --- what comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("schema", FIELDS)
def test_every_field_of_an_answer_is_kept(document, schema):
    kind, renamed = FIELDS[schema]
    names = {one.name for one in dataclasses.fields(kind)}
    told = document["components"]["schemas"][schema]["properties"].keys()
    lost = {name for name in told if renamed.get(name, name) not in names} - DECODED
    assert not lost


def test_every_error_of_the_node_has_its_class():
    for kind in OF_THE_NODE:
        told = {
            "code": kind.code,
            "message": "m",
            "cause": kind.cause,
            "retryable": kind.retryable,
            "hint": None,
            "detail": {"a": 1},
        }
        error = failures.error_from_body(json.dumps({"error": told}).encode(), 400)
        assert type(error) is kind
        shown = (error.code, error.cause, error.retryable, error.detail)
        assert shown == (kind.code, kind.cause, kind.retryable, {"a": 1})
    codes = [kind.code for kind in OF_THE_NODE]
    assert len(codes) == len(set(codes))


def test_a_code_of_a_newer_node_is_told_as_it_is():
    told = {"code": "new", "message": "m", "cause": "node", "retryable": True}
    reader = FrameReader("ex-1")
    line = json.dumps({"seq": 0, "type": "error", "error": told}).encode() + b"\n"
    reader.feed(line)
    assert isinstance(reader.error, errors.NodeError)
    assert (reader.error.code, reader.error.retryable) == ("new", True)
