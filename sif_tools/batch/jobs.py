"""What a batch is to do, and a journal of what it has done.

The list has an image a line: ``SOURCE [NAME]``; blank lines and those that begin with ``#`` mean
nothing. Without a name an image gets that of its source: what follows the scheme, without ``//``.

The journal has a JSON object a line, the last one on a source counting::

    {"source": …, "name": …, "state": "done", "image": key, "manifest_digest": …, …}
    {"source": …, "name": …, "state": "failed", "code": …, "message": …}

A line that a crash cut short is dropped. Its images are looked up again when a batch is resumed, so
a journal that is lost or old costs time and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sif_tools.errors import BadBatch, BadName
from sif_tools.store.layout import quoted


@dataclass(frozen=True, slots=True)
class Job:
    source: str
    name: str


def read_list(path: Path) -> list[Job]:
    """The jobs of a list, each once. BadBatch names the line that makes no sense."""
    try:
        lines = path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise BadBatch(f"{path}: {error.strerror}") from error
    jobs: dict[Job, None] = {}
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise BadBatch(f"{path}, line {number}: more than SOURCE and NAME")
        source = words[0]
        name = words[1] if len(words) == 2 else default_name(source)
        try:
            quoted(name)
        except BadName as error:
            raise BadBatch(f"{path}, line {number}: {error.message}") from error
        if names.setdefault(name, source) != source:
            raise BadBatch(f"{path}, line {number}: {name!r} is the name of another image, too")
        jobs[Job(source, name)] = None
    return list(jobs)


def default_name(source: str) -> str:
    """``docker://HOST/NAME:TAG`` is found by ``HOST/NAME:TAG``, ``oci:DIR:TAG`` by ``DIR:TAG``."""
    return source.partition(":")[2].strip("/") or source


class Journal:
    """Appends; one process writes it. `done` has what was done before, by source and name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Job, dict[str, Any]] = {}
        try:
            end = self._load()
            self._file = path.open("ab")
            # What a crash left without its end must not become the start of the next line.
            self._file.truncate(end)
        except OSError as error:
            raise BadBatch(f"{path}: {error.strerror}") from error

    def _load(self) -> int:
        end = 0
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                for job, node in _parsed(line):
                    if node.get("state") == "done":
                        self.done[job] = node
                    else:
                        self.done.pop(job, None)
        return end

    def add(self, job: Job, **what: Any) -> None:
        """Note what became of a job. In the kernel's hands when this returns."""
        node = {"source": job.source, "name": job.name} | what
        self._file.write((json.dumps(node) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parsed(line: bytes) -> Iterator[tuple[Job, dict[str, Any]]]:
    try:
        node = json.loads(line)
        yield Job(node["source"], node["name"]), node
    except (ValueError, KeyError, TypeError):
        return  # not ours to judge: it is only looked up again
