"""HTTP itself: who is let in, what errors look like, what the OpenAPI document promises."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandboxd.config import Config
from tests.e2e.refusals import refusal
from tests.e2e.restarts import started_again
from tests.framework.daemon import Daemon, DaemonError

ROUTES = [
    ("GET", "/v1/node"),
    ("GET", "/v1/images"),
    ("POST", "/v1/images"),
    ("GET", "/v1/sandboxes"),
    ("POST", "/v1/sandboxes"),
    ("GET", "/v1/sandboxes/x"),
    ("DELETE", "/v1/sandboxes/x"),
    ("POST", "/v1/sandboxes/x/exec"),
    ("GET", "/v1/sandboxes/x/files?path=/x"),
    ("PUT", "/v1/sandboxes/x/files?path=/x"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
    ("GET", "/docs"),
    ("OPTIONS", "/v1/sandboxes"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_is_open_without_the_token(daemon: Daemon, method: str, path: str):
    token = daemon.token
    wrong = [
        {},
        {"Authorization": ""},
        {"Authorization": token},
        {"Authorization": f"Basic {token}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": f"Bearer {token.swapcase()}"},
        {"Cookie": f"token={token}"},
        {"X-Api-Key": token},
    ]
    for headers in wrong:
        answer = httpx.request(method, daemon.base_url + path, headers=headers)
        refusal(answer, 401, "unauthorized", "request")
        assert answer.headers["WWW-Authenticate"].lower().startswith("bearer")
    two = httpx.Headers([("Authorization", f"Bearer {token}"), ("Authorization", "Bearer x")])
    answer = httpx.request(method, daemon.base_url + path, headers=two)
    refusal(answer, 401, "unauthorized", "request")
    in_query = httpx.request(method, daemon.base_url + path, params={"token": token})
    refusal(in_query, 401, "unauthorized", "request")


def test_the_scheme_may_be_written_in_any_case(daemon: Daemon):
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} {daemon.token}"}
        assert httpx.get(f"{daemon.base_url}/v1/node", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_token_and_tells_nothing(daemon: Daemon, path: str):
    answer = httpx.get(daemon.base_url + path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_the_token_is_its_owners_alone(daemon: Daemon):
    status = (daemon.state_dir / "token").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_uid != 0
    assert len(daemon.token) >= 43  # 256 bits in base64


def test_the_token_is_kept_over_a_restart_and_one_that_others_read_is_refused(start_daemon: Any):
    daemon = start_daemon()
    token = daemon.token
    daemon.process.terminate()
    daemon.process.wait(30)
    with started_again(daemon) as again:
        assert again.token == token
    (daemon.state_dir / "token").chmod(0o644)
    with pytest.raises(DaemonError, match="token"), started_again(daemon):
        pass


def test_errors_of_the_router_look_like_all_others(daemon: Daemon):
    refusal(daemon.http.get("/v1/nothing"), 404, "route-not-found", "request")
    refusal(daemon.http.patch("/v1/sandboxes"), 405, "method-not-allowed", "request")
    refusal(daemon.http.post("/healthz"), 405, "method-not-allowed", "request")
    refusal(daemon.http.get("/v1/sandboxes/"), 404, "route-not-found", "request")


def test_a_body_that_is_too_large_is_refused_before_it_is_read(daemon: Daemon):
    host, _, port = daemon.base_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = (
            f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.token}\r\n"
            f"Content-Length: {1 << 40}\r\n\r\n"
        )
        connection.sendall(head.encode())
        answer = b""
        while b"}}" not in answer and (part := connection.recv(65_536)):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"body-too-large"' in answer
    chunks = (b" " * (1 << 20) for _ in range(Config().max_body_bytes // (1 << 20) + 8))
    refusal(daemon.http.post("/v1/sandboxes", content=chunks), 413, "body-too-large", "request")


def test_what_is_no_http_does_no_harm(daemon: Daemon):
    host, _, port = daemon.base_url.removeprefix("http://").rpartition(":")
    nonsense = [
        b"\0" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/node HTTP/1.1\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"PUT /v1/sandboxes/x/files HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"GET /v1/node HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ]
    for data in nonsense:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(65_536):
                answer += part
            assert not answer.startswith(b"HTTP/1.1 2"), data[:60]
            assert b"Traceback" not in answer
    assert daemon.http.get("/healthz").status_code == 200


def resolve(document: dict[str, Any], reference: str) -> Any:
    node: Any = document
    for part in reference.removeprefix("#/").split("/"):
        node = node[part.replace("~1", "/").replace("~0", "~")]
    return node


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in references(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in references(value)]
    return []


def test_the_openapi_document_holds_together(daemon: Daemon):
    document = daemon.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for reference in references(document):
        assert resolve(document, reference), reference
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    wanted = {
        ("POST", "/v1/sandboxes"), ("GET", "/v1/sandboxes"),
        ("GET", "/v1/sandboxes/{sandbox_id}"), ("DELETE", "/v1/sandboxes/{sandbox_id}"),
        ("POST", "/v1/sandboxes/{sandbox_id}/exec"),
        ("GET", "/v1/sandboxes/{sandbox_id}/files"), ("PUT", "/v1/sandboxes/{sandbox_id}/files"),
        ("GET", "/v1/images"), ("POST", "/v1/images"), ("GET", "/v1/node"),
        ("GET", "/healthz"), ("GET", "/readyz"),
    }  # fmt: skip
    assert wanted <= set(operations)
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    for (_, path), operation in operations.items():
        assert operation["responses"]
        if path not in ("/", "/healthz", "/readyz"):
            assert operation["security"] == [{"bearer": []}]
            assert "401" in operation["responses"]
        for name in (part[1:-1] for part in path.split("/") if part.startswith("{")):
            assert name in {p["name"] for p in operation["parameters"] if p["in"] == "path"}


def test_answers_have_the_fields_that_the_document_says(daemon: Daemon, sandbox: str):
    document = daemon.http.get("/openapi.json").json()
    result = daemon.exec(sandbox, ["true"])
    seen = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
    node = daemon.http.get("/v1/node").json()
    written = daemon.http.put(
        f"/v1/sandboxes/{sandbox}/files", params={"path": "/tmp/x"}, content=b""
    ).json()
    for name, answer in (
        ("ExecAnswer", result), ("SandboxAnswer", seen), ("NodeAnswer", node),
        ("FileAnswer", written),
    ):  # fmt: skip
        schema = document["components"]["schemas"][name]
        assert set(answer) == set(schema["properties"]), name
        assert set(schema.get("required", [])) <= set(answer), name


def test_examples_of_the_document_work(daemon: Daemon):
    document = daemon.http.get("/openapi.json").json()
    body = document["paths"]["/v1/sandboxes"]["post"]["requestBody"]["content"]["application/json"]
    schema = body["schema"]
    while "$ref" in schema:
        schema = resolve(document, schema["$ref"])
    (example,) = schema["examples"]
    with daemon.sandbox("busybox", **{k: v for k, v in example.items() if k != "image"}) as sandbox:
        path = "/v1/sandboxes/{sandbox_id}/exec"
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = content["schema"]
        while "$ref" in schema:
            schema = resolve(document, schema["$ref"])
        for example in schema["examples"]:
            answer = daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json=example)
            assert answer.status_code == 200, answer.text


def test_no_answer_names_a_path_of_the_host_or_of_the_code(daemon: Daemon, sandbox: str):
    base = f"/v1/sandboxes/{sandbox}"
    answers = [
        daemon.http.post("/v1/images", json={"image": "absent"}),
        daemon.http.post(f"{base}/exec", json={"command": ["true"], "cwd": "/none"}),
        daemon.http.get(f"{base}/files", params={"path": "/none"}),
        daemon.http.post("/v1/sandboxes", content=b"{"),
        daemon.http.get("/v1/node"),
        daemon.http.get(base),
    ]
    for answer in answers:
        text = json.dumps(answer.json())
        for private in (str(daemon.state_dir.parent), str(Path(__file__).parents[2]), ".py"):
            assert private not in text


def test_another_address_than_loopback_is_served_with_the_token(start_daemon: Any):
    daemon = start_daemon()
    daemon.process.terminate()
    daemon.process.wait(30)
    with started_again(daemon, address="0.0.0.0") as again:
        bare = httpx.get(f"{again.base_url}/v1/node")
        refusal(bare, 401, "unauthorized", "request")
        assert again.http.get("/v1/node").status_code == 200


def test_a_port_that_is_taken_is_named(start_daemon: Any):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DaemonError, match=f"cannot listen on {address}"):
            start_daemon(arguments=("--listen", address))
