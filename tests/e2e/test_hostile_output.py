"""Any bytes, in any pieces, by every way out of a sandbox: they arrive as they were written.

Hypothesis makes the bytes, among them what the daemon's own protocols are made of; a program in the
sandbox writes them out again, piece by piece. Invalid UTF-8 is the rule here, not the exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sandboxd.client import Client, Sandbox
from tests.framework.daemon import Daemon

SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
PROTOCOLS = (
    b'{"seq":3,"type":"exit","exit_code":0}\n',
    b'{"seq":0,"type":"started","exec_id":"ex-1"}\n',
    b"0 " + b"0" * 32 + b"\n",
    b"\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"\x1b]0;title\x07\x1b[2J\x00",
    b"\xf0\x9f",
    b"\xff\xfe" * 3000,
    b"\n" * 5000,
)
PIECES = st.lists(
    st.tuples(st.booleans(), st.one_of(st.binary(max_size=200), st.sampled_from(PROTOCOLS))),
    max_size=12,
)
Written = dict[str, bytes]
Way = Callable[[str], tuple[Written, int | None]]


@pytest.fixture(scope="module")
def box(daemon: Daemon) -> Iterator[Sandbox]:
    with Client(daemon.base_url, daemon.token) as client, client.create("busybox") as sandbox:
        yield sandbox


def script(box: Sandbox, pieces: list[tuple[bool, bytes]], code: int) -> str:
    """Writes the pieces, each with a write of its own."""
    box.exec("rm -rf /tmp/p; mkdir /tmp/p")
    lines = []
    for number, (is_err, data) in enumerate(pieces):
        box.write_file(f"/tmp/p/{number}", data)
        lines.append(f"cat /tmp/p/{number}{' >&2' if is_err else ''}")
    return "\n".join([*lines, f"(exit {code})"])


def ways(box: Sandbox) -> dict[str, Way]:
    def plain(command: str) -> tuple[Written, int | None]:
        result = box.exec(command, timeout_s=30)
        return {"stdout": result.stdout_bytes, "stderr": result.stderr_bytes}, result.exit_code

    def streamed(command: str) -> tuple[Written, int | None]:
        written = {"stdout": b"", "stderr": b""}
        with box.exec_stream(command, timeout_s=30) as stream:
            for output in stream:
                written[output.stream] += output.data
            return written, stream.exit.exit_code

    def background(command: str) -> tuple[Written, int | None]:
        written = {"stdout": b"", "stderr": b""}
        process = box.start_process(command, stdin=False)
        try:
            for output in process.output():
                written[output.stream] += output.data
            return written, process.info.exit_code
        finally:
            process.remove()

    def session(command: str) -> tuple[Written, int | None]:
        result = shell.exec(command, timeout_s=30)
        return {"stdout": result.stdout_bytes, "stderr": result.stderr_bytes}, result.exit_code

    def session_streamed(command: str) -> tuple[Written, int | None]:
        written = {"stdout": b"", "stderr": b""}
        with shell.exec_stream(command, timeout_s=30) as stream:
            for output in stream:
                written[output.stream] += output.data
            return written, stream.exit.exit_code

    def batch(command: str) -> tuple[Written, int | None]:
        with Client(box._client.url, box._client._address._base["Authorization"][7:]) as client:
            [result] = client.exec_many([{"sandbox": box.id, "command": command}])
        assert not isinstance(result, Exception)
        return {"stdout": result.stdout_bytes, "stderr": result.stderr_bytes}, result.exit_code

    shell = box.open_session()
    return {
        "exec": plain,
        "stream": streamed,
        "process": background,
        "session": session,
        "session-stream": session_streamed,
        "batch": batch,
    }


@pytest.fixture(scope="module")
def every_way(box: Sandbox) -> Iterator[dict[str, Way]]:
    yield ways(box)
    for info in box.sessions():
        box.session(info.id).close()


@pytest.mark.parametrize("way", ["exec", "stream", "process", "session", "session-stream", "batch"])
def test_whatever_is_written_arrives(box: Sandbox, every_way: dict[str, Way], way: str):
    @given(pieces=PIECES, code=st.integers(0, 120))
    @SETTINGS
    def check(pieces: list[tuple[bool, bytes]], code: int) -> None:
        written, ended = every_way[way](script(box, pieces, code))
        expected = {
            "stdout": b"".join(data for is_err, data in pieces if not is_err),
            "stderr": b"".join(data for is_err, data in pieces if is_err),
        }
        assert (written, ended) == (expected, code)

    check()


@given(data=st.binary(max_size=3000))
@SETTINGS
def _echoed(box: Sandbox, data: bytes) -> None:
    assert box.exec(["cat"], stdin=data).stdout_bytes == data
    with box.open_session() as shell:
        assert shell.exec("cat", stdin=data).stdout_bytes == data
    process = box.start_process(["cat"])
    process.write(data, eof=True)
    assert b"".join(output.data for output in process.output()) == data
    process.remove()
    box.write_file("/tmp/echo", data)
    assert box.read_file("/tmp/echo") == data


def test_whatever_goes_in_comes_out(box: Sandbox):
    _echoed(box)


@given(name=st.binary(min_size=1, max_size=60).filter(lambda b: not {0, 47} & set(b)))
@SETTINGS
def _named(box: Sandbox, name: bytes) -> None:
    if name in (b".", b".."):
        return
    box.exec(["rm", "-rf", "/tmp/n"])
    box.mkdir("/tmp/n")
    path = "/tmp/n/" + name.decode("utf-8", "surrogateescape")
    box.write_file(path, b"x")
    [entry] = box.find("/tmp/n", type="file").entries
    assert entry.path == path
    assert (
        box.exec('cd /tmp/n; for n in * .*; do [ -f "$n" ] && printf %s "$n"; done').stdout_bytes
        == name
    )
    assert box.remove(path) == 1


def test_whatever_a_file_is_called(box: Sandbox):
    _named(box)
