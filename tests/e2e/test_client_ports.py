"""Ports of a sandbox through the Python client and the command line."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import AsyncClient, Client
from sandboxd.client.sync import Sandbox
from sandboxd.errors import PortClosed, SandboxDead, Unauthorized
from tests.e2e.test_ports_http import start_server
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

MIB = 1 << 20
RAW, HTTP = 7000, 7002


@pytest.fixture(scope="module")
def node(leak_check: LeakCheck, python_image: Path) -> Iterator[Daemon]:
    with running_daemon(leak_check, {"python": python_image}) as daemon:
        daemon.warm_up("python")
        yield daemon


@pytest.fixture(scope="module")
def served(node: Daemon) -> Iterator[str]:
    with node.sandbox("python") as sandbox:
        start_server(node, sandbox, "raw", RAW)
        start_server(node, sandbox, "http", HTTP)
        yield sandbox


@pytest.fixture
def box(node: Daemon, served: str) -> Iterator[Sandbox]:
    with Client(node.base_url, node.token) as client:
        yield client.connect(served)


def read_all(sock: socket.socket) -> bytes:
    told = bytearray()
    while data := sock.recv(MIB):
        told += data
    return bytes(told)


def test_http(node: Daemon, box: Sandbox):
    with box.http(HTTP) as http:
        seen = http.post("/echo?a=1", content=b"x" * MIB).json()
        assert (seen["target"], seen["size"]) == ("/echo?a=1", MIB)
        assert http.get("/status").status_code == 418
    with box.http(9) as http, pytest.raises(PortClosed):
        http.get("/")


def test_a_tunnel_with_much_in_both_directions(box: Sandbox):
    data = random.Random(11).randbytes(20 * MIB)
    with box.tunnel(RAW) as tunnel:

        def send() -> None:
            tunnel.send(data)
            tunnel.end()

        sender = threading.Thread(target=send)
        sender.start()
        told = b"".join(iter(tunnel.receive, b""))
        sender.join()
    assert told[len(data) :] == b"|%d" % len(data)
    assert hashlib.sha256(told[: len(data)]).digest() == hashlib.sha256(data).digest()
    with pytest.raises(PortClosed):
        box.tunnel(9)


def test_a_tunnel_into_what_is_gone(node: Daemon, box: Sandbox):
    sandbox = node.create("python")
    start_server(node, sandbox, "raw", RAW)
    with Client(node.base_url, node.token) as client, client.connect(sandbox).tunnel(RAW) as tunnel:
        node.delete(sandbox)
        with pytest.raises(SandboxDead):
            tunnel.receive()
    with Client(node.base_url, "no-such-token-at-all") as client:
        stranger = Sandbox(client, box.info)
        with pytest.raises(Unauthorized):
            stranger.tunnel(RAW)


def test_a_forward(box: Sandbox):
    data = os.urandom(2 * MIB)
    with box.forward(RAW) as forward:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", forward.port), timeout=30) as sock:
                sender = threading.Thread(
                    target=lambda s: (s.sendall(data), s.shutdown(1)), args=(sock,)
                )
                sender.start()
                assert read_all(sock) == data + b"|%d" % len(data)
                sender.join()
        assert forward.last_error is None
        idle = socket.create_connection(("127.0.0.1", forward.port), timeout=30)
        idle.sendall(b"x")
        assert idle.recv(1) == b"x"
    with idle:
        assert idle.recv(1) == b""  # closed with the forward
    with box.forward(9) as forward:
        with socket.create_connection(("127.0.0.1", forward.port), timeout=30) as sock:
            assert sock.recv(1) == b""
    assert isinstance(forward.last_error, PortClosed)


def test_the_same_in_asyncio(node: Daemon, served: str):
    async def use() -> None:
        async with AsyncClient(node.base_url, node.token) as client:
            box = await client.connect(served)
            async with box.http(HTTP) as http:
                seen = (await http.post("/echo", content=b"x" * MIB)).json()
                assert seen["size"] == MIB
            async with box.http(9) as http:
                with pytest.raises(PortClosed):
                    await http.get("/")
            data = os.urandom(5 * MIB)
            async with await box.tunnel(RAW) as tunnel:

                async def send() -> None:
                    await tunnel.send(data)
                    await tunnel.end()

                sending = asyncio.create_task(send())
                told = bytearray()
                while piece := await tunnel.receive():
                    told += piece
                await sending
                assert told == data + b"|%d" % len(data)
            async with await box.forward(RAW) as forward:
                reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
                writer.write(b"hello")
                writer.write_eof()
                assert await reader.read() == b"hello|5"
                writer.close()
                await writer.wait_closed()

    asyncio.run(use())


def test_port_forward_on_the_command_line(node: Daemon, served: str):
    command = [sys.executable, "-m", "sandboxd", "port-forward", served, f"0:{RAW}"]
    command += ["--url", node.base_url, "--token-file", str(node.state_dir / "token")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SANDBOXD_")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "leads to port" in line, line + process.stderr.read()
        port = int(line.split("127.0.0.1:")[1].split()[0])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"hello")
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b"hello|5"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
