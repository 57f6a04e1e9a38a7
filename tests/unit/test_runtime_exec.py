"""The rules of an exec, with a PID 1 that the test plays itself.

PID 1's part is scripted in a thread; what the daemon does about it runs in a real event loop.
"""

import asyncio
import errno
import os
import signal

import pytest

from sandboxd.errors import (
    CommandTooLong,
    CwdNotFound,
    DiskFull,
    ExecSetupFailed,
    NodeError,
    OomKilled,
    PidsExhausted,
    SandboxDead,
    SandboxLost,
    TooManyExecs,
    UserNotFound,
)
from sandboxd.init import protocol
from sandboxd.init.protocol import ExecFlag, KillScope, MsgType, Step
from sandboxd.model import ExecRequest, Truncate
from sandboxd.runtime import exec as exec_module
from sandboxd.runtime.control import Control
from sandboxd.runtime.exec import Exec
from sandboxd.runtime.oom import OomCounter
from sandboxd.runtime.pipes import Leftovers
from tests.unit.fakes_pid1 import ScriptedPid1, failed, seqpacket_pair


class Bench:
    """One control socket with a scripted PID 1 at its other end."""

    def __init__(self, oom_path=""):
        ours, theirs = seqpacket_pair()
        self.pid1 = ScriptedPid1(theirs)
        self.closed = []
        self.control = Control(ours, self.closed.append)
        self.oom = OomCounter(oom_path)
        self.leftovers = Leftovers()
        self.unkillable = 0

    def start(self, **fields):
        request = ExecRequest(command=("x",), **fields)
        running = Exec(
            self.control, request, user="0", cwd="/w", oom=self.oom, leftovers=self.leftovers,
            on_kill=lambda _: None,
            on_unkillable=self._unkillable,
        )  # fmt: skip
        payload = protocol.exec_payload(
            user="0", cwd="/w", argv=("x",), env=b"", env_count=0, nofile=10
        )
        running.start(payload, ExecFlag.EXEC_STDIN if request.stdin is not None else 0)
        return running

    def _unkillable(self):
        self.unkillable += 1

    async def expect(self, kind):
        message, fds = await asyncio.to_thread(self.pid1.receive)
        assert message.type == kind
        protocol.close_fds(fds)
        return message

    async def expect_kill(self, number):
        message = await self.expect(MsgType.M_KILL)
        assert protocol.KILL_REQ.unpack(message.payload) == (number, KillScope.KILL_TREE)
        return message

    def close(self):
        self.control.fail(SandboxDead("test is over"))
        self.leftovers.close()
        self.oom.close()
        self.pid1.sock.close()


@pytest.fixture
def play():
    """Runs ``part(bench)`` in an event loop, and looks that no fd is left over."""

    def play(part, **options):
        before = open_fds()

        async def main():
            bench = Bench(**options)
            try:
                async with asyncio.timeout(20):
                    await part(bench)
            finally:
                bench.close()

        asyncio.run(main())
        assert open_fds() == before

    return play


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))


def test_output_in_the_pipe_at_exit_is_not_lost(play):
    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        out, err = bench.pid1.start(sent.id)
        os.write(out, b"o" * 60_000)
        os.write(err, b"e")
        bench.pid1.exit(sent.id, 3 << 8)
        result = await running.done
        assert result.exit_code == 3
        assert result.stdout.data == b"o" * 60_000
        assert result.stderr.data == b"e"
        assert (result.cpu_user_s, result.cpu_system_s) == (0.0015, 0.0025)
        # The writers are still open: the pipes live on, drained.
        assert len(bench.leftovers) == 2
        protocol.close_fds((out, err))
        assert bench.control.waiting == 0

    play(part)


def test_a_child_that_never_stops_writing_does_not_hold_the_answer(play):
    async def part(bench):
        running = bench.start(max_output_bytes=100, truncate=Truncate.TAIL)
        sent = await bench.expect(MsgType.M_EXEC)
        out, err = bench.pid1.start(sent.id)
        stop = asyncio.Event()

        def flood():
            try:
                while not stop.is_set():
                    os.write(out, b"y" * 4096)
            except BrokenPipeError:
                pass

        flooding = asyncio.get_running_loop().run_in_executor(None, flood)
        bench.pid1.exit(sent.id)
        result = await running.done
        assert result.exit_code == 0
        assert len(result.stdout.data) <= 100
        stop.set()
        bench.leftovers.close()
        await flooding
        protocol.close_fds((out, err))

    play(part)


def test_a_leftover_pipe_is_drained_so_that_its_writer_goes_on(play):
    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        out, err = bench.pid1.start(sent.id)
        bench.pid1.exit(sent.id)
        await running.done
        # Far more than a pipe holds: blocks for ever, or dies of SIGPIPE, if nobody reads.
        await asyncio.to_thread(write_all, out, b"z" * 300_000)
        protocol.close_fds((out, err))
        while len(bench.leftovers):
            await asyncio.sleep(0.01)

    play(part)


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def test_leftovers_are_bounded(play):
    async def part(bench):
        writers = []
        for _ in range(Leftovers.PIPES_MAX + 5):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            bench.leftovers.adopt(read_fd)
            writers.append(write_fd)
        assert len(bench.leftovers) == Leftovers.PIPES_MAX
        with pytest.raises(BrokenPipeError):
            os.write(writers[0], b"x")
        os.write(writers[-1], b"x")
        protocol.close_fds(writers)

    play(part)


def test_timeout_sends_term_then_kill_and_answers_after_gone(play):
    async def part(bench):
        running = bench.start(timeout_s=0.05, grace_s=0.05)
        sent = await bench.expect(MsgType.M_EXEC)
        out, err = bench.pid1.start(sent.id)
        os.write(out, b"partial")
        await bench.expect_kill(signal.SIGTERM)
        await bench.expect_kill(signal.SIGKILL)
        bench.pid1.exit(sent.id, signal.SIGKILL)
        await asyncio.sleep(0.05)
        assert not running.done.done(), "answered before R_GONE"
        protocol.close_fds((out, err))
        bench.pid1.send(MsgType.R_GONE, sent.id)
        result = await running.done
        assert (result.exit_code, result.timed_out, result.signal) == (124, True, 9)
        assert result.stdout.data == b"partial"
        assert not result.oom_killed

    play(part)


def test_timeout_without_grace_kills_at_once(play):
    async def part(bench):
        running = bench.start(timeout_s=0.02, grace_s=0)
        sent = await bench.expect(MsgType.M_EXEC)
        await bench.expect_kill(signal.SIGKILL)
        bench.pid1.send(MsgType.R_GONE, sent.id)
        bench.pid1.exit(sent.id, signal.SIGKILL)
        assert (await running.done).timed_out

    play(part)


def test_main_process_that_ends_within_the_grace_leaves_nobody(play):
    async def part(bench):
        running = bench.start(timeout_s=0.02, grace_s=60)
        sent = await bench.expect(MsgType.M_EXEC)
        await bench.expect_kill(signal.SIGTERM)
        bench.pid1.exit(sent.id, 0)
        await bench.expect_kill(signal.SIGKILL)
        assert not running.done.done()
        bench.pid1.send(MsgType.R_GONE, sent.id)
        result = await running.done
        assert (result.exit_code, result.timed_out, result.signal) == (124, True, None)

    play(part)


def test_cancel_kills_the_tree_without_grace(play):
    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        running.cancel()
        running.cancel()
        await bench.expect_kill(signal.SIGKILL)
        bench.pid1.exit(sent.id, signal.SIGKILL)
        bench.pid1.send(MsgType.R_GONE, sent.id)
        assert (await running.done).exit_code == 137
        assert bench.control.waiting == 0

    play(part)


def test_what_cannot_be_killed_gives_the_sandbox_up(play, monkeypatch):
    monkeypatch.setattr(exec_module, "GONE_WAIT_S", 0.05)

    async def part(bench):
        running = bench.start(timeout_s=0.01, grace_s=0)
        with pytest.raises(SandboxLost):
            await running.done
        assert bench.unkillable == 1

    play(part)


@pytest.mark.parametrize(
    ("step", "err", "kind"),
    [
        (Step.STEP_TABLE_FULL, errno.EAGAIN, TooManyExecs),
        (Step.STEP_CLONE, errno.EAGAIN, PidsExhausted),
        (Step.STEP_USER, errno.ENOENT, UserNotFound),
        (Step.STEP_GROUP, errno.ENOENT, UserNotFound),
        (Step.STEP_CWD, errno.ENOENT, CwdNotFound),
        (Step.STEP_CWD, errno.EACCES, CwdNotFound),
        (Step.STEP_CWD, errno.ENOSPC, DiskFull),
        (Step.STEP_MESSAGE, errno.E2BIG, CommandTooLong),
        (Step.STEP_EXEC, errno.E2BIG, CommandTooLong),
        (Step.STEP_EXEC_CGROUP, errno.ENOSPC, NodeError),
        (Step.STEP_RLIMIT, errno.EPERM, ExecSetupFailed),
        (Step.STEP_TTY, errno.ENOSPC, ExecSetupFailed),  # of ptys: nothing of a disk
        (999, 12345, ExecSetupFailed),
    ],
)
def test_failed_steps_are_errors(play, step, err, kind):
    async def part(bench):
        for how in ("exit", "failed"):
            running = bench.start()
            sent = await bench.expect(MsgType.M_EXEC)
            if how == "exit":
                bench.pid1.exit(sent.id, 127 << 8, failure=(step, 0, err, 0))
            else:
                bench.pid1.send(MsgType.R_FAILED, sent.id, failed(step, err))
            with pytest.raises(kind) as caught:
                await running.done
            assert type(caught.value) is kind
            assert {"step", "errno"} <= set(caught.value.detail)

    play(part)


def test_what_a_workload_can_bring_about_is_not_retryable():
    for kind in (TooManyExecs, PidsExhausted, DiskFull, ExecSetupFailed, SandboxDead, OomKilled):
        assert kind.cause == "workload"
        assert not kind.retryable


def test_exec_failure_is_a_result(play):
    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        bench.pid1.exit(sent.id, 126 << 8, failure=(Step.STEP_EXEC, 0, errno.EACCES, 0))
        assert (await running.done).exit_code == 126

    play(part)


@pytest.mark.parametrize("counted", [b"oom_kill 4\n", b"oom_kill 3\n"])
def test_oom_is_told_when_the_count_rose_and_the_command_was_killed(play, tmp_path, counted):
    path = tmp_path / "memory.oom_control"
    path.write_bytes(b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")

    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        path.write_bytes(b"oom_kill_disable 0\nunder_oom 0\n" + counted)
        bench.pid1.exit(sent.id, signal.SIGKILL)
        result = await running.done
        assert result.exit_code == 137
        assert result.oom_killed == (b"4" in counted)

    play(part, oom_path=str(path))


def test_oom_counter_of_both_cgroup_versions(tmp_path):
    path = tmp_path / "file"
    for text, count in (
        (b"low 0\nhigh 0\nmax 9\noom 7\noom_kill 5\noom_group_kill 2\n", 5),
        (b"oom_kill_disable 0\nunder_oom 0\noom_kill 6\n", 6),
        (b"oom_kill 8", 8),
        (b"oom_group_kill 2\n", 0),
        (b"oom_kill x\n", 0),
        (b"", 0),
    ):
        path.write_bytes(text)
        counter = OomCounter(str(path))
        assert counter.read() == count
        counter.close()
    assert OomCounter("").read() == 0
    assert OomCounter(str(tmp_path / "none")).read() == 0


def test_death_ends_everything_that_waits(play):
    async def part(bench):
        first, second = bench.start(), bench.start(stdin=b"x" * 10)
        await bench.expect(MsgType.M_EXEC)
        bench.pid1.sock.close()
        while not bench.closed:
            await asyncio.sleep(0.001)
        assert bench.closed == ["exited"]
        bench.control.fail(SandboxDead("gone", reason="exited"))
        for running in (first, second):
            with pytest.raises(SandboxDead):
                await running.done
        with pytest.raises(SandboxDead):
            bench.start()

    play(part)


def test_stdin_is_fed_and_a_closed_one_is_no_error(play):
    async def part(bench):
        data = os.urandom(500_000)
        running = bench.start(stdin=data)
        message, _ = await asyncio.to_thread(bench.pid1.receive)
        assert message.flags & ExecFlag.EXEC_STDIN
        out, err, stdin = bench.pid1.start(message.id, 3)
        with os.fdopen(stdin, "rb") as file:
            assert await asyncio.to_thread(file.read) == data
        protocol.close_fds((out, err))
        bench.pid1.exit(message.id)
        await running.done

        running = bench.start(stdin=data)
        sent = await bench.expect(MsgType.M_EXEC)
        fds = bench.pid1.start(sent.id, 3)
        protocol.close_fds(fds)
        await asyncio.sleep(0.01)
        bench.pid1.exit(sent.id)
        assert (await running.done).exit_code == 0

    play(part)


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        b"short",
        protocol.MSG.pack(MsgType.R_EXIT, 1, 5, 0),
        protocol.pack(MsgType.R_EXIT, 1, b"too short"),
        protocol.pack(MsgType.R_EXIT, 1, b"x" * 1000),
        protocol.pack(MsgType.R_FAILED, 1, b"x"),
        protocol.pack(MsgType.R_STARTED, 1, b"x" * 8),
        protocol.pack(77, 1),
    ],
)
def test_a_pid1_that_breaks_the_protocol_is_not_believed(play, datagram):
    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        assert sent.id == 1
        bench.pid1.sock.send(datagram)
        while not bench.closed:
            await asyncio.sleep(0.001)
        bench.control.fail(SandboxDead("gone", reason=bench.closed[0]))
        with pytest.raises(SandboxDead):
            await running.done

    play(part)


def test_unknown_ids_and_surplus_fds_are_dropped(play):
    async def part(bench):
        running = bench.start()
        sent = await bench.expect(MsgType.M_EXEC)
        protocol.close_fds(bench.pid1.start(999))
        bench.pid1.exit(998)
        ours = bench.pid1.start(sent.id, 3)
        protocol.close_fds(ours)
        bench.pid1.exit(sent.id)
        assert (await running.done).exit_code == 0
        bench.pid1.exit(sent.id)
        await asyncio.sleep(0.01)
        assert not bench.closed

    play(part)


def test_a_queue_that_is_never_read_is_bounded(play):
    async def part(bench):
        request = ExecRequest(command=("x",))
        payload = protocol.exec_payload(
            user="0", cwd="/", argv=("x" * 60_000,), env=b"", env_count=0, nofile=1
        )

        def start():
            Exec(
                bench.control, request, user="0", cwd="/", oom=bench.oom,
                leftovers=bench.leftovers, on_kill=lambda _: None,
            on_unkillable=lambda: None,
            ).start(payload, 0)  # fmt: skip

        with pytest.raises(TooManyExecs):
            for _ in range(1000):
                start()
        waiting = bench.control.waiting
        assert 10 < waiting < 1000
        # What was queued arrives once PID 1 reads again.
        for _ in range(waiting):
            await bench.expect(MsgType.M_EXEC)

    play(part)


def test_a_large_payload_goes_through_a_memfd(play):
    async def part(bench):
        request = ExecRequest(command=("x",))
        payload = protocol.exec_payload(
            user="0", cwd="/", argv=["y" * 100_000] * 3, env=b"", env_count=0, nofile=1
        )
        Exec(
            bench.control, request, user="0", cwd="/", oom=bench.oom,
            leftovers=bench.leftovers, on_kill=lambda _: None,
            on_unkillable=lambda: None,
        ).start(payload, 0)  # fmt: skip
        message, fds = await asyncio.to_thread(bench.pid1.receive)
        assert message.flags & ExecFlag.EXEC_PAYLOAD_FD
        assert message.payload == b""
        assert os.pread(fds[0], protocol.PAYLOAD_MAX, 0) == payload
        protocol.close_fds(fds)

    play(part)
