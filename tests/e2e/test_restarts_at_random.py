"""A daemon that is killed at random instants under load, again and again.

Each worker keeps a ledger of what it was promised: what was answered must be there afterwards, what
was cut off may be or may not, but never by half. In the end every sandbox on the node is one that a
ledger knows, for the daemon and for the launcher.

`SANDBOXD_TESTS_SEED` replays a run (the instants are the clock's, the requests the seed's),
`SANDBOXD_TESTS_ROUNDS` makes it longer.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.e2e.host_processes import pids_with, wait_for
from tests.e2e.restarts import Node, running_node
from tests.framework.daemon import Daemon
from tests.framework.leaks import LeakCheck

SEED = int(os.environ.get("SANDBOXD_TESTS_SEED", "7"))
ROUNDS = int(os.environ.get("SANDBOXD_TESTS_ROUNDS", "3"))
WORKERS = 4
LIFE_S = (0.3, 2.0)
"""Of a daemon, from its readiness on."""
CUT = httpx.TransportError


@pytest.fixture
def node(leak_check: LeakCheck, busybox: Path) -> Iterator[Node]:
    with running_node(leak_check, {"busybox": busybox}) as node:
        yield node


@dataclass
class Box:
    """What is known of one sandbox."""

    id: str
    written: dict[str, set[str]] = field(default_factory=dict)
    """Contents that a file may have: one that was answered, and those that were cut off since."""
    session: str = ""
    variable: set[str] = field(default_factory=lambda: {""})
    snapshots: dict[str, str] = field(default_factory=dict)
    """Content of /root/exec when it was taken, by id."""
    processes: dict[str, str] = field(default_factory=dict)
    """Marker by id."""
    is_deleted: bool = False
    """Perhaps: the request was cut off."""


class Worker:
    """Asks for things at random, one after another, and remembers what it was told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rng = random.Random(SEED * 1000 + number)
        self.boxes: list[Box] = []
        self.cut_creates: dict[str, str] = {}
        """Content of the file it was asked for with, by the key of a create that was cut off."""
        self.count = 0
        self.failure: BaseException | None = None

    def work(self, http: httpx.Client, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.one(http)
        except CUT:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the thread is joined
            self.failure = error

    def one(self, http: httpx.Client) -> None:
        if len(self.boxes) < 2:
            self.create(http)
            return
        box = self.rng.choice(self.boxes)
        asks = (self.create, self.execute, self.upload, self.snapshot, self.command, self.start)
        ask = self.rng.choice((*asks, self.delete))
        if ask in (self.create, self.delete):
            if len(self.boxes) > 4:
                self.delete(http, box)
            else:
                self.create(http)
        else:
            ask(http, box)

    def fresh(self) -> str:
        self.count += 1
        return f"{self.number}.{self.count}"

    def create(self, http: httpx.Client, key: str = "") -> None:
        content = self.cut_creates.get(key) or self.fresh()
        key = key or f"key-{content}"
        self.cut_creates[key] = content
        body = {
            "image": "busybox",
            "files": [{"path": f"/root/{n}", "content": content} for n in range(3)],
            "run": f"worker-{self.number}",
        }
        answer = http.post("/v1/sandboxes", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 201, answer.text
        del self.cut_creates[key]
        box = Box(answer.json()["id"])
        box.written = {f"/root/{n}": {content} for n in range(3)}
        self.boxes.append(box)

    def execute(self, http: httpx.Client, box: Box) -> None:
        content = self.fresh()
        path = "/root/exec"
        may_be = box.written.setdefault(path, {""})
        may_be.add(content)
        command = f"printf {content} > {path}.new && mv {path}.new {path}"
        answer = http.post(f"/v1/sandboxes/{box.id}/exec", json={"command": command})
        assert answer.json()["exit_code"] == 0, answer.text
        box.written[path] = {content}

    def upload(self, http: httpx.Client, box: Box) -> None:
        content = self.fresh()
        path = "/root/upload"
        box.written.setdefault(path, {""}).add(content * 100_000)
        answer = http.put(
            f"/v1/sandboxes/{box.id}/files", params={"path": path}, content=content * 100_000
        )
        assert answer.is_success, answer.text
        box.written[path] = {content * 100_000}

    def snapshot(self, http: httpx.Client, box: Box) -> None:
        if len(box.written.get("/root/exec", ())) != 1 or len(box.snapshots) > 3:
            return
        (content,) = box.written["/root/exec"]
        answer = http.post(f"/v1/sandboxes/{box.id}/snapshots", json={"on_running": "copy"})
        assert answer.status_code == 201, answer.text
        box.snapshots[answer.json()["id"]] = content

    def command(self, http: httpx.Client, box: Box) -> None:
        path = f"/v1/sandboxes/{box.id}/sessions"
        if not box.session:
            answer = http.post(path, json={})
            assert answer.status_code == 201, answer.text
            box.session = answer.json()["id"]
        content = self.fresh()
        box.variable.add(content)
        answer = http.post(f"{path}/{box.session}/exec", json={"command": f"V={content}"})
        assert answer.json()["exit_code"] == 0, answer.text
        box.variable = {content}

    def start(self, http: httpx.Client, box: Box) -> None:
        if len(box.processes) > 3:
            return
        marker = f"{10**9 + self.rng.randrange(10**9)}"
        path = f"/v1/sandboxes/{box.id}/processes"
        answer = http.post(path, json={"command": ["sleep", marker]})
        assert answer.status_code == 201, answer.text
        box.processes[answer.json()["id"]] = marker

    def delete(self, http: httpx.Client, box: Box) -> None:
        box.is_deleted = True
        answer = http.delete(f"/v1/sandboxes/{box.id}")
        assert answer.status_code == 204, answer.text
        assert all(not pids_with(marker) for marker in box.processes.values())
        self.boxes.remove(box)

    # --- afterwards --------------------------------------------------------------------------

    def look(self, http: httpx.Client) -> None:
        """Compare the node with the ledger, and know everything again."""
        for box in [box for box in self.boxes if box.is_deleted]:
            self.delete(http, box)
        for key in list(self.cut_creates):
            self.create(http, key)
        for box in self.boxes:
            self.look_at(http, box)

    def look_at(self, http: httpx.Client, box: Box) -> None:
        seen = http.get(f"/v1/sandboxes/{box.id}")
        assert seen.json()["state"] == "running", seen.text
        for path, may_be in box.written.items():
            answer = http.get(f"/v1/sandboxes/{box.id}/files", params={"path": path})
            content = answer.text if answer.is_success else ""
            assert content in may_be, (path, content[:50], [text[:50] for text in may_be])
            box.written[path] = {content}
        if box.session:
            path = f"/v1/sandboxes/{box.id}/sessions/{box.session}/exec"
            value = http.post(path, json={"command": 'echo "$V"'}).json()["stdout"].strip()
            assert value in box.variable
            box.variable = {value}
        listed = http.get(f"/v1/sandboxes/{box.id}/processes").json()["processes"]
        running = {one["id"] for one in listed if one["state"] == "running"}
        assert running >= box.processes.keys()
        for marker in box.processes.values():
            assert len(pids_with(marker)) == 1
        for snapshot, content in box.snapshots.items():
            forked = http.post("/v1/sandboxes", json={"snapshot": snapshot})
            assert forked.status_code == 201, forked.text
            fork = f"/v1/sandboxes/{forked.json()['id']}"
            answer = http.get(f"{fork}/files", params={"path": "/root/exec"})
            assert answer.text == content
            assert http.delete(fork).status_code == 204
        for snapshot in box.snapshots:
            assert http.delete(f"/v1/snapshots/{snapshot}").is_success
        box.snapshots.clear()


def under_load(node: Node, daemon: Daemon, workers: list[Worker], rng: random.Random) -> None:
    """Let the workers ask until the daemon is killed at a random instant."""
    stop = threading.Event()
    headers = {"Authorization": f"Bearer {daemon.token}"}
    clients = [httpx.Client(base_url=daemon.base_url, headers=headers, timeout=60) for _ in workers]
    threads = [
        threading.Thread(target=worker.work, args=(client, stop))
        for worker, client in zip(workers, clients, strict=True)
    ]
    for thread in threads:
        thread.start()
    stop.wait(rng.uniform(*LIFE_S))
    node.kill_daemon(daemon)
    stop.set()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure


def listed(daemon: Daemon) -> set[str]:
    found: set[str] = set()
    query: dict[str, str] = {}
    while True:
        page = daemon.http.get("/v1/sandboxes", params=query).json()
        found |= {one["id"] for one in page["sandboxes"]}
        if not page.get("next"):
            return found
        query["after"] = page["next"]


def wait_known(daemon: Daemon, count: int) -> None:
    """Until the launcher has no others: what nobody knows of would be there for ever."""

    def known() -> bool:
        counts = daemon.http.get("/v1/node").json()["counts"]
        return bool(counts["sandboxes"] == count)

    wait_for(known, f"a launcher with {count} sandboxes")


@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_nothing_that_was_promised_is_lost_whenever_the_daemon_dies(node: Node):
    print(f"SANDBOXD_TESTS_SEED={SEED} SANDBOXD_TESTS_ROUNDS={ROUNDS}")
    rng = random.Random(SEED)
    workers = [Worker(number) for number in range(WORKERS)]
    daemon = node.serve()
    for _ in range(ROUNDS):
        under_load(node, daemon, workers, rng)
        daemon = node.serve()
        for worker in workers:
            worker.look(daemon.http)
        mine = {box.id for worker in workers for box in worker.boxes}
        assert listed(daemon) == mine
        wait_known(daemon, len(mine))
    asked = sum(worker.count for worker in workers)
    print(f"{asked} requests that change something, {ROUNDS} daemons killed")
    assert asked > ROUNDS  # they got through to something
    for worker in workers:
        for box in list(worker.boxes):
            worker.delete(daemon.http, box)
    for snapshot in daemon.http.get("/v1/snapshots").json()["snapshots"]:
        daemon.http.delete(f"/v1/snapshots/{snapshot['id']}")
