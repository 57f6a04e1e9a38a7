"""The blocking client: ``Client`` and ``Sandbox``. No event loop, no thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, Unpack

from sandboxd.client import calls, file_calls, local_tree, process_calls, session_calls
from sandboxd.client.calls import CreateOptions, ExecOptions
from sandboxd.client.file_calls import FileEntry, Listing
from sandboxd.client.frames import FrameReader
from sandboxd.client.local_files import CHUNK_BYTES, replacing
from sandboxd.client.process_calls import Processes, ProcessOptions
from sandboxd.client.results import (
    Deleted,
    Events,
    ExecResult,
    FileInfo,
    Images,
    Infos,
    Node,
    Prefetches,
    SandboxInfo,
    Snapshot,
    Snapshots,
    Stats,
)
from sandboxd.client.session_calls import SessionInfos, SessionOptions
from sandboxd.client.sync_driver import Driver
from sandboxd.client.sync_process import Process
from sandboxd.client.sync_session import Session
from sandboxd.client.sync_stream import ExecStream
from sandboxd.errors import SandboxdError


class Client(Driver):
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

    # --- snapshots ---------------------------------------------------------------------------

    def snapshots(self) -> Snapshots:
        return self.do(calls.snapshots())

    def delete_snapshot(self, snapshot: Snapshot | str) -> None:
        """What was forked from it lives on. One that is not there is deleted."""
        one = snapshot.id if isinstance(snapshot, Snapshot) else snapshot
        self.do(calls.delete_snapshot(one))

    # --- images, the node --------------------------------------------------------------------

    def images(self) -> Images:
        return self.do(calls.images())

    def prefetch(self, names: Iterable[str]) -> Prefetches:
        """Make images ready ahead of need; what became of each is in its place."""
        return self.do(calls.prefetch(names))

    def evict_image(self, name: str) -> None:
        """Unmount it. Raises ImageInUse while it has sandboxes."""
        self.do(calls.evict_image(name))

    def node(self) -> Node:
        return self.do(calls.node())


class Sandbox:
    """One sandbox. Made by ``create`` or ``connect``, here or at a ``Client``.

    As a context manager: one that was created is deleted at the end, one that was connected to is
    left as it is.
    """

    def __init__(
        self, client: Client, info: SandboxInfo, *, owned: bool = False, owns_client: bool = False
    ) -> None:
        self._client = client
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
    ) -> Snapshot:
        """Keep its files as they are now. With live processes: refused, or they are killed first,
        or what was written is copied while they are frozen."""
        return self._client.do(calls.snapshot(self.id, name, on_running, ttl_s))

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

    def events(self, after: int = 0) -> Events:
        """What became of it, the oldest first; ``after`` is the ``seq`` of the last one known."""
        return self._client.do(calls.events(self.id, after))

    def delete(self) -> None:
        """When it returns, no process of it lives. Idempotent."""
        self._client.delete(self.id)

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
        call = calls.execute_stream(self.id, command, options)
        return ExecStream(self._client, self.id, call, FrameReader())

    def resume_stream(self, exec_id: str, from_seq: int = 0) -> ExecStream:
        """Take up the stream of a command that goes on, detached or cut off a moment ago."""
        call = calls.resume_stream(self.id, exec_id, from_seq)
        return ExecStream(self._client, self.id, call, FrameReader(exec_id, from_seq))

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

    # --- files -------------------------------------------------------------------------------

    def read_file(self, path: str, *, user: str | None = None) -> bytes:
        return self._client.do(file_calls.read(self.id, path, user))

    def read_text(self, path: str, *, user: str | None = None) -> str:
        """Raises UnicodeDecodeError for what is no UTF-8."""
        return self.read_file(path, user=user).decode()

    def write_file(
        self,
        path: str,
        data: str | bytes,
        *,
        user: str | None = None,
        mode: int | None = None,
        parents: bool = True,
    ) -> FileInfo:
        """Replace a file in one step: readers see the old or the new one."""
        raw = data.encode() if isinstance(data, str) else data
        return self._client.do(
            file_calls.write(self.id, path, raw, len(raw), user=user, mode=mode, parents=parents)
        )

    def upload_file(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        user: str | None = None,
        mode: int | None = None,
        parents: bool = True,
    ) -> FileInfo:
        """Copy a file of ours into the sandbox, at constant memory. Keeps its mode if none is
        given. Raises OSError for what concerns ours."""
        with open(source, "rb") as file:
            status = os.fstat(file.fileno())
            call = file_calls.write(
                self.id,
                path,
                None,
                status.st_size,
                user=user,
                mode=status.st_mode & 0o777 if mode is None else mode,
                parents=parents,
            )
            return self._client.upload(call, iter(lambda: file.read(CHUNK_BYTES), b""))

    def download_file(
        self, path: str, target: str | os.PathLike[str], *, user: str | None = None
    ) -> int:
        """Copy a file of the sandbox to ours, at constant memory; its size. What breaks off leaves
        nothing at ``target``."""
        with (
            self._client.stream(file_calls.read(self.id, path, user)) as pieces,
            replacing(target) as file,
        ):
            return sum(file.write(piece) for piece in pieces)

    def upload_dir(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        owner: str | None = None,
        user: str | None = None,
    ) -> int:
        """Put the content of a directory of ours into one of the sandbox, which is made if it is
        missing; how many names that were. Raises OSError for what concerns ours."""
        call = file_calls.unpack(self.id, path, owner, user)
        return self._client.upload(call, local_tree.pack(source))

    def download_dir(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        user: str | None = None,
    ) -> local_tree.Unpacked:
        """Put the content of a directory of the sandbox into one of ours. What leads out of it is
        left out (``local_tree``)."""
        call = file_calls.pack(self.id, path, include, exclude, user)
        with self._client.stream(call) as pieces:
            return local_tree.unpack(local_tree.PieceFile(pieces), target)

    def stat(self, path: str, *, follow: bool = False, user: str | None = None) -> FileEntry:
        """Raises FileNotFound. A symlink itself, unless ``follow``."""
        return self._client.do(file_calls.stat(self.id, path, follow, user))

    def list_dir(
        self,
        path: str,
        *,
        recursive: bool = False,
        limit: int = file_calls.LIST_MAX,
        user: str | None = None,
    ) -> Listing:
        return self._client.do(file_calls.list_dir(self.id, path, recursive, limit, user))

    def mkdir(
        self,
        path: str,
        *,
        mode: int | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> FileEntry:
        """Make a directory; with ``parents`` one that is there is done."""
        return self._client.do(file_calls.mkdir(self.id, path, mode, parents, user))

    def move(
        self, source: str, destination: str, *, overwrite: bool = False, user: str | None = None
    ) -> FileEntry:
        """Rename; ``destination`` is the new name, never a directory to put it in."""
        return self._client.do(file_calls.move(self.id, source, destination, overwrite, user))

    def chmod(
        self, path: str, mode: int, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """How many names were changed."""
        return self._client.do(file_calls.chmod(self.id, path, mode, recursive, user))

    def chown(
        self, path: str, owner: str, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """``name`` or ``uid``, with ``:group``. How many names were changed."""
        return self._client.do(file_calls.chown(self.id, path, owner, recursive, user))

    def remove(
        self,
        path: str,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
        user: str | None = None,
    ) -> int:
        """How many names are gone."""
        call = file_calls.remove(self.id, path, recursive, missing_ok, user)
        return self._client.do(call)
