"""The servers of ``internet``: a program of its own, run in that namespace. Not imported by tests.

TCP answers with the address that was connected to, so that a test can tell who answered. DNS
answers from a table, with an alias first for every name that has one label more than two, and
remembers what it was asked: ``queries`` on stdin prints that as JSON and forgets it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

ASKED: list[str] = []


async def told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    address, port = writer.get_extra_info("sockname")[:2]
    writer.write(f"{address}:{port}\n".encode())
    try:
        await writer.drain()
        # What comes is counted and told at its end, for tests of bandwidth.
        total = 0
        while data := await reader.read(1 << 16):
            total += len(data)
        writer.write(f"{total}\n".encode())
        await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class Names(asyncio.DatagramProtocol):
    def __init__(self, names: dict[str, list[str]]) -> None:
        self._names = names

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        ASKED.append(name)
        response = dns.message.make_response(query, recursion_available=True)
        addresses = self._names.get(name)
        if addresses is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype == dns.rdatatype.A:
            owner = question.name
            if name.startswith("www."):
                alias = dns.rrset.from_text(owner, 60, "IN", "CNAME", "cdn.invalid.")
                response.answer.append(alias)
                owner = alias[0].target
            response.answer.append(dns.rrset.from_text_list(owner, 60, "IN", "A", addresses))
        wire = response.to_wire(max_size=4096)
        self._transport.sendto(wire, addr)


async def main() -> None:
    config = json.loads(sys.argv[1])
    loop = asyncio.get_running_loop()
    for port in config["tcp"]:
        await asyncio.start_server(told, "0.0.0.0", port, backlog=1000)
    names = partial(Names, config["names"])
    await loop.create_datagram_endpoint(names, local_addr=(config["dns"], 53))
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(ASKED), flush=True)
        ASKED.clear()


asyncio.run(main())
