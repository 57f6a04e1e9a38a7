"""What a node owes: the sandboxes of one worker as its answers describe them.

A request that was answered has one outcome. One that was cut off, or refused while a part of the
node was dead, has two: each sandbox has the *states* it may be in, and what is seen afterwards must
be one of them. What is refused must be refused with a name that the fault of the moment allows.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.e2e.fault_plan import PLACES, Action
from tests.e2e.host_processes import new_marker, pids_with, wait_for
from tests.e2e.image_factory import BULK_BYTES, BULK_FILES
from tests.e2e.refusals import refusal

IMAGES = ("busybox", "bulky")
LIMITS = {"memory_mb": 64, "disk_mb": 16, "pids": 40}
SNAPSHOTS = 2
PROCESSES = 3


@dataclass(frozen=True)
class Allowed:
    """What a fault excuses while it lasts."""

    refusals: frozenset[tuple[int, str, str]] = frozenset()
    """Status, code, cause."""
    is_cut: bool = False
    """Connections may break."""
    loses: str = ""
    """`node`: every sandbox and snapshot; `image`: the sandboxes of one image."""


class Uncertain(Exception):
    """The request may have been carried out or not."""


class Cut(Uncertain):
    """And there is nobody who could be asked."""


@dataclass(frozen=True)
class State:
    """Of one sandbox. Replaced, never changed."""

    files: dict[str, str] = field(default_factory=dict)
    session: str = ""
    variable: str = ""
    processes: dict[str, str] = field(default_factory=dict)
    """What each was given on stdin, which it repeats, by id."""


@dataclass
class Box:
    id: str
    image: str
    states: list[State]
    markers: dict[str, str] = field(default_factory=dict)
    """In the command line of each process, by id; ended ones included."""
    is_lost: bool = False
    is_deleted: bool = False
    """Perhaps."""

    @property
    def path(self) -> str:
        return f"/v1/sandboxes/{self.id}"

    @property
    def state(self) -> State:
        (state,) = self.states
        return state


@dataclass(frozen=True)
class Snapshot:
    image: str
    files: dict[str, str]


def bulk_sums() -> list[str]:
    """SHA-256 of the files of the image `bulky`, from what they were made of."""
    noise = random.Random(20_240_229)
    return [hashlib.sha256(noise.randbytes(BULK_BYTES)).hexdigest() for _ in range(BULK_FILES)]


class Worker:
    """Carries out its actions one after another, and holds the node to each answer."""

    def __init__(self, number: int, sums: list[str]) -> None:
        self.number = number
        self.sums = sums
        self.boxes: list[Box | None] = [None] * PLACES
        self.creates: dict[str, tuple[int, dict[str, Any], Box]] = {}
        """Creates that may have been carried out, by idempotency key."""
        self.snapshots: dict[str, Snapshot] = {}
        self.allowed = Allowed()
        self.count = 0
        self.refused: list[str] = []

    # --- asking -------------------------------------------------------------------------------

    def ask(self, http: httpx.Client, method: str, path: str, **request: Any) -> httpx.Response:
        """An answer that is no failure of the node. Raises Uncertain where one is excused."""
        try:
            answer = http.request(method, path, **request)
        except httpx.TransportError as error:
            if self.allowed.is_cut:
                raise Cut from error
            raise AssertionError(f"{method} {path}: {error!r} is not excused") from error
        if answer.is_success:
            return answer
        error = answer.json()["error"]
        name = (answer.status_code, error["code"], error["cause"])
        if name not in self.allowed.refusals:
            if error["cause"] != "node":
                return answer  # for the caller to expect
            raise AssertionError(f"{method} {path}: {answer.text} is not excused")
        refusal(answer, *name, retryable=error["cause"] == "node")
        self.refused.append(error["code"])
        raise Uncertain(error["code"])

    def change(
        self, box: Box, after: Callable[[State], State], ask: Callable[[], httpx.Response]
    ) -> httpx.Response:
        """Ask for what makes `after` of the state of `box`; both are possible until answered."""
        before = box.state
        box.states = [before, after(before)]
        answer = ask()
        assert answer.is_success, answer.text
        box.states = [after(before)]
        return answer

    def fresh(self) -> str:
        self.count += 1
        return f"{self.number}.{self.count}"

    # --- actions ------------------------------------------------------------------------------

    def act(self, http: httpx.Client, action: Action) -> None:
        """Raises Cut where the daemon is gone."""
        box = self.boxes[action.place]
        try:
            if box is None:
                if all(place != action.place for place, _, _ in self.creates.values()):
                    self.create(http, action.place, action.number)
            elif len(box.states) == 1 and not box.is_lost and not box.is_deleted:
                getattr(self, action.verb)(http, box, action)
        except Cut:
            raise
        except Uncertain as refused:
            if box is not None and refused.args == ("sandbox-lost",):
                box.is_lost = True

    def create(self, http: httpx.Client, place: int, number: int, snapshot: str = "") -> None:
        content = self.fresh()
        key = f"key-{content}"
        if snapshot:
            taken = self.snapshots[snapshot]
            body: dict[str, Any] = {"snapshot": snapshot}
            box = Box("", taken.image, [State(taken.files)])
        else:
            image = IMAGES[number % 2]
            body = {"image": image, "files": [{"path": "/root/made", "content": content}]}
            box = Box("", image, [State({"/root/made": content})])
        body |= {"limits": LIMITS, "run": f"worker-{self.number}"}
        self.creates[key] = (place, body, box)
        self.finish_create(http, key)

    def finish_create(self, http: httpx.Client, key: str) -> None:
        place, body, box = self.creates[key]
        answer = self.ask(
            http, "POST", "/v1/sandboxes", json=body, headers={"Idempotency-Key": key}
        )
        assert answer.status_code == 201, answer.text
        del self.creates[key]
        box.id = answer.json()["id"]
        self.boxes[place] = box

    def execute(self, http: httpx.Client, box: Box, action: Action) -> None:
        content, path, code = self.fresh(), f"/root/{action.number % 3}", action.number % 100
        size = action.number % 30_000
        command = (
            f"printf {content} > {path}.new && mv {path}.new {path} || exit 111; "
            f"head -c {size} /dev/zero | tr '\\0' o; printf e-{content} >&2; exit {code}"
        )
        answer = self.change(
            box,
            lambda state: replace(state, files={**state.files, path: content}),
            lambda: self.run(http, box, command),
        )
        result = answer.json()
        assert result["exit_code"] == code, result
        assert (result["signal"], result["timed_out"]) == (None, False), result
        assert result["stdout"] == "o" * size, (size, result["stdout_total_bytes"])
        assert result["stderr"] == f"e-{content}", result

    def run(self, http: httpx.Client, box: Box, command: str, **more: Any) -> httpx.Response:
        return self.ask(http, "POST", f"{box.path}/exec", json={"command": command, **more})

    def read_image(self, http: httpx.Client, box: Box, action: Action) -> None:
        if box.image != "bulky":
            return
        number = action.number % BULK_FILES
        result = self.run(http, box, f"sha256sum /bulk/{number}").json()
        assert result["exit_code"] == 0, result
        assert result["stdout"].split() == [self.sums[number], f"/bulk/{number}"]

    def signalled(self, http: httpx.Client, box: Box, action: Action) -> None:
        number = (9, 15, 11, 6)[action.number % 4]
        result = self.run(http, box, f"kill -{number} $$").json()
        assert (result["exit_code"], result["timed_out"]) == (128 + number, False), result

    def time_out(self, http: httpx.Client, box: Box, action: Action) -> None:
        marker = new_marker()
        command = f"echo began; setsid sleep {marker} & sleep {marker}"
        result = self.run(http, box, command, timeout_s=0.5).json()
        assert (result["exit_code"], result["timed_out"]) == (124, True), result
        assert result["stdout"] in ("began\n", ""), result
        assert pids_with(marker) == []

    def upload(self, http: httpx.Client, box: Box, action: Action) -> None:
        path, content = f"/root/{action.number % 3}", self.fresh() * (action.number % 50_000 + 1)
        self.change(
            box,
            lambda state: replace(state, files={**state.files, path: content}),
            lambda: self.ask(
                http, "PUT", f"{box.path}/files", params={"path": path}, content=content
            ),
        )

    def download(self, http: httpx.Client, box: Box, action: Action) -> None:
        path = f"/root/{action.number % 3}"
        assert self.content_of(http, box, path) == box.state.files.get(path)

    def content_of(self, http: httpx.Client, box: Box, path: str) -> str | None:
        """None where there is no such file."""
        answer = self.ask(http, "GET", f"{box.path}/files", params={"path": path})
        if answer.is_success:
            return answer.text
        refusal(answer, 404, "file-not-found", "request")
        return None

    def command(self, http: httpx.Client, box: Box, action: Action) -> None:
        path = f"{box.path}/sessions"
        if not box.state.session:
            answer = self.ask(http, "POST", path, json={})
            assert answer.status_code == 201, answer.text
            box.states = [replace(box.state, session=answer.json()["id"], variable="")]
        content, before, session = self.fresh(), box.state.variable, box.state.session
        body = {"command": f'echo "$V"; V={content}; (exit 3)'}
        answer = self.change(
            box,
            lambda state: replace(state, variable=content),
            lambda: self.ask(http, "POST", f"{path}/{session}/exec", json=body),
        )
        result = answer.json()
        assert (result["exit_code"], result["stdout"]) == (3, f"{before}\n"), result

    def start(self, http: httpx.Client, box: Box, action: Action) -> None:
        if len(box.state.processes) >= PROCESSES:
            return
        marker = new_marker()
        body = {"command": ["sh", "-c", f"cat; : {marker}"], "stdin": True}
        answer = self.ask(http, "POST", f"{box.path}/processes", json=body)
        assert answer.status_code == 201, answer.text
        process = answer.json()["id"]
        box.markers[process] = marker
        box.states = [replace(box.state, processes={**box.state.processes, process: ""})]

    def write(self, http: httpx.Client, box: Box, action: Action) -> None:
        if not box.state.processes:
            self.start(http, box, action)
        process = sorted(box.state.processes)[action.number % len(box.state.processes)]
        self.write_to(http, box, process, f"{self.fresh()}\n" * (action.number % 50 + 1))

    def write_to(self, http: httpx.Client, box: Box, process: str, data: str) -> None:
        path = f"{box.path}/processes/{process}/stdin"
        self.change(
            box,
            lambda state: replace(
                state,
                processes={**state.processes, process: state.processes[process] + data},
            ),
            lambda: self.ask(http, "POST", path, json={"data": data}),
        )

    def halt(self, http: httpx.Client, box: Box, action: Action) -> None:
        """A stopped process loses nothing that it is sent, and holds nothing else up."""
        if not box.state.processes:
            return
        process = min(box.state.processes)
        path = f"{box.path}/processes/{process}/signal"
        for signal in ("STOP", "CONT"):
            body = {"signal": signal, "scope": "tree"}
            assert self.ask(http, "POST", path, json=body).is_success
            self.write_to(http, box, process, f"{self.fresh()}\n")
            assert self.run(http, box, "exit 5").json()["exit_code"] == 5

    def fill(self, http: httpx.Client, box: Box, action: Action) -> None:
        result = self.run(http, box, "dd if=/dev/zero of=/root/fill bs=64k 2>&1").json()
        assert result["exit_code"] == 1, result
        assert "No space left" in result["stdout"], result
        content = self.fresh() * 100_000
        answer = self.ask(
            http, "PUT", f"{box.path}/files", params={"path": "/root/late"}, content=content
        )
        refusal(answer, 409, "disk-full", "workload")
        assert self.run(http, box, "rm /root/fill").json()["exit_code"] == 0

    def snapshot(self, http: httpx.Client, box: Box, action: Action) -> None:
        if len(self.snapshots) >= SNAPSHOTS:
            victim = sorted(self.snapshots)[action.number % SNAPSHOTS]
            del self.snapshots[victim]  # whatever becomes of the request: it is not relied upon
            assert self.ask(http, "DELETE", f"/v1/snapshots/{victim}").status_code == 204
        answer = self.ask(http, "POST", f"{box.path}/snapshots", json={"on_running": "copy"})
        if answer.status_code == 409:
            refusal(answer, 409, "snapshot-too-deep", "request")
            return
        assert answer.status_code == 201, answer.text
        self.snapshots[answer.json()["id"]] = Snapshot(box.image, box.state.files)

    def roll_back(self, http: httpx.Client, box: Box, action: Action) -> None:
        fitting = sorted(k for k, one in self.snapshots.items() if one.image == box.image)
        if not fitting:
            return
        chosen = fitting[action.number % len(fitting)]
        self.change(
            box,
            lambda _: State(self.snapshots[chosen].files),
            lambda: self.ask(http, "POST", f"{box.path}/rollback", json={"snapshot": chosen}),
        )

    def fork(self, http: httpx.Client, box: Box, action: Action) -> None:
        if not self.snapshots:
            return
        self.delete(http, box, action)
        chosen = sorted(self.snapshots)[action.number % len(self.snapshots)]
        self.create(http, action.place, action.number, chosen)

    def reset(self, http: httpx.Client, box: Box, action: Action) -> None:
        # What it was made with is of its making; a reset begins from the image.
        self.change(box, lambda _: State(), lambda: self.ask(http, "POST", f"{box.path}/reset"))

    def delete(self, http: httpx.Client, box: Box, action: Action | None = None) -> None:
        box.is_deleted = True
        answer = self.ask(http, "DELETE", box.path)
        assert answer.status_code == 204, answer.text
        for marker in box.markers.values():
            assert pids_with(marker) == []
        self.boxes[self.boxes.index(box)] = None

    # --- afterwards ---------------------------------------------------------------------------

    def look(self, http: httpx.Client, loses: str) -> set[str]:
        """Compare the healed node with what it owes; the images whose sandboxes were lost."""
        self.allowed = Allowed()
        lost: set[str] = set()
        for box in self.boxes:
            if box is not None and box.is_deleted:
                self.delete(http, box)
        known = {one["id"] for one in http.get("/v1/snapshots").json()["snapshots"]}
        if loses == "node":
            self.snapshots = {k: one for k, one in self.snapshots.items() if k in known}
        lost_snapshots = self.snapshots.keys() - known
        assert not lost_snapshots, (lost_snapshots, known)
        for key in list(self.creates):
            if self.creates[key][1].get("snapshot", "") in {"", *known}:
                self.finish_create(http, key)
            else:
                del self.creates[key]
        for box in self.boxes:
            if box is not None and not self.look_at(http, box, loses):
                lost.add(box.image)
                self.delete(http, box)
        return lost

    def look_at(self, http: httpx.Client, box: Box, loses: str) -> bool:
        """Whether it lives."""
        seen = self.ask(http, "GET", box.path).json()
        if seen["state"] == "failed":
            assert loses, f"nothing excuses that {box} was lost: {seen['failure']}"
            named = (seen["failure"]["code"], seen["failure"]["cause"])
            assert named == ("sandbox-lost", "node"), seen
            answer = http.post(f"{box.path}/exec", json={"command": ["true"]})
            refusal(answer, 410, "sandbox-lost", "node", retryable=True)
            return False
        assert not box.is_lost, f"{box.id} was said to be lost"
        assert seen["state"] == "running", seen
        # One that was filled when the daemon was killed is full still.
        assert self.run(http, box, "rm -f /root/fill").json()["exit_code"] == 0
        outputs = self.outputs(http, box)
        states = [one for one in box.states if self.is_alike(http, box, one, outputs)]
        assert states, f"{box} is in none of its states"
        box.states = states[:1]
        for process, marker in box.markers.items():
            expected = 1 if process in box.state.processes else 0
            assert len(pids_with(marker)) == expected, (process, pids_with(marker))
        return True

    def is_alike(self, http: httpx.Client, box: Box, state: State, outputs: dict[str, str]) -> bool:
        paths = {path for one in box.states for path in one.files}
        if any(self.content_of(http, box, path) != state.files.get(path) for path in paths):
            return False
        if any(outputs.get(process) != told for process, told in state.processes.items()):
            return False
        if not state.session:
            return True
        path = f"{box.path}/sessions/{state.session}/exec"
        answer = self.ask(http, "POST", path, json={"command": 'echo "$V"'})
        return answer.is_success and answer.json()["stdout"] == f"{state.variable}\n"

    def outputs(self, http: httpx.Client, box: Box) -> dict[str, str]:
        """All that each living process has said, up to a line that it is sent for this."""
        listed = self.ask(http, "GET", f"{box.path}/processes").json()["processes"]
        living = {one["id"] for one in listed if one["state"] == "running"} & box.markers.keys()
        said: dict[str, str] = {}
        for process in sorted(living):
            path = f"{box.path}/processes/{process}"
            body = {"signal": "CONT", "scope": "tree"}  # a halt may have been cut off
            assert self.ask(http, "POST", f"{path}/signal", json=body).is_success
            # What was cut off may still be on its way: what comes behind it ends the doubt.
            mark = f"mark {self.fresh()}\n"
            assert self.ask(http, "POST", f"{path}/stdin", json={"data": mark}).is_success
            said[process] = self.output_with(http, path, mark)
            box.states = [
                replace(one, processes={**one.processes, process: one.processes[process] + mark})
                if process in one.processes
                else one
                for one in box.states
            ]
        return said

    def output_with(self, http: httpx.Client, path: str, mark: str) -> str:
        found: dict[str, Any] = {}

        def is_there() -> bool:
            found.update(self.ask(http, "GET", path, params={"stdout_offset": 0}).json()["stdout"])
            return str(found["data"]).endswith(mark)

        wait_for(is_there, f"{mark!r} in the output", 20)
        assert (found["offset"], found["lost_bytes"]) == (0, 0), found
        assert len(found["data"]) == found["total_bytes"], found
        return str(found["data"])
