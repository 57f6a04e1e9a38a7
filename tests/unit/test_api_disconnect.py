"""A client that goes away takes its command with it: over a real socket and a real server."""

import json
import os
import socket
import threading
import time

import pytest
import uvicorn

from sandboxd.api.app import create_app
from sandboxd.config import load_config
from sandboxd.launcher.client import LauncherClient
from sandboxd.runtime.manager import Runtime
from tests.unit.fakes_launcher import FakeLauncher, default_store

TOKEN = "test-token-0123456789"


def until(condition):
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=["uvloop", "asyncio"])
def server(request, tmp_path, file_program):
    """``(port, launcher)``"""
    (tmp_path / "root").mkdir()
    config = load_config(
        env={}, overrides={"state_dir": str(tmp_path), "runtime_dir": str(tmp_path)}
    )
    launcher = FakeLauncher(config.launcher_socket, tmp_path / "root", file_program)
    runtime = Runtime(config, LauncherClient(config.launcher_socket), default_store())
    app = create_app(config, runtime, token=TOKEN)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, loop=request.param, log_level="warning", access_log=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: server.started and runtime.ready)
    yield listener.getsockname()[1], launcher
    server.should_exit = True
    thread.join(20)
    listener.close()
    launcher.close()


def send(port, method, path, body=b"", length=None):
    """A request on a connection of its own, its answer not read."""
    sock = socket.create_connection(("127.0.0.1", port), 10)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    sock.sendall(head.encode() + body)
    return sock


def answer_of(sock):
    with sock, sock.makefile("rb") as file:
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, json.loads(file.read(length)) if length else None


def make(port):
    _, sandbox = answer_of(send(port, "POST", "/v1/sandboxes", b'{"image": "debian"}'))
    return sandbox["id"]


def test_a_command_whose_client_has_gone_is_killed(server, tmp_path):
    port, _ = server
    sandbox = make(port)
    path = tmp_path / "pid"
    command = f"echo $$ > {path}.new; mv {path}.new {path}; trap '' TERM HUP; sleep 60 & wait"
    body = json.dumps({"command": command}).encode()
    sock = send(port, "POST", f"/v1/sandboxes/{sandbox}/exec", body)
    until(path.exists)
    pid = int(path.read_text())
    assert os.path.exists(f"/proc/{pid}")
    sock.close()
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    body = b'{"command": ["/bin/echo", "still"]}'
    status, result = answer_of(send(port, "POST", f"/v1/sandboxes/{sandbox}/exec", body))
    assert (status, result["stdout"]) == (200, "still\n")


def test_an_upload_that_breaks_off_changes_nothing(server, tmp_path):
    port, launcher = server
    sandbox = make(port)
    (tmp_path / "root/f").write_bytes(b"old")
    url = f"/v1/sandboxes/{sandbox}/files?path=/f"
    sock = send(port, "PUT", url, b"n" * 100_000, length=200_000)
    until(launcher.pid1s[sandbox][-1].files_under_way)
    sock.close()
    until(lambda: not launcher.pid1s[sandbox][-1].files_under_way())
    assert os.listdir(tmp_path / "root") == ["f"]
    assert (tmp_path / "root/f").read_bytes() == b"old"


def test_a_download_that_nobody_reads_is_let_go(server, tmp_path):
    port, _ = server
    sandbox = make(port)
    with open(tmp_path / "root/f", "wb") as file:
        file.truncate(300 << 20)
    before = len(os.listdir("/proc/self/fd"))
    sock = send(port, "GET", f"/v1/sandboxes/{sandbox}/files?path=/f")
    assert sock.recv(100).startswith(b"HTTP/1.1 200")
    sock.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_large_file_comes_whole(server, tmp_path):
    port, _ = server
    sandbox = make(port)
    data = os.urandom(20_000_000)
    (tmp_path / "root/f").write_bytes(data)
    sock = send(port, "GET", f"/v1/sandboxes/{sandbox}/files?path=/f")
    with sock, sock.makefile("rb") as file:
        lines = []
        while (line := file.readline()) != b"\r\n":
            lines.append(line.lower())
        assert b"content-length: 20000000\r\n" in lines
        got = file.read(20_000_000)
    assert got == data
