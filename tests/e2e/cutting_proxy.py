"""A TCP proxy before the daemon that cuts connections where a test says.

For: tests of what a client makes of a broken connection. Each answer body is let through up to a
number of bytes, then both ends are reset; when there are no numbers left, all of it is.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from urllib.parse import urlsplit

RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no time, socket(7)
PIECE = 65536


class CuttingProxy:
    """``cuts``: for each connection in turn, how many bytes of what the daemon says pass."""

    def __init__(self, base_url: str) -> None:
        target = urlsplit(base_url)
        assert target.hostname is not None
        assert target.port is not None
        self._target = (target.hostname, target.port)
        self.cuts: deque[int] = deque()
        self.made = 0
        """How many connections were cut."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open |= {near, far}
            passing = self.cuts.popleft() if self.cuts else None
            for work in ((near, far, None), (far, near, passing)):
                thread = threading.Thread(target=self._pump, args=work)
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket, passing: int | None) -> None:
        with contextlib.suppress(OSError):
            while passing is None or passing > 0:
                data = source.recv(PIECE if passing is None else min(PIECE, passing))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
                passing = None if passing is None else passing - len(data)
            self.made += 1
            for one in (source, sink):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()


@contextlib.contextmanager
def cutting_proxy(base_url: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(base_url)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()
