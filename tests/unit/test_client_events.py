"""Following a node's events over cuts: told once each, for as long as anything comes."""

import asyncio
import contextlib
import json

import pytest

from sandboxd.client import AsyncClient, Client, ConnectionLost
from sandboxd.client import retries as retries_module

HEARTBEAT = b'{"type":"heartbeat","seq":7}\n'
CUTS = 12


def event(seq):
    row = {"type": "event", "seq": seq, "at": "2026-01-01T00:00:00.000Z", "kind": "k"}
    row |= {"sandbox": None, "run": None, "message": "m", "detail": {}}
    return json.dumps(row).encode() + b"\n"


def connections(barren):
    """What each connection brings before it is cut: mostly heartbeats, and half a line."""
    yield [event(7)[:20], event(7)[20:] + event(8)[:30]]
    for _ in range(CUTS):
        yield [] if barren else [HEARTBEAT]
    yield [event(8), b'{"type":"end","seq":8}\n']


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(retries_module, "FIRST_PAUSE_S", 0.0)


def blocking(barren):
    asked = []

    class Cut(Client):
        @contextlib.contextmanager
        def stream(self, call):
            asked.append(call.path)

            def pieces():
                yield from next(feed)
                if len(asked) < CUTS + 2:
                    raise ConnectionLost("cut")

            yield pieces()

    feed = connections(barren)
    return list(Cut("http://n", "t").events()), asked


def in_asyncio(barren):
    asked = []

    class Cut(AsyncClient):
        @contextlib.asynccontextmanager
        async def stream(self, call):
            asked.append(call.path)

            async def pieces():
                for piece in next(feed):
                    yield piece
                if len(asked) < CUTS + 2:
                    raise ConnectionLost("cut")

            yield pieces()

    async def collect():
        return [one async for one in Cut("http://n", "t").events()]

    feed = connections(barren)
    return asyncio.run(collect()), asked


@pytest.mark.parametrize("told_by", [blocking, in_asyncio])
def test_each_is_told_once_over_many_cuts(told_by):
    told, asked = told_by(barren=False)
    assert [one.seq for one in told] == [7, 8]
    assert asked[0] == "/v1/events?after=0&follow=false"
    assert set(asked[1:]) == {"/v1/events?after=7&follow=false"}
    assert len(asked) == CUTS + 2


@pytest.mark.parametrize("told_by", [blocking, in_asyncio])
def test_where_nothing_comes_it_is_given_up(told_by):
    with pytest.raises(ConnectionLost):
        told_by(barren=True)
