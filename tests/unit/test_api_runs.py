"""Runs, draining and admission over HTTP."""

import threading
import time

import pytest

from sandboxd.api.schemas.node import NodeAnswer
from sandboxd.api.schemas.runs import DrainAnswer, RunAnswer, RunEndedAnswer
from sandboxd.config import load_config
from tests.unit.fakes_api import create, error_of, make_client, wait_ready


def put(client, name, **body):
    answer = client.put(f"/v1/runs/{name}", json=body)
    assert answer.status_code == 200, answer.text
    return RunAnswer.model_validate(answer.json())


def end(client, name, **query):
    answer = client.delete(f"/v1/runs/{name}", params=query)
    assert answer.status_code == 200, answer.text
    return RunEndedAnswer.model_validate(answer.json())


def refused(client, status, **body):
    return error_of(client.post("/v1/sandboxes", json={"image": "debian", **body}), status)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestLeases:
    def test_one_that_is_not_renewed_ends_all_of_its_run(self, client, launcher):
        put(client, "r", lease_s=1)
        mine, other = create(client, run="r"), create(client, run="other")
        until(lambda: mine.id not in launcher.rows)
        assert list(launcher.rows) == [other.id]
        error = refused(client, 409, run="r")
        assert (error["code"], error["cause"], error["retryable"]) == (
            "run-ended",
            "request",
            False,
        )
        assert error["detail"]["why"] == "its lease ran out"
        assert error_of(client.post("/v1/runs/r/heartbeat"), 409)["code"] == "run-ended"
        assert error_of(client.put("/v1/runs/r", json={}), 409)["code"] == "run-ended"

    def test_heartbeats_keep_it(self, client):
        put(client, "r", lease_s=1)
        create(client, run="r")
        for _ in range(8):
            assert client.post("/v1/runs/r/heartbeat").status_code == 200
            time.sleep(0.2)
        row = RunAnswer.model_validate(client.get("/v1/runs/r").json())
        assert (row.state, row.sandboxes, row.lease_s) == ("active", 1, 1)

    def test_without_one_nothing_ends(self, client):
        assert put(client, "r").expires_at is None
        create(client, run="r")
        assert client.post("/v1/runs/r/heartbeat").json()["expires_at"] is None

    def test_a_lease_can_be_taken_away(self, client):
        put(client, "r", lease_s=1)
        made = create(client, run="r")
        put(client, "r")
        time.sleep(1.3)
        assert client.get(f"/v1/sandboxes/{made.id}").status_code == 200

    def test_nobody_set_it_up(self, client):
        create(client, run="r")
        assert error_of(client.post("/v1/runs/r/heartbeat"), 404)["code"] == "run-not-found"
        assert error_of(client.get("/v1/runs/none"), 404)["code"] == "run-not-found"
        assert client.get("/v1/runs/r").json()["created_at"] is None

    @pytest.mark.parametrize("body", [{"lease_s": 0}, {"lease_s": -1}, {"max_sandboxes": -1}])
    def test_impossible(self, client, body):
        assert error_of(client.put("/v1/runs/r", json=body), 422)["code"] == "request-invalid"

    def test_it_outlives_the_daemon(self, config, launcher):
        with make_client(config) as client:
            wait_ready(client)
            put(client, "leased", lease_s=2)
            put(client, "quota", max_sandboxes=1)
            mine = create(client, run="leased")
            end(client, "over")
        assert set(launcher.kept) == {"run:leased", "run:quota", "run:over"}
        launcher.kept["run:damaged"] = {"nonsense": 1}
        with make_client(config) as client:
            wait_ready(client)
            assert refused(client, 409, run="over")["code"] == "run-ended"
            create(client, run="quota")
            assert refused(client, 429, run="quota")["code"] == "quota-exceeded"
            assert client.post("/v1/runs/leased/heartbeat").status_code == 200
            until(lambda: mine.id not in launcher.rows)

    def test_an_ending_that_a_daemon_did_not_finish_is_finished(self, config, launcher):
        with make_client(config) as client:
            wait_ready(client)
            made = create(client, run="r")
            launcher.held.add("delete")
            assert end(client, "r", within_s=0.1).pending == [made.id]
        launcher.held.clear()
        with make_client(config) as client:
            until(lambda: not launcher.rows)

    def test_a_launcher_that_starts_anew_is_told(self, client, launcher):
        put(client, "r", max_sandboxes=3)
        assert client.post("/v1/node/drain").status_code == 200
        launcher.stop()
        launcher.kept.clear()
        launcher.restart()
        until(lambda: set(launcher.kept) == {"run:r", "drain"})


class TestEnding:
    def test_everything_of_it_and_nothing_else(self, client, launcher):
        mine = [create(client, run="a/b") for _ in range(2)]
        other = create(client, run="a")
        done = end(client, "a%2Fb")
        assert sorted(done.deleted) == sorted(one.id for one in mine)
        assert list(launcher.rows) == [other.id]
        again = end(client, "a/b")
        assert (again.deleted, again.pending, again.failed) == ([], [], [])

    def test_one_that_nobody_knows(self, client):
        assert end(client, "never").deleted == []
        assert refused(client, 409, run="never")["code"] == "run-ended"

    def test_creates_that_wait_are_sent_away(self, client):
        for _ in range(4):
            create(client)
        answers = []
        body = {"image": "debian", "run": "r", "wait_s": 30}
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/sandboxes", json=body))
        )
        thread.start()
        until(lambda: client.get("/v1/node").json()["admission"]["waiting"] == 1)
        assert end(client, "r").refused == 1
        thread.join(10)
        assert error_of(answers[0], 409)["code"] == "run-ended"

    def test_one_that_is_being_made_is_ended_too(self, client, launcher):
        launcher.held.add("create")
        thread = threading.Thread(
            target=client.post,
            args=("/v1/sandboxes",),
            kwargs={"json": {"image": "debian", "run": "r"}},
        )
        thread.start()
        until(lambda: client.get("/v1/runs").json()["runs"])
        pending = end(client, "r", within_s=0.1)
        assert len(pending.pending) == 1
        launcher.release("create")
        thread.join(10)
        until(lambda: not launcher.rows)
        assert client.get("/v1/sandboxes").json()["sandboxes"] == []

    def test_its_name_is_free_again_later(self, config, launcher):
        config = load_config(
            env={},
            overrides={
                "state_dir": config.state_dir,
                "runtime_dir": config.runtime_dir,
                "run_ended_s": 0.2,
            },
        )
        with make_client(config) as client:
            wait_ready(client)
            end(client, "r")
            refused(client, 409, run="r")
            time.sleep(0.25)
            create(client, run="r")

    def test_the_list_goes_page_by_page(self, client):
        for name in "cab":
            put(client, name)
        first = client.get("/v1/runs", params={"limit": 2}).json()
        assert [row["name"] for row in first["runs"]] == ["a", "b"]
        rest = client.get("/v1/runs", params={"after": first["next"]}).json()
        assert ([row["name"] for row in rest["runs"]], rest["next"]) == (["c"], None)


class TestQuotas:
    def test_of_sandboxes(self, client):
        put(client, "r", max_sandboxes=2)
        made = [create(client, run="r") for _ in range(2)]
        error = refused(client, 429, run="r")
        assert (error["code"], error["cause"], error["retryable"]) == (
            "quota-exceeded",
            "request",
            True,
        )
        assert error["detail"]["reason"] == "run-sandboxes"
        create(client, run="other")
        client.delete(f"/v1/sandboxes/{made[0].id}")
        create(client, run="r")

    def test_of_creates_a_second(self, client):
        put(client, "r", max_creates_per_s=1)
        create(client, run="r")
        answer = client.post("/v1/sandboxes", json={"image": "debian", "run": "r"})
        assert error_of(answer, 429)["detail"]["reason"] == "run-rate"
        assert answer.headers["Retry-After"] == "1"
        began = time.monotonic()
        create(client, run="r", wait_s=10)  # the wait is for the rate too
        assert time.monotonic() - began > 0.5

    def test_by_default(self, config, launcher):
        config = load_config(
            env={},
            overrides={
                "state_dir": config.state_dir,
                "runtime_dir": config.runtime_dir,
                "run_max_sandboxes": 1,
            },
        )
        with make_client(config) as client:
            wait_ready(client)
            create(client, run="r")
            assert refused(client, 429, run="r")["code"] == "quota-exceeded"
            put(client, "r", max_sandboxes=0)
            create(client, run="r")


class TestDrain:
    def test_nothing_new_and_what_is_there_goes_on(self, client):
        made = create(client)
        state = DrainAnswer.model_validate(client.post("/v1/node/drain").json())
        assert (state.draining, state.why, state.deadline, state.sandboxes) == (
            True,
            "asked",
            None,
            1,
        )
        answer = client.post("/v1/sandboxes", json={"image": "debian"})
        error = error_of(answer, 503)
        assert (error["code"], error["cause"], error["retryable"]) == (
            "node-draining",
            "node",
            True,
        )
        assert int(answer.headers["Retry-After"]) >= 1
        assert error_of(client.get("/readyz"), 503)["code"] == "node-draining"
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/node").json()["admission"]["closed_by"] == ["draining"]
        command = {"command": ["/bin/true"]}
        assert client.post(f"/v1/sandboxes/{made.id}/exec", json=command).status_code == 200
        assert client.post("/v1/node/undrain").json()["draining"] is False
        create(client)

    def test_those_that_wait_are_told(self, client):
        for _ in range(4):
            create(client)
        answers = []
        body = {"image": "debian", "wait_s": 30}
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/sandboxes", json=body))
        )
        thread.start()
        until(lambda: client.get("/v1/node").json()["admission"]["waiting"] == 1)
        client.post("/v1/node/drain")
        thread.join(10)
        assert error_of(answers[0], 503)["code"] == "node-draining"

    def test_a_deadline_deletes_all(self, client, launcher):
        create(client)
        state = client.post("/v1/node/drain", json={"deadline_s": 0.2}).json()
        assert state["deadline"] is not None
        until(lambda: not launcher.rows)

    def test_a_deadline_can_be_put_off(self, client, launcher):
        create(client)
        client.post("/v1/node/drain", json={"deadline_s": 0.2})
        client.post("/v1/node/drain", json={"deadline_s": 100})
        time.sleep(0.5)
        assert len(launcher.rows) == 1

    def test_it_outlives_the_daemon(self, config, launcher):
        with make_client(config) as client:
            wait_ready(client)
            client.post("/v1/node/drain")
        with make_client(config) as client:
            until(lambda: client.get("/v1/node").json()["ready"])
            assert refused(client, 503)["code"] == "node-draining"
            client.post("/v1/node/undrain")
            create(client)
        with make_client(config) as client:
            wait_ready(client)

    def test_before_the_job_ends(self, config, launcher, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 65))
        with make_client(config) as client:
            wait_ready(client)
            create(client)
            drain = None
            until(lambda: client.get("/v1/node").json()["admission"]["drain"]["draining"])
            drain = client.get("/v1/node").json()["admission"]["drain"]
            assert drain["why"] == "job-end"
            assert drain["deadline"] < drain["job_end"]
            # Asking for it once more does not put the end of the job off.
            again = client.post("/v1/node/drain").json()
            assert (again["why"], again["deadline"]) == ("job-end", drain["deadline"])
            assert len(launcher.rows) == 1


class TestRoom:
    def test_the_node_tells_what_it_has(self, client):
        create(client, limits={"memory_mb": 100, "disk_mb": 50, "cpus": 0.5, "pids": 9})
        node = NodeAnswer.model_validate(client.get("/v1/node").json())
        assert node.admission.open
        used = node.admission.used
        assert (used["sandboxes"], used["cpus"], used["pids"]) == (1, 0.5, 10)
        assert 150 <= used["memory_mb"] <= 160
        assert used.keys() == node.admission.capacity.keys()
        assert node.admission.capacity["sandboxes"] == 4

    def test_memory_is_what_is_short(self, config, launcher):
        total = client_memory_mb()
        config = load_config(
            env={},
            overrides={
                "state_dir": config.state_dir,
                "runtime_dir": config.runtime_dir,
                "memory_overcommit": 1000 / (total - 512),  # 1,000 MiB
            },
        )
        with make_client(config) as client:
            wait_ready(client)
            limits = {"memory_mb": 300, "disk_mb": 100}
            for _ in range(2):
                create(client, limits=limits)
            answer = client.post("/v1/sandboxes", json={"image": "debian", "limits": limits})
            error = error_of(answer, 429)
            assert (error["code"], error["detail"]["reason"]) == ("node-overloaded", "memory_mb")
            assert int(answer.headers["Retry-After"]) >= 1
            # What the whole node could not hold is no matter of waiting.
            huge = {"memory_mb": 2000, "disk_mb": 1}
            assert refused(client, 422, limits=huge)["code"] == "request-invalid"

    def test_a_machine_short_of_memory_takes_nothing_on(self, config, launcher):
        config = load_config(
            env={},
            overrides={
                "state_dir": config.state_dir,
                "runtime_dir": config.runtime_dir,
                # More than is ever free, less than there is.
                "memory_reserve_mb": client_memory_mb() - 4,
                "memory_overcommit": 1e5,
            },
        )
        with make_client(config) as client:
            wait_ready(client)
            error = refused(client, 429)
            assert (error["code"], error["detail"]["reason"]) == ("node-overloaded", "pressure")
            assert client.get("/v1/node").json()["admission"]["closed_by"] == ["memory-low"]


def client_memory_mb():
    with open("/proc/meminfo", encoding="ascii") as file:
        return int(file.readline().split()[1]) >> 10
