"""Sandboxes come, are listed, and go: exactly once, by their time, and with all they had."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from tests.e2e.at_once import at_once, client_of, in_background
from tests.e2e.host_processes import new_marker, pids_with, wait_for, wait_for_marker
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

UNKNOWN = "sb-" + "a" * 26


def create(daemon: Daemon, key: str | None = None, **spec: Any):
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"image": "busybox", **spec}
    return daemon.http.post("/v1/sandboxes", json=body, headers=headers)


def listed(daemon: Daemon, **query: Any) -> list[str]:
    answer = daemon.http.get("/v1/sandboxes", params=query)
    assert answer.status_code == 200, answer.text
    return [sandbox["id"] for sandbox in answer.json()["sandboxes"]]


def test_a_sandbox_says_what_it_is(daemon: Daemon):
    spec = {
        "run": "run-1", "name": "first", "labels": {"task": "t-1"}, "hostname": "box",
        "limits": {"cpus": 0.5, "memory_mb": 64, "disk_mb": 32, "pids": 50}, "ttl_s": 120,
    }  # fmt: skip
    answer = create(daemon, **spec)
    assert answer.status_code == 201
    made = answer.json()
    sandbox = made["id"]
    try:
        assert re.fullmatch(r"sb-[a-z2-7]{26}", sandbox)  # 128 bits in base32
        assert answer.headers["Location"] == f"/v1/sandboxes/{sandbox}"
        for name in ("run", "name", "labels", "hostname", "ttl_s"):
            assert made[name] == spec[name]
        assert spec["limits"].items() <= made["limits"].items()
        assert (made["state"], made["image"], made["failure"]) == ("running", "busybox", None)
        assert (made["user"], made["workdir"]) == ("0", "/")
        created = datetime.fromisoformat(made["created_at"])
        expires = datetime.fromisoformat(made["expires_at"])
        assert (expires - created).total_seconds() == pytest.approx(120, abs=0.01)
        assert daemon.http.get(f"/v1/sandboxes/{sandbox}").json() == made
        assert sandbox in listed(daemon)
    finally:
        daemon.delete(sandbox)
    refusal(daemon.http.get(f"/v1/sandboxes/{sandbox}"), 404, "sandbox-not-found", "request")
    assert sandbox not in listed(daemon)


def test_deleting_is_idempotent(daemon: Daemon):
    sandbox = daemon.create("busybox")
    for _ in range(3):
        answer = daemon.http.delete(f"/v1/sandboxes/{sandbox}")
        assert (answer.status_code, answer.content) == (204, b"")
    assert daemon.http.delete(f"/v1/sandboxes/{UNKNOWN}").status_code == 204


def test_deleting_ten_times_at_once_answers_ten_times(daemon: Daemon):
    sandbox = daemon.create("busybox")
    with client_of(daemon) as client:
        delete = lambda _: client.delete(f"/v1/sandboxes/{sandbox}").status_code  # noqa: E731
        assert at_once(delete, range(10), threads=10) == [204] * 10


@pytest.mark.parametrize("sandbox", [UNKNOWN, "x", "..", "%2e%2e", "sb-%00", "sb-" + "a" * 3000])
def test_an_unknown_id_is_404_for_all_that_needs_one(daemon: Daemon, sandbox: str):
    base = f"/v1/sandboxes/{sandbox}"
    answers = [
        daemon.http.get(base),
        daemon.http.post(f"{base}/exec", json={"command": ["true"]}),
        daemon.http.get(f"{base}/files", params={"path": "/x"}),
        daemon.http.put(f"{base}/files", params={"path": "/x"}, content=b""),
    ]
    for answer in answers:
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["code"] in ("sandbox-not-found", "route-not-found")


def test_nothing_of_a_sandbox_lives_when_its_delete_answers(daemon: Daemon):
    marker = new_marker()
    sandbox = daemon.create("busybox")
    daemon.exec(sandbox, f"trap '' TERM; for i in 1 2 3; do setsid sleep {marker} & done")
    wait_for_marker(marker, count=3)
    daemon.delete(sandbox)
    assert pids_with(marker) == []


def test_a_delete_ends_what_runs_by_name_and_never_by_an_exit_code(daemon: Daemon):
    marker = new_marker()
    sandbox = daemon.create("busybox")
    with client_of(daemon) as client:

        def run() -> Any:
            command = {"command": ["sleep", marker]}
            return client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)

        with in_background(run) as answer:
            wait_for_marker(marker)
            daemon.delete(sandbox)
            assert pids_with(marker) == []
            error = refusal(answer.result(), 410, "sandbox-dead", "workload")
    assert error["detail"]["reason"] == "deleted"
    refusal(
        daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": ["true"]}),
        404,
        "sandbox-not-found",
        "request",
    )


def test_a_sandbox_goes_when_its_time_is_up_whatever_runs_in_it(daemon: Daemon):
    marker = new_marker()
    sandbox = daemon.create("busybox", ttl_s=1.5)
    with client_of(daemon) as client:
        command = {"command": ["sleep", marker]}
        answer = client.post(f"/v1/sandboxes/{sandbox}/exec", json=command)
    refusal(answer, 410, "sandbox-dead", "workload")
    wait_for(lambda: sandbox not in listed(daemon), "the end of a sandbox whose time is up")
    assert pids_with(marker) == []


def test_the_same_key_and_request_give_the_same_sandbox(daemon: Daemon):
    key = f"key-{new_marker()}"
    before = set(listed(daemon))
    with client_of(daemon) as client:

        def same(_: int) -> tuple[int, str]:
            answer = client.post(
                "/v1/sandboxes", json={"image": "busybox"}, headers={"Idempotency-Key": key}
            )
            return answer.status_code, answer.json()["id"]

        answers = at_once(same, range(8), threads=8)
    try:
        assert len(set(answers)) == 1
        assert answers[0][0] == 201
        assert same_again(daemon, key) == answers[0][1]
        assert set(listed(daemon)) - before == {answers[0][1]}
        refusal(create(daemon, key, run="other"), 409, "idempotency-conflict", "request")
    finally:
        daemon.delete(answers[0][1])


def same_again(daemon: Daemon, key: str) -> str:
    return str(create(daemon, key).json()["id"])


def test_a_create_that_failed_may_be_tried_again_with_its_key(daemon: Daemon):
    key = f"key-{new_marker()}"
    missing = daemon.http.post(
        "/v1/sandboxes", json={"image": "absent"}, headers={"Idempotency-Key": key}
    )
    refusal(missing, 404, "image-not-found", "request")
    made = create(daemon, key)
    assert made.status_code == 201
    daemon.delete(made.json()["id"])


def test_sandboxes_are_listed_by_run_label_and_state_page_by_page(daemon: Daemon):
    run = f"run-{new_marker()}"
    made = [
        daemon.create("busybox", run=run, labels={"n": str(n), "half": str(n % 2)})
        for n in range(5)
    ]
    try:
        assert listed(daemon, run=run) == sorted(made)
        assert listed(daemon, run=run, label="half=1") == sorted([made[1], made[3]])
        assert listed(daemon, run=run, label=["half=0", "n=4"]) == [made[4]]
        assert listed(daemon, run=run, label="n") == sorted(made)
        assert listed(daemon, run=run, label="none") == []
        assert listed(daemon, run=run, state="failed") == []
        first = daemon.http.get("/v1/sandboxes", params={"run": run, "limit": 2}).json()
        rest = listed(daemon, run=run, after=first["next"], limit=3)
        assert [one["id"] for one in first["sandboxes"]] + rest == sorted(made)
        for query in ({"limit": 0}, {"limit": 1001}, {"state": "gone"}, {"limit": "x"}):
            answer = daemon.http.get("/v1/sandboxes", params=query)
            refusal(answer, 422, "request-invalid", "request")
    finally:
        for sandbox in made:
            daemon.delete(sandbox)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"image": ""},
        {"image": 5},
        {"image": "../busybox"},
        {"image": "busybox/../busybox"},
        {"image": "/etc/passwd"},
        {"image": "a\0b"},
        {"image": "busybox", "other": 1},
        {"image": "busybox", "limits": {"other": 1}},
        {"image": "busybox", "limits": {"memory_mb": -1}},
        {"image": "busybox", "limits": {"memory_mb": 0}},
        {"image": "busybox", "limits": {"memory_mb": 1 << 24}},
        {"image": "busybox", "limits": {"memory_mb": "64"}},
        {"image": "busybox", "limits": {"memory_mb": 64.5}},
        {"image": "busybox", "limits": {"cpus": 0}},
        {"image": "busybox", "limits": {"pids": 2**63}},
        {"image": "busybox", "ttl_s": 0},
        {"image": "busybox", "ttl_s": -5},
        {"image": "busybox", "ttl_s": 10**7},
        {"image": "busybox", "hostname": "two words"},
        {"image": "busybox", "hostname": "x" * 64},
        {"image": "busybox", "env": {"A": 5}},
        {"image": "busybox", "env": {"A": "\0"}},
        {"image": "busybox", "env": {"A": "x" * 17_000}},
        {"image": "busybox", "labels": {"a": "\n"}},
        {"image": "busybox", "workdir": "relative"},
        {"image": "busybox", "user": "a:b:c"},
    ],
)
def test_a_spec_that_says_nothing_sensible_is_refused_and_makes_nothing(
    daemon: Daemon, body: dict[str, Any]
):
    before = listed(daemon)
    refusal(daemon.http.post("/v1/sandboxes", json=body), 422, "request-invalid", "request")
    assert listed(daemon) == before


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"image": "busybox", "ttl_s": NaN}',
        b'{"image": "busybox", "ttl_s": Infinity}', b'{"image": "busybox", "ttl_s": 1e999}',
        b'{"image": "\xff"}', b'{"image": "\\ud800"}', b"[" * 100_000,
        b'{"image": "busybox", "ttl_s": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_is_refused(daemon: Daemon, raw: bytes):
    answer = daemon.http.post("/v1/sandboxes", content=raw)
    refusal(answer, 422, "request-invalid", "request")


def test_a_full_node_says_so_and_when_to_come_back(start_daemon: Any):
    daemon = start_daemon(environment={"SANDBOXD_MAX_SANDBOXES": "2"})
    first, second = daemon.create("busybox"), daemon.create("busybox")
    answer = create(daemon)
    refusal(answer, 429, "node-overloaded", "node", retryable=True)
    daemon.delete(first)
    third = daemon.create("busybox")
    daemon.delete(second)
    daemon.delete(third)
