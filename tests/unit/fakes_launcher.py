"""A launcher in Python: speaks launcher/protocol.py, with a FakePid1 behind each sandbox."""

import contextlib
import os
import pathlib
import select
import socket
import threading

from sandboxd.errors import ImageNotFound
from sandboxd.images.store import CheckedImage, KnownImage
from sandboxd.init.fingerprint import fingerprint
from sandboxd.launcher import protocol
from sandboxd.model import ImageConfig
from tests.unit.fakes_pid1 import FakePid1, seqpacket_pair
from tests.unit.fakes_processes import FakeProcesses


class FakeStore:
    """Images without files. ``images`` is name -> ImageConfig."""

    directory = pathlib.Path("/nonexistent")

    def __init__(self, images):
        self.images = images

    async def check(self, name):
        if name not in self.images:
            raise ImageNotFound(f"no image {name!r}")
        return CheckedImage(name, f"key-{name}", 4096, 1000, self.images[name])

    async def open(self, image):
        return self.open_now(image)

    def open_now(self, image):
        return os.open("/dev/null", os.O_RDONLY)

    def remembered(self, name):
        return None

    async def known(self):
        return [KnownImage(name, 1000, 1e9) for name in sorted(self.images)]


def default_store():
    config = ImageConfig(env=("PATH=/usr/bin:/bin", "LANG=C.UTF-8"), workdir="/work", user="0")
    return FakeStore({"debian": config, "other": ImageConfig()})


class FakeLauncher:
    """Listens at ``path``; ``root`` is what all sandboxes see as their root.

    ``fail[verb]`` is a list of errors to answer with first; a verb in ``held`` is not answered
    until ``release``.
    """

    def __init__(self, path, root, file_program=None):
        self.path = str(path)
        self.root = root
        self.file_program = file_program
        self.oom_path = ""
        self.servers_answer = True
        self.rows = {}
        self.pid1s = {}
        self.mounted = {}
        self.frozen = {}
        self.fail = {}
        self.held = set()
        self.kept = {}
        self._held_back = []
        self.seen = []
        self._lock = threading.RLock()
        self._connections = []
        self._stop_r, self._stop_w = os.pipe()
        self.processes = FakeProcesses(self.event)
        self._begin()

    init = fingerprint()

    def _begin(self):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            waiting = [self._stop_r, self._listener, *self._connections]
            ready, _, _ = select.select(waiting, [], [])
            if self._stop_r in ready:
                os.read(self._stop_r, 1)
                return
            for one in ready:
                if one is self._listener:
                    self._connections.append(one.accept()[0])
                    continue
                try:
                    message, fds = protocol.receive(one)
                except OSError:
                    message, fds = None, []
                if message is None:
                    self._connections.remove(one)
                    one.close()
                    continue
                with self._lock:
                    self._handle(one, message, fds)

    def _handle(self, connection, message, fds):
        self.seen.append(message)
        if message["verb"] in self.held:
            self._held_back.append((connection, message, fds))
        else:
            self._answer(connection, message, fds)

    def _answer(self, connection, message, fds):
        verb = message["verb"]
        out_fds = []
        if self.fail.get(verb):
            answer = {"error": self.fail[verb].pop(0)}
        elif verb.startswith("process-"):
            answer = self.processes.answer(message, fds, out_fds)
        else:
            answer = getattr(self, "do_" + verb)(message, out_fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            protocol.send(connection, {"id": message["id"], **answer}, tuple(out_fds))
        for fd in out_fds:
            os.close(fd)

    def do_hello(self, message, _fds):
        said = {"version": protocol.VERSION, "init": self.init, "boot_id": "b", "started_at": 1.0}
        return {"ok": said}

    def do_probe(self, message, _fds):
        return {"ok": {"answer": self.servers_answer}}

    def do_node(self, message, _fds):
        return {
            "ok": {
                "features": {"userns": True},
                "limits": {"memory_mb": "enforced", "cpus": "none"},
                "capacity": {"memory_mb": 1000},
                "counts": {"sandboxes": len(self.rows)},
            }
        }

    def do_mount(self, message, _fds):
        self.mounted[message["key"]] = message["name"]
        return {"ok": {"key": message["key"]}}

    def do_unmount(self, message, _fds):
        self.mounted.pop(message["key"], None)
        return {"ok": {"key": message["key"]}}

    def do_images(self, message, _fds):
        rows = [
            {"key": key, "name": name, "pid": 1, "users": 0} for key, name in self.mounted.items()
        ]
        return {"ok": {"images": rows}}

    def do_create(self, message, fds):
        ours, theirs = seqpacket_pair()
        sandbox = message["sandbox"]
        self.pid1s[sandbox] = [FakePid1(theirs, self.root, self.file_program)]
        self.rows[sandbox] = {
            "sandbox": sandbox,
            "pid": 1,
            "state": "running",
            "images": message["images"],
            "meta": message["meta"],
        }
        fds.append(ours.detach())
        ok = {"sandbox": sandbox, "pid": 1, "phases": {"clone": 0.5, "pivot": 0.25}}
        return {"ok": {**ok, "oom_kill_path": self.oom_path}}

    def do_attach(self, message, fds):
        if message["sandbox"] not in self.rows:
            return {"error": {"code": "sandbox-not-found", "message": "gone"}}
        ours, theirs = seqpacket_pair()
        self.pid1s[message["sandbox"]].append(FakePid1(theirs, self.root, self.file_program))
        fds.append(ours.detach())
        return {"ok": {"sandbox": message["sandbox"], "oom_kill_path": self.oom_path}}

    def do_list(self, message, _fds):
        later = sorted(key for key in self.rows if key > message["after"])
        page = later[:3]
        return {
            "ok": {"sandboxes": [self.rows[key] for key in page], "more": len(later) > len(page)}
        }

    def do_state(self, message, _fds):
        row = self.rows.get(message["sandbox"])
        if row is None:
            return {"error": {"code": "sandbox-not-found", "message": "gone"}}
        return {"ok": {"state": row["state"], "reason": row.get("reason", "")}}

    def do_delete(self, message, _fds):
        self.rows.pop(message["sandbox"], None)
        for pid1 in self.pid1s.pop(message["sandbox"], []):
            pid1.die()
        return {"ok": {"sandbox": message["sandbox"]}}

    def do_snapshots(self, message, _fds):
        return {"ok": {"snapshots": [], "more": False}}

    def do_note(self, message, _fds):
        self.rows[message["sandbox"]]["meta"] = message["meta"]
        return {"ok": {}}

    def do_keep(self, message, _fds):
        self.kept[message["name"]] = message["record"]
        if message["record"] is None:
            del self.kept[message["name"]]
        return {"ok": {}}

    def do_kept(self, message, _fds):
        later = sorted(name for name in self.kept if name > message["after"])
        page = [[name, self.kept[name]] for name in later[:2]]
        return {"ok": {"kept": page, "more": len(later) > 2}}

    def do_freeze(self, message, _fds):
        self.frozen[message["sandbox"]] = message["frozen"]
        return {"ok": {"execs": 1}}

    def do_usage(self, message, _fds):
        return {"ok": {"cpu_usage_usec": 1_500_000, "memory_bytes": 4096, "pids": 3}}

    # --- what tests bring about --------------------------------------------------------------

    def release(self, verb):
        with self._lock:
            self.held.discard(verb)
            held, self._held_back = self._held_back, []
            for connection, message, fds in held:
                self._answer(connection, message, fds)

    def event(self, message):
        with self._lock:
            for connection in self._connections:
                protocol.send(connection, message)

    def kill_pid1(self, sandbox):
        for pid1 in self.pid1s[sandbox]:
            pid1.die()
        self.pid1s[sandbox] = []

    def stop(self):
        """Die: connections and the listener close."""
        os.write(self._stop_w, b"x")
        self._thread.join(10)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._connections = []

    def restart(self):
        self._begin()

    def close(self):
        self.stop()
        self.processes.close()
        for sandbox in list(self.pid1s):
            self.kill_pid1(sandbox)
        os.close(self._stop_r)
        os.close(self._stop_w)
