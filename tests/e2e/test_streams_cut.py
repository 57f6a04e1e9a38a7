"""A stream that is cut anywhere gives the same bytes: the clients over real, broken connections."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator

import httpx
import pytest

from sandboxd.client import AsyncClient, Client, StreamExit
from tests.e2e.cutting_proxy import CuttingProxy, cutting_proxy
from tests.framework.daemon import Daemon

COMMAND = """i=0; while [ $i -lt 12 ]
do echo out $i; echo err $i >&2; sleep 0.004; i=$((i+1)); done; (exit 7)"""
OUT = "".join(f"out {n}\n" for n in range(12)).encode()
ERR = "".join(f"err {n}\n" for n in range(12)).encode()
Told = tuple[bytes, bytes, StreamExit]
Stream = Callable[[str], Told]


@pytest.fixture
def proxy(daemon: Daemon) -> Iterator[CuttingProxy]:
    with cutting_proxy(daemon.base_url) as one:
        yield one


@pytest.fixture(params=["exec", "session"])
def stream(request: pytest.FixtureRequest, daemon: Daemon, proxy: CuttingProxy, sandbox: str
) -> Iterator[Stream]:  # fmt: skip
    """Runs a command by the blocking client, each connection of whose stream is a new one."""
    with Client(daemon.base_url, daemon.token) as straight:
        box = straight.connect(sandbox)
        session = box.open_session() if request.param == "session" else None

        def tell(command: str) -> Told:
            with Client(proxy.url, daemon.token) as client:
                seen = {"stdout": b"", "stderr": b""}
                box_there = type(box)(client, box.info)
                if session is None:
                    begun = box_there.exec_stream(command)
                else:
                    there = type(session)(client, sandbox, session.info)
                    begun = there.exec_stream(command)
                with begun as frames:
                    for output in frames:
                        seen[output.stream] += output.data
                    return seen["stdout"], seen["stderr"], frames.exit

        yield tell
        if session is not None:
            session.close()


def length_of_an_answer(daemon: Daemon, sandbox: str) -> int:
    """Bytes of the head and all frames, about; where a cut comes too late nothing is cut."""
    url = f"{daemon.base_url}/v1/sandboxes/{sandbox}/exec"
    headers = {"Authorization": f"Bearer {daemon.token}", "Accept": "application/x-ndjson"}
    answer = httpx.post(url, json={"command": COMMAND, "encoding": "base64"}, headers=headers)
    return len(answer.content) + sum(len(k) + len(v) + 4 for k, v in answer.headers.raw) + 40


def test_cut_at_each_place(daemon: Daemon, sandbox: str, proxy: CuttingProxy, stream: Stream):
    """In the head, before the first frame, in the middle of one, between two, before the last."""
    places = range(1, length_of_an_answer(daemon, sandbox), 41)
    for place in places:
        proxy.cuts.append(place)
        out, err, end = stream(COMMAND)
        assert (out, err, end.exit_code) == (OUT, ERR, 7), f"cut after {place} bytes"
        assert (end.stdout_total_bytes, end.stderr_total_bytes) == (len(OUT), len(ERR))
    assert proxy.made > len(places) * 3 // 4


def test_cut_again_and_again(proxy: CuttingProxy, stream: Stream):
    """At a frame or two each time, so that something comes between two cuts."""
    proxy.cuts.extend([700] * 12)
    out, err, end = stream(COMMAND)
    assert (out, err, end.exit_code) == (OUT, ERR, 7)
    assert proxy.made > 1


def test_much_output_cut_in_the_middle(proxy: CuttingProxy, stream: Stream):
    proxy.cuts.extend([100_000, 300_000, 1_000_000, 2_500_000])
    made = "head -c 5000000 /dev/urandom > /tmp/x; sha256sum /tmp/x >&2; cat /tmp/x"
    out, err, end = stream(made)
    assert (len(out), end.exit_code) == (5_000_000, 0)
    assert hashlib.sha256(out).hexdigest() == err.split()[0].decode()
    assert proxy.made == 4


def test_cut_at_each_place_in_asyncio(daemon: Daemon, sandbox: str, proxy: CuttingProxy):
    places = range(1, length_of_an_answer(daemon, sandbox), 97)

    async def main() -> None:
        for place in places:
            proxy.cuts.append(1 << 40)  # to connect
            async with AsyncClient(proxy.url, daemon.token) as client:
                box = await client.connect(sandbox)
                # On the connection that is there already, kept alive or not.
                proxy.cuts.append(place)
            async with AsyncClient(proxy.url, daemon.token) as client:
                there = type(box)(client, box.info)
                seen = {"stdout": b"", "stderr": b""}
                async with there.exec_stream(COMMAND) as stream:
                    async for output in stream:
                        seen[output.stream] += output.data
                    end = await stream.exit()
                assert (seen["stdout"], seen["stderr"], end.exit_code) == (OUT, ERR, 7), place

    asyncio.run(main())
    assert proxy.made > len(places) * 3 // 4


def test_the_command_runs_once_whatever_is_cut(
    daemon: Daemon, proxy: CuttingProxy, stream: Stream, sandbox: str
):
    for place in range(1, 900, 60):
        proxy.cuts.append(place)
        stream("echo x >> /tmp/count; echo done")
    counted = daemon.exec(sandbox, "wc -l < /tmp/count")["stdout"].strip()
    assert int(counted) == len(range(1, 900, 60))
