"""Where the daemons of a Slurm job are: the files that its nodes publish on shared storage.

One directory a job, one file a node, written whole and renamed into place; only the job's owner can
read them::

    $SANDBOXD_SLURM_DIR (~/.sandboxd/slurm)      0700 where we made it
        4711/                                    the job's id; 0700
            node1.json                           0600; there while the daemon of node1 serves
            node2.json

    {"version": 1, "job": "4711", "restart": 0, "node": "node1",
     "url": "http://10.0.0.1:40123", "token": "…", "job_end": 1767225600, "since": 1767139200.1}

``job_end`` (Unix time) is null where the job has no end. ``restart`` counts how often the job was
requeued. A node whose file is not there (yet, or any more) serves nothing; one that lost its power
may have left a file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sandboxd.client.failures import ClientMisused

VERSION: Final = 1
DIRECTORY: Final = "SANDBOXD_SLURM_DIR"
DEFAULT_DIRECTORY: Final = "~/.sandboxd/slurm"
JOB: Final = "SLURM_JOB_ID"
NODE: Final = "SLURMD_NODENAME"
SUFFIX: Final = ".json"
FILE_MAX_BYTES: Final = 64 * 1024
_JOB_ID: Final = re.compile(r"[0-9]{1,20}")
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A daemon of a job, as its node published it. The token is not shown."""

    job: str
    node: str
    url: str
    token: str
    restart: int = 0
    job_end: float | None = None
    since: float = 0.0

    def __repr__(self) -> str:
        return f"SlurmNode(job={self.job!r}, node={self.node!r}, url={self.url!r})"

    def to_json(self) -> dict[str, Any]:
        """The content of its file."""
        fields = ("job", "restart", "node", "url", "token", "job_end", "since")
        return {"version": VERSION} | {name: getattr(self, name) for name in fields}


def job_directory(
    job: str | int | None = None, directory: str | os.PathLike[str] | None = None
) -> Path:
    """That of a job, by default of the one this process is part of.

    Raises ClientMisused where it is in none.
    """
    name = str(job) if job is not None else os.environ.get(JOB, "")
    if not name:
        raise ClientMisused("this is no Slurm job", hint=f"give job=, or set {JOB}")
    if not _JOB_ID.fullmatch(name):
        raise ClientMisused(f"{name!r} is no id of a Slurm job", hint="it is a number")
    return base_directory(directory) / name


def base_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Where the directories of jobs are."""
    return Path(directory or os.environ.get(DIRECTORY) or DEFAULT_DIRECTORY).expanduser()


def file_name(node: str) -> str:
    """Raises ClientMisused for a name that no node has."""
    if not _NODE_NAME.fullmatch(node):
        raise ClientMisused(f"{node!r} is no name of a Slurm node")
    return node + SUFFIX


def nodes(
    job: str | int | None = None, directory: str | os.PathLike[str] | None = None
) -> list[SlurmNode]:
    """All that a job has published so far, by name; none where the job has no directory.

    Raises ClientMisused for a file that somebody else wrote or can read.
    """
    where = job_directory(job, directory)
    try:
        names = sorted(os.listdir(where))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ClientMisused(f"{where}: {error.strerror}") from error
    found = []
    for name in names:
        if not name.startswith(".") and name.endswith(SUFFIX):
            node = _read(where / name)
            if node is not None:  # it went while we looked
                found.append(node)
    return found


def node(
    name: str | None = None,
    job: str | int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> SlurmNode:
    """One node's daemon, by default that of the node that this process runs on.

    Raises ClientMisused where it is not published.
    """
    where = job_directory(job, directory)
    wanted = name or os.environ.get(NODE, "")
    if not wanted:
        raise ClientMisused("this is no node of a Slurm job", hint=f"give a node, or set {NODE}")
    found = _read(where / file_name(wanted))
    if found is None:
        raise ClientMisused(
            f"no sandboxd of node {wanted} is published in {where}",
            hint="is the job running? sandboxd slurm status tells",
        )
    return found


def _read(path: Path) -> SlurmNode | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClientMisused(f"{path}: {error.strerror}") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        # On shared storage another user could have been there first, and have us send him all.
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            raise ClientMisused(f"{path}: it belongs to another user (uid {status.st_uid})")
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
            raise ClientMisused(f"{path}: others can read or write it")
        content = file.read(FILE_MAX_BYTES)
    try:
        return _parse(json.loads(content))
    except (ValueError, KeyError, TypeError) as error:
        raise ClientMisused(f"{path}: it is none that sandboxd publishes: {error!r}") from error


def _parse(fields: dict[str, Any]) -> SlurmNode:
    if fields["version"] != VERSION:
        raise ValueError(f"version {fields['version']}")
    end = fields["job_end"]
    job, node, url, token = (str(fields[name]) for name in ("job", "node", "url", "token"))
    if not all((job, node, url, token)):
        raise ValueError("a text is missing")
    return SlurmNode(
        job,
        node,
        url,
        token,
        restart=int(fields["restart"]),
        job_end=None if end is None else float(end),
        since=float(fields["since"]),
    )
