"""Many sandboxes and many commands in one request, and a thousand commands at once."""

from __future__ import annotations

import hashlib

from tests.e2e.at_once import client_of
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon


def create(daemon: Daemon, count: int, **sandbox: object) -> list[str]:
    body = {"count": count, "sandbox": {"image": "busybox", **sandbox}}
    answer = daemon.http.post("/v1/sandboxes:batch", json=body)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert [item["index"] for item in made["items"]] == list(range(count))
    assert made["created"] == count
    return [item["sandbox"]["id"] for item in made["items"]]


def test_sandboxes_in_one_request(daemon: Daemon):
    names = create(daemon, 10, run="batch")
    assert len(set(names)) == 10
    for name in names:
        assert daemon.exec(name, ["echo", "on"])["stdout"] == "on\n"
        daemon.delete(name)


def test_the_same_key_makes_them_once(daemon: Daemon):
    body = {"count": 3, "sandbox": {"image": "busybox"}}
    headers = {"Idempotency-Key": "once"}
    ids = [
        [one["sandbox"]["id"] for one in
         daemon.http.post("/v1/sandboxes:batch", json=body, headers=headers).json()["items"]]
        for _ in range(2)
    ]  # fmt: skip
    assert ids[0] == ids[1]
    for name in ids[0]:
        daemon.delete(name)


def test_one_that_fails_undoes_no_other(daemon: Daemon, sandbox: str):
    execs = [
        {"sandbox": sandbox, "command": "echo a; exit 3"},
        {"sandbox": "sb-none", "command": "true"},
        {"sandbox": sandbox, "command": ["true"], "cwd": "/nowhere"},
        {"sandbox": sandbox, "command": "cat", "stdin": "b"},
    ]
    answer = daemon.http.post("/v1/execs:batch", json={"execs": execs})
    assert answer.status_code == 200
    first, unknown, nowhere, last = answer.json()["items"]
    assert (first["result"]["exit_code"], first["result"]["stdout"]) == (3, "a\n")
    assert (unknown["result"], unknown["error"]["code"]) == (None, "sandbox-not-found")
    assert nowhere["error"]["code"] == "cwd-not-found"
    assert (last["index"], last["result"]["stdout"], last["error"]) == (3, "b", None)
    answer = daemon.http.post("/v1/sandboxes:batch", json={"count": 1, "sandbox": {"image": "no"}})
    assert answer.json()["items"][0]["error"]["code"] == "image-not-found"
    for body in ({"execs": []}, {"execs": [{"sandbox": sandbox}]}):
        refusal(daemon.http.post("/v1/execs:batch", json=body), 422, "request-invalid", "request")


def test_a_thousand_commands_over_many_sandboxes_keep_their_bytes(daemon: Daemon):
    """Each command's output, error and code are its own and can be told beforehand."""
    names = create(daemon, 16)
    script = "i=0; while [ $i -lt $0 ]; do echo $1.$i; i=$((i+1)); done; echo $1 >&2; exit $2"
    execs = [
        {
            "sandbox": names[n % len(names)],
            "command": ["sh", "-c", script, str(n % 97), str(n), str(n % 113)],
            "timeout_s": 100,
        }
        for n in range(1000)
    ]
    with client_of(daemon) as client:
        items = client.post("/v1/execs:batch", json={"execs": execs}).json()["items"]
    for n, item in enumerate(items):
        expected = "".join(f"{n}.{i}\n" for i in range(n % 97))
        result = item["result"]
        assert item["error"] is None
        got = hashlib.sha256(result["stdout"].encode()).digest()
        assert got == hashlib.sha256(expected.encode()).digest(), n
        assert (result["stderr"], result["exit_code"]) == (f"{n}\n", n % 113)
    for name in names:
        daemon.delete(name)
