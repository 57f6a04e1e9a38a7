"""Background processes over HTTP, with a fake launcher and real processes behind it."""

import base64

import pytest

from sandboxd.api.answers import _whole_characters
from sandboxd.api.schemas.process import ProcessAnswer, ProcessList, ProcessOutputAnswer
from sandboxd.config import load_config
from tests.unit.fakes_launcher import FakeLauncher
from tests.unit.test_api_sandboxes import create, error_of, make_client, wait_ready


@pytest.fixture
def config(tmp_path):
    return load_config(env={}, overrides={"state_dir": str(tmp_path), "runtime_dir": str(tmp_path)})


@pytest.fixture
def launcher(config, tmp_path):
    (tmp_path / "root").mkdir()
    fake = FakeLauncher(config.launcher_socket, tmp_path / "root")
    yield fake
    fake.close()


@pytest.fixture
def client(config, launcher):
    with make_client(config) as client:
        wait_ready(client)
        yield client


@pytest.fixture
def url(client):
    return f"/v1/sandboxes/{create(client).id}/processes"


def start(client, url, command, **body):
    answer = client.post(url, json={"command": command, **body})
    assert answer.status_code == 201, answer.text
    made = ProcessAnswer.model_validate(answer.json())
    assert answer.headers["location"] == f"{url}/{made.id}"
    return f"{url}/{made.id}"


def get(client, process, **query):
    answer = client.get(process, params=query)
    assert answer.status_code == 200, answer.text
    return ProcessOutputAnswer.model_validate(answer.json())


def finish(client, process):
    while get(client, process, wait_s=10).state == "running":
        pass


def test_a_process_from_start_to_removal(client, url):
    process = start(client, url, "read x; echo got $x; echo err >&2; exit 3", name="n")
    seen = get(client, process)
    assert (seen.state, seen.exit_code, seen.name, seen.stdout) == ("running", None, "n", None)
    assert seen.command == "read x; echo got $x; echo err >&2; exit 3"
    answer = client.post(f"{process}/stdin", json={"data": "hi\n"})
    assert answer.json() == {"written_bytes": 3}
    finish(client, process)
    seen = get(client, process, stdout_offset=4, stderr_offset=0)
    assert (seen.state, seen.exit_code, seen.signal, seen.error) == ("exited", 3, None, None)
    assert seen.cpu_user_s == 0.0015
    assert (seen.stdout.data, seen.stdout.offset, seen.stdout.next_offset) == ("hi\n", 4, 7)
    assert (seen.stderr.data, seen.stderr.total_bytes, seen.stderr.closed) == ("err\n", 4, True)
    listed = ProcessList.model_validate(client.get(url).json())
    assert [one.id for one in listed.processes] == [seen.id]
    assert client.delete(process).status_code == 204
    assert error_of(client.get(process), 404)["code"] == "process-not-found"


def test_raw_bytes_in_and_out(client, url):
    process = start(client, url, ["cat"])
    data = bytes(range(256)) * 100
    headers = {"Content-Type": "application/octet-stream"}
    client.post(f"{process}/stdin?eof=true", content=data, headers=headers).raise_for_status()
    finish(client, process)
    seen = get(client, process, stdout_offset=0, encoding="base64")
    assert base64.b64decode(seen.stdout.data) == data
    assert error_of(client.post(f"{process}/stdin", json={"data": "x"}), 409)["code"] == (
        "stdin-closed"
    )


def test_a_restarted_daemon_finds_everything_again(config, launcher):
    with make_client(config) as client:
        wait_ready(client)
        url = f"/v1/sandboxes/{create(client).id}/processes"
        processes = [start(client, url, f"echo {n}; read x; echo then $x") for n in range(5)]
    with make_client(config) as client:
        wait_ready(client)
        assert len(client.get(url).json()["processes"]) == 5
        for number, process in enumerate(processes):
            client.post(f"{process}/stdin", json={"data": "go\n"}).raise_for_status()
            finish(client, process)
            seen = get(client, process, stdout_offset=0)
            assert seen.stdout.data == f"{number}\nthen go\n"
            assert seen.exit_code == 0


def test_signals(client, url):
    process = start(client, url, ["sleep", "600"])
    assert client.post(f"{process}/signal", json={"signal": "term"}).status_code == 204
    finish(client, process)
    assert get(client, process).signal == 15
    for signal in ("TERM", 15):
        answer = client.post(f"{process}/signal", json={"signal": signal})
        assert error_of(answer, 409)["code"] == "process-ended"
    for signal in ("WHAT", 0, 65):
        answer = client.post(f"{process}/signal", json={"signal": signal})
        assert error_of(answer, 422)["code"] == "request-invalid"


def test_a_start_that_fails_is_named(client, url):
    answer = client.post(url, json={"command": "x", "user": "nobody-here"})
    assert error_of(answer, 422)["code"] == "user-not-found"
    answer = client.post(url, json={"command": ["x"], "login": True})
    assert error_of(answer, 422)["code"] == "request-invalid"
    assert client.get(url).json() == {"processes": []}


def test_processes_go_with_their_sandbox(client, url):
    process = start(client, url, ["sleep", "600"])
    client.delete(url.rpartition("/")[0])
    assert error_of(client.get(process), 404)["code"] == "sandbox-not-found"


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", 0), (b"abc", 3), ("aü".encode(), 3), ("aü".encode()[:2], 1),
        ("€".encode()[:1], 0), ("€".encode()[:2], 0), ("a\U0001f600".encode()[:4], 1),
        ("\U0001f600".encode(), 4), (b"\xff", 1), (b"a\x80\x80\x80\x80", 5), (b"\xf8", 1),
    ],
)  # fmt: skip
def test_where_whole_characters_end(data, whole):
    assert _whole_characters(data) == whole
    # What is left over is the beginning of a character, as Python's decoder sees it.
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    assert decoder.getstate()[0] == data[whole:]
