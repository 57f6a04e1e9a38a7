"""The launcher's loop: promises, tasks, time-outs, and events of descriptors that come and go."""

from __future__ import annotations

import gc
import os
import socket
import time
import weakref

import pytest

from sandboxd.launcher.loop import TIMERS_SWEPT, Loop, Promise


@pytest.fixture
def loop():
    """A loop that gives up rather than hang, and is closed."""
    made = Loop()
    deadline = made.call_later(20, made.stop)
    yield made
    deadline.cancel()
    made._epoll.close()


def run(loop, task):
    """The task's promise, once it has ended."""
    done = loop.spawn(task)
    done.watch(loop.stop)
    loop.run()
    loop._stopped = False
    assert done.settled
    return done


def result(loop, task):
    done = run(loop, task)
    if done.error is not None:
        raise done.error
    return done.value


def test_a_promise_is_settled_once():
    promise, seen = Promise(), []
    promise.watch(lambda: seen.append(promise.value))
    promise.resolve(1)
    promise.resolve(2)
    promise.reject(ValueError())
    promise.watch(lambda: seen.append("late"))
    assert (promise.value, promise.error, seen) == (1, None, [1, "late"])


def test_a_task_gets_values_and_errors(loop):
    good, bad = Promise(), Promise()

    def task():
        first = yield good
        try:
            yield bad
        except KeyError as error:
            return [first, error.args]

    loop.call_later(0, lambda: good.resolve("value"))
    loop.call_later(0, lambda: bad.reject(KeyError("why")))
    assert result(loop, task()) == ["value", ("why",)]


def test_an_error_of_a_task_is_its_promises(loop):
    def task():
        yield from loop.sleep(0)
        raise ValueError("of the task")

    assert str(run(loop, task()).error) == "of the task"


def test_many_tasks_wait_at_once(loop):
    order = []

    def task(n):
        yield from loop.sleep(n / 200)
        order.append(n)

    def all_of_them():
        yield from [loop.spawn(task(n)) for n in (3, 1, 2)]

    result(loop, all_of_them())
    assert order == [1, 2, 3]


def test_a_timeout_says_of_what(loop):
    def task():
        yield from loop.wait(Promise(), 0.001, "an answer")

    with pytest.raises(TimeoutError, match="an answer"):
        result(loop, task())


def test_an_answer_after_its_timeout_is_discarded(loop):
    discarded = []
    promise = Promise(discarded.append)

    def task():
        yield from loop.wait(promise, 0.001, "an answer")

    assert isinstance(run(loop, task()).error, TimeoutError)
    promise.resolve("fds")
    assert discarded == ["fds"]


def test_an_answer_in_time_is_not_discarded(loop):
    discarded = []
    promise = Promise(discarded.append)

    def task():
        return (yield from loop.wait(promise, 0.01, "an answer"))

    loop.call_later(0, lambda: promise.resolve("fds"))
    assert result(loop, task()) == "fds"
    result(loop, loop.sleep(0.02))
    assert discarded == []


def test_an_error_after_a_timeout_discards_nothing(loop):
    promise = Promise(lambda value: pytest.fail(f"discarded {value}"))

    def task():
        yield from loop.wait(promise, 0.001, "an answer")

    run(loop, task())
    promise.reject(OSError(5, "late"))


def test_a_promise_that_others_wait_for_outlives_one_timeout(loop):
    death = Promise()

    def impatient():
        yield from loop.wait(death, 0.001, "death")

    def patient():
        yield from loop.wait(death, 10, "death")
        return "dead"

    done = loop.spawn(patient())
    assert isinstance(run(loop, impatient()).error, TimeoutError)
    assert not done.settled
    death.resolve(None)
    result(loop, loop.sleep(0))
    assert done.value == "dead"


def test_timeouts_that_did_not_happen_hold_nothing(loop):
    class Value:
        pass

    def task():
        values = []
        for _ in range(3 * TIMERS_SWEPT):
            promise = Promise()
            promise.resolve(Value())
            late = Promise()
            loop.call_later(0, lambda late=late: late.resolve(Value()))
            value = yield from loop.wait(late, 3600, "never")
            values.append(weakref.ref(value))
            del value, promise, late
        return values

    values = result(loop, task())
    gc.collect()
    assert sum(value() is not None for value in values) <= 2
    assert len(loop._timers) <= TIMERS_SWEPT + 2


def test_a_cancelled_timer_does_not_wake_the_loop(loop):
    loop.call_later(0.001, lambda: pytest.fail("it was cancelled")).cancel()
    began = time.process_time()
    result(loop, loop.sleep(0.01))
    assert time.process_time() - began < 1


def test_a_callback_that_raises_does_not_end_the_loop(loop, capsys):
    loop.call_later(0, lambda: 1 / 0)
    result(loop, loop.sleep(0.001))
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_readers_are_called_until_removed(loop):
    read_fd, write_fd = os.pipe()
    seen = []

    def readable():
        seen.append(os.read(read_fd, 1))
        if len(seen) == 3:
            loop.remove_reader(read_fd)
            loop.stop()

    loop.add_reader(read_fd, readable)
    os.write(write_fd, b"abcd")
    loop.run()
    assert seen == [b"a", b"b", b"c"]
    loop.remove_reader(read_fd)  # idempotent
    os.close(read_fd)
    os.close(write_fd)


def test_one_fd_has_a_reader_and_a_writer(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        seen = []

        def writable():
            seen.append("writable")
            loop.remove_writer(ours.fileno())
            theirs.send(b"x")

        def readable():
            seen.append(ours.recv(1))
            loop.remove_reader(ours.fileno())
            loop.stop()

        loop.add_reader(ours.fileno(), readable)
        loop.add_writer(ours.fileno(), writable)
        loop.run()
        assert seen == ["writable", b"x"]
        # Both sides are gone, so it can be watched anew.
        loop.add_reader(ours.fileno(), readable)
        loop.remove_reader(ours.fileno())


def test_an_event_of_a_closed_fd_is_not_its_successors(loop):
    """Two pipes are readable in one batch; the first callback replaces the second pipe."""
    pipes = [os.pipe(), os.pipe()]
    for _, write_fd in pipes:
        os.write(write_fd, b"x")
    called = []

    def first_of(n):
        def readable():
            called.append(n)
            other_read, other_write = pipes[1 - n]
            for fd in (pipes[n][0], other_read):
                loop.remove_reader(fd)
            os.close(other_read)
            os.close(other_write)
            new_read, new_write = os.pipe()
            assert other_read in (new_read, new_write)
            if new_read != other_read:
                os.dup2(new_read, other_read)
            pipes[1 - n] = (new_read, new_write)
            loop.add_reader(new_read, lambda: called.append("a pipe that is empty"))
            loop.call_later(0.01, loop.stop)

        return readable

    for n, (read_fd, _) in enumerate(pipes):
        loop.add_reader(read_fd, first_of(n))
    loop.run()
    assert len(called) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)
