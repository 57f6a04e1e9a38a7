"""Passes connections on from a socket that was inherited to a port where this program runs.

So that tests reach a daemon in another network namespace: a socket stays in the one it was made in.
``python relay.py FD PORT``, in the daemon's namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


async def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    port = int(sys.argv[2])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(serve, sock=listener)
    await server.serve_forever()


asyncio.run(main())
