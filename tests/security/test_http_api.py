"""The HTTP API from the outside: who may ask, and what is asked too much."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time

import httpx
import pytest

from sandboxd.config import Config
from tests.framework import times
from tests.framework.daemon import Daemon
from tests.security.probing import Inside

ROUTES = [
    ("GET", "/v1/sandboxes"),
    ("POST", "/v1/sandboxes"),
    ("GET", "/v1/sandboxes/x"),
    ("DELETE", "/v1/sandboxes/x"),
    ("POST", "/v1/sandboxes/x/exec"),
    ("GET", "/v1/sandboxes/x/files?path=/etc/passwd"),
    ("PUT", "/v1/sandboxes/x/files?path=/etc/passwd"),
    ("GET", "/v1/images"),
    ("POST", "/v1/images"),
    ("GET", "/v1/node"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("OPTIONS", "/v1/sandboxes"),
    ("TRACE", "/v1/sandboxes"),
]
TOKENS = {
    "none": None,
    "empty": "",
    "bearer alone": "Bearer",
    "wrong": "Bearer " + "A" * 43,
    "basic": "Basic dXNlcjpwYXNz",
    "no scheme": "{token}",
    "prefix": "Bearer {prefix}",
    "longer": "Bearer {token}A",
    "upper case": "Bearer {upper}",
    "twice": "Bearer {token} {token}",
    "quoted": 'Bearer "{token}"',
    "null": "Bearer null",
}


@pytest.fixture
def stranger(daemon: Daemon):
    with httpx.Client(base_url=daemon.base_url, timeout=times.scaled(30)) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_route_needs_the_token(method: str, path: str, stranger: httpx.Client) -> None:
    answer = stranger.request(method, path)
    assert answer.status_code == 401, answer.text
    assert "sandboxes" not in answer.text


def test_the_page_without_a_token_says_nothing(stranger: httpx.Client, daemon: Daemon) -> None:
    """It is the same for all nodes at all times; what it shows, it asks for with the token."""
    with daemon.sandbox("busybox", name="told-to-nobody") as sandbox:
        page = stranger.get("/").text
    assert page == stranger.get("/").text
    assert "<title>" in page
    for secret in (sandbox, "told-to-nobody", daemon.token, "busybox"):
        assert secret not in page


@pytest.mark.parametrize("kind", TOKENS)
def test_token_is_taken_whole_or_not_at_all(
    kind: str, stranger: httpx.Client, daemon: Daemon
) -> None:
    token = daemon.token
    form = TOKENS[kind]
    headers = {}
    if form is not None:
        headers["Authorization"] = form.format(
            token=token, prefix=token[:-1], upper=token.swapcase()
        )
    assert stranger.get("/v1/sandboxes", headers=headers).status_code == 401


def test_two_authorizations_are_none(stranger: httpx.Client, daemon: Daemon) -> None:
    headers = [("Authorization", "Bearer x"), ("Authorization", f"Bearer {daemon.token}")]
    assert stranger.get("/v1/sandboxes", headers=headers).status_code == 401


def test_token_is_not_taken_from_elsewhere(stranger: httpx.Client, daemon: Daemon) -> None:
    token = daemon.token
    for answer in (
        stranger.get("/v1/sandboxes", params={"token": token, "access_token": token}),
        stranger.get("/v1/sandboxes", headers={"X-Api-Key": token}),
        stranger.get("/v1/sandboxes", headers={"Cookie": f"Authorization=Bearer {token}"}),
    ):
        assert answer.status_code == 401


@pytest.mark.parametrize(
    "path",
    ["//healthz/../v1/sandboxes", "/healthz/../v1/sandboxes", "/healthz%2f..%2fv1/sandboxes",
     "/healthz;/v1/sandboxes", "/v1/sandboxes/", "/V1/sandboxes", "/healthz/v1/sandboxes"],
)  # fmt: skip
def test_path_does_not_get_past_the_token(path: str, daemon: Daemon) -> None:
    raw = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    assert b" 401 " in _raw(daemon, raw).split(b"\r\n")[0]


def test_control_the_token_opens(daemon: Daemon) -> None:
    assert daemon.http.get("/v1/sandboxes").status_code == 200
    assert httpx.get(f"{daemon.base_url}/healthz").status_code == 200


def test_token_file_is_closed(daemon: Daemon) -> None:
    status = (daemon.state_dir / "token").stat()
    assert status.st_mode & 0o077 == 0
    assert len(daemon.token) >= 43  # 256 bits in base64


def test_token_is_in_no_command_line_or_environment_or_log(daemon: Daemon) -> None:
    token = daemon.token
    for pid in daemon.refresh_family():
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
                assert token.encode() not in file.read()
    assert token not in daemon.log_file.read_text(errors="replace")


def test_memory_of_the_api_is_closed_to_its_own_account(daemon: Daemon) -> None:
    """It is not dumpable: /proc/PID/mem then belongs to root."""
    assert os.stat(f"/proc/{daemon.api_pid}/mem").st_uid == 0
    assert os.stat(f"/proc/{daemon.api_pid}/environ").st_uid == 0
    assert os.stat(f"/proc/{daemon.api_pid}").st_uid != 0  # the control: the account is another


IDS = [
    "..", "../..", "%2e%2e", "..%2f..%2fetc", "sb-", "*", "x" * 4000, "sb-%00", "a/b", "%ff", "-1",
    "'; drop", "${id}", "\u202e",
]  # fmt: skip


@pytest.mark.parametrize("identifier", IDS)
def test_made_up_id_is_nobodys(identifier: str, daemon: Daemon) -> None:
    for tail in ("", "/exec", "/files?path=/etc/passwd"):
        method = "POST" if tail == "/exec" else "GET"
        content = b'{"command": ["/bin/id"]}' if tail == "/exec" else None
        answer = daemon.http.request(method, f"/v1/sandboxes/{identifier}{tail}", content=content)
        assert answer.status_code in (200, 404, 405, 414, 422), answer.text
        assert "uid=" not in answer.text
        if answer.headers["content-type"].startswith("text/html"):  # "../.." leads to the page
            assert (answer.url.path, identifier) == ("/", "../..")
        elif answer.status_code == 200:  # the list itself, which "." and ".." lead to
            assert set(answer.json()) == {"sandboxes", "next"}


def test_ids_are_not_guessable(daemon: Daemon) -> None:
    ids = []
    for _ in range(8):
        with daemon.sandbox("busybox") as name:
            ids.append(name)
    assert len(set(ids)) == 8
    for name in ids:
        random = name.rpartition("-")[2]
        assert re.fullmatch(r"[a-z2-7]{26,}", random), name  # 5 bits each: 128 and more
    assert len({name.rpartition("-")[2][:4] for name in ids}) > 1


@pytest.mark.parametrize(
    "image",
    [
        "../secret",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "busybox.sif/..",
        "\0",
        "x" * 300,
        "-",
        "~",
        "%2e",
    ],
)
def test_image_name_is_no_path(image: str, daemon: Daemon) -> None:
    for path, body in (("/v1/sandboxes", {"image": image}), ("/v1/images", {"image": image})):
        answer = daemon.http.post(path, json=body)
        assert answer.status_code in (404, 422), answer.text


def test_image_that_is_a_link_out_of_the_store_is_not_followed_blindly(daemon: Daemon) -> None:
    link = daemon.images_dir / "outside.sif"
    link.symlink_to("/etc/shadow")
    try:
        answer = daemon.http.post("/v1/images", json={"image": "outside"})
        assert answer.status_code in (404, 422, 503), answer.text
        assert "root:" not in answer.text
    finally:
        link.unlink()


BODIES = {
    "not json": b"{",
    "not an object": b"[]",
    "nan": b'{"image": "busybox", "ttl_s": NaN}',
    "infinite": b'{"image": "busybox", "ttl_s": 1e999}',
    "negative": b'{"image": "busybox", "limits": {"memory_mb": -1}}',
    "huge number": b'{"image": "busybox", "limits": {"memory_mb": 1e30}}',
    "beyond 64 bits": b'{"image": "busybox", "limits": {"pids": 99999999999999999999}}',
    "string for a number": b'{"image": "busybox", "limits": {"pids": "64"}}',
    "unknown field": b'{"image": "busybox", "privileged": true}',
    "unknown limit": b'{"image": "busybox", "limits": {"oom": false}}',
    "zero in a name": b'{"image": "busybox", "hostname": "a\\u0000b"}',
    "path in a name": b'{"image": "busybox", "hostname": "../../etc"}',
    "zero in a variable": b'{"image": "busybox", "env": {"A": "x\\u0000y"}}',
    "equals in a variable": b'{"image": "busybox", "env": {"A=B": "x"}}',
    "relative directory": b'{"image": "busybox", "workdir": "work"}',
    "user with a line": b'{"image": "busybox", "user": "root\\nagent"}',
    "deep": b'{"image": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "surrogate": b'{"image": "busybox", "name": "\\ud800"}',
    "not utf-8": b'{"image": "\xff\xfe"}',
}


@pytest.mark.parametrize("kind", BODIES)
def test_body_is_refused(kind: str, daemon: Daemon) -> None:
    before = len(daemon.http.get("/v1/sandboxes").json()["sandboxes"])
    answer = daemon.http.post("/v1/sandboxes", content=BODIES[kind])
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["cause"] == "request"
    assert len(daemon.http.get("/v1/sandboxes").json()["sandboxes"]) == before


def _raw(daemon: Daemon, data: bytes, timeout_s: float = 10) -> bytes:
    """Send bytes; what comes back until the other end closes or is silent."""
    host, _, port = daemon.base_url.removeprefix("http://").partition(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                got += part
    return got


def test_header_flood_is_cut_off(daemon: Daemon) -> None:
    flood = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X-Flood: " + b"x" * (1 << 20) + b"\r\n"
    answer = _raw(daemon, flood * 4 + b"\r\n", 5)
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert daemon.http.get("/healthz").status_code == 200


def test_body_that_says_it_is_huge_is_not_read(stranger: httpx.Client, daemon: Daemon) -> None:
    for headers in ({}, {"Authorization": f"Bearer {daemon.token}"}):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n{lines}"
        answer = _raw(daemon, head.encode() + b"Connection: close\r\n\r\n", 5).split(b"\r\n")[0]
        assert b" 401 " in answer or b" 413 " in answer, answer


def test_body_that_grows_unsaid_is_cut_off(daemon: Daemon) -> None:
    def grow():
        for _ in range(Config().max_body_bytes // (1 << 20) + 8):
            yield b" " * (1 << 20)

    with httpx.Client(base_url=daemon.base_url, timeout=times.scaled(60)) as client:
        headers = {"Authorization": f"Bearer {daemon.token}"}
        try:
            status = client.post("/v1/sandboxes", content=grow(), headers=headers).status_code
        except httpx.TransportError:
            status = 413  # closed on it
    assert status == 413
    assert daemon.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "smuggled",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 60\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
    ],
)
def test_ambiguous_length_smuggles_nothing(smuggled: bytes, daemon: Daemon) -> None:
    """A second request behind the first one's body must not be taken with its token."""
    inner = b"GET /v1/node HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\n"
    head += f"Authorization: Bearer {daemon.token}\r\n".encode()
    answer = _raw(daemon, head + smuggled + b"\r\n0\r\n\r\n" + inner, 3)
    assert b"max_sandboxes" not in answer


def test_slow_client_does_not_hold_others_up(daemon: Daemon, standing: str) -> None:
    host, _, port = daemon.base_url.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            connection = socket.create_connection((host, int(port)), 5)
            stack.callback(connection.close)
            connection.sendall(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")
        started = time.monotonic()
        assert daemon.exec(standing, ["/bin/true"])["exit_code"] == 0
        assert time.monotonic() - started < 10


def test_errors_tell_nothing_of_the_daemon(daemon: Daemon, as_root: Inside) -> None:
    answers = [
        daemon.http.get("/v1/sandboxes/nobody"),
        daemon.http.post("/v1/sandboxes", json={"image": "nobody"}),
        daemon.http.post("/v1/sandboxes", content=b"{"),
        daemon.http.get(f"/v1/sandboxes/{as_root.sandbox}/files", params={"path": "/nobody"}),
        daemon.http.post(f"/v1/sandboxes/{as_root.sandbox}/exec", json={"command": [], "x": 1}),
    ]
    for answer in answers:
        assert answer.status_code >= 400
        text = json.dumps(answer.json())
        for word in (
            "Traceback",
            ".py",
            str(daemon.state_dir),
            str(daemon.images_dir),
            daemon.token,
        ):
            assert word not in text
        assert "server" not in {name.lower() for name in answer.headers}
