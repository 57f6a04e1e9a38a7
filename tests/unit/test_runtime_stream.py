"""Streams of frames: bounds, resuming, and who is given up on, without a sandbox."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.errors import ExecNotFound, SandboxDead, StreamPositionLost
from sandboxd.model import ExecResult, StreamResult
from sandboxd.runtime.stream import StreamLimits, Streams

NOTHING = StreamResult(b"", 0, False)
RESULT = ExecResult(3, None, False, False, NOTHING, NOTHING, 0.5, 0.1, 0.2, 4096)
LIMITS = StreamLimits(
    unsent_bytes=10_000, replay_bytes=50_000, total_bytes=10**9, resume_s=0.2, detached_s=0.2
)


class Source:
    def __init__(self):
        self.said = []

    def pause(self):
        self.said.append("pause")

    def resume(self):
        self.said.append("resume")

    def cancel(self):
        self.said.append("cancel")


class Bench:
    def __init__(self, *, encoding="utf-8", detach=False, limits=LIMITS):
        self.streams = Streams(limits, lambda: "ex-1")
        self.stream = self.streams.open("sb-1", encoding=encoding, detach=detach)
        self.source = Source()
        self.done = asyncio.get_running_loop().create_future()
        self.stream.begin(self.source, self.done)
        self.stream.started(7)

    def out(self, data):
        self.stream.sinks[0].feed(data)

    def err(self, data):
        self.stream.sinks[1].feed(data)

    async def end(self):
        self.done.set_result(RESULT)
        await asyncio.sleep(0)


def play(part, **options):
    async def main():
        bench = Bench(**options)
        try:
            async with asyncio.timeout(20):
                await part(bench)
        finally:
            bench.streams.close()
        assert bench.streams.kept_bytes == 0

    asyncio.run(main())


async def read_all(reader):
    frames = []
    while (lines := await reader.next(5)) is not None:
        assert lines.endswith(b"\n")
        frames += [json.loads(line) for line in lines.splitlines()]
    return frames


def output(frames, kind):
    return "".join(frame["data"] for frame in frames if frame["type"] == kind)


def test_frames_in_order_with_an_explicit_end():
    async def part(bench):
        reader = bench.stream.attach(0)
        bench.out(b"a")
        bench.err(b"b")
        bench.out(b"c")
        await bench.end()
        frames = await read_all(reader)
        assert [(f["seq"], f["type"]) for f in frames] == [
            (0, "started"), (1, "stdout"), (2, "stderr"), (3, "stdout"), (4, "exit"),
        ]  # fmt: skip
        assert frames[0] == {"seq": 0, "type": "started", "exec_id": "ex-1", "pid": 7}
        assert frames[-1]["exit_code"] == 3
        assert await reader.next(5) is None

    play(part)


def test_an_error_midway_is_the_last_frame():
    async def part(bench):
        reader = bench.stream.attach(0)
        bench.out(b"a")
        bench.done.set_exception(SandboxDead("gone", reason="exited"))
        frames = await read_all(reader)
        assert frames[-1]["type"] == "error"
        assert frames[-1]["error"] == {
            "code": "sandbox-dead", "message": "gone", "cause": "workload", "retryable": False,
            "hint": None, "detail": {"reason": "exited"},
        }  # fmt: skip

    play(part)


def test_a_character_that_two_reads_share_is_whole():
    async def part(bench):
        reader = bench.stream.attach(0)
        for byte in "grüße €".encode():
            bench.out(bytes([byte]))
        bench.out(b"\xff\xe2\x82")
        await bench.end()
        assert output(await read_all(reader), "stdout") == "grüße €\ufffd\ufffd"

    play(part)


def test_a_silent_stream_says_that_it_lives():
    async def part(bench):
        reader = bench.stream.attach(0)
        bench.out(b"a")
        await reader.next(5)
        assert json.loads(await reader.next(0.01)) == {"seq": 1, "type": "heartbeat"}
        bench.out(b"b")
        assert json.loads(await reader.next(5))["seq"] == 2

    play(part)


def test_a_slow_reader_stops_the_command_and_starts_it_again():
    async def part(bench):
        reader = bench.stream.attach(0)
        bench.out(b"x" * 6000)
        assert bench.source.said == []
        bench.out(b"x" * 6000)
        assert bench.source.said == ["pause"]
        await reader.next(5)
        assert bench.source.said == ["pause", "resume"]

    play(part)


def test_what_was_sent_is_kept_within_its_bound():
    async def part(bench):
        reader = bench.stream.attach(0)
        for _ in range(100):
            bench.out(b"x" * 5000)
            await reader.next(5)
        assert bench.stream.kept_bytes <= 50_000 + 6000
        with pytest.raises(StreamPositionLost) as lost:
            bench.stream.attach(0)
        first = lost.value.detail["first_seq"]
        assert lost.value.detail["last_seq"] == 100
        bench.stream.attach(first)
        with pytest.raises(StreamPositionLost):
            bench.stream.attach(102)

    play(part)


def test_above_the_nodes_budget_little_is_kept():
    limits = StreamLimits(10_000, 10**9, 100_000, 0.2, 0.2)

    async def part(bench):
        reader = bench.stream.attach(0)
        for _ in range(100):
            bench.out(b"x" * 5000)
            await reader.next(5)
        assert bench.stream.kept_bytes <= 100_000 + 6000

    play(part, limits=limits)


def test_nobody_comes_back_and_the_command_is_killed():
    async def part(bench):
        bench.stream.attach(0).close()
        await asyncio.sleep(0.05)
        assert bench.source.said == []
        await asyncio.sleep(0.3)
        assert bench.source.said == ["cancel"]

    play(part)


def test_whoever_comes_back_keeps_the_command():
    async def part(bench):
        for _ in range(4):
            reader = bench.stream.attach(0)
            reader.close()
            await asyncio.sleep(0.1)
        bench.stream.attach(0)
        await asyncio.sleep(0.3)
        assert bench.source.said == []

    play(part)


def test_a_detached_command_goes_on_and_loses_its_oldest_frames():
    async def part(bench):
        bench.stream.attach(0).close()
        for _ in range(4):
            bench.out(b"x" * 5000)
        assert bench.source.said == ["pause"]
        await asyncio.sleep(0.3)
        assert bench.source.said == ["pause", "resume"]
        for _ in range(100):
            bench.out(b"x" * 5000)
        bench.out(b"last")
        await bench.end()
        assert "cancel" not in bench.source.said
        assert bench.source.said.count("pause") == 1
        with pytest.raises(StreamPositionLost) as lost:
            bench.stream.attach(0)
        reader = bench.stream.attach(lost.value.detail["first_seq"])
        frames = await read_all(reader)
        assert frames[-1]["type"] == "exit"
        assert frames[-2]["data"] == "last"

    play(part, detach=True)


def test_an_ended_stream_can_be_taken_up_for_a_while():
    async def part(bench):
        reader = bench.stream.attach(0)
        bench.out(b"a")
        await bench.end()
        first = await read_all(reader)
        reader.close()
        again = await read_all(bench.streams.find("sb-1", "ex-1").attach(1))
        assert again == first[1:]
        bench.streams.find("sb-1", "ex-1").attach(0).close()
        await asyncio.sleep(0.3)
        with pytest.raises(ExecNotFound):
            bench.streams.find("sb-1", "ex-1")

    play(part)


def test_a_second_client_takes_over():
    async def part(bench):
        first = bench.stream.attach(0)
        await first.next(5)
        waiting = asyncio.ensure_future(first.next(5))
        await asyncio.sleep(0)
        second = bench.stream.attach(0)
        assert await waiting is None
        first.close()
        bench.out(b"a")
        await bench.end()
        assert [f["seq"] for f in await read_all(second)] == [0, 1, 2]

    play(part)


@given(
    pieces=st.lists(st.tuples(st.booleans(), st.binary(max_size=3000)), max_size=40),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    encoding=st.sampled_from(["utf-8", "base64"]),
)
def test_cut_anywhere_and_resumed_gives_the_same_frames(pieces, cuts, encoding):
    async def part(bench):
        seen = []
        cuts_left = list(cuts)
        reader = bench.stream.attach(0)
        limit = cuts_left.pop() if cuts_left else None
        for at, (is_err, data) in enumerate(pieces):
            (bench.err if is_err else bench.out)(data)
            if limit is not None and at >= limit:
                # Sent, but the client saw only the first half of it.
                lines = (await reader.next(5)).splitlines()
                seen += lines[: len(lines) // 2]
                reader.close()
                reader = bench.stream.attach(len(seen))
                limit = at + cuts_left.pop() if cuts_left else None
        await bench.end()
        while (lines := await reader.next(5)) is not None:
            seen += lines.splitlines()
        frames = [json.loads(line) for line in seen]
        assert [f["seq"] for f in frames] == list(range(len(frames)))
        for kind, wanted in (("stdout", False), ("stderr", True)):
            sent = b"".join(data for is_err, data in pieces if is_err is wanted)
            if encoding == "utf-8":
                assert output(frames, kind) == sent.decode("utf-8", "replace")
            else:
                import base64

                parts = [base64.b64decode(f["data"]) for f in frames if f["type"] == kind]
                assert b"".join(parts) == sent

    limits = StreamLimits(10**9, 10**9, 10**9, 5, 5)
    play(part, encoding=encoding, limits=limits)
