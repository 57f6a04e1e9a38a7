"""The launcher's table of background processes in Python: real processes of this user, real spools.

A thread a process fills its spools; each process is a session of its own, and "tree" means its
process group.
"""

import contextlib
import errno
import os
import select
import signal
import subprocess
import threading
import time

from sandboxd.init import protocol as wire
from sandboxd.init.protocol import ExecFlag, KillScope, Step
from sandboxd.launcher.spool import SpoolWriter


class FakeProcess:
    def __init__(self, message, payload, told):
        self.row = {
            "process": message["process"],
            "pid": 42,
            "flags": message["flags"],
            "spool": message["capacity"] > 0,
            "meta": message["meta"],
            "started_at": time.time(),
            "exit": None,
        }
        self._told = told
        argc = wire.EXEC_REQ.unpack_from(payload)[0]
        words = [part.decode() for part in payload[wire.EXEC_REQ.size :].split(b"\0")[:-1]]
        argv = words[2 : 2 + argc]
        if message["flags"] & ExecFlag.EXEC_SHELL:
            argv = ["/bin/sh", "-c", *argv]
        pipes = [os.pipe(), os.pipe()]
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.spools = [SpoolWriter(message["capacity"]) for _ in pipes]
        in_r, self.stdin = os.pipe()
        self.child = subprocess.Popen(
            argv, stdin=in_r, stdout=pipes[0][1], stderr=pipes[1][1], start_new_session=True
        )
        wire.close_fds([in_r, pipes[0][1], pipes[1][1]])
        self.sources = [read for read, _ in pipes]
        for source in self.sources:
            os.set_blocking(source, False)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        open_ones = dict(zip(self.sources, self.spools, strict=True))
        while open_ones:
            for source in select.select(list(open_ones), [], [])[0]:
                with contextlib.suppress(BlockingIOError):
                    if not open_ones[source].fill(source, 65536, is_tty=False):
                        open_ones.pop(source).end()
                        os.close(source)
            os.eventfd_write(self.event_fd, 1)
        _, status, _ = os.wait4(self.child.pid, 0)
        self.child.returncode = 0
        self.row["exit"] = {
            "at": time.time(), "failure": [0, 0, 0], "status": status,
            "user_us": 1500, "system_us": 2500, "maxrss_kb": 4096, "oom": False,
        }  # fmt: skip
        self._told(self)

    def fds(self):
        kept = [self.event_fd, *(spool.fd for spool in self.spools)]
        return [os.dup(fd) for fd in [*kept, *([self.stdin] if self.stdin >= 0 else [])]]

    def signal(self, number, scope):
        with contextlib.suppress(ProcessLookupError):
            if scope == KillScope.KILL_TREE:
                os.killpg(self.child.pid, number)
            elif self.child.returncode is None:
                os.kill(self.child.pid, number)

    def close_stdin(self):
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def remove(self):
        self.signal(signal.SIGKILL, KillScope.KILL_TREE)
        self.thread.join(10)
        self.close_stdin()
        for spool in self.spools:
            spool.close()
        os.close(self.event_fd)


class FakeProcesses:
    def __init__(self, event):
        self._event = event
        self._table = {}

    def answer(self, message, fds, out_fds):
        verb = message["verb"].removeprefix("process-").replace("-", "_")
        if verb in ("start", "list"):
            return getattr(self, verb)(message, fds, out_fds)
        process = self._table.get((message["sandbox"], message["process"]))
        if process is None:
            return {"error": {"code": "process-not-found", "message": "no such process"}}
        if verb == "attach":
            out_fds += process.fds()
        elif verb == "signal":
            process.signal(message["signal"], message["scope"])
        elif verb == "close_stdin":
            process.close_stdin()
        elif verb == "remove":
            self._table.pop((message["sandbox"], message["process"])).remove()
        return {"ok": {}}

    def start(self, message, fds, out_fds):
        payload = os.pread(fds[0], wire.PAYLOAD_MAX, 0)
        if payload[wire.EXEC_REQ.size :].startswith(b"nobody-here\0"):
            return {"ok": {"failure": [int(Step.STEP_USER), 0, errno.ENOENT]}}
        process = FakeProcess(message, payload, lambda one: self._exited(message["sandbox"], one))
        self._table[message["sandbox"], message["process"]] = process
        row = dict(process.row, exit=None)
        out_fds += process.fds()
        return {"ok": row}

    def list(self, message, _fds, _out_fds):
        rows = [
            process.row
            for (sandbox, name), process in sorted(self._table.items())
            if sandbox == message["sandbox"] and name > message["after"]
        ]
        return {"ok": {"processes": rows[:2], "more": len(rows) > 2}}

    def _exited(self, sandbox, process):
        event = {"event": "process-exited", "sandbox": sandbox, "process": process.row["process"]}
        with contextlib.suppress(OSError):
            self._event({**event, "exit": process.row["exit"]})

    def close(self):
        for process in list(self._table.values()):
            process.remove()
        self._table.clear()
