"""Breaks parts of a node at random while workers use it, and holds the node to what it promised.

For: the short run of this tier and the long one of the tier `faults`. The plan is `fault_plan`'s,
what an answer may be `fault_model`'s. A fault comes after a planned number of actions, is healed,
and when the round's actions have ended the whole node is compared with the model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import httpx

from tests.e2e.at_once import client_of
from tests.e2e.fault_model import LIMITS, Allowed, Cut, Worker, bulk_sums
from tests.e2e.fault_plan import WORKERS, Action, Round
from tests.e2e.host_processes import (
    family_with,
    new_marker,
    pids_with,
    status_of,
    wait_for,
    wait_for_end,
    wait_for_marker,
)
from tests.e2e.refusals import refusal
from tests.e2e.restarts import Node, start_node
from tests.framework import host_state

LOST = (410, "sandbox-lost", "node")
NO_NODE = (503, "node-unavailable", "node")
NO_IMAGE = (503, "image-unavailable", "node")
NO_SNAPSHOT = (404, "snapshot-not-found", "request")
"""Snapshots are the launcher's, and gone with it."""

NODE_DIES = Allowed(frozenset({LOST, NO_NODE, NO_IMAGE, NO_SNAPSHOT}), loses="node")
IMAGE_DIES = Allowed(frozenset({LOST, NO_IMAGE}), loses="image")
ALLOWED = {
    "kill daemon": Allowed(is_cut=True),
    "stop daemon": Allowed(),
    "kill host helper": NODE_DIES,
    "stop host helper": Allowed(),
    "kill launcher": NODE_DIES,
    "stop launcher": Allowed(),
    "kill zygote": NODE_DIES,
    "stop zygote": Allowed(),
    "kill image server": IMAGE_DIES,
    # An exec whose time is up while the server does not answer has no result.
    "stop image server": Allowed(frozenset({NO_IMAGE})),
    "kill view server": Allowed(),
    "stop view server": Allowed(),
    "kill client": Allowed(),
    "stop client": Allowed(),
    "stop processes": Allowed(),
    "remove store": Allowed(frozenset({NO_IMAGE})),
}
FAULTS = tuple(sorted(ALLOWED))
PARTS = {
    "launcher": "sandboxd.launcher",
    "zygote": "init zygote",
    "image server": "squashfuse_ll",
    "view server": "sandboxd.views",
}
CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[3].encode(), {
    "Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"})
sys.stdout.buffer.write(urllib.request.urlopen(request).read())
"""
SIZE = 3_000_000
"""Of an output that a stopped client has not read yet."""


class Turns:
    """Counts the actions of a round, so that a fault comes after the planned one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._working = WORKERS

    def one_done(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def worker_done(self) -> None:
        with self._changed:
            self._working -= 1
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count or not self._working)


class FaultRun:
    """One node, its daemon and the workers, over the rounds of a plan."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.daemon = node.serve()
        sums = bulk_sums()
        self.workers = [Worker(number, sums) for number in range(WORKERS)]
        self.rounds = 0

    @property
    def count(self) -> int:
        return sum(worker.count for worker in self.workers)

    def play(self, planned: Round) -> None:
        """One round. Raises whatever was not as it should be."""
        allowed = ALLOWED[planned.fault]
        turns, failures = Turns(), list[BaseException]()
        threads = []
        for worker, actions in zip(self.workers, planned.actions, strict=True):
            worker.allowed = allowed
            threads.append(
                threading.Thread(target=self.work, args=(worker, actions, turns, failures))
            )
        for thread in threads:
            thread.start()
        try:
            turns.wait(planned.after)
            self.break_it(planned)
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        self.compare(allowed)
        self.rounds += 1

    def work(
        self,
        worker: Worker,
        actions: tuple[Action, ...],
        turns: Turns,
        failures: list[BaseException],
    ) -> None:
        try:
            with client_of(self.daemon) as client:
                for action in actions:
                    try:
                        worker.act(client, action)
                    except Cut:
                        return
                    except BaseException as error:
                        error.add_note(f"worker {worker.number}: {action}")
                        raise
                    turns.one_done()
        except BaseException as error:  # noqa: BLE001 - raised where the thread is joined
            failures.append(error)
        finally:
            turns.worker_done()

    def compare(self, allowed: Allowed) -> None:
        wait_for(self.is_ready, "a node that serves")
        with client_of(self.daemon) as client:
            lost = set[str]().union(*(one.look(client, allowed.loses) for one in self.workers))
            if allowed.loses == "image":
                assert len(lost) <= 1, lost
            mine = {box.id for worker in self.workers for box in worker.boxes if box}
            listed = client.get("/v1/sandboxes", params={"limit": 1000}).json()["sandboxes"]
            assert {one["id"] for one in listed} == mine

            def is_known() -> bool:
                # What only the launcher knew of would be there for ever.
                counts = client.get("/v1/node").json()["counts"]
                return bool(counts["sandboxes"] == len(mine))

            wait_for(is_known, f"a launcher with {len(mine)} sandboxes")

    def is_ready(self) -> bool:
        try:
            return self.daemon.http.get("/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        with client_of(self.daemon) as client:
            for worker in self.workers:
                worker.allowed = Allowed()
                for box in list(worker.boxes):
                    if box:
                        worker.delete(client, box)
            for one in client.get("/v1/snapshots").json()["snapshots"]:
                assert client.delete(f"/v1/snapshots/{one['id']}").status_code == 204
            assert client.get("/v1/sandboxes").json()["sandboxes"] == []

    # --- faults -------------------------------------------------------------------------------

    def break_it(self, planned: Round) -> None:
        """Do it, and heal what does not heal by itself."""
        how, _, what = planned.fault.partition(" ")
        special: dict[str, Callable[[Round], None]] = {
            "kill daemon": self.kill_daemon,
            "kill host helper": self.kill_host_helper,
            "kill client": self.kill_client,
            "stop client": self.stop_client,
            "stop processes": self.stop_processes,
            "remove store": self.remove_store,
        }
        if planned.fault in special:
            special[planned.fault](planned)
            return
        pids = self.pids_of(what)
        if not pids:
            return  # no image is in use
        pid = pids[planned.number % len(pids)] if what == "image server" else pids[0]
        launcher = self.pids_of("launcher")[0]
        if how == "stop":
            with stopped(pid):
                threading.Event().wait(planned.pause_s)
            return
        with contextlib.suppress(ProcessLookupError):  # an idle image's server just ended
            os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        if ALLOWED[planned.fault].loses == "node":
            # Until the daemon has seen it, it tells what the old one had.
            wait_for_end(launcher)
            self.pids_of("zygote")  # another one

    def pids_of(self, what: str) -> list[int]:
        """Of a part of the node, the eldest first."""
        if what == "daemon":
            return [self.daemon.pid]
        if what == "host helper":
            return [self.node.process.pid]
        found: list[int] = []

        def is_there() -> bool:
            family = host_state.process_table()[self.node.process.pid].descendants()
            found[:] = family_with({one.pid for one in family}, PARTS[what])
            return bool(found) or what == "image server"

        wait_for(is_there, f"a {what}")
        return found

    def kill_daemon(self, planned: Round) -> None:
        self.node.kill_daemon(self.daemon)
        self.daemon = self.node.serve()

    def kill_host_helper(self, planned: Round) -> None:
        """Only root could start it again, and the daemon is not."""
        old = self.node.process
        parts = [one.pid for one in host_state.process_table()[old.pid].descendants()]
        old.kill()
        old.wait()
        for pid in parts:
            wait_for_end(pid)
        self.node.notices.close()
        again = start_node(self.node.home, self.node.environment)
        self.node.process, self.node.notices = again.process, again.notices
        self.node.wait_notice("READY=1")

    def client(self, sandbox: str, command: str) -> subprocess.Popen[bytes]:
        body = f'{{"command": "{command}"}}'
        words = [f"{self.daemon.base_url}/v1/sandboxes/{sandbox}/exec", self.daemon.token, body]
        return subprocess.Popen(
            [sys.executable, "-c", CLIENT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    @contextlib.contextmanager
    def own_sandbox(self) -> Iterator[tuple[httpx.Client, str]]:
        with client_of(self.daemon) as client:
            body = {"image": "busybox", "limits": LIMITS}
            made = client.post("/v1/sandboxes", json=body)
            assert made.status_code == 201, made.text
            path = f"/v1/sandboxes/{made.json()['id']}"
            yield client, path
            assert client.delete(path).status_code == 204

    def kill_client(self, planned: Round) -> None:
        marker = new_marker()
        with self.own_sandbox() as (client, path):
            killed = self.client(path.rpartition("/")[2], f"setsid sleep {marker} & sleep {marker}")
            # One is the client itself, whose command line holds the command.
            wait_for_marker(marker, count=3)
            killed.kill()
            killed.communicate()
            wait_for(lambda: pids_with(marker) == [], "the end of what nobody waits for")
            answer = client.post(f"{path}/exec", json={"command": "exit 9"})
            assert answer.json()["exit_code"] == 9, answer.text

    def stop_client(self, planned: Round) -> None:
        with self.own_sandbox() as (_, path):
            command = f"head -c {SIZE} /dev/zero | tr '\\\\0' a; exit 7"
            slow = self.client(path.rpartition("/")[2], command)
            with stopped(slow.pid):
                threading.Event().wait(planned.pause_s)
            said, complaint = slow.communicate(timeout=60)
            result = httpx.Response(200, content=said).json() if said else {}
            assert result.get("exit_code") == 7, complaint
            assert result["stdout"] == "a" * SIZE

    def stop_processes(self, planned: Round) -> None:
        """Stopped from without, with all that there is in the sandbox but its PID 1."""
        marker = new_marker()
        with self.own_sandbox() as (client, path):
            command = f"setsid sleep {marker} & sleep {marker} & true"
            assert client.post(f"{path}/exec", json={"command": command}).json()["exit_code"] == 0
            wait_for_marker(marker, count=2)
            for pid in pids_with(marker):
                os.kill(pid, signal.SIGSTOP)
            body = {"command": "kill -STOP $$", "timeout_s": 0.5}
            result = client.post(f"{path}/exec", json=body).json()
            assert (result["exit_code"], result["timed_out"]) == (124, True), result
            assert len(pids_with(marker)) == 2
        assert pids_with(marker) == []

    def remove_store(self, planned: Round) -> None:
        images = self.node.home / "images"
        away = images.with_name("away")
        images.rename(away)
        try:
            with client_of(self.daemon) as client:
                made = client.post("/v1/sandboxes", json={"image": "rare"})
                refusal(made, *NO_IMAGE, retryable=True)
            threading.Event().wait(planned.pause_s)
        finally:
            away.rename(images)
        with client_of(self.daemon) as client:
            made = client.post("/v1/sandboxes", json={"image": "rare", "limits": LIMITS})
            assert made.status_code == 201, made.text
            assert client.delete(f"/v1/sandboxes/{made.json()['id']}").status_code == 204
            assert client.delete("/v1/images/rare").is_success


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status_of(pid)["State"][0] in "TZ", "a standstill")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
