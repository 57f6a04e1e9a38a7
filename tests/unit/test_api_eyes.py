"""Metrics, the node's events and its history over HTTP, and what they say of what was done."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandboxd.errors import NodeOverloaded, OomKilled, StreamPositionLost
from sandboxd.model import Event, ExecResult, StreamResult
from sandboxd.runtime import node_events
from sandboxd.runtime.history import quantile_ms
from sandboxd.runtime.meters import SERIES_MAX, Histogram, Labelled, Meters
from sandboxd.runtime.node_events import NodeEvents, Wanted
from tests.unit.fakes_api import create, error_of, make_client, run, wait_ready

HOSTILE = '<img src=x onerror="alert(1)">\n# HELP x'


def samples(client):
    """By name and labels, as Prometheus' own parser reads them."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
    }


def lines(client, **query):
    answer = client.get("/v1/events", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    *rows, end = map(json.loads, answer.text.splitlines())
    assert end["type"] == "end"
    return rows, end["seq"]


class TestMetrics:
    def test_what_was_done_is_counted(self, client):
        before = samples(client)
        box = create(client)
        assert run(client, box.id, ["sh", "-c", "exit 3"]).exit_code == 3
        error_of(client.post("/v1/sandboxes", json={"image": "none"}), 404)
        error_of(client.post(f"/v1/sandboxes/{box.id}/exec", json={"command": []}), 422)
        error_of(client.get("/v1/sandboxes/none"), 404)
        after = samples(client)
        risen = {key: after[key] - before.get(key, 0) for key in after}
        total = (("le", "+Inf"), ("phase", "total"))
        assert risen[("sandboxd_create_seconds_bucket", *total)] == 1
        assert risen[("sandboxd_create_seconds_count", ("phase", "total"))] == 1
        assert risen[("sandboxd_exec_seconds_count",)] == 1
        assert risen[("sandboxd_execs_total", ("end", "exited"))] == 1
        assert after[("sandboxd_sandboxes", ("state", "running"))] == 1
        assert after[("sandboxd_admission_used", ("resource", "sandboxes"))] == 1
        assert after[("sandboxd_node_up",)] == 1

        def failed(code, cause="request", reason=""):
            labels = (("cause", cause), ("code", code), ("reason", reason))
            return risen[("sandboxd_request_failures_total", *labels)]

        assert failed("image-not-found") == 1
        assert failed("request-invalid") == 1
        assert failed("sandbox-not-found") == 1
        assert client.delete(f"/v1/sandboxes/{box.id}").status_code == 204
        assert samples(client)[("sandboxd_delete_seconds_count",)] == 1

    def test_a_full_node_says_what_there_is_too_little_of(self, client):
        for _ in range(4):
            create(client)
        error_of(client.post("/v1/sandboxes", json={"image": "debian"}), 429)
        told = samples(client)
        assert told[("sandboxd_admission_refusals_total", ("reason", "sandboxes"))] == 1
        assert told[("sandboxd_admission_open",)] == 0

    def test_no_label_names_a_sandbox_a_run_or_an_image(self, client):
        before = set(samples(client))
        for number in range(3):
            box = create(client, name=f"n{number}", run=f"run-{number}")
            run(client, box.id, "true")
            client.delete(f"/v1/sandboxes/{box.id}")
        text = client.get("/metrics").text
        assert box.id not in text
        assert "run-2" not in text
        assert "debian" not in text
        # The first lifecycle brings its phases and events, two more bring nothing.
        new = {key[0] for key in set(samples(client)) - before}
        assert new <= {
            "sandboxd_create_seconds_bucket",
            "sandboxd_create_seconds_count",
            "sandboxd_create_seconds_sum",
            "sandboxd_events_total",
        }

    def test_without_a_launcher_the_daemon_still_tells(self, config):
        with make_client(config) as client:
            told = samples(client)
        assert told[("sandboxd_node_up",)] == 0
        assert told[("process_open_fds",)] > 3

    def test_a_token_is_needed_and_its_lack_is_counted(self, client):
        for path in ("/metrics", "/v1/events", "/v1/node/history"):
            error_of(client.get(path, headers={"Authorization": ""}), 401)
        labels = (("cause", "request"), ("code", "unauthorized"), ("reason", ""))
        assert samples(client)[("sandboxd_request_failures_total", *labels)] == 3

    def test_labels_are_bounded_whatever_comes(self):
        counts = Labelled()
        for number in range(SERIES_MAX + 50):
            counts.add(f"code-{number}", "node")
        assert len(counts.counts) == SERIES_MAX + 1
        assert counts.counts[("other", "other")] == 50
        meters = Meters()
        meters.refused(OomKilled("x", reason=HOSTILE))
        assert list(meters.refusals.counts) == [("oom-killed", "workload", "")]

    def test_a_histogram_counts_by_upper_bound(self):
        meter = Histogram((1.0, 2.0))
        for value in (0.5, 1.0, 1.5, 9.0):
            meter.observe(value)
        assert (meter.counts, meter.total) == ([2, 1, 1], 12.0)

    @pytest.mark.parametrize(
        ("end", "timed_out", "oom"), [("timed-out", True, True), ("oom-killed", False, True)]
    )
    def test_how_a_command_ended(self, end, timed_out, oom):
        empty = StreamResult(b"", 0, False)
        meters = Meters()
        meters.exec_ended(
            ExecResult(
                exit_code=124, signal=None, timed_out=timed_out, timeout_reason=None,
                oom_killed=oom, stdout=empty, stderr=empty, wall_s=2.0, cpu_user_s=0.0,
                cpu_system_s=0.0, peak_memory_bytes=0,
            )
        )  # fmt: skip
        assert meters.exec_ends[end] == 1
        assert sum(meters.exec_ends.values()) == 1


class TestEvents:
    def test_a_life_is_told_in_order(self, client):
        first = create(client, run="a", name=HOSTILE[:20])
        second = create(client, run="b")
        client.delete(f"/v1/sandboxes/{first.id}")
        rows, seq = lines(client)
        assert [row["kind"] for row in rows if row["sandbox"] == first.id] == [
            "created",
            "deleting",
            "deleted",
        ]
        assert [row["seq"] for row in rows] == list(range(rows[0]["seq"], seq + 1))
        assert [one["sandbox"] for one in lines(client, run="b")[0]] == [second.id]
        kinds = {one["kind"] for one in lines(client, kind=["deleted", "created"])[0]}
        assert kinds == {"created", "deleted"}
        assert lines(client, after=seq) == ([], seq)

    def test_a_create_that_failed_is_told(self, client, launcher):
        launcher.fail["create"] = [{"code": "sandbox-setup-failed", "message": "no"}]
        client.post("/v1/sandboxes", json={"image": "debian", "run": "r"})
        (row,) = lines(client, kind="create-failed")[0]
        assert row["run"] == "r"
        assert row["detail"]["cause"] == "node"

    def test_a_message_is_bounded_whatever_it_quotes(self, client):
        box = create(client)
        client.post(f"/v1/sandboxes/{box.id}/exec", json={"command": "true", "cwd": "/x" * 2000})
        events = client.app.state.runtime.find(box.id).events
        events.add("exec-failed", "y" * 5000)
        assert max(len(row["message"]) for row in lines(client)[0]) == 500

    def test_a_drain_is_the_nodes_own(self, client):
        client.post("/v1/node/drain")
        client.post("/v1/node/undrain")
        rows, _ = lines(client, kind=["drain", "undrain"])
        assert [(row["kind"], row["sandbox"]) for row in rows] == [
            ("drain", None),
            ("undrain", None),
        ]

    def test_what_is_not_yet_is_no_position(self, client):
        _, seq = lines(client)
        error = error_of(client.get("/v1/events", params={"after": seq + 1}), 410)
        assert error["code"] == "stream-position-lost"

    def test_another_daemon_goes_on_above(self, config, launcher):
        with make_client(config) as client:
            wait_ready(client)
            _, seq = lines(client)
        with make_client(config) as client:
            wait_ready(client)
            rows, _ = lines(client, after=seq)
        assert (rows[0]["kind"], rows[0]["detail"]) == ("gap", {"after": seq})
        assert seq < rows[0]["seq"] < rows[1]["seq"]

    def test_a_ring_that_forgot_says_so(self, monkeypatch):
        monkeypatch.setattr(node_events, "RING", 4)
        events = NodeEvents(lambda _: None, first=100)
        for number in range(6):
            events.tell("k", str(number))
        assert events.after(102) == (list(events._ring), None)
        found, gap = events.after(101)
        assert ([one.seq for one in found], gap) == ([103, 104, 105, 106], 102)
        assert events.after(0)[1] is None
        assert events.after(106) == ([], None)


def test_a_follower_is_woken_and_told_how_far_it_is():
    import asyncio

    async def follow():
        events = NodeEvents(lambda _: None, first=10)
        follower = events.follow(0, Wanted(kinds=frozenset({"wanted"})), stay=True)
        events.tell("other", "")
        assert json.loads(await follower.next(0.01)) == {"type": "heartbeat", "seq": 11}
        waiting = asyncio.ensure_future(follower.next(60))
        await asyncio.sleep(0)
        events.add("sb-1", "r", Event(1, 0.0, "wanted", "m", {"a": 1}))
        told = json.loads(await waiting)
        assert told == {
            "type": "event", "seq": 12, "at": "1970-01-01T00:00:00.000Z", "kind": "wanted",
            "sandbox": "sb-1", "run": "r", "message": "m", "detail": {"a": 1},
        }  # fmt: skip
        waiting = asyncio.ensure_future(follower.next(60))
        await asyncio.sleep(0)
        events.close()
        assert json.loads(await waiting)["type"] == "end"
        assert await follower.next(60) is None
        with pytest.raises(StreamPositionLost):
            events.follow(13, Wanted(), stay=False)
        follower.close()
        for _ in range(node_events.FOLLOWERS_MAX):
            events.follow(0, Wanted(), stay=True)
        with pytest.raises(NodeOverloaded):
            events.follow(0, Wanted(), stay=True)

    asyncio.run(follow())


class TestHistory:
    def test_a_point_is_what_was_since_the_one_before(self, client):
        box = create(client)
        for _ in range(3):
            run(client, box.id, "true")
        runtime = client.app.state.runtime
        client.portal.call(runtime.history.write)
        client.portal.call(runtime.history.write)
        told = client.get("/v1/node/history").json()
        first, second = told["points"]
        assert (first["creates"], first["execs"], first["sandboxes"]) == (1, 3, 1)
        assert 0 < first["exec_p50_ms"] <= first["exec_p95_ms"]
        assert (second["creates"], second["execs"], second["exec_p50_ms"]) == (0, 0, None)
        assert 0 < first["memory_used_bytes"] < first["memory_total_bytes"]

    def test_quantiles_are_those_of_the_nearest_rank(self):
        values = [number / 1000 for number in range(1, 101)]
        assert quantile_ms(values, 0.5) == 50
        assert quantile_ms(values, 0.95) == 95
        assert quantile_ms([0.007], 0.95) == 7
        assert quantile_ms([], 0.5) is None
