"""Connections to ports of sandboxes: how many there may be, and how each of them ends.

The one who uses a connection does so within ``Ports.connection``. When the sandbox ends, is reset
or paused, the user's task is cancelled there, wherever it waits, and sees the reason raised
instead.
Not for what goes through a connection: HTTP and WebSockets are the API's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sandboxd.config import Config
from sandboxd.errors import NodeOverloaded, PortTimeout, TooManyPortConnections
from sandboxd.runtime.port_connection import PortConnection, open_connection
from sandboxd.runtime.sandbox import Sandbox


class Ports:
    """Those of all sandboxes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._open = 0

    def __len__(self) -> int:
        return self._open

    @contextlib.asynccontextmanager
    async def connection(self, sandbox: Sandbox, port: int) -> AsyncIterator[PortConnection]:
        """A connection to a port of the sandbox's loopback, closed at the end of the block.

        Raises PortClosed, PortTimeout, PortBroken, TooManyPortConnections, NodeOverloaded, and what
        ends the sandbox or its connections, at any ``await`` in the block.
        """
        control = sandbox.control_to_start()
        config = self._config
        if len(sandbox.ports) >= config.max_port_connections:
            raise TooManyPortConnections(
                f"the sandbox's ports have their {config.max_port_connections} connections"
            )
        if self._open >= config.max_node_port_connections:
            raise NodeOverloaded(
                f"the node has its {config.max_node_port_connections} connections to ports"
            )
        task = asyncio.current_task()
        assert task is not None
        connection: PortConnection | None = None
        sandbox.ports.add(task)
        self._open += 1
        try:
            try:
                async with asyncio.timeout(config.port_connect_s) as clock:
                    connection = await open_connection(control, port, sandbox.touch)
            except TimeoutError:
                if not clock.expired():
                    raise
                raise PortTimeout(
                    f"port {port} took no connection within {config.port_connect_s:g} s", port=port
                ) from None
            yield connection
        except BaseException:
            error = sandbox.ports.remove(task)
            if error is None or task.uncancel() > 0:
                raise
            raise error.with_traceback(None) from None
        finally:
            sandbox.ports.remove(task)
            self._open -= 1
            if connection is not None:
                connection.close()
