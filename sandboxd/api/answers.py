"""The runtime's values as the JSON that ``schemas`` describes.

Built as plain dicts and written by pydantic's own serializer: to put a trusted value of megabytes
through validation again would cost more than the command that made it.
"""

from __future__ import annotations

import binascii
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from sandboxd.errors import SandboxdError
from sandboxd.model import ExecResult, FileInfo
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
        "image_key": view.image_key,
        "run": view.spec.run,
        "name": view.spec.name,
        "labels": view.spec.labels,
        "node": node,
        "limits": asdict(view.limits),
        "enforcement": enforcement,
        "user": view.user,
        "workdir": view.workdir,
        "hostname": view.spec.hostname,
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
