"""Watching a node, in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from sandboxd.client import eyes_calls
from sandboxd.client.aio_driver import AsyncDriver
from sandboxd.client.eyes_calls import EventLines, HistoryPoint, NodeEvent
from sandboxd.client.failures import ConnectionLost
from sandboxd.client.retries import Resumes


class AsyncNodeEyes(AsyncDriver):
    """What a client can see of the node as a whole."""

    async def events(
        self,
        after: int = 0,
        *,
        follow: bool = False,
        run: str | None = None,
        sandbox: str | None = None,
        kinds: Sequence[str] = (),
    ) -> AsyncIterator[NodeEvent]:
        """What became of the node and its sandboxes after the event of that ``seq`` (0: all that is
        kept), those that match all that is given. With ``follow`` it goes on for ever, also when
        the connection is cut or the daemon starts anew."""
        lines, resumes = EventLines(after), Resumes()
        while True:
            cut = None
            lines.begin()
            call = eyes_calls.events(
                lines.seq, follow=follow, run=run, sandbox=sandbox, kinds=kinds
            )
            try:
                async with self.stream(call) as pieces:
                    async for piece in pieces:
                        lines.pieces += 1  # a heartbeat too is a sign that it works
                        resumes.progress(lines.pieces)
                        for event in lines.feed(piece):
                            yield event
            except ConnectionLost as error:
                cut = error
            if lines.ended and not follow:
                return
            await asyncio.sleep(resumes.after_cut(cut))

    async def metrics(self) -> str:
        """In Prometheus' text format."""
        return await self.do(eyes_calls.metrics())

    async def history(self) -> list[HistoryPoint]:
        """The last hour, the oldest first."""
        return await self.do(eyes_calls.history())
