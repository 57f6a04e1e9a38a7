"""The room in which creates wait: turns, chairs, quotas, and those that give up."""

import asyncio

import pytest

from sandboxd.errors import NodeOverloaded, RunEnded
from sandboxd.runtime.capacity import Amounts
from sandboxd.runtime.waiting import Request, Shortage, WaitingRoom

ONE = Amounts(sandboxes=1)
FULL = Shortage("sandboxes", "full")
QUOTA = Shortage("run-sandboxes", "the run is full", own=True)


class Node:
    """So many seats, and a quota for some runs."""

    def __init__(self, seats=0, quotas=(), chairs=1024):
        self.seats = seats
        self.quotas = dict(quotas)
        self.taken = []
        self.room = WaitingRoom(self.seat, self.leave, self.refusal, chairs)

    def seat(self, request):
        runs = [one.partition("/")[0] for one in self.taken]
        if runs.count(request.run) >= self.quotas.get(request.run, 99):
            return QUOTA
        if len(self.taken) >= self.seats:
            return FULL
        self.taken.append(request.sandbox_id)
        return None

    def leave(self, request):
        self.taken.remove(request.sandbox_id)

    def refusal(self, shortage, request):
        return NodeOverloaded(shortage.message, reason=shortage.reason)

    async def come(self, name, wait_s=5):
        await self.room.enter(Request(name, name.partition("/")[0], ONE), wait_s)
        return name

    def begin(self, *names, wait_s=5):
        return [asyncio.create_task(self.come(name, wait_s)) for name in names]

    async def free(self, seats):
        self.seats += seats
        self.room.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def run(main):
    async def bounded():
        async with asyncio.timeout(10):
            await main()

    asyncio.run(bounded())


def test_runs_take_turns_and_within_one_it_is_first_come_first_served():
    async def main():
        node = Node()
        node.begin("a/1", "a/2", "a/3", "a/4", "b/1", "c/1", "b/2")
        await asyncio.sleep(0)
        for _ in range(7):
            await node.free(1)
        assert node.taken == ["a/1", "b/1", "c/1", "a/2", "b/2", "a/3", "a/4"]
        assert len(node.room) == 0

    run(main)


def test_a_newcomer_passes_nobody():
    async def main():
        node = Node()
        node.begin("a/1")
        await asyncio.sleep(0)
        node.seats = 1  # free, and nobody has been told yet
        with pytest.raises(NodeOverloaded):
            await node.come("b/1", 0)
        await asyncio.sleep(0)
        assert node.taken == ["a/1"]

    run(main)


def test_a_run_at_its_quota_keeps_no_other_waiting():
    async def main():
        node = Node(seats=9, quotas={"a": 1})
        node.begin("a/1", "a/2")
        await asyncio.sleep(0)
        assert await node.come("b/1", 0) == "b/1"
        assert node.taken == ["a/1", "b/1"]
        with pytest.raises(NodeOverloaded, match="the run is full"):
            await node.come("a/3", 0)
        node.leave(Request("a/1", "a", ONE))
        await node.free(0)
        assert node.taken == ["b/1", "a/2"]

    run(main)


def test_one_that_gives_up_is_passed_over():
    async def main():
        node = Node()
        first, second, third = node.begin("a/1", "a/2", "a/3")
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        await node.free(2)
        assert node.taken == ["a/1", "a/3"]
        assert second.cancelled()
        assert await asyncio.gather(first, third) == ["a/1", "a/3"]

    run(main)


def test_one_that_is_seated_and_cancelled_at_once_gives_its_seat_on():
    async def main():
        node = Node()
        first, second = node.begin("a/1", "b/1")
        await asyncio.sleep(0)
        node.seats = 1
        node.room.wake()
        assert node.taken == ["a/1"]
        first.cancel()
        assert await second == "b/1"
        assert first.cancelled()
        assert node.taken == ["b/1"]

    run(main)


def test_nobody_waits_longer_than_it_asked_to():
    async def main():
        node = Node()
        with pytest.raises(NodeOverloaded):
            await node.come("a/1", 0.01)
        assert len(node.room) == 0
        await node.free(1)
        assert node.taken == []

    run(main)


def test_a_run_with_all_the_chairs_gives_one_up():
    async def main():
        node = Node(chairs=3)
        greedy = node.begin("a/1", "a/2", "a/3")
        await asyncio.sleep(0)
        with pytest.raises(NodeOverloaded):
            await node.come("a/4")
        [other] = node.begin("b/1")
        await asyncio.sleep(0)
        with pytest.raises(NodeOverloaded):
            await greedy[2]
        # With two against one there is nothing more to give up.
        with pytest.raises(NodeOverloaded):
            await node.come("b/2")
        await node.free(2)
        assert node.taken == ["a/1", "b/1"]
        assert other.done()
        greedy[1].cancel()

    run(main)


def test_a_run_is_sent_away():
    async def main():
        node = Node()
        tasks = node.begin("a/1", "b/1", "a/2")
        await asyncio.sleep(0)
        assert node.room.refuse(lambda: RunEnded("over"), "a") == 2
        results = await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        assert [type(one) for one in results] == [RunEnded, RunEnded]
        await node.free(5)
        assert node.taken == ["b/1"]

    run(main)


def test_a_shortage_that_ends_by_itself_is_looked_at_again():
    async def main():
        node = Node(seats=1)
        told = iter([Shortage("run-rate", "too fast", own=True, ready_in_s=0.01)] * 3)
        seat = node.seat
        node.room._seat = lambda request: next(told, None) or seat(request)
        await node.come("a/1", 5)  # nobody frees anything meanwhile
        assert node.taken == ["a/1"]

    run(main)
