"""When time is up, and what is kept of those for whom it no longer matters."""

import asyncio

from sandboxd.runtime.expiry import SWEPT, Expiry


def test_what_no_longer_matters_is_not_kept():
    async def main():
        alive = {"a"}
        due = []
        expiry = Expiry(due.append, alive.__contains__)
        for n in range(20 * SWEPT):
            expiry.add(f"gone-{n}", 3600)
            assert len(expiry) <= SWEPT
        expiry.add("a", 0.01)
        for _ in range(2 * SWEPT):  # renewed again and again
            expiry.add("a", 3600)
        async with asyncio.timeout(10):
            while not due:
                await asyncio.sleep(0.005)
        assert due == ["a"]
        expiry.close()

    asyncio.run(main())


def test_many_that_matter_are_all_called_in_order():
    async def main():
        due = []
        expiry = Expiry(due.append)
        names = [f"{n:05}" for n in range(3 * SWEPT)]
        for n, name in enumerate(names):
            expiry.add(name, n / 1e6)
        async with asyncio.timeout(10):
            while len(due) < len(names):
                await asyncio.sleep(0.005)
        assert due == names

    asyncio.run(main())
