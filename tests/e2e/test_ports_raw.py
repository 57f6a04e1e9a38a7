"""WebSockets and raw TCP to a program in a sandbox, and what ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect as aio_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.e2e.host_processes import status_of, wait_for
from tests.e2e.test_ports_http import SETTINGS, start_server, url
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.fixtures import StartDaemon
from tests.framework.leaks import LeakCheck

MIB = 1 << 20
RAW, WEB, HTTP = 7000, 7001, 7002


@pytest.fixture(scope="module")
def node(leak_check: LeakCheck, python_image: Path) -> Iterator[Daemon]:
    with running_daemon(leak_check, {"python": python_image}, environment=SETTINGS) as daemon:
        daemon.warm_up("python")
        yield daemon


@pytest.fixture(scope="module")
def box(node: Daemon) -> Iterator[str]:
    with node.sandbox("python") as sandbox:
        start_server(node, sandbox, "raw", RAW)
        start_server(node, sandbox, "websocket", WEB)
        yield sandbox


@contextlib.contextmanager
def opened(node: Daemon, path: str, **options: Any) -> Iterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {node.token}"}
    address = node.base_url.replace("http", "ws", 1) + path
    options = {"max_size": None, "compression": None, "proxy": None, **options}
    with connect(address, additional_headers=headers, **options) as connection:
        yield connection


def tunnel_path(sandbox: str, port: int = RAW) -> str:
    return f"/v1/sandboxes/{sandbox}/ports/{port}/tunnel"


def refused(node: Daemon, path: str, **options: Any) -> tuple[int, str, str]:
    """Status, code and cause of the answer to a handshake."""
    with pytest.raises(InvalidStatus) as caught, opened(node, path, **options):
        pass
    answer = caught.value.response
    error = json.loads(answer.body or b"")["error"]
    assert error["retryable"] is False
    assert answer.headers["X-Sandboxd-Error"] == error["code"]
    return answer.status_code, error["code"], error["cause"]


def open_ports(daemon: Daemon) -> int:
    """Sockets of the API process that belong to another network namespace: its own see none of
    them in /proc/net."""
    return len(sockets_of(daemon) - listed_sockets())


def sockets_of(daemon: Daemon) -> set[str]:
    names = set()
    for entry in os.scandir(f"/proc/{daemon.api_pid}/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(entry.path)
            if name.startswith("socket:"):
                names.add(name[8:-1])
    return names


def listed_sockets() -> set[str]:
    listed = set()
    for table, column in (("tcp", 9), ("tcp6", 9), ("unix", 6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            listed.add(line.split()[column])
    return listed


# --- the tunnel ----------------------------------------------------------------------------------


def test_fifty_megabytes_through_a_tunnel_are_exact_and_half_closed(node: Daemon, box: str):
    data = random.Random(7).randbytes(50 * MIB)

    async def echo() -> tuple[bytes, int]:
        address = node.base_url.replace("http", "ws", 1) + tunnel_path(box)
        headers = {"Authorization": f"Bearer {node.token}"}
        async with aio_connect(address, additional_headers=headers, proxy=None) as tunnel:

            async def send() -> None:
                for at in range(0, len(data), 123_457):
                    await tunnel.send(data[at : at + 123_457])
                await tunnel.send("eof")

            sending = asyncio.create_task(send())
            told = bytearray()
            while (piece := await tunnel.recv()) != "eof":
                assert isinstance(piece, bytes)
                told += piece
            await sending
            with pytest.raises(ConnectionClosed) as closed:
                await tunnel.recv()
            assert closed.value.rcvd is not None
            return bytes(told), closed.value.rcvd.code

    told, code = asyncio.run(echo())
    # The tail is what the program says after it has seen the end of what came.
    assert told[len(data) :] == b"|%d" % len(data)
    assert hashlib.sha256(told[: len(data)]).digest() == hashlib.sha256(data).digest()
    assert code == 1000


def test_a_tunnel_that_is_not_read_costs_no_memory(node: Daemon, box: str):
    """The client sends and never reads, until nothing is taken any more."""
    before = int(status_of(node.api_pid)["VmRSS"].split()[0])
    host, port = node.base_url.removeprefix("http://").split(":")
    head = f"GET {tunnel_path(box)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {node.token}\r\n"
    head += "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    # RFC 6455, 5.2: a final binary frame of 65536 bytes, masked with zeros.
    frame = b"\x82\xff" + (65536).to_bytes(8, "big") + bytes(4) + b"x" * 65536
    with socket.create_connection((host, int(port)), timeout=1.5) as sock:
        sock.sendall(head.encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 101 ")
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 512 * MIB:
                sock.sendall(frame)
                sent += 65536
        after = int(status_of(node.api_pid)["VmRSS"].split()[0])
    assert after - before < 32 * 1024, (before, after, sent)


def test_text_in_a_tunnel_is_refused(node: Daemon, box: str):
    with opened(node, tunnel_path(box)) as tunnel:
        tunnel.send("hello")
        with pytest.raises(ConnectionClosed) as closed:
            tunnel.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "request-invalid")


def test_refusals(node: Daemon, box: str):
    assert refused(node, tunnel_path(box, 9)) == (409, "port-closed", "workload")
    assert refused(node, url(box, "/", 9)) == (409, "port-closed", "workload")
    assert refused(node, tunnel_path("sb-none")) == (404, "sandbox-not-found", "request")
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(node.base_url.replace("http", "ws", 1) + tunnel_path(box), proxy=None),
    ):
        pass
    assert caught.value.response.status_code == 401


# --- WebSockets ----------------------------------------------------------------------------------


def test_messages_pass_both_ways(node: Daemon, box: str):
    with opened(node, url(box, "/", WEB), subprotocols=["a", "b"]) as ws:
        assert ws.subprotocol == "b"
        for message in ("grüße", b"\0\xff", "", b"", "x" * 900_000, os.urandom(MIB)):
            ws.send(message)
            assert ws.recv() == message
        ws.send(["in ", "pieces"])
        assert ws.recv() == "in pieces"


def test_what_a_program_sees_of_a_websocket(node: Daemon, box: str):
    with opened(node, url(box, "/head?q=told-to-nobody", WEB)) as ws:
        headers = {name.lower(): value for name, value in json.loads(ws.recv())}
    assert headers["host"] == f"localhost:{WEB}"
    assert "authorization" not in headers
    assert "told-to-nobody" not in node.log_file.read_text()


def test_the_programs_close_reaches_the_client(node: Daemon, box: str):
    with opened(node, url(box, "/close", WEB)) as ws:
        with pytest.raises(ConnectionClosed) as closed:
            ws.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, "as asked")


@pytest.mark.parametrize("path", ["/large", "/drop"])
def test_a_websocket_that_breaks_the_rules_is_closed(node: Daemon, box: str, path: str):
    with opened(node, url(box, path, WEB)) as ws:
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                ws.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code in (1001, 1009)


def test_a_program_that_speaks_no_websocket(node: Daemon):
    with node.sandbox("python") as sandbox:
        start_server(node, sandbox, "http", HTTP)
        for path in ("/echo", "/nonsense", "/switch", "/hang-up", "/endless-headers"):
            assert refused(node, url(sandbox, path, HTTP)) == (409, "port-broken", "workload")
        assert refused(node, url(sandbox, "/silent", HTTP)) == (409, "port-timeout", "workload")


# --- what ends them ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "reset", "pause", "kill"])
def test_what_ends_or_stops_a_sandbox_ends_its_connections(node: Daemon, how: str):
    before = open_ports(node)
    sandbox = node.create("python")
    start_server(node, sandbox, "raw", RAW)
    start_server(node, sandbox, "websocket", WEB)
    start_server(node, sandbox, "http", HTTP)
    with (
        opened(node, tunnel_path(sandbox)) as tunnel,
        opened(node, url(sandbox, "/", WEB)) as ws,
        node.http.stream("GET", url(sandbox, "/flood", HTTP)) as answer,
    ):
        tunnel.send(b"x")
        assert tunnel.recv() == b"x"
        assert open_ports(node) == before + 3
        if how == "delete":
            node.delete(sandbox)
            code = "sandbox-dead"
        elif how == "kill":
            node.exec(sandbox, "kill -9 -1")  # all but PID 1: the programs are gone
            code = "port-broken"
        else:
            node.http.post(f"/v1/sandboxes/{sandbox}/{how}").raise_for_status()
            code = {"reset": "sandbox-reset", "pause": "sandbox-paused"}[how]
        for one in (tunnel, ws):
            with pytest.raises(ConnectionClosed) as closed:
                while one.recv() != "eof":
                    pass
                one.send("eof")
                one.recv()
            assert closed.value.rcvd is not None
            if how != "kill":
                assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, code)
        with pytest.raises(Exception, match=r"closed|incomplete|peer"):
            for _ in answer.iter_raw():
                pass
    wait_for(lambda: open_ports(node) == before, "the end of its sockets")
    if how == "pause":
        refusal = node.http.get(url(sandbox, "/echo", HTTP)).json()["error"]
        assert refusal["code"] == "sandbox-paused"
        node.http.post(f"/v1/sandboxes/{sandbox}/resume").raise_for_status()
        assert node.http.get(url(sandbox, "/echo", HTTP)).status_code == 200
    if how == "reset":
        error = node.http.get(url(sandbox, "/echo", HTTP)).json()["error"]
        assert error["code"] == "port-closed"
    node.delete(sandbox)


def test_a_client_that_goes_away_leaves_no_socket(node: Daemon, box: str):
    before = open_ports(node)
    for _ in range(20):
        with opened(node, tunnel_path(box)) as tunnel:
            tunnel.send(b"x")
            tunnel.socket.close()
    wait_for(lambda: open_ports(node) == before, "the end of their sockets")


def test_use_of_a_port_counts_as_use_of_the_sandbox(node: Daemon):
    with node.sandbox("python", idle_timeout_s=1.5) as sandbox:
        start_server(node, sandbox, "raw", RAW)
        # A background process counts as well: it must have none.
        node.exec(
            sandbox,
            "python3 /server.py raw 7009 </dev/null >/tmp/out 2>&1 & "
            "until grep -q ready /tmp/out; do sleep 0.05; done",
        )
        for process in node.http.get(f"/v1/sandboxes/{sandbox}/processes").json()["processes"]:
            node.http.delete(f"/v1/sandboxes/{sandbox}/processes/{process['id']}")
        with opened(node, tunnel_path(sandbox, 7009)) as tunnel:
            until = time.monotonic() + 3.5
            while time.monotonic() < until:
                tunnel.send(b"x")
                assert tunnel.recv() == b"x"
                time.sleep(0.1)
            # And then not: an open connection alone keeps nothing alive.
            with pytest.raises(ConnectionClosed):
                tunnel.recv(timeout=20)
        gone = f"/v1/sandboxes/{sandbox}"
        wait_for(lambda: node.http.get(gone).status_code == 404, "the end of its deletion")


def test_a_silent_tunnel_is_ended(start_daemon: StartDaemon, python_image: Path):
    settings = {"SANDBOXD_PORT_IDLE_S": "1"}
    daemon = start_daemon(images={"python": python_image}, environment=settings)
    with daemon.sandbox("python") as sandbox:
        start_server(daemon, sandbox, "raw", RAW)
        with opened(daemon, tunnel_path(sandbox)) as tunnel:
            with pytest.raises(ConnectionClosed) as closed:
                tunnel.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.reason == "port-timeout"
