"""The blocking client: ``Client`` and ``Sandbox``. No event loop; no thread but a
forward's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, Unpack

from sandboxd.client import calls, diff_calls, process_calls, run_calls, session_calls
from sandboxd.client.calls import BatchExec, CreateOptions, ExecOptions
from sandboxd.client.diff_calls import Diff
from sandboxd.client.frames import FrameReader
from sandboxd.client.process_calls import Processes, ProcessOptions
from sandboxd.client.reloaded import Reloaded
from sandboxd.client.results import (
    Deleted,
    Egress,
    Events,
    ExecResult,
    ExecResults,
    Images,
    Infos,
    Many,
    Node,
    Prefetches,
    PreparedImage,
    SandboxInfo,
    Snapshot,
    Snapshots,
    Stats,
)
from sandboxd.client.run_calls import LEASE_S, DrainInfo, RunEnd, RunInfo, RunOptions
from sandboxd.client.session_calls import SessionInfos, SessionOptions
from sandboxd.client.sync_eyes import NodeEyes
from sandboxd.client.sync_files import SandboxFiles
from sandboxd.client.sync_port import SandboxPorts
from sandboxd.client.sync_process import Process
from sandboxd.client.sync_run import Run
from sandboxd.client.sync_session import Session
from sandboxd.client.sync_stream import ExecStream
from sandboxd.errors import SandboxdError


class Client(NodeEyes):
    """One daemon: its sandboxes, its images, itself."""

    # --- sandboxes ---------------------------------------------------------------------------

    def create(self, image: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """A new sandbox; as a context manager it is deleted at the end of the block."""
        return Sandbox(self, self.do(calls.create(image, options)), owned=True)

    def fork(self, snapshot: Snapshot | str, **options: Unpack[CreateOptions]) -> Sandbox:
        """A new sandbox that begins as a snapshot; otherwise as ``create``."""
        origin = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        return Sandbox(self, self.do(calls.create(None, options, origin)), owned=True)

    def connect(self, sandbox_id: str) -> Sandbox:
        """One that is there already. As a context manager it is left alive."""
        return Sandbox(self, self.do(calls.get(sandbox_id)))

    def list(
        self,
        *,
        run: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        state: str | None = None,
    ) -> Iterator[SandboxInfo]:
        """Those that match all that is given, page by page as they are asked for."""
        after: str | None = ""
        while after is not None:
            page, after = self.do(calls.list_page(run, labels, state, after))
            yield from page

    def create_many(
        self, image: str, count: int, **options: Unpack[CreateOptions]
    ) -> Many[Sandbox]:
        """Several alike in one request, in order; in the place of one that could not be made its
        error. Each is to be deleted as any other."""
        made = self.do(calls.create_many(image, count, options))
        return self._sandboxes(made)

    def fork_many(
        self, snapshot: Snapshot | str, count: int, **options: Unpack[CreateOptions]
    ) -> Many[Sandbox]:
        """The same, each beginning as a snapshot."""
        origin = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        return self._sandboxes(self.do(calls.create_many(None, count, options, origin)))

    def _sandboxes(self, made: Many[SandboxInfo]) -> Many[Sandbox]:
        return [
            one if isinstance(one, SandboxdError) else Sandbox(self, one, owned=True)
            for one in made
        ]

    def exec_many(self, execs: Iterable[BatchExec]) -> ExecResults:
        """Run commands in any sandboxes of the node, in one request; in order, each one's result or
        error, when the last has ended."""
        return self.do(calls.execute_many(execs))

    def delete(self, sandbox_id: str) -> None:
        """When it returns, no process of the sandbox lives. One that is not there is deleted."""
        self.do(calls.delete(sandbox_id))

    def delete_many(
        self,
        *,
        run: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        within_s: float = 60.0,
    ) -> Deleted:
        """End all of a run, or all with these labels (a None is any value), or both."""
        return self.do(calls.delete_many(run, labels, within_s))

    # --- runs, draining ----------------------------------------------------------------------

    def run(
        self,
        name: str | None = None,
        *,
        lease_s: float = LEASE_S,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Sandboxes that end together: at the end of the block, or when this process dies."""
        return Run(self, name, lease_s, options)

    def runs(self) -> Iterator[RunInfo]:
        """All that the node knows of, page by page as they are asked for."""
        after: str | None = ""
        while after is not None:
            page, after = self.do(run_calls.list_page(after))
            yield from page

    def delete_run(self, name: str, *, within_s: float = 60.0) -> RunEnd:
        """End everything of a run; no create of it is let in for a while. Idempotent."""
        return self.do(run_calls.end(name, within_s))

    def drain(self, deadline_s: float | None = None) -> DrainInfo:
        """Have the node take nothing more on, and delete all in ``deadline_s`` if that is given."""
        return self.do(run_calls.drain(deadline_s))

    def undrain(self) -> DrainInfo:
        return self.do(run_calls.undrain())

    # --- snapshots ---------------------------------------------------------------------------

    def snapshots(self, *, run: str | None = None, sandbox: str | None = None) -> Snapshots:
        """Those of a run, or taken of a sandbox; all if neither is given."""
        return self.do(calls.snapshots(run, sandbox))

    def get_snapshot(self, snapshot_id: str) -> Snapshot:
        return self.do(calls.get_snapshot(snapshot_id))

    def delete_snapshot(self, snapshot: Snapshot | str) -> None:
        """What was forked from it lives on. One that is not there is deleted."""
        one = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        self.do(calls.delete_snapshot(one))

    def export_snapshot(self, snapshot: Snapshot | str, target: str | os.PathLike[str]) -> int:
        """A snapshot as a delta SIF, to be laid over its image elsewhere; its bytes."""
        return self._download(diff_calls.export(snapshot), target)

    def snapshot_diff(
        self,
        snapshot: Snapshot | str,
        *,
        since: Snapshot | str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> Diff:
        """What a snapshot has that its image, or another snapshot, has not, and vice versa."""
        return self.do(diff_calls.of_snapshot(snapshot, since, after, limit))

    def download_snapshot_diff(
        self,
        snapshot: Snapshot | str,
        target: str | os.PathLike[str],
        *,
        since: Snapshot | str | None = None,
    ) -> int:
        """The same as a tar, an OCI layer; its bytes. What breaks off leaves nothing."""
        return self._download(diff_calls.tar_of_snapshot(snapshot, since), target)

    # --- images, the node --------------------------------------------------------------------

    def images(self) -> Images:
        return self.do(calls.images())

    def prepare_image(self, name: str) -> PreparedImage:
        """Check and mount it, so that its first sandbox need not wait for that."""
        return self.do(calls.prepare_image(name))

    def prefetch(self, names: Iterable[str]) -> Prefetches:
        """Make images ready ahead of need; what became of each is in its place."""
        return self.do(calls.prefetch(names))

    def evict_image(self, name: str) -> None:
        """Unmount it. Raises ImageInUse while it has sandboxes."""
        self.do(calls.evict_image(name))

    def node(self) -> Node:
        return self.do(calls.node())

    def reload(self) -> Reloaded:
        """Have the daemon read its configuration again. Raises ConfigError, with nothing changed,
        where something in it is wrong."""
        return self.do(calls.reload())


class Sandbox(SandboxFiles, SandboxPorts):
    """One sandbox. Made by ``create`` or ``connect``, here or at a ``Client``.

    As a context manager: one that was created is deleted at the end, one that was connected to is
    left as it is.
    """

    def __init__(
        self, client: Client, info: SandboxInfo, *, owned: bool = False, owns_client: bool = False
    ) -> None:
        self._client: Client = client
        self._owned = owned
        self._owns_client = owns_client
        self.info = info
        """What was last known of it; ``refresh`` asks again."""

    @property
    def id(self) -> str:
        return self.info.id

    @classmethod
    def create(
        cls, image: str, *, client: Client | None = None, **options: Unpack[CreateOptions]
    ) -> Sandbox:
        """A new sandbox, on the daemon that the environment names if no client is given."""
        return cls._with(client, lambda one: one.create(image, **options))

    @classmethod
    def connect(cls, sandbox_id: str, *, client: Client | None = None) -> Sandbox:
        """One that is there already."""
        return cls._with(client, lambda one: one.connect(sandbox_id))

    @classmethod
    def list(
        cls,
        *,
        client: Client | None = None,
        run: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        state: str | None = None,
    ) -> Infos:
        """Those that match all that is given."""
        with contextlib.ExitStack() as stack:
            one = client or stack.enter_context(Client())
            return [*one.list(run=run, labels=labels, state=state)]

    @classmethod
    def _with(cls, client: Client | None, make: Callable[[Client], Sandbox]) -> Sandbox:
        if client is not None:
            return make(client)
        with contextlib.ExitStack() as undo:
            sandbox = make(undo.enter_context(Client()))
            sandbox._owns_client = True
            undo.pop_all()
            return sandbox

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._owned:
                self.delete()
        except SandboxdError:
            if error is None:  # the first error is the one to tell of; its TTL ends the sandbox
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the connections that were made for this sandbox alone. It lives on."""
        if self._owns_client:
            self._client.close()

    # --- its life ----------------------------------------------------------------------------

    def refresh(self) -> SandboxInfo:
        """Ask about it."""
        self.info = self._client.do(calls.get(self.id))
        return self.info

    def renew(self, ttl_s: float | None = None) -> SandboxInfo:
        """Let it live for ``ttl_s`` from now on; as long as when it was made if left out."""
        self.info = self._client.do(calls.renew(self.id, ttl_s))
        return self.info

    def pause(self) -> SandboxInfo:
        """Freeze its processes; nothing can be started until ``resume``."""
        self.info = self._client.do(calls.pause(self.id))
        return self.info

    def resume(self) -> SandboxInfo:
        self.info = self._client.do(calls.resume(self.id))
        return self.info

    def snapshot(
        self,
        name: str = "",
        *,
        on_running: Literal["fail", "kill", "copy"] = "fail",
        ttl_s: float | None = None,
        processes: bool = False,
    ) -> Snapshot:
        """Keep its files as they are now. With live processes: refused, or they are killed first,
        or what was written is copied while they are frozen. No node keeps ``processes``."""
        return self._client.do(calls.snapshot(self.id, name, on_running, ttl_s, processes))

    def copy(self, *paths: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """A new sandbox of the same image with these of its files and directories, and nothing else
        of it: what a verdict is taken in. Its processes are frozen meanwhile."""
        given: CreateOptions = {**options, "copy_from": {"sandbox": self.id, "paths": paths}}
        return Sandbox(self._client, self._client.do(calls.create(None, given)), owned=True)

    def diff(
        self,
        *,
        since: Snapshot | str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> Diff:
        """What it has that its image, or a snapshot, has not, and the other way round. Its
        processes are frozen meanwhile; give ``next`` as ``after`` where there is more."""
        return self._client.do(diff_calls.of_sandbox(self.id, since, after, limit))

    def download_diff(
        self, target: str | os.PathLike[str], *, since: Snapshot | str | None = None
    ) -> int:
        """The same as a tar, an OCI layer, told file by file; its bytes. For one moment's, take
        that of a snapshot. What breaks off leaves nothing."""
        return self._client._download(diff_calls.tar_of_sandbox(self.id, since), target)

    def reset(self, snapshot: Snapshot | str | None = None) -> SandboxInfo:
        """Kill all its processes and begin anew, from the bare image or a snapshot."""
        to = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        self.info = self._client.do(calls.reset(self.id, to))
        return self.info

    def rollback(self, snapshot: Snapshot | str) -> SandboxInfo:
        """Kill all its processes and go back to a snapshot of it."""
        to = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        self.info = self._client.do(calls.rollback(self.id, to))
        return self.info

    def stats(self) -> Stats:
        return self._client.do(calls.stats(self.id))

    def events(self, after: int = 0, *, limit: int | None = None) -> Events:
        """What became of it, the oldest first; ``after`` is the ``seq`` of the last one known."""
        return self._client.do(calls.events(self.id, after, limit))

    def egress(self, after: int = 0, *, limit: int | None = None) -> Egress:
        """Where it went, where it was stopped, which names it asked for."""
        return self._client.do(calls.egress(self.id, after, limit))

    def delete(self) -> None:
        """When it returns, no process of it lives. Idempotent."""
        self._client.do(calls.delete(self.id))

    # --- commands ----------------------------------------------------------------------------

    def exec(self, command: str | Sequence[str], **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a command to its end. A list is run as it is, a string by the sandbox's shell.

        A command that fails is a result. Raises SandboxdError where there is none: what the
        workload brought about has ``cause`` ``workload``, what the machine did ``node``.
        """
        return self._client.do(calls.execute(self.id, command, options))

    def exec_stream(
        self, command: str | Sequence[str], **options: Unpack[ExecOptions]
    ) -> ExecStream:
        """Run a command and be told its output as it comes (``ExecStream``). Whatever it writes is
        told: ``max_output_bytes`` and ``truncate`` do not count here."""
        exec_id = options.get("exec_id") or calls.new_exec_id()
        call = calls.execute_stream(self.id, command, options, exec_id)
        return ExecStream(self._client, self.id, call, FrameReader(exec_id))

    def resume_stream(self, exec_id: str, from_seq: int = 0) -> ExecStream:
        """Take up the stream of a command that goes on, detached or cut off a moment ago."""
        call = calls.resume_stream(self.id, exec_id, from_seq)
        return ExecStream(self._client, self.id, call, FrameReader(exec_id, from_seq))

    def kill_exec(self, exec_id: str) -> None:
        """Kill a command that runs, with its whole tree: when it returns, none of it lives. Whoever
        waits for it gets its result. Idempotent."""
        self._client.do(calls.kill_exec(self.id, exec_id))

    # --- background processes ----------------------------------------------------------------

    def start_process(
        self, command: str | Sequence[str], **options: Unpack[ProcessOptions]
    ) -> Process:
        """Start a command that outlives this client and the daemon."""
        call = process_calls.start(self.id, command, options)
        return Process(self._client, self.id, self._client.do(call))

    def process(self, process_id: str) -> Process:
        """One that was started before."""
        told = self._client.do(process_calls.news(self.id, process_id))
        return Process(self._client, self.id, told.info)

    def processes(self) -> Processes:
        """All that were not removed, in the order in which they were started."""
        return self._client.do(process_calls.list_all(self.id))

    # --- sessions ----------------------------------------------------------------------------

    def open_session(self, **options: Unpack[SessionOptions]) -> Session:
        """A shell, or Python, whose directory, variables and functions last between commands."""
        return Session(
            self._client, self.id, self._client.do(session_calls.open_new(self.id, options))
        )

    def session(self, session_id: str) -> Session:
        """One that was opened before."""
        info = self._client.do(session_calls.get(self.id, session_id))
        return Session(self._client, self.id, info)

    def sessions(self) -> SessionInfos:
        """All that were not closed, in the order in which they were opened."""
        return self._client.do(session_calls.list_all(self.id))
