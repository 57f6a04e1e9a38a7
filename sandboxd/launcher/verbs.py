"""What a daemon can ask of the launcher: one method a verb of protocol.py's table."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sandboxd.errors import NodeError, RequestError, SandboxdError
from sandboxd.init.fingerprint import fingerprint
from sandboxd.init.protocol import KillScope
from sandboxd.launcher import exclusive, freeze, protocol, usage
from sandboxd.launcher.diffs import Diffs
from sandboxd.launcher.images import Images
from sandboxd.launcher.kept import Kept
from sandboxd.launcher.layers import Stack
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.processes import Processes
from sandboxd.launcher.sandboxes import Sandbox, Sandboxes
from sandboxd.launcher.slots import Slot, Slots
from sandboxd.launcher.snapshots import Snapshots
from sandboxd.launcher.transfers import Transfers
from sandboxd.linux.seccomp import PROGRAM_BYTES_MAX

Answer = tuple[dict[str, Any], tuple[int, ...]]
"""The answer's ``ok``, and descriptors that go with it and are closed once sent."""


class Verbs:
    def __init__(
        self,
        loop: Loop,
        *,
        node: Callable[[], dict[str, Any]],
        sandboxes: Sandboxes,
        images: Images,
        slots: Slots,
        snapshots: Snapshots,
        processes: Processes,
        transfers: Transfers,
        diffs: Diffs,
    ) -> None:
        self._loop = loop
        self._node = node
        self.sandboxes = sandboxes
        self.images = images
        self.slots = slots
        self.snapshots = snapshots
        self.processes = processes
        self.kept = Kept()
        self.transfers = transfers
        self.diffs = diffs

    def serve(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        """Serve one request; its descriptors are closed in the end. Raises SandboxdError."""
        verbs: dict[str, Callable[[dict[str, Any], list[int]], Task[Answer]]] = {
            "hello": self._hello,
            "node": self._describe,
            "mount": self._mount,
            "unmount": self._unmount,
            "images": self._images,
            "create": self._create,
            "attach": self._attach,
            "list": self._list,
            "state": self._state,
            "delete": self._delete,
            "reset": self._reset,
            "snapshot": self._snapshot,
            "diff": self._diff,
            "snapshots": self._list_snapshots,
            "snapshot-delete": self._delete_snapshot,
            "note": self._note,
            "keep": self._keep,
            "kept": self._list_kept,
            "kill-exec": self._kill_exec,
            "freeze": self._freeze,
            "probe": self._probe,
            "exclusive": self._exclusive,
            "usage": self._usage,
            "egress": self._egress,
            "process-start": self._process_start,
            "process-list": self._process_list,
            "process-attach": self._process_attach,
            "process-signal": self._process_signal,
            "process-close-stdin": self._process_close_stdin,
            "process-remove": self._process_remove,
        }
        try:
            handler = verbs.get(str(message.get("verb")))
            if handler is None:
                raise RequestError(f"no such verb: {message.get('verb')!r}")
            return (yield from handler(message, fds))
        finally:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

    def undo(self, message: dict[str, Any], ok: dict[str, Any]) -> Task[None]:
        """Take back what a daemon asked for that is gone before it was answered: nobody knows of
        it. What cannot be taken back is in the tables, for the next daemon to find."""
        verb = message.get("verb")
        with suppress(SandboxdError):
            if verb == "create":
                yield from self.sandboxes.delete(message["sandbox"])
                self.processes.forget_sandbox(message["sandbox"])
            elif verb == "snapshot":
                self.snapshots.delete(message["snapshot"])
            elif verb == "process-start" and "process" in ok:
                yield from self.processes.remove(self.processes.find(message))

    def _hello(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        if message.get("version") != protocol.VERSION:
            raise protocol.mismatch(f"{message.get('version')!r}", str(protocol.VERSION))
        node = self._node()
        return {
            "version": protocol.VERSION,
            "init": fingerprint(),
            "boot_id": node["boot_id"],
            "started_at": node["started_at"],
        }, ()
        yield  # a generator like the others

    def _describe(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del message, fds
        node = self._node()
        counts = {
            **node.get("counts", {}),
            "sandboxes": len(self.sandboxes.by_id),
            "slots_ready": self.slots.ready,
            "slots_primed": len(self.slots.primed()),
            "in_teardown": self.slots.in_teardown,
            "images": len(self.images.by_key),
        }
        return {**node, "counts": counts}, ()
        yield

    def _mount(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        if len(fds) != 1:
            raise RequestError("mount takes the SIF's descriptor")
        label = {"name": str(message["name"]), "digest": str(message.get("digest", ""))}
        image = yield from self.images.mount(
            message["key"], os.dup(fds[0]), int(message["sif_offset"]), label
        )
        return {"key": image.key, **image.label}, ()

    def _unmount(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        name = self.images.unmount(message["key"])
        if name is not None:
            self.slots.forget_image(name)
        return {"key": message["key"]}, ()
        yield

    def _images(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del message, fds
        rows = [
            {"key": i.key, **i.label, "pid": i.pid, "users": len(i.sandboxes)}
            for i in self.images.by_key.values()
            if i.ready.settled
        ]
        return {"images": rows}, ()
        yield

    def _create(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        sandbox, phases, control = yield from self.sandboxes.create(
            message,
            self._stack(message, tuple(message["images"])),
            fill=self.transfers.fill(message),
            program=_program(fds[0]) if fds else b"",
        )
        assert sandbox.slot is not None
        return {
            "sandbox": sandbox.id,
            "pid": sandbox.slot.pid,
            "phases": phases,
            "copied": sandbox.root.filled if sandbox.root else {},
            **_oom(sandbox),
            "mapped": list(sandbox.mapped),
        }, (control, *self._alive_fds(sandbox), *_oom_fd(sandbox))

    def _alive_fds(self, sandbox: Sandbox) -> list[int]:
        """Copies, to be passed on and closed. One that is dead by now is a pipe at its end."""
        copies = []
        for key in sandbox.images:
            image = self.images.by_key.get(key)
            if image is not None and image.alive_fds:
                copies += [os.dup(fd) for fd in image.alive_fds]
            else:
                read, write = os.pipe2(os.O_CLOEXEC)
                os.close(write)
                copies.append(read)
        return copies

    def _attach(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        if sandbox.exclusive:
            # The daemon that asked for it is gone, and with its socket the command.
            yield from exclusive.end(self._loop, sandbox)
        control = yield from self.sandboxes.attach(sandbox)
        given = (control, *self._alive_fds(sandbox), *_oom_fd(sandbox))
        return {"sandbox": sandbox.id, **_oom(sandbox)}, given

    def _stack(self, message: dict[str, Any], images: tuple[str, ...]) -> Stack:
        """That of the snapshot the message names, else the bare images."""
        name = message.get("snapshot")
        return self.snapshots.find(name).stack if name else Stack((), images)

    def _reset(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        self._stack(message, sandbox.images)  # or nothing happens
        self.processes.forget_sandbox(sandbox.id)
        phases, control = yield from self.sandboxes.change(
            sandbox, self.sandboxes.reset(sandbox, lambda: self._stack(message, sandbox.images))
        )
        assert sandbox.slot is not None
        return {
            "sandbox": sandbox.id,
            "phases": phases,
            **_oom(sandbox),
        }, (control, *self._alive_fds(sandbox), *_oom_fd(sandbox))

    def _snapshot(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        return (yield from self.snapshots.take(message)), ()

    def _diff(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        if len(fds) != 1:
            raise RequestError("diff takes a pipe")
        since = self.snapshots.find(message["since"]).stack if message.get("since") else None
        if message.get("snapshot"):
            stack = self.snapshots.find(message["snapshot"]).stack
            return (yield from self.diffs.of_snapshot(stack, since, message, fds[0])), ()
        sandbox = self.sandboxes.find(message["sandbox"])
        return (yield from self.diffs.of_sandbox(sandbox, since, message, fds[0])), ()

    def _list_snapshots(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        rows = [r for r in self.snapshots.rows() if r["snapshot"] > str(message.get("after", ""))]
        page = protocol.page(rows)
        return {"snapshots": page, "more": len(rows) > len(page)}, ()
        yield

    def _delete_snapshot(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        self.snapshots.delete(message["snapshot"])
        return {"snapshot": message["snapshot"]}, ()
        yield

    def _list(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        rows = self.sandboxes.rows(after=str(message.get("after", "")))
        page = protocol.page(row.to_json() for row in rows)
        return {"sandboxes": page, "more": len(rows) > len(page)}, ()
        yield

    def _state(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        return {"state": str(sandbox.state), "reason": sandbox.reason}, ()
        yield

    def _delete(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        yield from self.sandboxes.delete(message["sandbox"])
        self.processes.forget_sandbox(message["sandbox"])
        return {"sandbox": message["sandbox"]}, ()

    def _kill_exec(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        self._slot(message).cgroups.kill_exec(int(message["cgroup"]))
        return {}, ()
        yield

    def _note(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        self.sandboxes.find(message["sandbox"]).meta = message["meta"]
        return {}, ()
        yield

    def _keep(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        self.kept.keep(str(message["name"]), message["record"])
        return {}, ()
        yield

    def _list_kept(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        rows, more = self.kept.page(str(message.get("after", "")))
        return {"kept": rows, "more": more}, ()
        yield

    def _freeze(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        while sandbox.changing is not None:  # it may be a copy, for which all is frozen too
            with suppress(OSError, TimeoutError, SandboxdError):
                yield sandbox.changing
        cgroups = self._slot(message).cgroups
        if not message["frozen"]:
            sandbox.paused = False
            freeze.thaw(cgroups)
            return {"execs": 0}, ()
        execs = yield from freeze.freeze(self._loop, cgroups)
        sandbox.paused = True
        return {"execs": execs}, ()

    def _probe(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        answer = yield from self.images.answer(sandbox.images)
        return {"answer": answer}, ()

    def _exclusive(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        if message["how"] == "end":
            return {"execs": (yield from exclusive.end(self._loop, sandbox))}, ()
        steps = exclusive.begin(self._loop, sandbox, message["how"])
        return {"execs": (yield from self.sandboxes.change(sandbox, steps))}, ()

    def _usage(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        figures = usage.usage(self._slot(message).cgroups)
        return {**figures, **usage.disk_usage(sandbox.root)}, ()
        yield

    def _egress(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        sandbox = self.sandboxes.find(message["sandbox"])
        return (
            yield from self.sandboxes.networks.egress(
                sandbox.id, int(message["after"]), int(message["limit"])
            )
        ), ()

    def _process_start(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        if len(fds) != 1:
            raise RequestError("process-start takes the command's descriptor")
        return (
            yield from self.processes.start(
                self.sandboxes.find(message["sandbox"]), message, fds[0]
            )
        )

    def _process_list(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        rows, more = self.processes.rows(message["sandbox"], str(message.get("after", "")))
        return {"processes": rows, "more": more}, ()
        yield

    def _process_attach(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        return {}, (yield from self.processes.attach(self.processes.find(message)))

    def _process_signal(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        process = self.processes.find(message)
        number, scope = int(message["signal"]), KillScope(message["scope"])
        yield from self.processes.deliver(process, number, scope)
        return {}, ()

    def _process_close_stdin(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        self.processes.close_stdin(self.processes.find(message))
        return {}, ()
        yield

    def _process_remove(self, message: dict[str, Any], fds: list[int]) -> Task[Answer]:
        del fds
        yield from self.processes.remove(self.processes.find(message))
        return {}, ()

    def _slot(self, message: dict[str, Any]) -> Slot:
        slot = self.sandboxes.find(message["sandbox"]).slot
        if slot is None:
            raise NodeError("the sandbox is still being made")
        return slot


def _oom(sandbox: Sandbox) -> dict[str, Any]:
    """Where its OOM kills are counted: a path, or the last descriptor of the answer."""
    groups = sandbox.slot.cgroups if sandbox.slot else None
    return {
        "oom_kill_path": groups.oom_kill_path if groups else None,
        "oom_fd": groups is not None and groups.watched is not None,
    }


def _oom_fd(sandbox: Sandbox) -> tuple[int, ...]:
    return sandbox.slot.cgroups.count_fd() if sandbox.slot else ()


def _program(fd: int) -> bytes:
    """A seccomp program that came in a memfd."""
    found = os.pread(fd, PROGRAM_BYTES_MAX + 1, 0)
    if not 0 < len(found) <= PROGRAM_BYTES_MAX:
        raise RequestError(f"a seccomp program has at most {PROGRAM_BYTES_MAX} bytes")
    return found
