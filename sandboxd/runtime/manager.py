"""The table of sandboxes: create, find, delete, and what the launcher tells.

There is no database: what lives is in the launcher, and every connection to it begins with asking
for all of it (``adoption``). Until that is done nothing is created (``node-unavailable``). A
sandbox that this daemon gave up on while it could not be deleted is remembered and deleted at the
next connection, so that nothing lives that nobody knows of; its TTL stands behind that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from sandboxd.config import Config
from sandboxd.cpu_list import parse_cpu_list
from sandboxd.errors import (
    NodeUnavailable,
    SandboxDead,
    SandboxdError,
    SandboxNotFound,
)
from sandboxd.images.mounts import ImageMounts
from sandboxd.images.store import ImageStore
from sandboxd.launcher.client import Answer, LauncherClient
from sandboxd.model import InlineFile, SandboxSpec, SandboxState
from sandboxd.runtime.admission import Admission
from sandboxd.runtime.adoption import Adoption
from sandboxd.runtime.capacity import Amounts, node_capacity
from sandboxd.runtime.clock import ms_since
from sandboxd.runtime.creation import Creation
from sandboxd.runtime.drain import RECORD as DRAIN_RECORD
from sandboxd.runtime.drain import Drain
from sandboxd.runtime.expiry import Expiry
from sandboxd.runtime.failures import NODE_LOST, death
from sandboxd.runtime.history import History
from sandboxd.runtime.idempotency import IdempotencyKeys, fingerprint
from sandboxd.runtime.ids import new_id
from sandboxd.runtime.meters import Meters
from sandboxd.runtime.node_events import NodeEvents
from sandboxd.runtime.ports import Ports
from sandboxd.runtime.processes import ProcessTables
from sandboxd.runtime.profiles import Profiles
from sandboxd.runtime.runs import RunTable
from sandboxd.runtime.sandbox import IdempotencyMark, Sandbox, SandboxView
from sandboxd.runtime.sessions import SessionTables
from sandboxd.runtime.snapshots import SnapshotTable
from sandboxd.runtime.stream import StreamLimits, Streams

log = logging.getLogger(__name__)

REASON_WAIT_S: Final = 5.0
"""From the end of a control socket to asking the launcher why. Its word comes unasked, unless the
launcher is gone too or PID 1 lives; late, when hundreds of sandboxes end at once."""
REASON_ANSWER_S: Final = 20.0
"""For its answer to that."""

DELETE_AGAIN_S: Final = 5.0
EXPIRY_GRAIN_S: Final = 0.002
"""Two clocks and a timer that may fire early: what is closer than this is due."""
HOUSEKEEPING_S: Final = 5.0


class Runtime:
    """Everything the API asks. Made anywhere, ``start``ed in the event loop that serves."""

    def __init__(
        self,
        config: Config,
        launcher: LauncherClient | None = None,
        store: ImageStore | None = None,
    ) -> None:
        self.config = config
        self.launcher = launcher or LauncherClient(config.launcher_socket)
        self._store = store or ImageStore(config.images_dir)
        self._table: dict[str, Sandbox] = {}
        self._abandoned: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = False
        self._became_ready = asyncio.Event()
        self._adopted = False
        self._node: dict[str, Any] = {}
        self.meters = Meters()
        self.node_events = NodeEvents(self.meters.event)

    async def start(self) -> None:
        """Begin: connects in the background, and again whenever the launcher is lost."""
        self._loop = asyncio.get_running_loop()
        self.images = ImageMounts(
            self._store,
            self.launcher,
            idle_s=self.config.image_idle_s,
            copies_dir=self.config.image_copies_dir,
            copies_bytes=self.config.image_copies_mb << 20,
            read_ahead_bytes=self.config.image_read_ahead_mb << 20,
        )
        self.snapshots = SnapshotTable(self)
        self.exporting = asyncio.Lock()
        """Held while a snapshot is made a SIF: it takes a CPU, and room in TMPDIR."""
        self._keys = IdempotencyKeys()
        self.profiles = Profiles(self.config.seccomp_profiles_dir)
        self._creation = Creation(self, self._table, self._give_up)
        self._adoption = Adoption(self, self._table, self._abandoned, self._keys)
        self._expiry = Expiry(self._due, self._table.__contains__)
        self.runs = RunTable(self)
        self.drain = Drain(self, empty=self._empty, environment=os.environ)
        self.admission = Admission(
            self.config,
            self._capacity(),
            runs=self.runs,
            drain=self.drain,
            next_due_s=self._expiry.next_s,
        )
        self.ports = Ports(self.config)
        self.processes = ProcessTables(self.launcher, self.config, lambda: new_id("ps"))
        self.sessions = SessionTables(self.processes, lambda: new_id("ss"))
        self.streams = Streams(_stream_limits(self.config), lambda: new_id("ex"))
        self._housekeeping = self._loop.call_later(HOUSEKEEPING_S, self._keep_house)
        self.history = History(self)
        self.launcher.start(self)

    def reconfigure(self, config: Config) -> None:
        """Go by ``config`` from now on; only what ``reloading`` lists may differ."""
        self.config = config
        self.images.idle_s = config.image_idle_s
        self.processes.reconfigure(config)
        self.streams.limits = _stream_limits(config)
        self.admission.reconfigure(config, self._capacity())

    def cut_off(self) -> None:
        """End whatever somebody waits for, with NodeUnavailable: the daemon is about to end."""
        error = NodeUnavailable("the daemon is stopping")
        self.node_events.close()
        self.sessions.close()
        for sandbox in self._table.values():
            sandbox.disconnect(error)

    async def close(self) -> None:
        """Let go of everything; sandboxes live on, as they are the launcher's."""
        self._ready = False
        self._housekeeping.cancel()
        self.history.close()
        self._expiry.close()
        self.admission.close()
        self.drain.close()
        self.runs.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.images.close()
        await self.launcher.close()
        self.streams.close()
        self.cut_off()
        self.processes.close()
        self._table.clear()

    @property
    def table(self) -> Mapping[str, Sandbox]:
        """What this daemon knows of, whether or not that is all there is."""
        return self._table

    def _capacity(self) -> Amounts:
        return node_capacity(self.config, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    def _empty(self) -> None:
        for sandbox in list(self._table.values()):
            self._begin_delete(sandbox)

    # --- asking ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether sandboxes can be created: the launcher is there and all it has is known."""
        return self._ready

    async def wait_ready(self, within_s: float) -> None:
        """Until it is ready, but not for longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._became_ready.wait()

    @property
    def enforcement(self) -> dict[str, Any]:
        """How each limit is held, as the launcher said: ``enforced``, ``watchdog`` or ``none``."""
        limits = self._node.get("limits")
        return limits if isinstance(limits, dict) else {}

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs that the node may use; none until the launcher has said so."""
        said = self._node.get("cpus")
        return parse_cpu_list(said) if isinstance(said, str) and said else ()

    @property
    def cpus_allowed(self) -> tuple[int, ...]:
        """Those of ``cpus`` that sandboxes may have; ``max_limits`` can name others too, for nodes
        of another size."""
        most = self.config.max_limits.cpuset
        if not most:
            return self.cpus
        return tuple(sorted(set(self.cpus) & set(parse_cpu_list(most))))

    def find(self, sandbox_id: str) -> Sandbox:
        sandbox = self._table.get(sandbox_id)
        if sandbox is None:
            if not self._ready:
                # It may live in the launcher; only once all is adopted is absence a fact.
                raise self.launcher.unavailable("the node does not know its sandboxes yet")
            raise SandboxNotFound(f"no sandbox {sandbox_id!r} on this node")
        return sandbox

    def sandboxes(self) -> Iterator[Sandbox]:
        """In the order of their ids.

        Raises NodeUnavailable until they are known: an empty list would say that there are none.
        """
        if not self._adopted:
            raise self.launcher.unavailable("the node does not know its sandboxes yet")
        return iter([self._table[sandbox_id] for sandbox_id in sorted(self._table)])

    def counts(self) -> dict[str, int]:
        """Sandboxes by state; every state is there."""
        counted = Counter(sandbox.state for sandbox in self._table.values())
        return {state.value: counted[state] for state in SandboxState}

    async def node(self) -> dict[str, Any]:
        """The launcher's answer to ``node``, asked now."""
        answer = await self.launcher.call("node")
        self._node = answer.ok
        return answer.ok

    # --- creating ----------------------------------------------------------------------------

    async def create(
        self,
        spec: SandboxSpec,
        idempotency_key: str | None = None,
        *,
        files: Sequence[InlineFile] = (),
        program: bytes = b"",
        wait_s: float = 0.0,
    ) -> SandboxView:
        """A new sandbox with ``files`` in it, or the one that this key made before. ``program`` is
        that of ``spec.seccomp``.

        Waits ``wait_s`` at most where the node is full. Raises IdempotencyConflict,
        NodeUnavailable, NodeOverloaded, those of the image, of the launcher's set-up and of a file.
        """
        if not self._ready:
            raise self.launcher.unavailable("the launcher is not connected")
        self.admission.check(spec)
        if idempotency_key is None:
            return await self._creation.create(spec, None, files, program, wait_s=wait_s)
        mark = IdempotencyMark(idempotency_key, fingerprint(spec, files))
        while (given := self._keys.find(mark)) is not None:
            await asyncio.wait({given})
            if not given.cancelled():
                return given.result()
            # Whoever asked first has gone away, and its sandbox with it: this one makes its own.
        answer = self._keys.begin(mark)
        try:
            view = await self._creation.create(spec, mark, files, program, wait_s=wait_s)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except Exception as error:
            answer.set_exception(error)
            answer.exception()
            raise
        answer.set_result(view)
        return view

    def connect(self, sandbox: Sandbox, answer: Answer) -> None:
        """Take over the fds of an answer that says how a sandbox is reached."""
        path = str(answer.ok.get("oom_kill_path") or "")
        sandbox.kill_from_outside = lambda number: self._kill_exec(sandbox.id, number)
        sandbox.check_images = lambda told: self._check_images(sandbox.id, told)
        fds = answer.take_fds()
        oom_fd = fds.pop() if answer.ok.get("oom_fd") else -1
        sandbox.connect(fds, path, self._control_closed, oom_fd)

    def _check_images(self, sandbox_id: str, told: Callable[[bool], None]) -> None:
        async def ask() -> None:
            answers = True
            try:
                answer = await self.launcher.call("probe", sandbox=sandbox_id)
                answers = bool(answer.ok.get("answer"))
            except SandboxdError:
                pass  # nothing is known against them
            finally:
                told(answers)

        self.spawn(ask())

    def _kill_exec(self, sandbox_id: str, number: int) -> None:
        async def ask() -> None:
            with contextlib.suppress(SandboxdError):
                await self.launcher.call("kill-exec", sandbox=sandbox_id, cgroup=number)

        if number > 0:
            self.spawn(ask())

    # --- deleting ----------------------------------------------------------------------------

    async def delete(self, sandbox_id: str) -> None:
        """No process of it lives when this returns. One that does not exist is deleted already.

        Raises NodeUnavailable where that cannot be known; it is tried again by itself then.
        """
        sandbox = self._table.get(sandbox_id)
        if sandbox is None:
            if not self._ready:
                raise self.launcher.unavailable("the node does not know its sandboxes yet")
            return
        await asyncio.shield(self._begin_delete(sandbox))

    def _begin_delete(self, sandbox: Sandbox) -> asyncio.Task[None]:
        if sandbox.deletion is None:
            sandbox.deletion = self.spawn(self._delete(sandbox))
        return sandbox.deletion

    async def _delete(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.made.wait()
            if self._table.get(sandbox.id) is not sandbox:
                return
            sandbox.state = SandboxState.DELETING
            began_at = time.monotonic()
            sandbox.events.add("deleting", "no process of it lives once this is done")
            sandbox.disconnect(SandboxDead("the sandbox was deleted", reason="deleted"))
            await self.launcher.call("delete", sandbox=sandbox.id)
        except SandboxdError as error:
            log.warning(
                "sandbox %s cannot be deleted yet: %s",
                sandbox.id,
                error.message,
                extra=sandbox.about,
            )
            self._expiry.add(sandbox.id, DELETE_AGAIN_S)
            raise
        else:
            self.meters.deletes.observe(time.monotonic() - began_at)
            sandbox.events.add("deleted", "no process of it lives")
            self.forget(sandbox)
        finally:
            sandbox.deletion = None

    def forget(self, sandbox: Sandbox) -> None:
        """Let go of all that this daemon has of it."""
        if self._table.get(sandbox.id) is sandbox:
            del self._table[sandbox.id]
        self._let_go(sandbox)
        self.admission.leave(sandbox.id)

    def _let_go(self, sandbox: Sandbox) -> None:
        sandbox.disconnect(SandboxDead("the sandbox is gone", reason="deleted"))
        self.sessions.forget(sandbox.id)
        self.processes.forget(sandbox.id)
        if sandbox.mount is not None:
            self.images.release(sandbox.mount)
            sandbox.mount = None

    def _give_up(self, sandbox: Sandbox, *, asked: bool) -> None:
        """A create that failed. ``asked``: it may have been made all the same, and nobody would
        know of it."""
        self._table.pop(sandbox.id, None)
        self._let_go(sandbox)
        self.admission.leave(sandbox.id)
        if asked:
            self._abandoned.add(sandbox.id)
            self.spawn(self._delete_abandoned())

    async def _delete_abandoned(self) -> None:
        for sandbox_id in list(self._abandoned):
            try:
                await self.launcher.call("delete", sandbox=sandbox_id)
            except SandboxdError:
                return  # the next connection or housekeeping tries again
            self._abandoned.discard(sandbox_id)

    def _due(self, sandbox_id: str) -> None:
        sandbox = self._table.get(sandbox_id)
        if sandbox is None:
            return
        if sandbox.state is not SandboxState.DELETING:
            left_s, why = sandbox.due_in_s()
            if left_s > EXPIRY_GRAIN_S:
                # Renewed or used since: it is looked at again when its time is up as it is now.
                self._expiry.add(sandbox_id, left_s)
                return
            log.info("sandbox %s is deleted: %s", sandbox_id, why, extra=sandbox.about)
        self._begin_delete(sandbox)

    def watch_expiry(self, sandbox: Sandbox) -> None:
        """Look at it when its time is up, which may be earlier now than when it was last looked
        at."""
        self._expiry.add(sandbox.id, sandbox.due_in_s()[0])

    def _keep_house(self) -> None:
        self._housekeeping = self._loop.call_later(HOUSEKEEPING_S, self._keep_house)
        if self._ready:
            self.images.evict_idle()
            self.spawn(self.snapshots.delete_expired())
            self.spawn(self.runs.keep_house())
            if self._abandoned:
                self.spawn(self._delete_abandoned())

    # --- what the launcher tells -------------------------------------------------------------

    async def launcher_connected(self, hello: dict[str, Any]) -> None:
        """Ask for all there is and take it over; then, and only then, the node is ready."""
        began_at = time.monotonic()
        adopted = await self._adoption.take_over()
        for sandbox in list(self._table.values()):
            if sandbox.state is SandboxState.DELETING:
                self._begin_delete(sandbox)
        self._ready = self._adopted = True
        self._became_ready.set()
        self.spawn(self._delete_abandoned())
        told = f"the launcher is connected; {adopted} sandboxes were taken over"
        self.node_events.tell("node-connected", told, adopted=adopted)
        log.info(
            "launcher connected, %d sandboxes (%d adopted) in %.0f ms",
            len(self._table),
            adopted,
            ms_since(began_at),
        )

    async def adopt_kept(self, kept: dict[str, dict[str, Any]]) -> None:
        """Runs and a drain of an earlier daemon, and ours for a launcher that has started anew."""
        for record in self.runs.adopt(kept):
            await self.runs.keep(record)
        if self.drain.adopt(kept.get(DRAIN_RECORD)):
            await self.drain.keep()

    def launcher_lost(self) -> None:
        self._ready = False
        self._became_ready.clear()
        self.node_events.tell("node-lost", "the launcher is not connected any more")
        self.processes.launcher_lost()

    def launcher_event(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "process-exited":
            self.processes.told(event)
        elif kind == "image-died":
            log.warning("the server of image %s died", event.get("key"))
            self.node_events.tell(
                "image-died", "the server of an image died", image_key=str(event.get("key"))
            )
            self.images.died(str(event.get("key")))
        elif kind == "image-mounted":
            of = {name: str(event.get(name)) for name in ("key", "name", "digest")}
            self.images.mounted_for_another(**of)
        elif kind == "sandbox-died":
            sandbox = self._table.get(str(event.get("sandbox")))
            reason = str(event.get("reason", ""))
            if sandbox is not None:
                sandbox.fail(death(reason))

    def _control_closed(self, sandbox: Sandbox, reason: str) -> None:
        if not self._ready:
            sandbox.fail(death(NODE_LOST))
        else:
            # Why is the launcher's to say, and its word is on the way over another socket.
            self.spawn(self._ask_why(sandbox, reason))

    async def _ask_why(self, sandbox: Sandbox, reason: str) -> None:
        """Fail it with the launcher's word. ``reason`` counts only where PID 1 lives: then it was
        PID 1 that broke the connection. A launcher that does not answer, or has never heard of the
        sandbox as it is another one's successor, is the node's fault and nobody else's."""
        await asyncio.sleep(REASON_WAIT_S)
        if not sandbox.is_cut_off:
            return
        try:
            answer = await self.launcher.call(
                "state", sandbox=sandbox.id, timeout_s=REASON_ANSWER_S
            )
        except SandboxdError:
            sandbox.fail(death(NODE_LOST))
        else:
            sandbox.fail(death(str(answer.ok.get("reason") or reason)))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A deletion that failed was logged where it failed.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SandboxdError):
            log.error("background task failed", exc_info=error)


def _stream_limits(config: Config) -> StreamLimits:
    return StreamLimits(
        unsent_bytes=config.stream_unsent_bytes,
        replay_bytes=config.stream_replay_bytes,
        total_bytes=config.stream_total_bytes,
        resume_s=config.stream_resume_s,
        detached_s=config.stream_detached_s,
    )
