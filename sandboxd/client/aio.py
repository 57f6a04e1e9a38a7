"""The asyncio client: ``AsyncClient`` and ``AsyncSandbox``; the names are those of ``sync``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from sandboxd.client import calls, diff_calls, process_calls, run_calls, session_calls
from sandboxd.client.aio_eyes import AsyncNodeEyes
from sandboxd.client.aio_files import AsyncSandboxFiles
from sandboxd.client.aio_port import AsyncSandboxPorts
from sandboxd.client.aio_process import AsyncProcess
from sandboxd.client.aio_run import AsyncRun
from sandboxd.client.aio_session import AsyncSession
from sandboxd.client.aio_stream import AsyncExecStream
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
from sandboxd.errors import SandboxdError


class AsyncClient(AsyncNodeEyes):
    """One daemon: its sandboxes, its images, itself."""

    # --- sandboxes ---------------------------------------------------------------------------

    def create(self, image: str, **options: Unpack[CreateOptions]) -> Pending:
        """A new sandbox: ``await`` it, or ``async with`` it, which deletes it at the end."""

        async def make() -> AsyncSandbox:
            return AsyncSandbox(self, await self.do(calls.create(image, options)), owned=True)

        return Pending(make())

    def fork(self, snapshot: Snapshot | str, **options: Unpack[CreateOptions]) -> Pending:
        """A new sandbox that begins as a snapshot; otherwise as ``create``."""
        origin = snapshot.id if isinstance(snapshot, Snapshot) else snapshot

        async def make() -> AsyncSandbox:
            info = await self.do(calls.create(None, options, origin))
            return AsyncSandbox(self, info, owned=True)

        return Pending(make())

    def connect(self, sandbox_id: str) -> Pending:
        """One that is there already: ``await`` it, or ``async with`` it, which leaves it alive."""

        async def find() -> AsyncSandbox:
            return AsyncSandbox(self, await self.do(calls.get(sandbox_id)))

        return Pending(find())

    async def list(
        self,
        *,
        run: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        state: str | None = None,
    ) -> AsyncIterator[SandboxInfo]:
        """Those that match all that is given, page by page as they are asked for."""
        after: str | None = ""
        while after is not None:
            page, after = await self.do(calls.list_page(run, labels, state, after))
            for info in page:
                yield info

    async def create_many(
        self, image: str, count: int, **options: Unpack[CreateOptions]
    ) -> Many[AsyncSandbox]:
        """Several alike in one request, in order; in the place of one that could not be made its
        error. Each is to be deleted as any other."""
        made = await self.do(calls.create_many(image, count, options))
        return self._sandboxes(made)

    async def fork_many(
        self, snapshot: Snapshot | str, count: int, **options: Unpack[CreateOptions]
    ) -> Many[AsyncSandbox]:
        """The same, each beginning as a snapshot."""
        origin = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        return self._sandboxes(await self.do(calls.create_many(None, count, options, origin)))

    def _sandboxes(self, made: Many[SandboxInfo]) -> Many[AsyncSandbox]:
        return [
            one if isinstance(one, SandboxdError) else AsyncSandbox(self, one, owned=True)
            for one in made
        ]

    async def exec_many(self, execs: Iterable[BatchExec]) -> ExecResults:
        """Run commands in any sandboxes of the node, in one request; in order, each one's result or
        error, when the last has ended."""
        return await self.do(calls.execute_many(execs))

    async def delete(self, sandbox_id: str) -> None:
        """When it returns, no process of the sandbox lives. One that is not there is deleted."""
        await self.do(calls.delete(sandbox_id))

    async def delete_many(
        self,
        *,
        run: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        within_s: float = 60.0,
    ) -> Deleted:
        """End all of a run, or all with these labels (a None is any value), or both."""
        return await self.do(calls.delete_many(run, labels, within_s))

    # --- runs, draining ----------------------------------------------------------------------

    def run(
        self,
        name: str | None = None,
        *,
        lease_s: float = LEASE_S,
        **options: Unpack[RunOptions],
    ) -> AsyncRun:
        """Sandboxes that end together: at the end of the block, or when this process dies."""
        return AsyncRun(self, name, lease_s, options)

    async def runs(self) -> AsyncIterator[RunInfo]:
        """All that the node knows of, page by page as they are asked for."""
        after: str | None = ""
        while after is not None:
            page, after = await self.do(run_calls.list_page(after))
            for info in page:
                yield info

    async def delete_run(self, name: str, *, within_s: float = 60.0) -> RunEnd:
        """End everything of a run; no create of it is let in for a while. Idempotent."""
        return await self.do(run_calls.end(name, within_s))

    async def drain(self, deadline_s: float | None = None) -> DrainInfo:
        """Have the node take nothing more on, and delete all in ``deadline_s`` if that is given."""
        return await self.do(run_calls.drain(deadline_s))

    async def undrain(self) -> DrainInfo:
        return await self.do(run_calls.undrain())

    # --- snapshots ---------------------------------------------------------------------------

    async def snapshots(self, *, run: str | None = None, sandbox: str | None = None) -> Snapshots:
        """Those of a run, or taken of a sandbox; all if neither is given."""
        return await self.do(calls.snapshots(run, sandbox))

    async def get_snapshot(self, snapshot_id: str) -> Snapshot:
        return await self.do(calls.get_snapshot(snapshot_id))

    async def delete_snapshot(self, snapshot: Snapshot | str) -> None:
        """What was forked from it lives on. One that is not there is deleted."""
        one = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        await self.do(calls.delete_snapshot(one))

    async def export_snapshot(
        self, snapshot: Snapshot | str, target: str | os.PathLike[str]
    ) -> int:
        """A snapshot as a delta SIF, to be laid over its image elsewhere; its bytes."""
        return await self._download(diff_calls.export(snapshot), target)

    async def snapshot_diff(
        self,
        snapshot: Snapshot | str,
        *,
        since: Snapshot | str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> Diff:
        """What a snapshot has that its image, or another snapshot, has not, and vice versa."""
        return await self.do(diff_calls.of_snapshot(snapshot, since, after, limit))

    async def download_snapshot_diff(
        self,
        snapshot: Snapshot | str,
        target: str | os.PathLike[str],
        *,
        since: Snapshot | str | None = None,
    ) -> int:
        """The same as a tar, an OCI layer; its bytes. What breaks off leaves nothing."""
        return await self._download(diff_calls.tar_of_snapshot(snapshot, since), target)

    # --- images, the node --------------------------------------------------------------------

    async def images(self) -> Images:
        return await self.do(calls.images())

    async def prepare_image(self, name: str) -> PreparedImage:
        """Check and mount it, so that its first sandbox need not wait for that."""
        return await self.do(calls.prepare_image(name))

    async def prefetch(self, names: Iterable[str]) -> Prefetches:
        """Make images ready ahead of need; what became of each is in its place."""
        return await self.do(calls.prefetch(names))

    async def evict_image(self, name: str) -> None:
        """Unmount it. Raises ImageInUse while it has sandboxes."""
        await self.do(calls.evict_image(name))

    async def node(self) -> Node:
        return await self.do(calls.node())

    async def reload(self) -> Reloaded:
        """Have the daemon read its configuration again. Raises ConfigError, with nothing changed,
        where something in it is wrong."""
        return await self.do(calls.reload())


class Pending(Awaitable["AsyncSandbox"]):
    """A sandbox on its way: to be awaited, or entered as the sandbox's own context."""

    def __init__(self, coming: Coroutine[Any, Any, AsyncSandbox]) -> None:
        self._coming = coming
        self._sandbox: AsyncSandbox | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSandbox]:
        return self._coming.__await__()

    async def __aenter__(self) -> AsyncSandbox:
        self._sandbox = await self._coming
        return self._sandbox

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._sandbox is not None
        await self._sandbox.__aexit__(kind, error, traceback)


class AsyncSandbox(AsyncSandboxFiles, AsyncSandboxPorts):
    """One sandbox. Made by ``create`` or ``connect``, here or at an ``AsyncClient``.

    As a context manager: one that was created is deleted at the end, one that was connected to is
    left as it is.
    """

    def __init__(
        self,
        client: AsyncClient,
        info: SandboxInfo,
        *,
        owned: bool = False,
        owns_client: bool = False,
    ) -> None:
        self._client: AsyncClient = client
        self._owned = owned
        self._owns_client = owns_client
        self.info = info
        """What was last known of it; ``refresh`` asks again."""

    @property
    def id(self) -> str:
        return self.info.id

    @classmethod
    def create(
        cls, image: str, *, client: AsyncClient | None = None, **options: Unpack[CreateOptions]
    ) -> Pending:
        """A new sandbox, on the daemon that the environment names if no client is given."""
        return cls._with(client, lambda one: one.create(image, **options))

    @classmethod
    def connect(cls, sandbox_id: str, *, client: AsyncClient | None = None) -> Pending:
        """One that is there already."""
        return cls._with(client, lambda one: one.connect(sandbox_id))

    @classmethod
    async def list(
        cls,
        *,
        client: AsyncClient | None = None,
        run: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        state: str | None = None,
    ) -> Infos:
        """Those that match all that is given."""
        async with contextlib.AsyncExitStack() as stack:
            one = AsyncClient() if client is None else client
            if client is None:
                await stack.enter_async_context(one)
            return [info async for info in one.list(run=run, labels=labels, state=state)]

    @classmethod
    def _with(cls, client: AsyncClient | None, make: Callable[[AsyncClient], Pending]) -> Pending:
        if client is not None:
            return make(client)

        async def come() -> AsyncSandbox:
            async with contextlib.AsyncExitStack() as undo:
                sandbox = await make(await undo.enter_async_context(AsyncClient()))
                sandbox._owns_client = True
                undo.pop_all()
                return sandbox

        return Pending(come())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._owned:
                await self.delete()
        except SandboxdError:
            if error is None:  # the first error is the one to tell of; its TTL ends the sandbox
                raise
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of the connections that were made for this sandbox alone. It lives on."""
        if self._owns_client:
            await self._client.close()

    # --- its life ----------------------------------------------------------------------------

    async def refresh(self) -> SandboxInfo:
        """Ask about it."""
        self.info = await self._client.do(calls.get(self.id))
        return self.info

    async def renew(self, ttl_s: float | None = None) -> SandboxInfo:
        """Let it live for ``ttl_s`` from now on; as long as when it was made if left out."""
        self.info = await self._client.do(calls.renew(self.id, ttl_s))
        return self.info

    async def pause(self) -> SandboxInfo:
        """Freeze its processes; nothing can be started until ``resume``."""
        self.info = await self._client.do(calls.pause(self.id))
        return self.info

    async def resume(self) -> SandboxInfo:
        self.info = await self._client.do(calls.resume(self.id))
        return self.info

    async def snapshot(
        self,
        name: str = "",
        *,
        on_running: Literal["fail", "kill", "copy"] = "fail",
        ttl_s: float | None = None,
        processes: bool = False,
    ) -> Snapshot:
        """Keep its files as they are now. With live processes: refused, or they are killed first,
        or what was written is copied while they are frozen. No node keeps ``processes``."""
        return await self._client.do(calls.snapshot(self.id, name, on_running, ttl_s, processes))

    def copy(self, *paths: str, **options: Unpack[CreateOptions]) -> Pending:
        """A new sandbox of the same image with these of its files and directories, and nothing else
        of it: what a verdict is taken in. Its processes are frozen meanwhile."""
        given: CreateOptions = {**options, "copy_from": {"sandbox": self.id, "paths": paths}}

        async def make() -> AsyncSandbox:
            info = await self._client.do(calls.create(None, given))
            return AsyncSandbox(self._client, info, owned=True)

        return Pending(make())

    async def diff(
        self,
        *,
        since: Snapshot | str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> Diff:
        """What it has that its image, or a snapshot, has not, and the other way round. Its
        processes are frozen meanwhile; give ``next`` as ``after`` where there is more."""
        return await self._client.do(diff_calls.of_sandbox(self.id, since, after, limit))

    async def download_diff(
        self, target: str | os.PathLike[str], *, since: Snapshot | str | None = None
    ) -> int:
        """The same as a tar, an OCI layer, told file by file; its bytes. For one moment's, take
        that of a snapshot. What breaks off leaves nothing."""
        return await self._client._download(diff_calls.tar_of_sandbox(self.id, since), target)

    async def reset(self, snapshot: Snapshot | str | None = None) -> SandboxInfo:
        """Kill all its processes and begin anew, from the bare image or a snapshot."""
        to = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        self.info = await self._client.do(calls.reset(self.id, to))
        return self.info

    async def rollback(self, snapshot: Snapshot | str) -> SandboxInfo:
        """Kill all its processes and go back to a snapshot of it."""
        to = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        self.info = await self._client.do(calls.rollback(self.id, to))
        return self.info

    async def stats(self) -> Stats:
        return await self._client.do(calls.stats(self.id))

    async def events(self, after: int = 0, *, limit: int | None = None) -> Events:
        """What became of it, the oldest first; ``after`` is the ``seq`` of the last one known."""
        return await self._client.do(calls.events(self.id, after, limit))

    async def egress(self, after: int = 0, *, limit: int | None = None) -> Egress:
        """Where it went, where it was stopped, which names it asked for."""
        return await self._client.do(calls.egress(self.id, after, limit))

    async def delete(self) -> None:
        """When it returns, no process of it lives. Idempotent."""
        await self._client.do(calls.delete(self.id))

    # --- commands ----------------------------------------------------------------------------

    async def exec(
        self, command: str | Sequence[str], **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a command to its end. A list is run as it is, a string by the sandbox's shell.

        A command that fails is a result. Raises SandboxdError where there is none: what the
        workload brought about has ``cause`` ``workload``, what the machine did ``node``.
        """
        return await self._client.do(calls.execute(self.id, command, options))

    def exec_stream(
        self, command: str | Sequence[str], **options: Unpack[ExecOptions]
    ) -> AsyncExecStream:
        """Run a command and be told its output as it comes (``AsyncExecStream``). Whatever it
        writes is told: ``max_output_bytes`` and ``truncate`` do not count here."""
        exec_id = options.get("exec_id") or calls.new_exec_id()
        call = calls.execute_stream(self.id, command, options, exec_id)
        return AsyncExecStream(self._client, self.id, call, FrameReader(exec_id))

    def resume_stream(self, exec_id: str, from_seq: int = 0) -> AsyncExecStream:
        """Take up the stream of a command that goes on, detached or cut off a moment ago."""
        call = calls.resume_stream(self.id, exec_id, from_seq)
        return AsyncExecStream(self._client, self.id, call, FrameReader(exec_id, from_seq))

    async def kill_exec(self, exec_id: str) -> None:
        """Kill a command that runs, with its whole tree: when it returns, none of it lives. Whoever
        waits for it gets its result. Idempotent."""
        await self._client.do(calls.kill_exec(self.id, exec_id))

    # --- background processes ----------------------------------------------------------------

    async def start_process(
        self, command: str | Sequence[str], **options: Unpack[ProcessOptions]
    ) -> AsyncProcess:
        """Start a command that outlives this client and the daemon."""
        call = process_calls.start(self.id, command, options)
        return AsyncProcess(self._client, self.id, await self._client.do(call))

    async def process(self, process_id: str) -> AsyncProcess:
        """One that was started before."""
        told = await self._client.do(process_calls.news(self.id, process_id))
        return AsyncProcess(self._client, self.id, told.info)

    async def processes(self) -> Processes:
        """All that were not removed, in the order in which they were started."""
        return await self._client.do(process_calls.list_all(self.id))

    # --- sessions ----------------------------------------------------------------------------

    async def open_session(self, **options: Unpack[SessionOptions]) -> AsyncSession:
        """A shell, or Python, whose directory, variables and functions last between commands."""
        return AsyncSession(
            self._client, self.id, await self._client.do(session_calls.open_new(self.id, options))
        )

    async def session(self, session_id: str) -> AsyncSession:
        """One that was opened before."""
        info = await self._client.do(session_calls.get(self.id, session_id))
        return AsyncSession(self._client, self.id, info)

    async def sessions(self) -> SessionInfos:
        """All that were not closed, in the order in which they were opened."""
        return await self._client.do(session_calls.list_all(self.id))
