"""The log of a real node in JSON, at its most talkative: whole, and without a secret."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx

from sandboxd.log_lines import VARIABLE
from tests.e2e.host_processes import family_with, wait_for
from tests.framework.daemon import running_daemon
from tests.framework.leaks import LeakCheck

SECRET = "hunter2-very-secret"
SETTINGS = {
    "SANDBOXD_LOG_LEVEL": "debug",
    "SANDBOXD_LOG_FORMAT": "json",
    "SANDBOXD_NODE_NAME": "n17",
    "SLURM_JOB_ID": "4711",
}


def test_every_line_is_json_and_none_has_a_secret(leak_check: LeakCheck, busybox: Path):
    with running_daemon(leak_check, {"busybox": busybox}, environment=SETTINGS) as daemon:
        box = daemon.create("busybox", run="run-7", env={"PASSWORD": SECRET})
        execute = f"/v1/sandboxes/{box}/exec"
        asked = {"command": ["cat"], "stdin": SECRET, "env": {"KEY": SECRET}}
        assert daemon.http.post(execute, json=asked).json()["stdout"] == SECRET
        daemon.http.post(execute, json={**asked, "cwd": "/none"})
        daemon.http.post(execute, content=f'{{"stdin": "{SECRET}'.encode())
        daemon.http.post("/v1/sandboxes", json={"image": "busybox", "env": {SECRET: 1}})
        wrong = {"Authorization": f"Bearer {SECRET}"}
        assert httpx.get(daemon.base_url + "/v1/node", headers=wrong).status_code == 401
        port = f"/v1/sandboxes/{box}/ports/9/http/?key={SECRET}"
        daemon.http.get(port, headers={"X-Sandboxd-Authorization": SECRET})
        family = daemon.refresh_family()
        for pid in family_with(family, "squashfuse_ll"):
            os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda: daemon.http.get(f"/v1/sandboxes/{box}").json()["state"] == "failed", "its end"
        )
        daemon.http.delete(f"/v1/sandboxes/{box}")
        text, token = daemon.log_file.read_text(), daemon.token
        # The launcher folds its lines too; every PID 1 begins with the zygote's environment.
        (launcher,) = family_with(family, "sandboxd.launcher")[:1]
        (zygote, *_) = family_with(family, "zygote")
        assert VARIABLE in environment_of(launcher)
        assert environment_of(zygote)
        assert VARIABLE not in environment_of(zygote)
    rows = [json.loads(line) for line in text.splitlines()]
    about = [row for row in rows if row.get("sandbox") == box]
    assert about
    assert {row["run"] for row in about} == {"run-7"}
    for row in rows:
        assert {"at", "level", "part", "message"} <= set(row)
        assert (row["node"], row["slurm_job_id"]) == ("n17", "4711")
    assert SECRET not in text
    assert token not in text


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()
