"""NFLOG messages, built here from nfnetlink_log.h and read by ``sandboxd.linux.nflog``."""

from __future__ import annotations

import socket
import struct

from hypothesis import given
from hypothesis import strategies as st

from sandboxd.linux.nflog import Packet, parse


def message(prefix: bytes, payload: bytes, kind: int = 0x0400) -> bytes:
    def attribute(number: int, value: bytes) -> bytes:
        padding = b"\0" * (-len(value) % 4)
        return struct.pack("=HH", 4 + len(value), number) + value + padding

    body = struct.pack("!BBH", 2, 0, 1) + attribute(10, prefix + b"\0") + attribute(9, payload)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def ipv4(protocol: int, rest: bytes, options: bytes = b"") -> bytes:
    words = 5 + len(options) // 4
    head = struct.pack("!BBHHHBBH", 0x40 | words, 0, 100, 0, 0, 64, protocol, 0)
    return head + socket.inet_aton("100.126.0.9") + socket.inet_aton("8.8.4.4") + options + rest


def test_packets_of_one_datagram() -> None:
    ports = struct.pack("!HH", 40000, 443)
    datagram = message(b"allow", ipv4(6, ports)) + message(b"deny", ipv4(17, ports, b"\1" * 8))
    assert list(parse(datagram)) == [
        Packet("allow", "100.126.0.9", "8.8.4.4", 6, 443),
        Packet("deny", "100.126.0.9", "8.8.4.4", 17, 443),
    ]


def test_protocol_without_ports_and_head_that_was_cut() -> None:
    (icmp,) = parse(message(b"deny", ipv4(1, b"\x08\0ab")))
    assert (icmp.protocol, icmp.port) == (1, 0)
    (cut,) = parse(message(b"deny", ipv4(6, b"\x9c")))
    assert cut.port == 0


def test_what_is_no_packet_is_left_out() -> None:
    assert list(parse(message(b"x", b"\x60" + b"\0" * 60))) == []
    assert list(parse(message(b"x", b"short"))) == []
    assert list(parse(message(b"x", ipv4(6, b"\0" * 4), kind=0x0401))) == []


@given(st.binary(max_size=300))
def test_any_bytes_are_borne(data: bytes) -> None:
    whole = message(b"allow", ipv4(6, b"\0\1\1\xbb"))
    for datagram in (data, whole + data, whole[: len(data) % len(whole)] + data):
        for packet in parse(datagram):
            assert 0 <= packet.port < 65536
