"""The runtime's values as the JSON that ``schemas`` describes.

Built as plain dicts and written by pydantic's own serializer: to put a trusted value of megabytes
through validation again would cost more than the command that made it.
"""

from __future__ import annotations

import binascii
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from sandboxd.api.schemas.mounts import mount_answers
from sandboxd.api.schemas.network import network_answer
from sandboxd.errors import SandboxdError
from sandboxd.model import ExecResult, FileInfo
from sandboxd.runtime.frames import error_fields
from sandboxd.runtime.processes import Output, Process
from sandboxd.runtime.sandbox import SandboxView


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


def timestamp(seconds: float) -> str:
    """RFC 3339, UTC, milliseconds."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def sandbox_answer(view: SandboxView, *, node: str, enforcement: dict[str, Any]) -> dict[str, Any]:
    failure = view.failure
    return {
        "id": view.id,
        "state": view.state,
        "image": view.spec.image,
        "snapshot": view.spec.snapshot,
        "copy_from": view.spec.copy_from and view.spec.copy_from.as_dict(),
        "seccomp": view.spec.seccomp and view.spec.seccomp.as_dict(),
        "image_key": view.image_key,
        "run": view.spec.run,
        "name": view.spec.name,
        "labels": view.spec.labels,
        "node": node,
        "limits": view.limits.as_dict(),
        "enforcement": enforcement,
        "user": view.user,
        "workdir": view.workdir,
        "hostname": view.spec.hostname,
        "network": network_answer(view.spec.network),
        "mounts": mount_answers(view.spec.mounts),
        "ttl_s": view.spec.ttl_s,
        "idle_timeout_s": view.spec.idle_timeout_s,
        "created_at": timestamp(view.created_at),
        "expires_at": timestamp(view.expires_at),
        "phases_ms": view.phases_ms,
        "failure": None if failure is None else failure_answer(failure),
    }


def failure_answer(failure: SandboxdError) -> dict[str, Any]:
    return {
        "code": failure.code,
        "message": failure.message,
        "cause": failure.cause,
        "retryable": failure.retryable,
    }


def _text(data: bytes, encoding: str) -> str:
    if encoding == "base64":
        return binascii.b2a_base64(data, newline=False).decode()
    return data.decode("utf-8", "replace")


def process_answer(process: Process) -> dict[str, Any]:
    end = process.exit
    state = "running"
    if end is not None:
        state = "exited" if end.failure is None else "failed"
    return {
        "id": process.id,
        "name": process.meta.get("name", ""),
        "state": state,
        "pid": process.pid,
        "command": process.meta.get("command", ""),
        "user": process.meta.get("user", ""),
        "cwd": process.meta.get("cwd", ""),
        "stdin": process.has_stdin,
        "tty": process.is_tty,
        "started_at": timestamp(process.started_at),
        "ended_at": timestamp(end.at) if end else None,
        "exit_code": end.exit_code if end else None,
        "signal": end.signal if end else None,
        "oom_killed": bool(end and end.oom_killed),
        "cpu_user_s": end.cpu_user_s if end else 0.0,
        "cpu_system_s": end.cpu_system_s if end else 0.0,
        "peak_memory_bytes": end.peak_memory_bytes if end else 0,
        "error": error_fields(end.failure) if end and end.failure else None,
    }


def session_answer(process: Process, *, busy: bool) -> dict[str, Any]:
    end = process.exit
    return {
        "id": process.id,
        "kind": process.meta["session"],
        "state": "open" if end is None else "ended",
        "busy": busy,
        "user": process.meta.get("user", ""),
        "cwd": process.meta.get("cwd", ""),
        "pid": process.pid,
        "started_at": timestamp(process.started_at),
        "ended_at": timestamp(end.at) if end else None,
        "exit_code": end.exit_code if end else None,
        "signal": end.signal if end else None,
    }


def session_exec_answer(result: ExecResult, encoding: str, *, ended: bool) -> dict[str, Any]:
    answer = exec_answer(result, encoding)
    # Of the interpreter as a whole, so not this command's.
    for name in ("timeout_reason", "cpu_user_s", "cpu_system_s", "peak_memory_bytes"):
        del answer[name]
    return {**answer, "session_state": "ended" if ended else "open"}


def output_answer(output: Output, encoding: str) -> dict[str, Any]:
    data = output.piece.data
    end = output.piece.offset + len(data)
    if encoding == "utf-8" and not (output.closed and end == output.total_bytes):
        data = data[: _whole_characters(data)]
    return {
        "data": _text(data, encoding),
        "encoding": encoding,
        "offset": output.piece.offset,
        "next_offset": output.piece.offset + len(data),
        "lost_bytes": output.piece.lost_bytes,
        "total_bytes": output.total_bytes,
        "closed": output.closed,
    }


def _whole_characters(data: bytes) -> int:
    """Length without a UTF-8 character at the end that is cut off (RFC 3629: four bytes at most).
    What can become no character counts as whole."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back and byte < 0xF5 else len(data)
        if byte < 0x80:
            break
    return len(data)


def exec_answer(result: ExecResult, encoding: str) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "timeout_reason": result.timeout_reason,
        "oom_killed": result.oom_killed,
        "stdout": _text(result.stdout.data, encoding),
        "stderr": _text(result.stderr.data, encoding),
        "encoding": encoding,
        "stdout_total_bytes": result.stdout.total_bytes,
        "stderr_total_bytes": result.stderr.total_bytes,
        "stdout_truncated": result.stdout.truncated,
        "stderr_truncated": result.stderr.truncated,
        "wall_s": result.wall_s,
        "cpu_user_s": result.cpu_user_s,
        "cpu_system_s": result.cpu_system_s,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def file_answer(path: str, info: FileInfo) -> dict[str, Any]:
    return {
        "path": path,
        "size_bytes": info.size_bytes,
        "mode": f"{info.mode:04o}",
        "uid": info.uid,
        "gid": info.gid,
        "mtime_ns": info.mtime_ns,
    }
