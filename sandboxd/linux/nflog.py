"""NFLOG: packets that a rule ``log group N`` copies to user space (nfnetlink_log.h).

The socket is bound by whoever has CAP_NET_ADMIN in its network namespace; reading from it needs
nothing, so that another process can be given it. What comes is the head of packets that a sandbox
made: ``parse`` takes nothing in it for granted.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

NETLINK_NETFILTER: Final = 12
NFNL_SUBSYS_ULOG: Final = 4
NFULNL_MSG_PACKET: Final = 0
NFULNL_MSG_CONFIG: Final = 1

NFULA_CFG_CMD: Final = 1
NFULA_CFG_MODE: Final = 2
NFULA_CFG_TIMEOUT: Final = 4
NFULA_CFG_QTHRESH: Final = 5
NFULNL_CFG_CMD_BIND: Final = 1
NFULNL_COPY_PACKET: Final = 2

NFULA_PAYLOAD: Final = 9
NFULA_PREFIX: Final = 10

NLM_F_REQUEST: Final = 1
NLM_F_ACK: Final = 4
NLMSG_ERROR: Final = 2

HEAD_BYTES: Final = 64
"""Of a packet: an IPv4 header with options is 60 at most, and where ports are found follows it."""
BATCH: Final = 16
"""Packets that the kernel may gather into one message …"""
BATCH_CS: Final = 5
"""… for so many hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Packet:
    """The head of an IPv4 packet. ``port`` is the destination's, 0 where the protocol has none."""

    prefix: str
    source: str
    destination: str
    protocol: int
    port: int


def bound(group: int) -> socket.socket:
    """A socket that is given what the rules of this network namespace log to ``group``.

    Raises OSError: EPERM without CAP_NET_ADMIN, EBUSY where somebody has the group.
    """
    sock = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
    )
    try:
        sock.bind((0, 0))
        command = _attribute(NFULA_CFG_CMD, struct.pack("B", NFULNL_CFG_CMD_BIND))
        mode = _attribute(NFULA_CFG_MODE, struct.pack("!IBB", HEAD_BYTES, NFULNL_COPY_PACKET, 0))
        threshold = _attribute(NFULA_CFG_QTHRESH, struct.pack("!I", BATCH))
        timeout = _attribute(NFULA_CFG_TIMEOUT, struct.pack("!I", BATCH_CS))
        _configure(sock, group, command)
        _configure(sock, group, mode + threshold + timeout)
    except OSError:
        sock.close()
        raise
    return sock


def _configure(sock: socket.socket, group: int, attributes: bytes) -> None:
    body = struct.pack("!BBH", socket.AF_UNSPEC, 0, group) + attributes
    kind = NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_CONFIG
    flags = NLM_F_REQUEST | NLM_F_ACK
    sock.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    answer = sock.recv(4096)
    _, kind, _, _, _, number = struct.unpack_from("=IHHIIi", answer)
    if kind != NLMSG_ERROR:
        raise OSError(71, "no answer to an NFLOG configuration", "nflog")
    if number:
        raise OSError(-number, "NFLOG configuration refused", "nflog")


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def parse(datagram: bytes) -> Iterator[Packet]:
    """The packets of one message. What cannot be read as one is left out."""
    at = 0
    while at + 16 <= len(datagram):
        length, kind = struct.unpack_from("=IH", datagram, at)
        if length < 16 or at + length > len(datagram):
            return
        if kind == NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_PACKET:
            # A struct nfgenmsg stands between the header and the attributes.
            found = dict(_attributes(datagram[at + 20 : at + length]))
            packet = _packet(found.get(NFULA_PREFIX, b""), found.get(NFULA_PAYLOAD, b""))
            if packet is not None:
                yield packet
        at += length + -length % 4


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4 or at + length > len(data):
            return
        yield kind & 0x3FFF, data[at + 4 : at + length]
        at += length + -length % 4


def _packet(prefix: bytes, payload: bytes) -> Packet | None:
    if len(payload) < 20 or payload[0] >> 4 != 4:
        return None
    header = (payload[0] & 15) * 4
    protocol = payload[9]
    port = 0
    if protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) and len(payload) >= header + 4:
        (port,) = struct.unpack_from("!H", payload, header + 2)
    return Packet(
        prefix.rstrip(b"\0").decode("ascii", "replace"),
        socket.inet_ntoa(payload[12:16]),
        socket.inet_ntoa(payload[16:20]),
        protocol,
        port,
    )
