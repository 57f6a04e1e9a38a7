"""Sandboxes and execs over HTTP, with a fake launcher and real processes behind it."""

import base64
import dataclasses
import json

import pytest

from sandboxd.api.schemas.node import NodeAnswer
from sandboxd.api.schemas.sandboxes import SandboxList
from sandboxd.runtime.manager import Runtime
from tests.unit.fakes_api import TOKEN, create, error_of, make_client, run, wait_ready


def test_create_exec_delete(client, launcher):
    made = create(client, run="r", labels={"a": "1"}, env={"X": "y"}, limits={"pids": 64})
    assert made.id.startswith("sb-")
    assert len(made.id) == 3 + 26
    assert made.state == "running"
    assert made.limits.pids == 64
    assert made.limits.memory_mb == 2048
    assert made.enforcement == {"memory_mb": "enforced", "cpus": "none"}
    assert {"image", "launcher", "launcher.clone", "total"} <= set(made.phases_ms)
    result = run(client, made.id, ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.signal, result.timed_out) == (3, None, False)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert (result.stdout_total_bytes, result.stdout_truncated) == (4, False)
    assert result.peak_memory_bytes == 4096 * 1024
    assert client.get(f"/v1/sandboxes/{made.id}").json()["id"] == made.id
    assert client.delete(f"/v1/sandboxes/{made.id}").status_code == 204
    assert client.delete(f"/v1/sandboxes/{made.id}").status_code == 204
    assert launcher.rows == {}
    assert error_of(client.get(f"/v1/sandboxes/{made.id}"), 404)["code"] == "sandbox-not-found"


def test_environment_is_image_then_sandbox_then_exec(client, launcher):
    made = create(client, env={"LANG": "xx", "A": "1", "B": "1"}, hostname="box")
    result = run(client, made.id, ["/usr/bin/env"], env={"B": "2"})
    assert dict(line.split("=", 1) for line in result.stdout.splitlines()) == {
        "PATH": "/usr/bin:/bin",
        "HOSTNAME": "box",
        "LANG": "xx",
        "A": "1",
        "B": "2",
    }
    asked = launcher.pid1s[made.id][0].execs[0]
    assert (asked["user"], asked["cwd"], asked["nofile"]) == ("0", "/work", 16384)


def test_a_string_is_for_the_shell_and_a_list_is_not(client):
    made = create(client)
    assert run(client, made.id, "echo $((1+1))").stdout == "2\n"
    assert run(client, made.id, ["/bin/echo", "$((1+1))"]).stdout == "$((1+1))\n"


def test_stdin_and_base64(client):
    made = create(client)
    assert run(client, made.id, ["/bin/cat"], stdin="grüße").stdout == "grüße"
    assert run(client, made.id, ["/bin/cat"]).stdout == ""
    raw = bytes(range(256)) * 4000
    result = run(
        client, made.id, ["/bin/cat"], stdin_base64=base64.b64encode(raw).decode(),
        encoding="base64",
    )  # fmt: skip
    assert base64.b64decode(result.stdout) == raw
    assert run(client, made.id, ["/usr/bin/printf", r"a\377b"]).stdout == "a\ufffdb"
    assert run(client, made.id, ["/bin/true"], stdin="x" * 3_000_000).exit_code == 0


def test_not_found_and_not_executable_are_results(client):
    made = create(client)
    assert run(client, made.id, ["/no/such"]).exit_code == 127
    assert run(client, made.id, ["/etc/passwd"]).exit_code == 126


def test_death_by_signal(client):
    made = create(client)
    result = run(client, made.id, ["/bin/sh", "-c", "kill -SEGV $$"])
    assert (result.exit_code, result.signal) == (139, 11)


def test_timeout_keeps_output_and_kills_the_tree(client):
    made = create(client)
    result = run(
        client,
        made.id,
        ["/bin/sh", "-c", "trap '' TERM; echo before; sleep 60 & wait; sleep 60"],
        timeout_s=0.3,
        grace_s=0.2,
    )
    assert (result.exit_code, result.timed_out) == (124, True)
    assert result.stdout == "before\n"
    assert 0.5 <= result.wall_s < 10
    assert run(client, made.id, ["/bin/true"]).exit_code == 0


def test_output_is_capped_and_counted(client):
    made = create(client)
    command = ["/bin/sh", "-c", "seq 1 200000"]
    whole = "".join(f"{n}\n" for n in range(1, 200001))
    for truncate, kept in (
        ("head", whole[:1000]),
        ("tail", whole[-1000:]),
        ("both", whole[:500] + whole[-500:]),
    ):
        result = run(client, made.id, command, max_output_bytes=1000, truncate=truncate)
        assert result.stdout == kept
        assert result.stdout_truncated
        assert result.stdout_total_bytes == len(whole)


def test_a_background_child_does_not_hold_the_answer(client):
    made = create(client)
    result = run(client, made.id, "echo started; sleep 5 &")
    assert result.stdout == "started\n"
    assert result.wall_s < 4


def test_errors_of_starting(client):
    made = create(client)
    url = f"/v1/sandboxes/{made.id}/exec"
    answer = client.post(url, json={"command": ["true"], "user": "nobody-here"})
    assert error_of(answer, 422)["code"] == "user-not-found"
    answer = client.post(url, json={"command": ["/bin/true"], "cwd": "/no/such"})
    assert error_of(answer, 422)["code"] == "cwd-not-found"
    answer = client.post(url, json={"command": ["/bin/true", "x" * 200_000]})
    assert error_of(answer, 422)["code"] == "command-too-long"
    answer = client.post(url, json={"command": ["/bin/true"] + ["x" * 100_000] * 50})
    assert error_of(answer, 422)["code"] == "command-too-long"
    result = run(client, made.id, ["/bin/echo"] + ["x" * 10_000] * 20)
    assert len(result.stdout) == 20 * 10_001


@pytest.mark.parametrize(
    "body",
    [
        {"image": "../etc"},
        {"image": "/etc/x"},
        {"image": "a/../b"},
        {"image": "debian\n"},
        {"image": "debian", "unknown": 1},
        {"image": "debian", "ttl_s": -1},
        {"image": "debian", "ttl_s": "5"},
        {"image": "debian", "limits": {"cpus": -1}},
        {"image": "debian", "limits": {"memory_mb": 2.5}},
        {"image": "debian", "limits": {"memory_mb": True}},
        {"image": "debian", "env": {"A=B": "x"}},
        {"image": "debian", "env": {"": "x"}},
        {"image": "debian", "env": {"A": "x\0"}},
        {"image": "debian", "env": {"A": "\ud800"}},
        {"image": "debian", "workdir": "relative"},
        {"image": "debian", "hostname": "-x"},
        {"image": "debian", "user": "a b"},
        {"image": "debian", "labels": {"k": "x\n"}},
        {"image": "debian", "limits": {"memory_mb": 2_000_000}},
        {"image": "debian", "ttl_s": 1e7},
        {"image": "debian", "env": {"A": "x" * 20_000}},
        {},
        [],
        None,
    ],
)
def test_bad_create_bodies_are_refused(client, body):
    # json.dumps writes a lone surrogate as an escape, as a hostile client would.
    answer = client.post(
        "/v1/sandboxes",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    error = error_of(answer, 422)
    assert (error["code"], error["cause"], error["retryable"]) == (
        "request-invalid",
        "request",
        False,
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"command": ["true"], "timeout_s": NaN}',
        '{"command": ["true"], "timeout_s": Infinity}',
        '{"command": ["true"], "timeout_s": 1e999}',
        '{"command": ["true"], "timeout_s": 0}',
        '{"command": ["true"], "timeout_s": 1e8}',
        '{"command": ["true"], "max_output_bytes": -1}',
        '{"command": ["true"], "max_output_bytes": 1e3}',
        '{"command": ["true"], "max_output_bytes": 99999999999}',
        '{"command": []}',
        '{"command": [""]}',
        '{"command": ""}',
        '{"command": ["a\\u0000b"]}',
        '{"command": ["\\ud800"]}',
        '{"command": ["true"], "stdin": "a", "stdin_base64": "YQ=="}',
        '{"command": ["true"], "stdin_base64": "?"}',
        '{"command": ["true"], "cwd": "/a\\u0000"}',
        '{"command": ["true"], "env": {"A\\u0000": "1"}}',
        '{"command": ["true"], "truncate": "middle"}',
        '{"command": ["true"], "x": 1}',
        "{",
        "",
        "[" * 100_000,
        "\xff",
    ],
)
def test_bad_exec_bodies_are_refused(client, text):
    made = create(client)
    answer = client.post(f"/v1/sandboxes/{made.id}/exec", content=text.encode("latin-1"))
    assert error_of(answer, 422)["code"] == "request-invalid"


def test_infinity_in_a_create_body_is_refused(client):
    answer = client.post(
        "/v1/sandboxes",
        content='{"image": "debian", "limits": {"cpus": Infinity}}',
        headers={"Content-Type": "application/json"},
    )
    assert error_of(answer, 422)["code"] == "request-invalid"


def test_image_not_found(client):
    error = error_of(client.post("/v1/sandboxes", json={"image": "nope"}), 404)
    assert error["code"] == "image-not-found"


def test_list_filters_and_pages(client):
    made = [create(client, run=f"r{n % 2}", labels={"n": str(n)}).id for n in range(4)]
    page = SandboxList.model_validate(client.get("/v1/sandboxes?limit=3").json())
    assert [one.id for one in page.sandboxes] == sorted(made)[:3]
    assert page.next == sorted(made)[2]
    rest = client.get("/v1/sandboxes", params={"limit": 3, "after": page.next}).json()
    assert [one["id"] for one in rest["sandboxes"]] == sorted(made)[3:]
    assert rest["next"] is None
    found = client.get("/v1/sandboxes?run=r1&label=n=3&state=running").json()["sandboxes"]
    assert [one["id"] for one in found] == [made[3]]
    assert len(client.get("/v1/sandboxes?label=n").json()["sandboxes"]) == 4
    assert client.get("/v1/sandboxes?state=failed").json()["sandboxes"] == []
    assert error_of(client.get("/v1/sandboxes?limit=0"), 422)["code"] == "request-invalid"


def test_a_full_node_says_when_to_come_back(client):
    for _ in range(4):
        create(client)
    answer = client.post("/v1/sandboxes", json={"image": "debian"})
    error = error_of(answer, 429)
    assert (error["code"], error["retryable"]) == ("node-overloaded", True)
    assert int(answer.headers["retry-after"]) >= 1


def test_idempotency_key(client, launcher):
    headers = {"Idempotency-Key": "k1"}
    body = {"image": "debian", "run": "r"}
    first = client.post("/v1/sandboxes", json=body, headers=headers)
    again = client.post("/v1/sandboxes", json=body, headers=headers)
    assert first.content == again.content
    assert len(launcher.rows) == 1
    other = client.post("/v1/sandboxes", json={**body, "run": "s"}, headers=headers)
    assert error_of(other, 409)["code"] == "idempotency-conflict"
    bad = client.post("/v1/sandboxes", json=body, headers={"Idempotency-Key": "x" * 300})
    assert error_of(bad, 422)["code"] == "request-invalid"


def test_a_failed_create_frees_its_key_and_its_room(client, launcher):
    launcher.fail["create"] = [
        {"code": "sandbox-setup-failed", "message": "no", "detail": {"step": "proc"}}
    ] * 5
    headers = {"Idempotency-Key": "k"}
    for _ in range(5):
        answer = client.post("/v1/sandboxes", json={"image": "debian"}, headers=headers)
        error = error_of(answer, 500)
        assert error["code"] == "sandbox-setup-failed"
        assert error["detail"] == {"step": "proc"}
    answer = client.post("/v1/sandboxes", json={"image": "debian"}, headers=headers)
    assert answer.status_code == 201


def test_the_token(client):
    for headers in (
        {"Authorization": ""},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \xff"},
    ):
        for path in ("/v1/sandboxes", "/openapi.json", "/nowhere"):
            raw = [(name, value.encode("latin-1")) for name, value in headers.items()]
            answer = client.get(path, headers=raw)
            assert error_of(answer, 401)["code"] == "unauthorized"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/healthz", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert client.get("/readyz", headers={"Authorization": ""}).status_code == 200


def test_what_is_no_route(client):
    assert error_of(client.get("/nowhere"), 404)["code"] == "route-not-found"
    assert error_of(client.put("/v1/sandboxes"), 405)["code"] == "method-not-allowed"


def test_a_body_too_large(config, launcher):
    small = dataclasses.replace(config, max_body_bytes=1000)
    with make_client(small) as client:
        wait_ready(client)
        body = b'{"image": "' + b"x" * 2000 + b'"}'
        headers = {"Content-Type": "application/json"}
        answer = client.post("/v1/sandboxes", content=body, headers=headers)
        assert error_of(answer, 413)["code"] == "body-too-large"
        # In pieces: no Content-Length.
        answer = client.post("/v1/sandboxes", content=iter([body]), headers=headers)
        assert error_of(answer, 413)["code"] == "body-too-large"


def test_a_bug_is_an_internal_error_without_a_traceback(config, launcher, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret path /etc/shadow")

    with make_client(config, raise_server_exceptions=False) as client:
        wait_ready(client)
        monkeypatch.setattr(Runtime, "find", broken)
        # By the general way, and by the shortcut.
        for answer in (
            client.get("/v1/sandboxes/sb-x"),
            client.post("/v1/sandboxes/sb-x/exec", json={"command": "true"}),
        ):
            assert error_of(answer, 500)["code"] == "internal-error"
            assert "shadow" not in answer.text
    with make_client(config) as client:
        for method, path in (("GET", ""), ("POST", "/exec")):
            with pytest.raises(RuntimeError):  # the server logs it
                client.request(method, f"/v1/sandboxes/sb-x{path}", json={"command": "true"})


def test_the_node(client):
    create(client)
    answer = NodeAnswer.model_validate(client.get("/v1/node").json())
    assert answer.name == "node-1"
    assert answer.sandboxes["running"] == 1
    assert answer.enforcement == {"memory_mb": "enforced", "cpus": "none"}
    assert answer.features == {"userns": True}


def test_without_a_launcher_everything_is_unavailable(config):
    with make_client(config) as client:
        answer = client.post("/v1/sandboxes", json={"image": "debian"})
        error = error_of(answer, 503)
        assert (error["code"], error["retryable"]) == ("node-unavailable", True)
        assert answer.headers["retry-after"] == "1"
        assert error_of(client.get("/readyz"), 503)["code"] == "node-unavailable"
        assert error_of(client.get("/v1/sandboxes/sb-x"), 503)["code"] == "node-unavailable"
        assert error_of(client.delete("/v1/sandboxes/sb-x"), 503)["code"] == "node-unavailable"
        assert error_of(client.get("/v1/sandboxes"), 503)["code"] == "node-unavailable"
        assert error_of(client.get("/v1/node"), 503)["code"] == "node-unavailable"


def test_every_documented_error_has_its_code(client):
    document = client.get("/openapi.json").json()
    exec_answers = document["paths"]["/v1/sandboxes/{sandbox_id}/exec"]["post"]["responses"]
    codes = {
        code
        for answer in exec_answers.values()
        for code in answer["content"]["application/json"].get("examples", {})
    }
    assert {"cwd-not-found", "unauthorized", "body-too-large", "sandbox-dead"} <= codes
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in ("/", "/healthz", "/readyz"))


def test_a_time_out_while_the_images_server_hangs_is_the_nodes(client, launcher):
    made = create(client)
    launcher.servers_answer = False
    body = {"command": ["sleep", "60"], "timeout_s": 0.2}
    answer = client.post(f"/v1/sandboxes/{made.id}/exec", json=body)
    error = error_of(answer, 503)
    assert (error["code"], error["cause"], error["retryable"]) == (
        "image-unavailable",
        "node",
        True,
    )
    assert run(client, made.id, ["true"]).exit_code == 0
    launcher.servers_answer = True
    assert client.post(f"/v1/sandboxes/{made.id}/exec", json=body).json()["exit_code"] == 124
