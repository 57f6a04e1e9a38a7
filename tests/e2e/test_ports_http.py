"""HTTP to a program in a sandbox: what passes, what does not, and servers that mean harm."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.background import Background
from tests.e2e.host_processes import status_of
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

MIB = 1 << 20
PORT = 8000
SERVER = Path(__file__).parent / "port_server.py"
SETTINGS = {
    "SANDBOXD_PORT_ANSWER_S": "4",
    "SANDBOXD_PORT_CONNECT_S": "3",
    "SANDBOXD_MAX_PORT_CONNECTIONS": "8",
    "SANDBOXD_PORT_MESSAGE_BYTES": str(MIB),
}


@pytest.fixture(scope="module")
def node(leak_check: LeakCheck, python_image: Path) -> Iterator[Daemon]:
    """Bounds that a test can reach."""
    with running_daemon(leak_check, {"python": python_image}, environment=SETTINGS) as daemon:
        daemon.warm_up("python")
        yield daemon


@pytest.fixture(scope="module")
def box(node: Daemon) -> Iterator[str]:
    with node.sandbox("python") as sandbox:
        start_server(node, sandbox, "http")
        yield sandbox


def start_server(node: Daemon, sandbox: str, mode: str, port: int = PORT) -> Background:
    """One that listens already."""
    node.http.put(
        f"/v1/sandboxes/{sandbox}/files?path=/server.py", content=SERVER.read_bytes()
    ).raise_for_status()
    command = ["python3", "/server.py", mode, str(port)]
    process = Background.start(node.http, sandbox, command)
    assert process.read(until=b"ready\n") == b"ready\n"
    return process


def url(sandbox: str, path: str, port: int = PORT) -> str:
    return f"/v1/sandboxes/{sandbox}/ports/{port}/http{path}"


def test_a_request_reaches_the_program_and_tells_it_nothing_of_the_node(node: Daemon, box: str):
    answer = node.http.post(
        url(box, "/echo?q=%2f&x"),
        content=b"hello",
        headers={
            "X-Mine": "1",
            "X-Forwarded-For": "10.1.2.3",
            "Connection": "X-Hop",
            "X-Hop": "1",
            "X-Sandboxd-Authorization": "Basic abc",
        },
    )
    assert answer.status_code == 200
    seen = answer.json()
    assert (seen["method"], seen["target"]) == ("POST", "/echo?q=%2f&x")
    assert (seen["size"], seen["sha256"]) == (5, hashlib.sha256(b"hello").hexdigest())
    headers = dict(seen["headers"])
    assert headers["host"] == f"localhost:{PORT}"
    assert headers["x-mine"] == "1"
    assert headers["authorization"] == "Basic abc"
    assert headers["content-length"] == "5"
    assert set(headers) & {"x-hop", "x-forwarded-for", "x-sandboxd-authorization"} == set()
    told = str(seen)
    assert node.token not in told
    assert "127.0.0.1:" + node.base_url.rpartition(":")[2] not in told


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "PATCH"])
def test_every_method_passes(node: Daemon, box: str, method: str):
    answer = node.http.request(method, url(box, "/echo"))
    assert answer.status_code == 200
    if method != "HEAD":
        assert answer.json()["method"] == method
    else:
        assert answer.content == b""
        assert int(answer.headers["content-length"]) > 0


def test_an_encoded_path_passes_as_it_is(node: Daemon, box: str):
    request = httpx.Request("GET", node.base_url, headers=node.http.headers)
    request.url = httpx.URL(node.base_url).copy_with(
        raw_path=url(box, "/echo").encode() + b"?%00%zz"
    )
    assert node.http.send(request).json()["target"] == "/echo?%00%zz"


def test_the_programs_own_errors_are_told_from_ours(node: Daemon, box: str):
    answer = node.http.get(url(box, "/status"))
    assert (answer.status_code, answer.text) == (418, "teapot")
    assert "x-sandboxd-error" not in answer.headers
    ours = node.http.get(url(box, "/", port=9))
    refusal(ours, 409, "port-closed", "workload")
    assert ours.headers["x-sandboxd-error"] == "port-closed"


def test_an_answers_head_is_cleaned(node: Daemon, box: str):
    answer = node.http.get(url(box, "/redirect"))
    assert answer.status_code == 302
    prefix = url(box, "")
    assert answer.headers["location"] == f"{prefix}/next?a=1"
    assert answer.headers["set-cookie"] == f"a=b; HttpOnly; Path={prefix}/"
    gone = {"x-sandboxd-error", "x-secret", "strict-transport-security"}
    assert gone & set(answer.headers) == set()
    node.http.cookies.clear()


@pytest.mark.parametrize(
    ("path", "status", "content"),
    [
        ("/old", 200, b"until the end"),
        ("/nothing", 204, b""),
        ("/hint", 200, b"after the hint"),
        ("/long", 200, b"good"),
        ("/length-and-chunks", 200, b"good"),
        ("/tiny-chunks", 200, b"a" * 200_000),
        ("/missing", 404, b"not here"),
    ],
)
def test_odd_but_sound_answers(node: Daemon, box: str, path: str, status: int, content: bytes):
    answer = node.http.get(url(box, path))
    assert (answer.status_code, answer.content) == (status, content)


def test_bodies_stream_in_both_directions(node: Daemon, box: str):
    """The program's answer to each piece is read before the next one is sent."""
    host, port = node.base_url.removeprefix("http://").split(":")
    head = f"POST {url(box, '/steps')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {node.token}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode())
        told = b""
        for piece in (b"one", b"two", b"three"):
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            while piece + b"!" not in told:
                data = sock.recv(65536)
                assert data, told
                told += data
        sock.sendall(b"0\r\n\r\n")
        while data := sock.recv(65536):
            told += data
    assert told.startswith(b"HTTP/1.1 200 ")
    assert told.endswith(b"\r\n0\r\n\r\n")


def test_fifty_megabytes_up_and_down_are_exact(node: Daemon, box: str):
    data = random.Random(5).randbytes(50 * MIB)

    def chunks() -> Iterator[bytes]:
        for at in range(0, len(data), 300_001):
            yield data[at : at + 300_001]

    wanted = hashlib.sha256(data).hexdigest()
    for content in (data, chunks()):
        seen = node.http.put(url(box, "/echo"), content=content).json()
        assert (seen["size"], seen["sha256"]) == (len(data), wanted)
    digest = hashlib.sha256()
    with node.http.stream("GET", url(box, "/random?5")) as answer:
        for piece in answer.iter_raw():
            digest.update(piece)
    assert digest.hexdigest() == wanted


def test_an_answer_before_the_whole_request(node: Daemon, box: str):
    answer = node.http.post(url(box, "/early"), content=b"x" * 8 * MIB)
    assert (answer.status_code, answer.content) == (413, b"enough")


@pytest.mark.parametrize(
    "path",
    [
        "/endless-headers",
        "/endless-line",
        "/two-lengths",
        "/split-header",
        "/status-999",
        "/switch",
        "/nonsense",
        "/hang-up",
        "/reset",
    ],
)
def test_what_is_no_http_is_the_workloads_fault(node: Daemon, box: str, path: str):
    refusal(node.http.get(url(box, path)), 409, "port-broken", "workload")


@pytest.mark.parametrize("path", ["/silent", "/dripping-head", "/endless-hints"])
def test_no_answer_in_time(node: Daemon, box: str, path: str):
    refusal(node.http.get(url(box, path)), 409, "port-timeout", "workload")


@pytest.mark.parametrize("path", ["/short", "/huge-chunk", "/no-chunk", "/silent-body"])
def test_an_answer_that_breaks_off_is_not_taken_for_whole(node: Daemon, box: str, path: str):
    with pytest.raises(httpx.RemoteProtocolError):
        node.http.get(url(box, path))


def test_a_client_that_does_not_read_costs_no_memory(node: Daemon, box: str):
    before = int(status_of(node.api_pid)["VmRSS"].split()[0])
    with node.http.stream("GET", url(box, "/flood")) as answer:
        taken = 0
        for piece in answer.iter_raw():
            taken += len(piece)
            if taken > 64 * MIB:
                break
        # Nobody reads now; what the program goes on sending stays in the sandbox.
        refusal(node.http.get(url(box, "/silent")), 409, "port-timeout", "workload")
        after = int(status_of(node.api_pid)["VmRSS"].split()[0])
    assert after - before < 32 * 1024, (before, after)


def test_one_sandboxs_connections_are_bounded(node: Daemon, box: str):
    with node.sandbox("python") as other:
        start_server(node, other, "http")
        with httpx.Client(base_url=node.base_url, headers=node.http.headers) as many:
            held = [
                many.send(many.build_request("GET", url(other, "/flood")), stream=True)
                for _ in range(8)
            ]
            refused = node.http.get(url(other, "/echo"))
            refusal(refused, 409, "too-many-port-connections", "workload")
            # Another sandbox has its own.
            assert node.http.get(url(box, "/echo")).status_code == 200
            for one in held:
                one.close()


def test_a_program_that_takes_no_connection(node: Daemon):
    with node.sandbox("python") as sandbox:
        start_server(node, sandbox, "full")
        codes = set()
        for _ in range(6):  # the first few are the kernel's to take
            answer = node.http.get(url(sandbox, "/"))
            codes.add(refusal(answer, 409, answer.json()["error"]["code"], "workload")["code"])
        assert codes == {"port-timeout"}


def test_ipv6_is_tried_too(node: Daemon):
    with node.sandbox("python") as sandbox:
        start_server(node, sandbox, "http6")
        assert node.http.get(url(sandbox, "/echo")).status_code == 200


def test_ports_of_what_is_not_there(node: Daemon, box: str):
    refusal(node.http.get(url("sb-none", "/")), 404, "sandbox-not-found", "request")
    refusal(node.http.get(url(box, "/", port=0)), 422, "request-invalid", "request")
    refusal(node.http.get(url(box, "/", port=65536)), 422, "request-invalid", "request")


def test_a_sandbox_reaches_no_port_of_another_or_of_the_node(node: Daemon, box: str):
    """Positive control: the same port in the sandbox that listens."""
    with node.sandbox("python") as other:
        refusal(node.http.get(url(other, "/echo")), 409, "port-closed", "workload")
        own = int(node.base_url.rpartition(":")[2])
        refusal(node.http.get(url(other, "/healthz", port=own)), 409, "port-closed", "workload")
    assert node.http.get(url(box, "/echo")).status_code == 200
