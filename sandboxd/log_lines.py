"""The one form of a line in a JSON log, and what makes it of lines that are not in it.

::

    {"at": "2026-01-02T03:04:05.678Z", "level": "warning", "part": "launcher", "message": "…",
     "node": "n17", "slurm_job_id": "4711", …}

``at``, ``level``, ``part`` and ``message`` are in every line, ``node`` and Slurm's ids where they
are known, ``sandbox`` and ``run`` where it is about one. The daemon's own come from ``logs``; the
node's root part and its launcher, which have no logging library, write plain lines on stderr, and
``fold_stderr`` makes of each one object. Standard library only: they import this.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

VARIABLE: Final = "_SANDBOXD_LOG_FIELDS"
"""Of the node's own processes, with the fields that all their lines have, as JSON; without it they
write plain text."""
_SLURM: Final = {
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_STEP_ID": "slurm_step_id",
    "SLURM_NODEID": "slurm_node_id",
    "SLURM_RESTART_COUNT": "slurm_restart_count",
}
_PREFIX: Final = re.compile(r"([a-z][a-z ]{0,30}): (.*)", re.DOTALL)
_SANDBOX: Final = re.compile(r"\bsb-[a-z2-7]{26}\b")


def common_fields(node: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What every line of a process has: the node's name, and Slurm's ids in a job."""
    ids = {name: environment[key] for key, name in _SLURM.items() if environment.get(key)}
    return {"node": node, **ids} if node else ids


def moment(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def fold_stderr(part: str) -> None:
    """From here on each line on this process's ``sys.stderr`` is a JSON object, where ``VARIABLE``
    is set. For forked children too, and for tracebacks, a line each."""
    fields = os.environ.get(VARIABLE)
    if fields is not None:
        sys.stderr = JsonLines(2, part, json.loads(fields))


class JsonLines(io.TextIOBase):
    """What is written comes out at ``fd`` a JSON object a line. A line that begins with ``name: ``
    is that part's."""

    def __init__(self, fd: int, part: str, fields: Mapping[str, str]) -> None:
        self._fd = fd
        self._part = part
        self._fields = dict(fields)
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._emit(line)
        return len(text)

    def _emit(self, line: str) -> None:
        part, message = self._part, line
        if (found := _PREFIX.fullmatch(line)) is not None:
            part, message = found.groups()
        row = {
            "at": moment(datetime.now(UTC).timestamp()),
            "level": "warning",
            "part": part,
            "message": message,
            **self._fields,
        }
        if (sandbox := _SANDBOX.search(message)) is not None:
            row["sandbox"] = sandbox.group()
        # In one piece: other processes of the node write to the same file.
        data = json.dumps(row).encode() + b"\n"
        try:
            os.write(self._fd, data)
        except OSError:
            return  # nobody reads it, and nothing is to fail for that

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd
