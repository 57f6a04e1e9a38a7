"""The application over a fake launcher, and what nearly every test of a route does with it."""

import time

from fastapi.testclient import TestClient

from sandboxd.api.app import create_app
from sandboxd.api.schemas.exec import ExecAnswer
from sandboxd.api.schemas.sandboxes import SandboxAnswer
from sandboxd.launcher.client import LauncherClient
from sandboxd.runtime.manager import Runtime
from tests.unit.fakes_launcher import default_store

TOKEN = "test-token-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def make_client(config, **options):
    runtime = Runtime(config, LauncherClient(config.launcher_socket), default_store())
    app = create_app(config, runtime, token=TOKEN)
    return TestClient(app, headers=HEADERS, **options)


def wait_ready(client):
    deadline = time.monotonic() + 10
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def create(client, **body):
    answer = client.post("/v1/sandboxes", json={"image": "debian", **body})
    assert answer.status_code == 201, answer.text
    return SandboxAnswer.model_validate(answer.json(), strict=False)


def run(client, sandbox_id, command, **body):
    answer = client.post(f"/v1/sandboxes/{sandbox_id}/exec", json={"command": command, **body})
    assert answer.status_code == 200, answer.text
    return ExecAnswer.model_validate(answer.json())


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "cause", "retryable", "hint", "detail"}
    return body["error"]
