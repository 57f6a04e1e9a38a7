"""Workers: their answers, their deaths, and that no descriptor stays behind."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from sandboxd.launcher import lanes
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.loop import Loop
from sandboxd.launcher.worker import Worker


def handlers():
    held = []

    def echo(request, fds):
        return {"said": request["text"], "fds": len(fds)}, ()

    def give(request, fds):
        return {}, (os.open("/dev/null", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY))

    def refuse(request, fds):
        raise FileNotFoundError(errno.ENOENT, "no such thing", "a name")

    def fail(request, fds):
        raise ValueError("a bug")

    def hold(request, fds):
        held.extend(fds)
        fds.clear()
        return {"held": len(held)}, ()

    def wait(request, fds):
        (gate,) = fds
        os.read(gate, 1)
        return {}, ()

    def open_fds(request, fds):
        return sorted(os.readlink(e.path) for e in os.scandir("/proc/self/fd")), ()

    return {
        "echo": echo,
        "give": give,
        "refuse": refuse,
        "fail": fail,
        "hold": hold,
        "wait": wait,
        "open-fds": open_fds,
    }


@pytest.fixture
def loop():
    before = set(os.listdir("/proc/self/fd"))
    made = Loop()
    deadline = made.call_later(30, made.stop)
    yield made
    deadline.cancel()
    made._epoll.close()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def worker(loop):
    others = children()  # of tests before: multiprocessing keeps one for good
    made = Worker(loop, "worker", handlers)
    yield made
    if made._sock is not None:
        made.kill()
        until(loop, lambda: made._sock is None)
    until(loop, lambda: children() <= others)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def until(loop, condition):
    def look():
        if condition():
            loop.stop()
        else:
            loop.call_later(0.002, look)

    look()
    loop.run()
    loop._stopped = False
    assert condition(), "it did not come to that"


def ask(loop, promise):
    """The reply's value; its fds are closed."""
    promise.watch(loop.stop)
    loop.run()
    loop._stopped = False
    if promise.error is not None:
        raise promise.error
    promise.value.close()
    return promise.value.value


def test_answers_come_in_order_and_with_fds(loop, worker):
    fd = os.open("/dev/null", os.O_RDONLY)
    first = worker.request("echo", (fd,), text="one")
    second = worker.request("give")
    os.close(fd)
    assert ask(loop, first) == {"said": "one", "fds": 1}
    second.watch(loop.stop)
    loop.run()
    loop._stopped = False
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in second.value.fds]
    assert links == ["/dev/null", "/dev/zero"]
    second.value.close()


def test_an_error_of_the_kernel_is_passed_on(loop, worker):
    with pytest.raises(FileNotFoundError) as refused:
        ask(loop, worker.request("refuse"))
    assert refused.value.filename == "a name"
    assert ask(loop, worker.request("echo", text="alive"))["said"] == "alive"


def test_a_bug_ends_the_worker_and_the_next_request_starts_another(loop, worker):
    first = ask(loop, worker.request("echo", text="x")) and worker.pid
    with pytest.raises(BrokenPipeError, match="worker died"):
        ask(loop, worker.request("fail"))
    assert ask(loop, worker.request("echo", text="again"))["said"] == "again"
    assert worker.pid != first
    until(loop, lambda: str(first) not in children())  # no zombie
    assert str(worker.pid) in children()


def test_a_worker_holds_none_of_our_descriptors(loop, worker):
    read_fd, write_fd = os.pipe()
    os.set_inheritable(write_fd, True)
    links = ask(loop, worker.request("open-fds"))
    os.close(write_fd)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    assert not [link for link in links if link.startswith(("pipe", "anon_inode:[eventpoll]"))][3:]


def test_a_worker_that_is_killed_under_a_request(loop, worker):
    read_fd, write_fd = os.pipe()
    promises = [worker.request("wait", (read_fd,)), worker.request("echo", text="behind it")]
    worker.kill()
    for promise in promises:
        with pytest.raises(BrokenPipeError):
            ask(loop, promise)
    assert worker.pid == 0
    assert ask(loop, worker.request("echo", text="new"))["said"] == "new"
    os.close(read_fd)
    os.close(write_fd)


def test_a_request_to_one_that_has_just_died_goes_to_its_successor(loop, worker):
    ask(loop, worker.request("echo", text="x"))
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # The loop has not run: it cannot know.
    assert ask(loop, worker.request("echo", text="y"))["said"] == "y"
    assert worker.pid != pid


def test_requests_wait_for_a_worker_that_does_not_read(loop, worker):
    """More than a socket's queue takes: none is lost, and order is kept."""
    read_fd, write_fd = os.pipe()
    blocked = worker.request("wait", (read_fd,))
    fd = os.open("/dev/null", os.O_RDONLY)
    promises = [worker.request("hold", (fd,), pad="x" * 1000) for _ in range(1000)]
    os.close(fd)
    assert worker._queue, "the test is to fill the socket"
    assert not any(promise.settled for promise in promises)
    os.write(write_fd, b"x")
    ask(loop, blocked)
    assert ask(loop, promises[-1]) == {"held": 1000}
    assert [promise.value.value["held"] for promise in promises] == list(range(1, 1001))
    assert not worker._queue
    os.close(read_fd)
    os.close(write_fd)


def test_what_waits_for_a_worker_that_dies_fails_with_it(loop, worker):
    read_fd, write_fd = os.pipe()
    worker.request("wait", (read_fd,))
    fd = os.open("/dev/null", os.O_RDONLY)
    promises = [worker.request("hold", (fd,), pad="x" * 1000) for _ in range(1000)]
    os.close(fd)
    worker.kill()
    for promise in promises:
        with pytest.raises(BrokenPipeError):
            ask(loop, promise)
    os.close(read_fd)
    os.close(write_fd)


def test_a_message_that_is_too_large_fails_by_itself(loop, worker):
    with pytest.raises(ValueError, match="larger"):
        ask(loop, worker.request("echo", text="x" * 70_000))
    assert ask(loop, worker.request("echo", text="y"))["said"] == "y"
    assert not worker._pending


def test_an_answer_after_its_timeout_is_closed(loop, worker):
    read_fd, write_fd = os.pipe()

    def impatient():
        blocked = worker.request("wait", (read_fd,))
        late = worker.request("give")
        try:
            yield from loop.wait(late, 0.01, "an answer")
        except TimeoutError:
            os.write(write_fd, b"x")
            yield blocked
            yield late
            return late.value.fds
        return None

    before = len(os.listdir("/proc/self/fd"))
    done = loop.spawn(impatient())
    done.watch(loop.stop)
    loop.run()
    loop._stopped = False
    assert done.value is not None
    # The worker's socket and pidfd are there since; the two of the answer are not.
    assert len(os.listdir("/proc/self/fd")) == before + 2
    os.close(read_fd)
    os.close(write_fd)


def test_a_worker_ends_with_its_launcher(loop, worker):
    ask(loop, worker.request("echo", text="x"))
    pid = str(worker.pid)
    assert pid in children()
    loop.remove_reader(worker._sock.fileno())
    worker._sock.close()
    worker._sock = None
    until(loop, lambda: pid not in children())


@pytest.fixture
def at_once_aside(loop, monkeypatch):
    """Workers of lanes that are set aside as soon as they have not answered at once."""
    monkeypatch.setattr(lanes, "STALL_S", 0.001)
    others = children()
    made = Lanes(loop, "worker", handlers)
    yield made
    made._worker.kill()
    until(loop, lambda: children() <= others)
    until(loop, lambda: not made._worker.is_started)


def stall(loop, made):
    """Have its worker set aside; the promise, and the end of the pipe that it waits for."""
    gate, opened = os.pipe()
    answer = made.request("wait", (gate,), lanes=("one",))
    os.close(gate)
    until(loop, lambda: made._aside)
    return answer, opened


def test_one_set_aside_has_its_place_again_where_nobody_took_it(loop, at_once_aside):
    answer, opened = stall(loop, at_once_aside)
    (slow,) = at_once_aside._aside.values()
    os.write(opened, b"x")
    os.close(opened)
    assert ask(loop, answer) == {}
    said = ask(loop, at_once_aside.request("echo", text="x", lanes=("one",)))
    assert said["said"] == "x"
    assert at_once_aside._worker is slow
    assert str(slow.pid) in children()


def test_one_set_aside_ends_where_another_works(loop, at_once_aside):
    answer, opened = stall(loop, at_once_aside)
    (slow,) = at_once_aside._aside.values()
    pid = str(slow.pid)
    assert ask(loop, at_once_aside.request("echo", text="y", lanes=("two",)))["said"] == "y"
    os.write(opened, b"x")
    os.close(opened)
    assert ask(loop, answer) == {}
    until(loop, lambda: pid not in children())
    until(loop, lambda: not slow.is_started)
    assert str(at_once_aside._worker.pid) in children()
