"""Spools: what is written is what is read, the newest of it, also while it is being written."""

import os
import select
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.launcher import protocol, spooler
from sandboxd.launcher.spool import HEADER_BYTES, SpoolReader, SpoolWriter


def pair(capacity):
    writer = SpoolWriter(capacity)
    return writer, SpoolReader(os.dup(writer.fd))


def put(writer, data):
    read, write = os.pipe()
    os.set_blocking(read, False)
    while data:
        sent = os.write(write, data[:4096])
        data = data[sent:]
        left = sent
        while left:
            left -= writer.fill(read, left, is_tty=False)
    os.close(write)
    assert writer.fill(read, 1, is_tty=False) == 0
    os.close(read)


@given(
    capacity=st.integers(1, 300),
    pieces=st.lists(st.binary(max_size=200), max_size=12),
    asked=st.integers(0, 3000),
    limit=st.integers(1, 3000),
)
def test_the_newest_bytes_are_there(capacity, pieces, asked, limit):
    writer, reader = pair(capacity)
    for piece in pieces:
        put(writer, piece)
    stream = b"".join(pieces)
    assert (reader.capacity, reader.written, reader.closed) == (capacity, len(stream), False)
    oldest = max(0, len(stream) - capacity)
    start = max(asked, oldest)
    piece = reader.read(asked, limit)
    assert piece.data == stream[start : start + limit]
    assert piece.offset == start
    assert piece.lost_bytes == max(0, oldest - asked)
    writer.end()
    assert reader.closed
    writer.close()
    reader.close()


def test_the_layout_is_the_documented_one():
    writer, reader = pair(100)
    put(writer, b"x" * 130 + b"abc")
    header = os.pread(writer.fd, HEADER_BYTES, 0)
    words = [int.from_bytes(header[at : at + 8], "little") for at in (0, 8, 16, 24)]
    assert words == [100, 133, 133, 0]
    assert os.pread(writer.fd, 3, HEADER_BYTES + 30) == b"abc"
    writer.end()
    assert os.pread(writer.fd, 1, 24) == b"\x01"
    writer.close()
    reader.close()


def test_a_reader_never_sees_bytes_of_another_round():
    """The byte at offset i is always i % 251, whatever the ring does meanwhile."""
    writer, reader = pair(70_000)
    pattern = bytes(i % 251 for i in range(251 * 50))  # longer than a piece, wherever it begins
    stop = threading.Event()

    def fill():
        read, write = os.pipe()
        os.set_blocking(read, False)
        at = 0
        while not stop.is_set():
            sent = os.write(write, pattern[at % 251 :][: 251 * 30])
            at += sent
            while sent:
                sent -= writer.fill(read, 65536, is_tty=False)
        os.close(read)
        os.close(write)

    thread = threading.Thread(target=fill)
    thread.start()
    offset = 0
    for _ in range(3000):
        piece = reader.read(offset, 9000)
        first = piece.offset % 251
        assert piece.data == pattern[first : first + len(piece.data)]
        offset = piece.offset + len(piece.data)
    stop.set()
    thread.join()
    writer.close()
    reader.close()


class Bench:
    """A spooler in a thread, asked as the launcher asks it."""

    def __init__(self):
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self._theirs = theirs
        self._spooler = spooler.Spooler(theirs)
        self._thread = threading.Thread(target=self._spooler.run)
        self._thread.start()

    def ask(self, op, fds=(), **fields):
        protocol.send(self.sock, {"id": 1, "op": op, **fields}, tuple(fds))
        message, got = protocol.receive(self.sock)
        return message, got

    def open(self, name, count=2, capacity=1000):
        pipes = [os.pipe() for _ in range(count)]
        _, fds = self.ask(
            "open", [read for read, _ in pipes], process=name, capacity=capacity, tty=False
        )
        for read, _ in pipes:
            os.close(read)
        return [write for _, write in pipes], fds[0], [SpoolReader(fd) for fd in fds[1:]]

    def close(self):
        self.sock.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._theirs.close()
        self._spooler._epoll.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def wait_for_event(event_fd):
    assert select.select([event_fd], [], [], 10)[0]
    os.eventfd_read(event_fd)


def test_output_wakes_whoever_waits(bench):
    (out, err), event_fd, spools = bench.open("a")
    os.write(out, b"hello")
    wait_for_event(event_fd)
    assert spools[0].read(0, 100).data == b"hello"
    os.write(err, b"oops")
    wait_for_event(event_fd)
    assert spools[1].read(0, 100).data == b"oops"
    os.close(out)
    wait_for_event(event_fd)
    assert [spool.closed for spool in spools] == [True, False]
    bench.ask("drop", process="a")
    with pytest.raises(BrokenPipeError):
        os.write(err, b"x")
    for spool in spools:
        spool.close()
    os.close(err)
    os.close(event_fd)


def test_drained_means_all_that_was_written_is_there(bench):
    (out, err), event_fd, spools = bench.open("a", capacity=1 << 20)
    for _ in range(200):
        before = spools[0].written
        os.write(out, b"x" * 60_000)
        bench.ask("drain", process="a")
        assert spools[0].written == before + 60_000
    assert bench.ask("drain", process="unknown")[0]["ok"] == {}
    bench.ask("drop", process="a")
    for spool in spools:
        spool.close()
    for fd in (out, err, event_fd):
        os.close(fd)


def test_descriptors_are_given_again(bench):
    (out, err), event_fd, spools = bench.open("a")
    os.write(out, b"hello")
    wait_for_event(event_fd)
    _, again = bench.ask("fds", process="a")
    reader = SpoolReader(again[1])
    assert reader.read(0, 100).data == b"hello"
    assert "errno" in bench.ask("fds", process="b")[0]
    bench.ask("drop", process="a")
    for spool in (*spools, reader):
        spool.close()
    for fd in (out, err, event_fd, again[0], again[2]):
        os.close(fd)


def test_who_floods_does_not_keep_others_from_being_served(bench):
    (flood, flood_err), event_fd, spools = bench.open("flood", capacity=1 << 20)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            os.write(flood, b"y" * 65536)

    thread = threading.Thread(target=write)
    thread.start()
    for number in range(50):
        (out, err), event, mine = bench.open(f"p{number}")
        os.write(out, b"hello")
        bench.ask("drain", process=f"p{number}")
        assert mine[0].read(0, 100).data == b"hello"
        bench.ask("drop", process=f"p{number}")
        for spool in mine:
            spool.close()
        for fd in (out, err, event):
            os.close(fd)
    stop.set()
    thread.join(10)
    bench.ask("drop", process="flood")
    for spool in spools:
        spool.close()
    for fd in (flood, flood_err, event_fd):
        os.close(fd)
