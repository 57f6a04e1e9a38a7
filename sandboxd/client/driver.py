"""What both drivers are, however they wait: one daemon's address, its connections, its tries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, Generic, Self, TypeVar

import httpx

from sandboxd.client import slurm
from sandboxd.client.address import RETRY_S, Address, find
from sandboxd.client.calls import Call
from sandboxd.client.failures import ClientMisused
from sandboxd.client.retries import Answer, Tries

Transport = TypeVar("Transport", httpx.BaseTransport, httpx.AsyncBaseTransport)


class DriverBase(ABC, Generic[Transport]):
    """``url`` and ``token`` default to the environment's (``address``). ``retry_s`` bounds how long
    a call is tried again where that is safe (``retries``). ``transport`` is for tests."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        retry_s: float = RETRY_S,
        transport: Transport | None = None,
    ) -> None:
        self._address = find(url, token)
        self._retry_s = retry_s
        self._own_transport: Transport | None = transport
        self._transport: Transport | None = None
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def from_slurm(
        cls,
        node: str | None = None,
        *,
        job: str | int | None = None,
        directory: str | os.PathLike[str] | None = None,
        retry_s: float = RETRY_S,
    ) -> Self:
        """The daemon of a node of a Slurm job: by default of the node and the job that this process
        is in. ``client.slurm.nodes`` has all of a job. Raises ClientMisused where none serves."""
        found = slurm.node(node, job, directory)
        return cls(found.url, found.token, retry_s=retry_s)

    @property
    def address(self) -> Address:
        """Where the daemon is, for what goes over connections of its own."""
        return self._address

    @property
    def url(self) -> str:
        return self._address.url

    @abstractmethod
    def _new_transport(self) -> Transport:
        """Connections to ``url``."""

    def _connections(self) -> Transport:
        if self._closed:
            raise ClientMisused("the client is closed")
        if self._pid != os.getpid():
            # Forked: the parent's connections are not ours to use, nor to close in an orderly way.
            self._transport, self._pid = None, os.getpid()
        if self._transport is None:
            self._transport = self._own_transport or self._new_transport()
        return self._transport

    def _retire(self) -> Transport | None:
        """Be closed; returns the connections where they are ours to close."""
        self._closed = True
        transport, self._transport = self._transport, None
        return transport if self._pid == os.getpid() else None

    def _tries(self, call: Call[Any], now: float) -> Tries:
        within_s = self._retry_s if call.retry_s is None else call.retry_s
        return Tries(self.url, repeatable=call.repeatable, now=now, within_s=within_s)


def answer_of(response: httpx.Response, body: bytes) -> Answer:
    return Answer(response.status_code, body, response.headers.get("retry-after"))
