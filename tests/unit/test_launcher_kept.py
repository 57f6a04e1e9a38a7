"""What the launcher keeps for a daemon: every page fits a message, and nobody fills it up."""

import socket

import pytest

from sandboxd.errors import RequestError
from sandboxd.launcher import kept, protocol
from sandboxd.launcher.kept import Kept


def test_the_largest_page_fits_a_message():
    records = Kept()
    # A run's name has 255 characters at most; JSON spells each of these with twelve.
    for n in range(kept.PAGE + 1):
        name = f"run:{n:03}" + "\U0001f600" * 252
        records.keep(name, {"why": "x" * (kept.RECORD_MAX - 11)})
    page, more = records.page("")
    assert (len(page), more) == (kept.PAGE, True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        protocol.send(ours, {"id": 2**40, "ok": {"kept": page, "more": more}})
        message, _ = protocol.receive(theirs)
    assert message is not None
    assert [name for name, _ in message["ok"]["kept"]] == [name for name, _ in page]


def test_pages_follow_one_another():
    records = Kept()
    names = [f"n{n:02}" for n in range(2 * kept.PAGE + 1)]
    for name in reversed(names):
        records.keep(name, {})
    found, after, more = [], "", True
    while more:
        page, more = records.page(after)
        found += [name for name, _ in page]
        after = found[-1]
    assert found == names


def test_bounds():
    records = Kept()
    with pytest.raises(RequestError, match="too large"):
        records.keep("a", {"x": "x" * kept.RECORD_MAX})
    with pytest.raises(RequestError, match="too large"):
        records.keep("a" * kept.NAME_MAX, {})
    for n in range(kept.RECORDS_MAX):
        records.keep(str(n), {})
    with pytest.raises(RequestError, match="kept already"):
        records.keep("one more", {})
    records.keep("0", {"in": "place"})
    records.keep("1", None)
    records.keep("1", None)
    records.keep("one more", {})
