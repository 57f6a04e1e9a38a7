"""`scripts/bench` as a whole, with next to no samples: everything is measured, nothing is left.

Not for: how fast anything is.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.framework import times

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts/bench"
RUN_S = times.scaled(600)
PNG = b"\x89PNG\r\n\x1a\n"  # ISO/IEC 15948, 5.2
# Measures of each scenario, and who must be there beside sandboxd. Its sizes are those of --tiny.
LIFE = {"bwrap", "crun", "crun, no limits", "runc", "chroot"}
WANTED: dict[str, dict[str, set[str]]] = {
    "lifecycle, 1 client": {
        "create": {"floor_sandbox"},
        "exec": {"floor_spawn"},
        "delete": set(),
        "together": LIFE,
    },
    "lifecycle, 4 clients": {
        "create": set(),
        "exec": set(),
        "delete": set(),
        "together": LIFE | {"floor_sandbox"},
        "rate": LIFE | {"floor_sandbox"},
        "errors": set(),
    },
    "Image": {
        measure: {"squashfuse", "kernel", "directory"}
        for measure in ("true", "python", "find", "cold python")
    },
    "create without a slot": {"create": {"floor_sandbox", "bwrap", "crun", "runc"}},
    "exec, 1 client": {"exec": {"floor_spawn", "chroot"}},
    "exec, 4 clients": {
        "exec": {"floor_spawn", "chroot"},
        "rate": {"floor_spawn", "chroot"},
        "errors": set(),
    },
    "files: clean": {
        "snapshot": set(),
        "fork": {"floor_sandbox"},
        "rollback": set(),
        "reset": {"floor_sandbox"},
    },
    "files: 50 files": {
        "snapshot": set(),
        "fork": set(),
        "rollback": set(),
        "reset": {"floor_sandbox"},
    },
    "files: 4 MB": {
        "snapshot": set(),
        "fork": set(),
        "rollback": set(),
        "reset": {"floor_sandbox"},
    },
    "snapshot by copy, 0.2 MB in 20 files": {"total": {"chroot"}, "frozen": set()},
    "5 forks of one snapshot": {"all": {"floor_sandbox"}, "all, one by one": set()},
    "episode: 30 commands, edits, pytest": {"episode": {"bwrap"}},
    "Python start": {"warm": {"chroot", "bwrap", "crun"}, "cold create": set(), "cold": set()},
    "10 live": {"create": {"floor_sandbox"}},
    "burst of 12 creates": {
        "all": set(),
        "one of them": {"floor_sandbox", "bwrap", "crun"},
        "rate": {"floor_sandbox", "bwrap", "crun"},
        "errors": set(),
    },
    "12 live": {"memory": set(), "create": {"floor_sandbox"}, "delete all": set()},
}

pytestmark = [
    pytest.mark.needs("root", "namespaces", "overlay", "fuse", "cgroup-kill", "cgroup-limits"),
    pytest.mark.timeout(RUN_S + 30),
]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Its exit code is 0, or 3 where a target is missed: with so few samples, some are."""
    done = subprocess.run(
        [BENCH, *arguments], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode in (0, 3), done.stdout[-4000:] + done.stderr[-4000:]
    return done


def test_a_tiny_run_measures_everything_beside_floors_and_peers(tmp_path: Path) -> None:
    done = run("--tiny", "--json", tmp_path / "figures.json", "--out", tmp_path / "plots")
    node = json.loads((tmp_path / "figures.json").read_text())
    assert node.keys() == {
        "format",
        "size",
        "machine",
        "figures",
        "targets",
        "subjects",
        "failures",
    }
    assert node["failures"] == []
    assert node["machine"]["cpus"] == os.cpu_count()
    assert node["machine"]["kernel"] == os.uname().release
    figures = node["figures"]
    assert {name: set(measures) for name, measures in figures.items()} == {
        name: set(measures) for name, measures in WANTED.items()
    }
    for scenario, measures in WANTED.items():
        for measure, beside in measures.items():
            subjects = figures[scenario][measure]["subjects"]
            assert subjects.keys() >= beside | {"sandboxd"}, (scenario, measure)
            for summary in subjects.values():
                assert summary["count"] > 0
                assert summary["p50"] <= summary["p99"]
    # nitrobox is measured, or the reason is told.
    together = figures["lifecycle, 1 client"]["together"]["subjects"]
    assert "nitrobox" in together or node["subjects"]["nitrobox"].startswith("left out: ")
    missed = [one for one in node["targets"] if one["outcome"] == "missed"]
    assert (done.returncode == 3) == bool(missed)
    plots = sorted((tmp_path / "plots").glob("*.png"))
    assert len(plots) == len(WANTED)
    assert all(path.read_bytes().startswith(PNG) for path in plots)
    assert json.loads((tmp_path / "plots/bench.json").read_text()) == node


def test_a_short_soak_finds_nothing_left(tmp_path: Path) -> None:
    run("--tiny", "--soak", "0.2", "--json", tmp_path / "figures.json")
    node = json.loads((tmp_path / "figures.json").read_text())
    soak = node["figures"]["soak"]
    assert soak["create"]["subjects"]["sandboxd"]["count"] > 0
    assert soak["sandboxes"]["subjects"]["sandboxd"]["p99"] == 0
    assert soak["cgroups"]["subjects"]["sandboxd"]["p50"] > 0
    assert soak["descriptors"]["subjects"]["sandboxd"]["count"] == 4


def test_it_says_what_it_does_not_know() -> None:
    done = subprocess.run(
        [BENCH, "--only", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "lifecycle" in done.stderr
