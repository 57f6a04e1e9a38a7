"""Every request of the API as a value, and how its answer is read. No input or output here.

A ``Call`` is all that a driver (``sync_driver``, ``aio_driver``) needs: what to send, how long to
wait, whether it may be sent twice, and what to make of the answer. Written once, for both.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Required, TypedDict, TypeVar
from urllib.parse import quote, urlencode

from sandboxd.client.address import Headers
from sandboxd.client.failures import NotSandboxd, error_from_json
from sandboxd.client.reloaded import Reloaded
from sandboxd.client.results import (
    Deleted,
    Egress,
    Event,
    ExecResult,
    Image,
    Node,
    Prefetched,
    PreparedImage,
    SandboxInfo,
    Snapshot,
    Stats,
)
from sandboxd.errors import SandboxdError

T = TypeVar("T")
M = TypeVar("M", SandboxInfo, ExecResult)

ANSWER_S: Final = 120.0
"""For all but an exec: a create may have to mount its image first."""
EXEC_MARGIN_S: Final = 40.0
"""Beyond a command's own time and grace: for killing its tree and sending what it wrote."""
SILENCE_S: Final = 60.0
"""A stream of frames that says nothing for longer, heartbeats included, has been cut."""
JSON: Final = (("Content-Type", "application/json"),)
BYTES: Final = (("Content-Type", "application/octet-stream"),)
FRAMES: Final = (("Accept", "application/x-ndjson"),)
PAGE: Final = 1000
ROOT: Final = "/v1/sandboxes"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """``repeatable``: doing it twice is as good as once, so it may be sent again when nobody knows
    whether it was done. ``read_s``: between two pieces of the answer; None is for ever."""

    method: str
    path: str
    parse: Callable[[bytes], T]
    body: bytes | None = None
    headers: Headers = ()
    read_s: float | None = ANSWER_S
    repeatable: bool = False
    retry_s: float | None = None
    """How long it is tried again; None: as the driver does."""

    def read(self, body: bytes) -> T:
        """What a good answer says. Raises NotSandboxd where it is not one of ours."""
        try:
            return self.parse(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise NotSandboxd(
                f"{self.method} {self.path}: an answer of another kind: {what}"
            ) from error


class ExecOptions(TypedDict, total=False):
    """How a command is run; what is left out is for the node to say."""

    cwd: str
    env: Mapping[str, str]
    user: str
    stdin: str | bytes
    timeout_s: float
    """Of the wall; then its whole process tree is killed and ``timed_out`` is true."""
    grace_s: float
    """Between SIGTERM and SIGKILL once the time is up."""
    max_output_bytes: int
    """Kept of each stream; the rest is read and counted."""
    truncate: Literal["head", "tail", "both"]
    login: bool
    """Run a command that is a string by a login shell."""
    idle_output_timeout_s: float
    """As ``timeout_s``, from the last byte of output."""
    merge_stderr: bool
    """Both streams as ``stdout``, in the order in which they were written."""
    detach: bool
    """Let it go on when this client goes."""
    exclusive: bool | Literal["kill", "freeze"]
    """With nothing else alive in the sandbox: all other processes are killed first (True), or
    frozen until it has ended."""
    tty: Mapping[str, int]
    """A terminal of ``cols`` and ``rows``; all that is written to it comes as ``stdout``."""
    exec_id: str
    """To kill it by (``kill_exec``) from elsewhere; a stream makes one up."""


class BatchExec(ExecOptions):
    """One of many commands."""

    sandbox: Required[str]
    command: Required[str | Sequence[str]]


class CreateOptions(TypedDict, total=False):
    """What a sandbox is like; what is left out is for the node to say."""

    run: str
    name: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    workdir: str
    user: str
    limits: Mapping[str, float | str]
    """``cpus``, ``memory_mb``, ``disk_mb``, ``inodes``, ``pids``, ``nofile``, ``shm_mb``,
    ``cpu_weight``, ``cpuset`` (a list like ``0-3,8``), ``io_read_bps``, ``io_write_bps``,
    ``io_read_iops``, ``io_write_iops``."""
    ttl_s: float
    idle_timeout_s: float
    hostname: str
    network: Literal["none", "full"] | Mapping[str, Any]
    """``{"allow": ["pypi.org:443", ...]}``, with ``bandwidth_mbit`` and ``run_network`` if wanted;
    a loopback if left out."""
    files: Mapping[str, str | bytes]
    """Small files by path, there from the start."""
    seccomp: str | Mapping[str, Any]
    """A profile of its own, by name or as OCI's ``linux.seccomp``: it can only take away."""
    copy_from: Mapping[str, Any]
    """``sandbox`` and ``paths``: these files of another one, which must have the same image."""
    mounts: Sequence[Mapping[str, Any]]
    """Files of the node: ``source``, ``target`` and, to write to them, ``read_only: False``."""
    wait_s: float
    """How long the node may keep the request waiting for room."""
    idempotency_key: str
    """Made up if left out. With the same key and options the same sandbox comes back."""


# --- sandboxes -------------------------------------------------------------------------------


def create(
    image: str | None, options: CreateOptions, snapshot: str | None = None
) -> Call[SandboxInfo]:
    """From an image, or from a snapshot, or (with ``copy_from``) from another's image."""
    body, key = _create_body(image, options, snapshot)
    return Call(
        "POST",
        ROOT,
        _parser(SandboxInfo.from_json),
        json.dumps(body).encode(),
        (*JSON, ("Idempotency-Key", key)),
        ANSWER_S + body.get("wait_s", 0.0),
        repeatable=True,
    )


def create_many(
    image: str | None, count: int, options: CreateOptions, snapshot: str | None = None
) -> Call[list[SandboxInfo | SandboxdError]]:
    """``count`` alike, each with its own result."""
    sandbox, key = _create_body(image, options, snapshot)
    return Call(
        "POST",
        f"{ROOT}:batch",
        _parser(lambda row: [_item(one, "sandbox", SandboxInfo) for one in row["items"]]),
        json.dumps({"sandbox": sandbox, "count": count}).encode(),
        (*JSON, ("Idempotency-Key", key)),
        None,
        repeatable=True,
    )


def _create_body(
    image: str | None, options: CreateOptions, snapshot: str | None
) -> tuple[dict[str, Any], str]:
    """A create's body and its idempotency key."""
    begin = {"snapshot": snapshot} if snapshot else {"image": image} if image else {}
    body: dict[str, Any] = {**begin, **options}
    key = body.pop("idempotency_key", None) or uuid.uuid4().hex
    if "files" in body:
        body["files"] = [_inline(path, data) for path, data in body["files"].items()]
    return body, key


def get(sandbox: str) -> Call[SandboxInfo]:
    return Call("GET", _path(sandbox), _parser(SandboxInfo.from_json), repeatable=True)


def list_page(
    run: str | None, labels: Mapping[str, str | None] | None, state: str | None, after: str
) -> Call[tuple[list[SandboxInfo], str | None]]:
    """One page and the ``after`` of the next, None at the end. A label's None is any value."""
    query = [("limit", str(PAGE)), *_selection(run, labels)]
    query += [("state", state)] if state else []
    query += [("after", after)] if after else []

    def parse(row: dict[str, Any]) -> tuple[list[SandboxInfo], str | None]:
        return [SandboxInfo.from_json(one) for one in row["sandboxes"]], row["next"]

    return Call("GET", f"{ROOT}?{urlencode(query)}", _parser(parse), repeatable=True)


def renew(sandbox: str, ttl_s: float | None) -> Call[SandboxInfo]:
    body = {} if ttl_s is None else {"ttl_s": ttl_s}
    return _post(f"{_path(sandbox)}/renew", body, SandboxInfo.from_json, repeatable=True)


def pause(sandbox: str) -> Call[SandboxInfo]:
    return Call("POST", f"{_path(sandbox)}/pause", _parser(SandboxInfo.from_json), repeatable=True)


def resume(sandbox: str) -> Call[SandboxInfo]:
    return Call("POST", f"{_path(sandbox)}/resume", _parser(SandboxInfo.from_json), repeatable=True)


def snapshot(
    sandbox: str, name: str, on_running: str, ttl_s: float | None, processes: bool
) -> Call[Snapshot]:
    body: dict[str, Any] = {"name": name, "on_running": on_running, "ttl_s": ttl_s}
    if processes:
        body["processes"] = True
    return _post(f"{_path(sandbox)}/snapshots", body, Snapshot.from_json)


def reset(sandbox: str, to: str | None) -> Call[SandboxInfo]:
    # Twice is as good as once but for what a program of the sandbox wrote in between: not repeated.
    return _post(f"{_path(sandbox)}/reset", {"snapshot": to}, SandboxInfo.from_json)


def rollback(sandbox: str, to: str) -> Call[SandboxInfo]:
    return _post(f"{_path(sandbox)}/rollback", {"snapshot": to}, SandboxInfo.from_json)


def snapshots(run: str | None, sandbox: str | None) -> Call[list[Snapshot]]:
    query = [(name, value) for name, value in (("run", run), ("sandbox", sandbox)) if value]
    return Call(
        "GET",
        f"/v1/snapshots?{urlencode(query)}" if query else "/v1/snapshots",
        _parser(lambda row: [Snapshot.from_json(one) for one in row["snapshots"]]),
        repeatable=True,
    )


def get_snapshot(snapshot_id: str) -> Call[Snapshot]:
    path = f"/v1/snapshots/{quote(snapshot_id, safe='')}"
    return Call("GET", path, _parser(Snapshot.from_json), repeatable=True)


def delete_snapshot(snapshot_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/snapshots/{quote(snapshot_id, safe='')}", _nothing, repeatable=True)


def stats(sandbox: str) -> Call[Stats]:
    return Call("GET", f"{_path(sandbox)}/stats", _parser(Stats.from_json), repeatable=True)


def events(sandbox: str, after: int, limit: int | None) -> Call[list[Event]]:
    query = f"after={after}" + ("" if limit is None else f"&limit={limit}")
    return Call(
        "GET",
        f"{_path(sandbox)}/events?{query}",
        _parser(lambda row: [Event.from_json(one) for one in row["events"]]),
        repeatable=True,
    )


def egress(sandbox: str, after: int, limit: int | None) -> Call[Egress]:
    query = f"after={after}" + ("" if limit is None else f"&limit={limit}")
    path = f"{_path(sandbox)}/egress?{query}"
    return Call("GET", path, _parser(Egress.from_json), repeatable=True)


def delete(sandbox: str) -> Call[None]:
    return Call("DELETE", _path(sandbox), _nothing, repeatable=True)


def delete_many(
    run: str | None, labels: Mapping[str, str | None] | None, within_s: float
) -> Call[Deleted]:
    query = [*_selection(run, labels), ("within_s", str(within_s))]
    return Call(
        "DELETE",
        f"{ROOT}?{urlencode(query)}",
        _parser(Deleted.from_json),
        read_s=within_s + ANSWER_S,
        repeatable=True,
    )


# --- exec ------------------------------------------------------------------------------------


def execute(sandbox: str, command: str | Sequence[str], options: ExecOptions) -> Call[ExecResult]:
    body = exec_body(command, options)
    body["encoding"] = "base64"  # what a program writes need not be text
    return _post(f"{_path(sandbox)}/exec", body, ExecResult.from_json, read_s=exec_read_s(options))


def execute_many(execs: Iterable[BatchExec]) -> Call[list[ExecResult | SandboxdError]]:
    rows = []
    for one in execs:
        options = {name: value for name, value in one.items() if name != "command"}
        rows.append(exec_body(one["command"], options) | {"encoding": "base64"})
    return _post(
        "/v1/execs:batch",
        {"execs": rows},
        lambda row: [_item(one, "result", ExecResult) for one in row["items"]],
        read_s=None,
    )


def new_exec_id() -> str:
    return f"ex-{uuid.uuid4().hex}"


def execute_stream(
    sandbox: str, command: str | Sequence[str], options: ExecOptions, exec_id: str
) -> Call[None]:
    """Answered by frames (``frames.FrameReader``); the daemon's heartbeats bound the silence. Its
    id is ours to choose: a stream that is cut before its first frame can be taken up too."""
    body = exec_body(command, options) | {"encoding": "base64", "exec_id": exec_id}
    path = f"{_path(sandbox)}/exec"
    return Call("POST", path, _nothing, json.dumps(body).encode(), (*JSON, *FRAMES), SILENCE_S)


def resume_stream(sandbox: str, exec_id: str, from_seq: int) -> Call[None]:
    path = f"{_path(sandbox)}/execs/{quote(exec_id, safe='')}?from_seq={from_seq}"
    return Call("GET", path, _nothing, None, FRAMES, SILENCE_S, repeatable=True)


def kill_exec(sandbox: str, exec_id: str) -> Call[None]:
    path = f"{_path(sandbox)}/execs/{quote(exec_id, safe='')}"
    return Call("DELETE", path, _nothing, repeatable=True)


def exec_body(command: str | Sequence[str], options: Mapping[str, object]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "command": command if isinstance(command, str) else list(command),
        **options,
    }
    if isinstance(body.get("stdin"), bytes):
        body["stdin_base64"] = base64.b64encode(body.pop("stdin")).decode()
    for name in ("env", "tty"):
        if name in body:
            body[name] = dict(body[name])
    return body


def exec_read_s(options: Mapping[str, Any]) -> float | None:
    """The node bounds a command that names no time; how, only it knows. A node that is gone is
    noticed by TCP's keep-alive."""
    timeout_s = options.get("timeout_s")
    return None if timeout_s is None else timeout_s + options.get("grace_s", 2.0) + EXEC_MARGIN_S


# --- images, the node ------------------------------------------------------------------------


def images() -> Call[list[Image]]:
    return Call(
        "GET",
        "/v1/images",
        _parser(lambda row: [Image.from_json(one) for one in row["images"]]),
        repeatable=True,
    )


def prefetch(names: Iterable[str]) -> Call[list[Prefetched]]:
    return _post(
        "/v1/images/prefetch",
        {"images": list(names)},
        lambda row: [Prefetched.from_json(one) for one in row["images"]],
        read_s=None,
        repeatable=True,
    )


def prepare_image(name: str) -> Call[PreparedImage]:
    return _post(
        "/v1/images", {"image": name}, PreparedImage.from_json, read_s=None, repeatable=True
    )


def evict_image(name: str) -> Call[None]:
    return Call("DELETE", f"/v1/images/{quote(name)}", _nothing, repeatable=True)


def node() -> Call[Node]:
    return Call("GET", "/v1/node", _parser(Node.from_json), repeatable=True)


def reload() -> Call[Reloaded]:
    return Call("POST", "/v1/node/reload", _parser(Reloaded.from_json), repeatable=True)


# --- what they share -------------------------------------------------------------------------


def _post(
    path: str,
    body: dict[str, Any],
    make: Callable[[dict[str, Any]], T],
    *,
    read_s: float | None = ANSWER_S,
    repeatable: bool = False,
) -> Call[T]:
    return Call("POST", path, _parser(make), json.dumps(body).encode(), JSON, read_s, repeatable)


def _parser(make: Callable[[dict[str, Any]], T]) -> Callable[[bytes], T]:
    return lambda body: make(json.loads(body))


def _item(row: dict[str, Any], name: str, kind: type[M]) -> M | SandboxdError:
    """One of many: what became of it, or why nothing did."""
    return kind.from_json(row[name]) if row["error"] is None else error_from_json(row["error"])


def _nothing(body: bytes) -> None:
    del body


def _path(sandbox: str) -> str:
    # Quoted whole: an id that is none must not reach another route.
    return f"{ROOT}/{quote(sandbox, safe='')}"


def _selection(run: str | None, labels: Mapping[str, str | None] | None) -> list[tuple[str, str]]:
    chosen = [] if run is None else [("run", run)]
    for name, value in (labels or {}).items():
        chosen.append(("label", name if value is None else f"{name}={value}"))
    return chosen


def _inline(path: str, data: str | bytes) -> dict[str, str]:
    if isinstance(data, str):
        return {"path": path, "content": data}
    return {"path": path, "content_base64": base64.b64encode(data).decode()}
