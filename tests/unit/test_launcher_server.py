"""The launcher's server: a slow reader loses nothing, one that reads nothing is let go."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxd.errors import DiskFull, SandboxDead, SandboxSetupError
from sandboxd.launcher import protocol, server
from sandboxd.launcher.loop import Loop, Promise
from sandboxd.launcher.server import Server

ANSWER = "x" * 2000
"""So large that a socket buffer (212,992 bytes by default) holds about a hundred."""

ERRORS = {
    "pipe": BrokenPipeError(32, "PID 1 is gone"),
    "set-up": SandboxSetupError("the sandbox could not be made: PID 1 is gone"),
    "dead": SandboxDead("PID 1 is gone"),
    "full": DiskFull("no room"),
}


class Echo:
    """In the place of the verbs: every request is answered with a descriptor of its own."""

    def __init__(self) -> None:
        self.held: dict[int, Promise[None]] = {}
        self.undone: list[int] = []

    def serve(self, message: dict[str, Any], fds: list[int]):
        for fd in fds:
            os.close(fd)
        if "raise" in message:
            raise ERRORS[message["raise"]]
        if message.get("hold"):
            held = self.held[message["n"]] = Promise()
            yield held
        if "release" in message:
            self.held[message["release"]].resolve(None)
        return {"echo": message["n"], "pad": ANSWER}, (os.open("/dev/null", os.O_RDONLY),)
        yield

    def undo(self, message: dict[str, Any], ok: dict[str, Any]):
        assert ok["echo"] == message["n"]
        self.undone.append(message["n"])
        return
        yield


@pytest.fixture
def running(tmp_path: Path):
    loop = Loop()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    served = Server(loop, listener, dict)
    served._verbs = Echo()
    served._slots = SimpleNamespace(zygote_dead=False)
    loop.add_reader(listener.fileno(), served._accept)
    stop_read, stop_write = os.pipe()
    loop.add_reader(stop_read, loop.stop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield SimpleNamespace(path=str(tmp_path / "s"), server=served)
    os.write(stop_write, b"x")
    thread.join()
    for connection in list(served._connections):
        connection.close()
    listener.close()
    os.close(stop_read)
    os.close(stop_write)


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    return sock


def test_answers_wait_for_a_slow_reader(running):
    with connect(running.path) as sock:
        for n in range(1000):
            protocol.send(sock, {"id": n, "n": n})
        got = []
        for _ in range(1000):
            message, fds = protocol.receive(sock)
            assert message is not None
            assert len(fds) == 1
            os.close(fds[0])
            got.append(message["ok"]["echo"])
    assert sorted(got) == list(range(1000))


def test_one_that_never_reads_is_let_go(running, monkeypatch):
    monkeypatch.setattr(server, "UNSENT_MAX", 50)
    before = len(os.listdir("/proc/self/fd"))
    with connect(running.path) as sock:
        sent = 0
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while sent < 100_000:
                protocol.send(sock, {"id": sent, "n": sent})
                sent += 1
    assert sent < 100_000
    with connect(running.path) as other:  # the others are served
        protocol.send(other, {"id": 1, "n": 7})
        message, fds = protocol.receive(other)
        assert message is not None
        assert message["ok"]["echo"] == 7
        os.close(fds[0])
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize("verb", ["create", "mount"])
def test_what_nobody_can_be_told_of_is_undone(running, verb: str):
    """A daemon that is gone when its request is done: its successor has listed all by then."""
    echo = running.server._verbs
    fds = len(os.listdir("/proc/self/fd"))
    with connect(running.path) as first:
        for n in (1, 2):
            protocol.send(first, {"id": n, "n": n, "verb": verb, "hold": True})
        ask(first, {"id": 3, "n": 3, "release": 1})
        # The one that is done while somebody is there to hear of it is not.
        assert answer(first)["id"] == 1
        assert echo.undone == []
    with connect(running.path) as second:
        ask(second, {"id": 4, "n": 4, "release": 2})
        if verb == "mount":
            assert answer(second)["event"] == "image-mounted"
        ask(second, {"id": 5, "n": 5})
        assert echo.undone == [2]
    # The server's ends of both, if it has not seen yet that they are closed.
    assert len(os.listdir("/proc/self/fd")) <= fds + 2


def ask(sock: socket.socket, message: dict[str, Any]) -> None:
    protocol.send(sock, message)
    assert answer(sock)["id"] == message["id"]


def answer(sock: socket.socket) -> dict[str, Any]:
    message, fds = protocol.receive(sock)
    for fd in fds:
        os.close(fd)
    assert message is not None
    return message


def test_what_is_no_message_leaks_no_descriptor():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        with open("/dev/null", "rb") as null:
            socket.send_fds(theirs, [b"[1]"], [null.fileno()])
            with pytest.raises(ValueError, match="not a JSON object"):
                protocol.receive(ours)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("error", "alive", "dead"),
    [
        ("pipe", "node-error", "node-unavailable"),
        ("set-up", "sandbox-setup-failed", "node-unavailable"),
        ("dead", "sandbox-dead", "node-unavailable"),
        ("full", "disk-full", "disk-full"),
    ],
)
def test_what_fails_because_the_zygote_died_is_the_nodes(running, error, alive, dead):
    with connect(running.path) as sock:
        told = []
        for is_dead in (False, True):
            running.server._slots.zygote_dead = is_dead
            protocol.send(sock, {"id": 1, "raise": error})
            told.append(protocol.receive(sock)[0]["error"]["code"])
    assert told == [alive, dead]
