"""Processes that resolve and keep images. One that dies loses the task it had, and is replaced.

A process each, and not threads: merging is Python's own work. They are spawned, not forked, as the
one that spawns them may have threads of its own.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from sif_tools.errors import SifError
from sif_tools.sources.open import open_source
from sif_tools.sources.source import SourceOptions
from sif_tools.store.build import diff_ids
from sif_tools.store.keeper import Keeper, KeepOptions
from sif_tools.store.layout import open_store
from sif_tools.store.plan import Chain, Cuts

_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """What every task of a batch has in common."""

    store: Path
    keep: KeepOptions
    source: SourceOptions
    architecture: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """`cuts` None: only look what the image is, and whether it is there (under `name`). With
    `only_shared`: the run of layers below the last cut, and nothing of the image's own."""

    number: int
    reference: str
    name: str | None
    cuts: Cuts | None = None
    only_shared: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`chain` of an image that is not there yet; `error` is (code, message, hint)."""

    number: int
    key: str | None = None
    manifest_digest: str | None = None
    chain: Chain | None = None
    written_bytes: int = 0
    size_bytes: int = 0
    source_bytes: int = 0
    error: tuple[str, str, str | None] | None = None


class Workers:
    """`count` processes; `run` gives them tasks. Use it in a `with`."""

    def __init__(self, options: WorkOptions, count: int) -> None:
        self._options = options
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start() for _ in range(count)]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._options), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Each task's outcome as it comes. A task whose process dies is given to another once."""
        waiting = deque(tasks)
        retried: set[int] = set()
        while waiting or any(worker.task for worker in self._workers):
            for worker in self._workers:
                if worker.task is None and waiting:
                    worker.give(waiting.popleft())
            for connection in wait([worker.connection for worker in self._workers]):
                at = next(n for n, one in enumerate(self._workers) if one.connection is connection)
                worker = self._workers[at]
                try:
                    yield worker.answer()
                except (EOFError, OSError):
                    task, how = worker.task, worker.end()
                    self._workers[at] = self._start()
                    if task is None:
                        continue
                    if task.number not in retried:
                        retried.add(task.number)
                        waiting.append(task)
                    else:
                        text = f"the process that converted it was killed twice ({how})"
                        yield Outcome(task.number, error=("worker-died", text, None))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()  # an idle one ends by itself, at once
        for worker in self._workers:
            worker.end()


class _Worker:
    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        self.task = task
        with suppress(OSError):  # it is dead, and its connection tells
            self.connection.send(task)

    def answer(self) -> Outcome:
        outcome = self.connection.recv()
        assert isinstance(outcome, Outcome)
        self.task = None
        return outcome

    def end(self) -> str:
        self.connection.close()
        if self.task is not None:
            self.process.terminate()
        self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"status {code}"


def _work(connection: Connection, options: WorkOptions) -> None:
    # An interrupt is for the one in front, who then ends us; and ending is by exception, so that
    # claims are let go of and temporary files removed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    keeper = Keeper(open_store(options.store), options.keep)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        outcome = _outcome(keeper, task, options)
        try:
            connection.send(outcome)
        except OSError:
            return


def _leave(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)


def _outcome(keeper: Keeper, task: Task, options: WorkOptions) -> Outcome:
    try:
        with open_source(task.reference, options.architecture, options.source) as source:
            source_bytes = sum(layer.size_bytes for layer in source.layers)
            if task.cuts is None:
                kept = keeper.find(source)
                if kept is not None and task.name is not None:
                    keeper.give_name(task.name, kept.key, source.manifest_digest)
                if kept is None:
                    chain = Chain(
                        tuple(diff_ids(source)), tuple(one.size_bytes for one in source.layers)
                    )
                    return Outcome(task.number, chain=chain, source_bytes=source_bytes)
            elif task.only_shared:
                return Outcome(task.number, written_bytes=keeper.keep_run(source, task.cuts))
            else:
                kept = keeper.keep(source, task.cuts, task.name)
            return Outcome(
                task.number,
                key=kept.key,
                manifest_digest=source.manifest_digest,
                written_bytes=kept.written_bytes,
                size_bytes=kept.size_bytes,
                source_bytes=source_bytes,
            )
    except SifError as error:
        return Outcome(task.number, error=(error.code, error.message, error.hint))
    except MemoryError:
        return Outcome(task.number, error=("out-of-memory", "no memory left for it", None))
    except Exception as error:  # noqa: BLE001 - one image must not end the others
        return Outcome(task.number, error=("internal-error", repr(error), None))
