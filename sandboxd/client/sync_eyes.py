"""Watching a node, blocking."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from sandboxd.client import eyes_calls
from sandboxd.client.eyes_calls import EventLines, HistoryPoint, NodeEvent
from sandboxd.client.failures import ConnectionLost
from sandboxd.client.retries import Resumes
from sandboxd.client.sync_driver import Driver


class NodeEyes(Driver):
    """What a client can see of the node as a whole."""

    def events(
        self,
        after: int = 0,
        *,
        follow: bool = False,
        run: str | None = None,
        sandbox: str | None = None,
        kinds: Sequence[str] = (),
    ) -> Iterator[NodeEvent]:
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
                with self.stream(call) as pieces:
                    for piece in pieces:
                        lines.pieces += 1  # a heartbeat too is a sign that it works
                        resumes.progress(lines.pieces)
                        yield from lines.feed(piece)
            except ConnectionLost as error:
                cut = error
            if lines.ended and not follow:
                return
            time.sleep(resumes.after_cut(cut))

    def metrics(self) -> str:
        """In Prometheus' text format."""
        return self.do(eyes_calls.metrics())

    def history(self) -> list[HistoryPoint]:
        """The last hour, the oldest first."""
        return self.do(eyes_calls.history())
