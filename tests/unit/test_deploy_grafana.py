"""The dashboard draws what the daemon tells: every metric and every label in it exists, and every
metric is drawn."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandboxd.errors import NodeError
from sandboxd.model import Event
from tests.unit.fakes_api import create, run

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/sandboxd.json"
NAME = re.compile(r"\b(?:sandboxd|process)_[a-z0-9_]+")
OF_A_SCRAPE = {"instance", "le"}
OF_THE_LAUNCHER = {
    "slots_ready": 1,
    "slots_primed": 1,
    "in_teardown": 0,
    "mounts": 1,
    "fuse_processes": 1,
    "swept": 0,
    "memory_bytes": 1,
    "launcher_memory_bytes": 1,
}


@pytest.fixture
def told(client, launcher):
    """Each sample's labels by its name, of a daemon to which everything has happened once."""
    launcher.do_node = lambda *_: {"ok": {"counts": OF_THE_LAUNCHER}}
    box = create(client)
    run(client, box.id, "true")
    client.delete(f"/v1/sandboxes/{box.id}")
    meters = client.app.state.runtime.meters
    meters.exec_failed(NodeError("x"))
    meters.event(Event(1, 0.0, "failed", "x", {"code": "sandbox-dead", "reason": "killed"}))
    for _ in range(5):
        client.post("/v1/sandboxes", json={"image": "debian"})
    client.app.state.runtime.admission.pressure.closed_by = ("memory-low",)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for one in family.samples:
            found.setdefault(one.name, set()).update(one.labels)
    return found


def expressions():
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"], ""


def test_every_metric_and_label_that_it_names_is_told(told):
    for title, expression, legend in expressions():
        names = NAME.findall(expression)
        assert names, title
        assert set(names) <= told.keys(), title
        labels = set().union(*(told[name] for name in names)) | OF_A_SCRAPE
        asked = set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            asked |= {one.strip() for one in group.split(",")}
        asked |= set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert asked <= labels, title


def test_every_metric_that_is_told_is_drawn(told):
    drawn = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, expression, _ in expressions()
        for name in NAME.findall(expression)
    }
    assert {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in told} == drawn


def test_no_two_panels_lie_over_each_other():
    board = json.loads(DASHBOARD.read_text())
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
