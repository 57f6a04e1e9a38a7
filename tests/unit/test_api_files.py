"""Files over HTTP, with a fake PID 1 that serves a directory of the test."""

import os
import time

import pytest
from fastapi.testclient import TestClient

from sandboxd.api.app import create_app
from sandboxd.api.routes import files as files_route
from sandboxd.api.schemas.files import FileAnswer
from sandboxd.config import load_config
from sandboxd.launcher.client import LauncherClient
from sandboxd.runtime.manager import Runtime
from tests.unit.fakes_launcher import FakeLauncher, default_store

TOKEN = "test-token-0123456789"


@pytest.fixture
def place(tmp_path, file_program):
    """``(client, url of the sandbox's files, the directory that is its root)``."""
    root = tmp_path / "root"
    root.mkdir()
    config = load_config(
        env={},
        overrides={
            "state_dir": str(tmp_path),
            "runtime_dir": str(tmp_path),
            "max_body_bytes": 1000,
            "max_file_bytes": 100 << 20,
        },
    )
    launcher = FakeLauncher(config.launcher_socket, root, file_program)
    runtime = Runtime(config, LauncherClient(config.launcher_socket), default_store())
    app = create_app(config, runtime, token=TOKEN)
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        deadline = time.monotonic() + 10
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sandbox = client.post("/v1/sandboxes", json={"image": "debian"}).json()
        before = sorted(os.listdir("/proc/self/fd"))
        yield client, f"/v1/sandboxes/{sandbox['id']}/files", root
        assert sorted(os.listdir("/proc/self/fd")) == before
    launcher.close()


def error_code(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["code"]


@pytest.mark.parametrize("size", [0, 1, 65536, 262_144, 262_145, 5_000_000])
def test_bytes_come_back_as_they_went_in(place, size):
    client, url, root = place
    data = os.urandom(size)
    answer = client.put(url, params={"path": "/d/e/file", "mode": "0750"}, content=data)
    assert answer.status_code == 200, answer.text
    info = FileAnswer.model_validate(answer.json())
    assert (info.path, info.size_bytes, info.mode) == ("/d/e/file", size, "0750")
    assert (root / "d/e/file").read_bytes() == data
    answer = client.get(url, params={"path": "/d/e/file"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content == data
    if size < 262_144:
        assert answer.headers["content-length"] == str(size)
        assert answer.headers["x-file-mode"] == "0750"


def test_a_file_is_not_bounded_by_the_limit_of_bodies(place):
    client, url, _ = place
    assert client.put(url, params={"path": "/f"}, content=b"x" * 2000).status_code == 200
    answer = client.put(url, params={"path": "/f"}, content=b"x" * (100 << 20) + b"y")
    assert error_code(answer, 413) == "body-too-large"


def test_errors_by_name(place):
    client, url, root = place
    (root / "dir").mkdir()
    (root / "secret").write_bytes(b"x")
    for path, status, code in (
        ("/none", 404, "file-not-found"),
        ("/secret/below", 404, "file-not-found"),
        ("/dir", 422, "not-a-regular-file"),
        ("/" + "n" * 300, 422, "file-error"),
    ):
        assert error_code(client.get(url, params={"path": path}), status) == code, path
    answer = client.put(url, params={"path": "/dir"}, content=b"x")
    assert error_code(answer, 422) == "not-a-regular-file"
    answer = client.put(url, params={"path": "/full"}, content=b"x")
    assert error_code(answer, 409) == "disk-full"
    answer = client.put(url, params={"path": "/no/parent", "parents": False}, content=b"x")
    assert error_code(answer, 404) == "file-not-found"
    answer = client.get(url, params={"path": "/none", "user": "nobody-here"})
    assert error_code(answer, 422) == "user-not-found"


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"path": "relative"},
        {"path": ""},
        {"path": "/a\0b"},
        {"path": "/" + "x" * 5000},
        {"path": "/x", "user": "a/b"},
        {"path": "/x", "mode": "999"},
    ],
)
def test_bad_parameters_are_refused(place, params):
    client, url, _ = place
    answer = client.put(url, params=params, content=b"x")
    assert error_code(answer, 422) == "request-invalid"


def test_an_upload_without_a_length(place):
    client, url, root = place
    for pieces in ([b"ab", b"cd"], [b"x" * 65536] * 40, []):
        answer = client.put(url, params={"path": "/f"}, content=iter(pieces))
        assert answer.status_code == 200
        assert (root / "f").read_bytes() == b"".join(pieces)


def test_a_large_upload_that_fails_early_is_told_why(place):
    client, url, _ = place
    answer = client.put(url, params={"path": "/full"}, content=b"x" * 3_000_000)
    assert error_code(answer, 409) == "disk-full"


def test_what_is_discarded_is_bounded(place, monkeypatch):
    monkeypatch.setattr(files_route, "DISCARD_MAX", 100_000)
    client, url, _ = place
    answer = client.put(url, params={"path": "/full"}, content=b"x" * 3_000_000)
    assert error_code(answer, 409) == "disk-full"


def test_files_of_a_sandbox_that_is_not_there(place):
    client, _, _ = place
    answer = client.get("/v1/sandboxes/sb-none/files", params={"path": "/x"})
    assert error_code(answer, 404) == "sandbox-not-found"


def test_images(place):
    client, _, _ = place
    listed = client.get("/v1/images").json()
    assert [(one["name"], one["mounted"], one["users"]) for one in listed["images"]] == [
        ("debian", True, 1),
        ("other", False, 0),
    ]
    assert listed["truncated"] is False
    prepared = client.post("/v1/images", json={"image": "other"})
    assert prepared.status_code == 200
    assert (prepared.json()["name"], prepared.json()["mounted"]) == ("other", True)
    listed = client.get("/v1/images").json()
    assert [(one["mounted"], one["users"]) for one in listed["images"]] == [(True, 1), (True, 0)]
    assert error_code(client.post("/v1/images", json={"image": "nope"}), 404) == "image-not-found"
    assert error_code(client.post("/v1/images", json={"image": ".."}), 422) == "request-invalid"
