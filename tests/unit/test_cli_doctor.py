"""What `doctor` makes of findings; whether the findings are true is tested in tests/kernel."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from sandboxd import cli
from sandboxd.cli import doctor
from sandboxd.config import Config
from sandboxd.linux.cgroup import CgroupLayout
from sandboxd.linux.cgroup_usage import GroupUsage
from sandboxd.linux.features import Features
from sandboxd.linux.findings import Probe, Status
from sandboxd.model import Enforcement

FEATURES = Features(
    ids=65_538,
    overlay=True,
    overlay_detached=True,
    writable_layer="tmpfs",
    fuse=True,
    squashfuse="/usr/bin/squashfuse_ll",
    proc=True,
    pidfd=True,
    seccomp=True,
    cgroup_kill=True,
    cgroup=CgroupLayout(None, frozenset()),
    limits={"memory": Enforcement.ENFORCED},
    fuse_request_timeout=False,
)
GOOD = Probe("overlay", Status.OK, "copy up")
SLOW = Probe("pipes", Status.WARN, "few [of] them", "sysctl -w x=1")
BAD = Probe("fuse", Status.FAIL, "No such device", "modprobe fuse")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Settings of whoever runs the tests are not those of the program under test."""
    for name in [name for name in os.environ if name.startswith("SANDBOXD_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def invoke(monkeypatch):
    asked = {}

    def run(probes, *arguments):
        def probe(account, **options):
            asked.update(options, account=account)
            return FEATURES, list(probes)

        monkeypatch.setattr(doctor.features, "probe", probe)
        monkeypatch.setattr(doctor, "refusal", lambda _: "")
        monkeypatch.setattr(doctor.uplink, "forward_policy", lambda: "")
        usage = [GroupUsage("sb-1", 3 << 20, 2), GroupUsage("left", 1 << 20, 0)]
        monkeypatch.setattr(doctor.cgroup_usage, "usage_below", lambda *_: usage)
        return CliRunner().invoke(cli.build(), ["doctor", *arguments])

    run.asked = asked
    return run


def test_each_probe_is_a_line_and_its_remedy_another(invoke):
    result = invoke([GOOD, SLOW])
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert ["ok", "overlay", "copy up"] in lines
    assert ["warn", "pipes", "few [of] them"] in lines
    assert lines[lines.index(["warn", "pipes", "few [of] them"]) + 1][1:] == ["sysctl", "-w x=1"]
    assert ["ok", "in", "use         1 cgroup with processes, 3 MiB"] in [
        [line[0], line[1], line[2]] for line in lines if len(line) == 3
    ]
    assert result.stdout.splitlines()[-1] == "5 ok, 1 warn, 0 fail"


def test_a_warning_is_no_failure_and_a_failure_is(invoke):
    assert invoke([GOOD, SLOW]).exit_code == 0
    assert invoke([GOOD, BAD]).exit_code == 1


def test_json(invoke):
    result = invoke([GOOD, BAD], "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["ok"] is False
    assert found["features"]["ids"] == 65_538
    remedy = {"name": "fuse", "status": "fail", "detail": "No such device"}
    assert remedy | {"remedy": "modprobe fuse"} in found["probes"]


def test_the_configuration_says_what_for(invoke, tmp_path):
    file = tmp_path / "sandboxd.toml"
    file.write_text('user = "someone"\nmax_sandboxes = 3\nsquashfuse = "/opt/squashfuse_ll"\n')
    assert invoke([GOOD], "--config", str(file)).exit_code == 0
    assert invoke.asked["account"] == "someone"
    assert invoke.asked["sandboxes"] == 3
    assert str(invoke.asked["squashfuse"]) == "/opt/squashfuse_ll"


def test_a_wrong_configuration_is_a_finding(invoke, tmp_path):
    file = tmp_path / "sandboxd.toml"
    file.write_text("no_such_key = 1\n")
    result = invoke([GOOD], "--config", str(file))
    assert result.exit_code == 1
    assert "no_such_key" in result.stdout
    assert "copy up" in result.stdout, "the rest is looked at all the same"


def test_what_keeps_the_views_from_serving_is_named(invoke, monkeypatch, tmp_path):
    assert "proc views" in invoke([GOOD]).output
    (tmp_path / "pyfuse3.py").write_text("raise ImportError('libfuse3.so.3: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = invoke([GOOD], "--json")
    (views,) = [p for p in json.loads(told.output)["probes"] if p["name"] == "proc views"]
    assert (views["status"], told.exit_code) == ("warn", 0)
    assert "libfuse3.so.3: no such file" in views["detail"]
    assert "libfuse3-dev" in views["remedy"]
    monkeypatch.setenv("SANDBOXD_PROC_VIEWS", "false")
    told = invoke([GOOD], "--json")
    (views,) = [p for p in json.loads(told.output)["probes"] if p["name"] == "proc views"]
    assert (views["status"], views["detail"][:3]) == ("ok", "off")


@pytest.mark.parametrize(
    ("refusal", "dropping", "expected", "remedy"),
    [
        ("", "", "ok", ""),
        ("net.ipv4.ip_forward is 0", "", "warn", "sysctl -w net.ipv4.ip_forward=1"),
        ("", "ip filter", "warn", "DOCKER-USER"),
    ],
)
def test_network_that_there_is_or_is_not(monkeypatch, refusal, dropping, expected, remedy):
    monkeypatch.setattr(doctor, "refusal", lambda _: refusal)
    monkeypatch.setattr(doctor.uplink, "forward_policy", lambda: dropping)
    found = doctor._network(Config())
    assert found.status == expected
    assert remedy in found.remedy
    assert refusal in found.detail
    assert dropping in found.detail
