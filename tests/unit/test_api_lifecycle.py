"""Renewing, pausing, looking at and ending sandboxes over HTTP; images; waiting for room."""

import base64
import threading
import time

import pytest

from sandboxd.api.schemas.lifecycle import DeletedAnswer, EventList, PrefetchAnswer, StatsAnswer
from sandboxd.api.schemas.sandboxes import SandboxAnswer
from sandboxd.runtime.events import EVENTS_MAX, EventLog
from tests.unit.fakes_api import create, error_of, make_client, run, wait_ready


def path(made, what=""):
    return f"/v1/sandboxes/{made.id}{what}"


def seconds(text):
    return time.mktime(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))


class TestRenew:
    def test_it_lives_from_now_on(self, client, launcher):
        made = create(client, ttl_s=10)
        answer = client.post(path(made, "/renew"), json={"ttl_s": 1000})
        renewed = SandboxAnswer.model_validate(answer.json(), strict=False)
        assert 980 < seconds(renewed.expires_at) - seconds(made.expires_at) < 1000
        assert launcher.rows[made.id]["meta"]["renewed_until"] > time.time() + 900

    def test_the_end_that_was_first_does_not_come(self, client):
        made = create(client, ttl_s=0.2)
        client.post(path(made, "/renew"), json={"ttl_s": 60})
        time.sleep(0.4)
        assert client.get(path(made)).status_code == 200

    def test_a_shorter_life_ends_early(self, client):
        made = create(client, ttl_s=60)
        client.post(path(made, "/renew"), json={"ttl_s": 0.05})
        wait_gone(client, made)

    def test_without_a_time_it_is_its_own(self, client):
        made = create(client, ttl_s=77)
        assert client.post(path(made, "/renew"), json={}).status_code == 200

    def test_more_than_the_node_allows(self, client):
        error = error_of(client.post(path(create(client), "/renew"), json={"ttl_s": 1e6}), 422)
        assert (error["code"], error["detail"]["field"]) == ("request-invalid", "ttl_s")


def wait_gone(client, made):
    deadline = time.monotonic() + 10
    while client.get(path(made)).status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestIdle:
    def test_nothing_asked_of_it(self, client):
        wait_gone(client, create(client, idle_timeout_s=1))

    def test_a_command_keeps_it(self, client):
        made = create(client, idle_timeout_s=1)
        assert run(client, made.id, ["/bin/sleep", "1.5"]).exit_code == 0
        assert client.get(path(made)).status_code == 200
        wait_gone(client, made)


class TestPause:
    def test_nothing_starts_and_files_stay(self, client, launcher):
        made = create(client)
        answer = client.post(path(made, "/pause"))
        assert answer.json()["state"] == "paused"
        assert client.post(path(made, "/pause")).status_code == 200
        assert launcher.frozen[made.id] is True
        error = error_of(client.post(path(made, "/exec"), json={"command": ["/bin/true"]}), 409)
        assert (error["code"], error["cause"]) == ("sandbox-paused", "request")
        assert client.put(path(made, "/files"), params={"path": "/a"}, content=b"x").is_success
        assert client.post(path(made, "/resume")).json()["state"] == "running"
        assert launcher.frozen[made.id] is False
        assert run(client, made.id, ["/bin/true"]).exit_code == 0

    def test_one_that_fails_is_no_pause(self, client, launcher):
        made = create(client)
        launcher.fail["freeze"] = [{"code": "node-error", "message": "cannot"}]
        assert error_of(client.post(path(made, "/pause")), 503)["code"] == "node-error"
        assert client.get(path(made)).json()["state"] == "running"
        assert launcher.rows[made.id]["meta"]["paused"] is False
        assert run(client, made.id, ["/bin/true"]).exit_code == 0

    def test_a_daemon_that_starts_anew_knows_of_it(self, config, launcher):
        with make_client(config) as first:
            wait_ready(first)
            made = create(first)
            first.post(path(made, "/pause"))
        with make_client(config) as second:
            wait_ready(second)
            assert second.get(path(made)).json()["state"] == "paused"
            second.post(path(made, "/resume"))
            assert run(second, made.id, ["/bin/true"]).exit_code == 0

    def test_it_can_be_deleted(self, client, launcher):
        made = create(client)
        client.post(path(made, "/pause"))
        assert client.delete(path(made)).status_code == 204
        assert launcher.rows == {}


class TestLooking:
    def test_stats(self, client):
        made = create(client, limits={"memory_mb": 64, "disk_mb": 64, "pids": 20})
        stats = StatsAnswer.model_validate(client.get(path(made, "/stats")).json())
        assert (stats.cpu.usage_s, stats.cpu.throttled_s) == (1.5, None)
        assert (stats.memory.used_bytes, stats.memory.limit_bytes) == (4096, 128 << 20)
        assert (stats.pids.count, stats.pids.limit) == (3, 20)

    def test_events(self, client, launcher):
        made = create(client)
        client.post(path(made, "/exec"), json={"command": ["/bin/true"], "user": "nobody-here"})
        client.post(path(made, "/renew"), json={})
        found = EventList.model_validate(client.get(path(made, "/events")).json())
        assert [event.kind for event in found.events] == ["created", "exec-failed", "renewed"]
        assert found.events[1].detail["code"] == "user-not-found"
        assert found.next == 3
        later = client.get(path(made, "/events"), params={"after": 2}).json()
        assert [event["seq"] for event in later["events"]] == [3]
        launcher.event({"event": "sandbox-died", "sandbox": made.id, "reason": "oom-killed"})
        deadline = time.monotonic() + 10
        while client.get(path(made)).json()["state"] != "failed":
            assert time.monotonic() < deadline
        last = client.get(path(made, "/events")).json()["events"][-1]
        assert (last["kind"], last["detail"]["reason"]) == ("failed", "oom-killed")

    def test_the_ring_is_bounded(self):
        log = EventLog()
        for number in range(EVENTS_MAX + 10):
            log.add("renewed", str(number))
        assert [event.seq for event in log.after(0, 2)] == [11, 12]
        assert len(log.after(0, 10_000)) == EVENTS_MAX


class TestDeletingMany:
    def test_by_run_and_label(self, client):
        made = [
            create(client, run="r1", labels={"a": "1"}),
            create(client, run="r1", labels={"a": "2"}),
            create(client, run="r2", labels={"a": "1"}),
        ]
        one = client.delete("/v1/sandboxes", params={"run": "r1", "label": "a=1"})
        assert DeletedAnswer.model_validate(one.json()).deleted == [made[0].id]
        rest = client.delete("/v1/sandboxes", params={"label": "a"})
        assert sorted(rest.json()["deleted"]) == sorted([made[1].id, made[2].id])
        assert client.get("/v1/sandboxes").json()["sandboxes"] == []
        assert client.delete("/v1/sandboxes", params={"run": "r1"}).json()["deleted"] == []

    def test_everything_must_be_meant(self, client):
        assert error_of(client.delete("/v1/sandboxes"), 422)["code"] == "request-invalid"

    def test_it_answers_in_time(self, client, launcher):
        made = create(client, run="r")
        launcher.held.add("delete")
        done = client.delete("/v1/sandboxes", params={"run": "r", "within_s": 0.05}).json()
        assert (done["deleted"], done["pending"]) == ([], [made.id])
        launcher.release("delete")
        wait_gone(client, made)

    def test_a_failure_is_named(self, client, launcher):
        made = create(client, run="r")
        launcher.fail["delete"] = [{"code": "node-error", "message": "cannot"}]
        done = client.delete("/v1/sandboxes", params={"run": "r"}).json()
        assert [(one["id"], one["code"]) for one in done["failed"]] == [(made.id, "node-error")]


class TestCreating:
    def test_files(self, client, tmp_path):
        raw = base64.b64encode(b"\0\xff").decode()
        files = [
            {"path": "/w/a.txt", "content": "grüße", "mode": "0600"},
            {"path": "/w/b", "content_base64": raw},
        ]
        made = create(client, files=files)
        assert "files" in made.phases_ms
        assert (tmp_path / "root/w/a.txt").read_text() == "grüße"
        assert (tmp_path / "root/w/a.txt").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "root/w/b").read_bytes() == b"\0\xff"

    def test_a_file_that_fails_leaves_no_sandbox(self, client, launcher):
        body = {"image": "debian", "files": [{"path": "/full", "content": ""}]}
        assert error_of(client.post("/v1/sandboxes", json=body), 409)["code"] == "disk-full"
        deadline = time.monotonic() + 10
        while launcher.rows:
            assert time.monotonic() < deadline
        assert client.get("/v1/sandboxes").json()["sandboxes"] == []

    @pytest.mark.parametrize(
        "file",
        [
            {"path": "/a"},
            {"path": "/a", "content": "", "content_base64": ""},
            {"path": "a", "content": ""},
            {"path": "/a", "content_base64": "!"},
            {"path": "/a", "content": "", "mode": "rw"},
        ],
    )
    def test_impossible_files(self, client, file):
        body = {"image": "debian", "files": [file]}
        assert error_of(client.post("/v1/sandboxes", json=body), 422)["code"] == "request-invalid"

    def test_other_files_are_another_request(self, client):
        for content, status in (("a", 201), ("a", 201), ("b", 409)):
            body = {"image": "debian", "files": [{"path": "/x", "content": content}]}
            answer = client.post("/v1/sandboxes", json=body, headers={"Idempotency-Key": "k"})
            assert answer.status_code == status

    def test_waiting_for_room(self, client):
        made = [create(client) for _ in range(4)]
        assert error_of(client.post("/v1/sandboxes", json={"image": "debian"}), 429)
        late = client.post("/v1/sandboxes", json={"image": "debian", "wait_s": 0.05})
        assert error_of(late, 429)["code"] == "node-overloaded"
        timer = threading.Timer(0.1, lambda: client.delete(path(made[0])))
        timer.start()
        answer = client.post("/v1/sandboxes", json={"image": "debian", "wait_s": 10})
        timer.join()
        assert answer.status_code == 201
        assert answer.json()["phases_ms"]["waiting"] > 10


class TestImages:
    def test_prefetch_says_what_became_of_each(self, client):
        answer = client.post("/v1/images/prefetch", json={"images": ["debian", "none"]})
        found = PrefetchAnswer.model_validate(answer.json()).images
        assert [(one.name, one.mounted) for one in found] == [("debian", True), ("none", False)]
        assert found[1].failure is not None
        assert found[1].failure.code == "image-not-found"

    def test_evict(self, client, launcher):
        made = create(client)
        error = error_of(client.delete("/v1/images/debian"), 409)
        assert (error["code"], error["detail"]) == ("image-in-use", {"users": 1})
        client.delete(path(made))
        assert client.delete("/v1/images/debian").status_code == 204
        assert launcher.mounted == {}
        assert client.delete("/v1/images/debian").status_code == 204
        assert create(client).state == "running"

    def test_a_name_with_a_slash(self, client):
        assert client.delete("/v1/images/swe/django").status_code == 204
        assert client.delete("/v1/images/..%2Fx").status_code in (404, 422)
