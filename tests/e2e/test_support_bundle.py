"""A support bundle of a real node: what is in it, and that no secret is."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

from tests.e2e.command_line import CommandLine
from tests.framework.daemon import Daemon

SECRET = "hunter2-very-secret"
WHOLE = {
    *("cgroups.json", "config.json", "doctor.json", "events.ndjson", "history.json"),
    *("images.json", "manifest.json", "metrics.txt", "mounts.txt", "node.json"),
    *("processes.json", "runs.json", "sandboxes.json"),
}


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.partition("/")[2]] = file.read().decode()
    return found


def test_it_has_what_helps_and_no_secret(daemon: Daemon, tmp_path: Path):
    box = daemon.create(
        "busybox",
        run="run-7",
        env={"PASSWORD": SECRET, "INNOCENT": SECRET},
        labels={"key": SECRET},
        files=[{"path": "/f", "content": SECRET}],
    )
    daemon.exec(box, ["cat"], stdin=SECRET, env={"X": SECRET})
    daemon.http.post(f"/v1/sandboxes/{box}/exec", json={"command": ["true"], "cwd": "/none"})
    process = {"command": ["sleep", "600", SECRET]}
    assert daemon.http.post(f"/v1/sandboxes/{box}/processes", json=process).status_code == 201
    command = CommandLine(daemon)
    command.environment["SANDBOXD_TOKEN_FILE"] = str(daemon.state_dir / "token")
    path = tmp_path / "bundle.tar.gz"
    done = command("support-bundle", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = contents(path)
    assert found.keys() >= WHOLE
    assert json.loads(found["manifest.json"])["failed"] == {}
    for name, text in found.items():
        assert SECRET not in text, name
        assert daemon.token not in text, name
    # The control: what the bundle was made of does have it.
    assert SECRET in daemon.http.get(f"/v1/sandboxes/{box}").text
    (told,) = [one for one in json.loads(found["sandboxes.json"]) if one["id"] == box]
    assert (told["run"], told["labels"]) == ("run-7", ["key"])
    events = [json.loads(line) for line in found["events.ndjson"].splitlines()]
    assert (box, "exec-failed") in {(one["sandbox"], one["kind"]) for one in events}
    assert "sandboxd_node_up 1.0" in found["metrics.txt"]
    assert json.loads(found["config.json"])["token_file"] == {
        "value": str(daemon.state_dir / "token"),
        "origin": "environment SANDBOXD_TOKEN_FILE",
    }
    commands = [one["command"] for one in json.loads(found["processes.json"])]
    assert any("sandboxd.launcher" in words for words in commands)
    again = command("support-bundle", "-o", str(path))
    assert again.returncode == 1
    assert b"bundle-exists" in again.stderr
    daemon.http.delete(f"/v1/sandboxes/{box}")


def test_without_a_daemon_it_has_the_rest(daemon: Daemon, tmp_path: Path):
    command = CommandLine(daemon)
    command.environment["SANDBOXD_URL"] = "http://127.0.0.1:1"
    path = tmp_path / "bundle.tar.gz"
    done = command("support-bundle", "--no-probe", "-o", str(path))
    assert done.returncode == 0, done.stderr
    found = contents(path)
    failed = json.loads(found["manifest.json"])["failed"]
    assert failed.keys() >= {"node.json", "metrics.txt", "events.ndjson"}
    assert "mounts.txt" in found
    assert "doctor.json" not in found
    assert b"without node.json: node-unreachable" in done.stderr
