"""The clients' transports against a server that says, byte for byte, what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import httpx
import pytest

from sandboxd.client.aio_transport import AsyncKeepAliveTransport
from sandboxd.client.sync_transport import KeepAliveTransport

Serve = Callable[..., "Server"]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    """Answers the n-th request on a connection with the n-th answer, then closes it."""

    def __init__(self, answers: list[bytes], *, then_wait: bool = False) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = threading.Semaphore(0)
        """Released for each connection that is closed here."""
        self._answers = answers
        self._then_wait = then_wait
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection, contextlib.suppress(OSError):
                for answer in self._answers:
                    self.requests.append(_one_request(connection))
                    connection.sendall(answer)
                if self._then_wait:
                    self._released.wait(30)
            self.closed.release()

    def release(self) -> None:
        """Do not wait at the end of a connection any longer."""
        self._released.set()

    def close(self) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)


def _one_request(connection: socket.socket) -> bytes:
    """Up to the end of its body, as its own headers tell it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    headers = head.lower()
    if b"chunked" in headers:
        while not body.endswith(b"0\r\n\r\n"):
            body += _more(connection)
    elif b"content-length: " in headers:
        length = int(headers.partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(body) < length:
            body += _more(connection)
    return head + b"\r\n\r\n" + body


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the client has gone")
    return data


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answers: list[bytes], **how: bool) -> Server:
        servers.append(Server(answers, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Blocking:
    """The blocking transport."""

    def __init__(self, idle_s: float) -> None:
        self._transport = KeepAliveTransport(idle_s=idle_s, socket_options=())

    def ask(self, request: httpx.Request) -> httpx.Response:
        response = self._transport.handle_request(request)
        try:
            response.read()
        finally:
            response.close()
        return response

    def close(self) -> None:
        self._transport.close()


class Asyncio:
    """The one for asyncio, with a loop that runs only while it is asked."""

    def __init__(self, idle_s: float) -> None:
        self._transport = AsyncKeepAliveTransport(idle_s=idle_s, socket_options=())
        self._runner = asyncio.Runner()

    def ask(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
            return response

        return self._runner.run(ask())

    def close(self) -> None:
        self._runner.run(self._transport.aclose())
        self._runner.close()


Client = Blocking | Asyncio


@pytest.fixture(params=[Blocking, Asyncio])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[[float], Client]]:
    made: list[Client] = []

    def make(idle_s: float) -> Client:
        made.append(request.param(idle_s))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make_client: Callable[[float], Client]) -> Client:
    return make_client(30.0)


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def ask(
    client: Client,
    url: str,
    method: str = "GET",
    content: Iterable[bytes] | None = None,
    read_s: float = 30.0,
) -> httpx.Response:
    timeout = {"connect": 30.0, "read": read_s, "write": 30.0, "pool": None}
    request = httpx.Request(
        method,
        url + "/x?y=1",
        headers={"Host": "here"}
        | ({"Transfer-Encoding": "chunked"} if content is not None else {}),
        stream=Pieces(content) if content is not None else httpx.ByteStream(b""),
        extensions={"timeout": timeout},
    )
    return client.ask(request)


def test_a_connection_is_used_again(serve: Serve, client: Client) -> None:
    server = serve([OK, OK, OK])
    for _ in range(3):
        answer = ask(client, server.url)
        assert (answer.status_code, answer.content) == (200, b"hello")
        assert answer.headers["content-length"] == "5"
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /x?y=1 HTTP/1.1\r\n")
    assert b"\r\nHost: here\r\n" in server.requests[0]


def test_one_that_the_server_closed_is_not(serve: Serve, client: Client) -> None:
    server = serve([OK])
    for _ in range(3):
        assert ask(client, server.url).content == b"hello"
        assert server.closed.acquire(timeout=30)
    assert server.connections == 3


def test_nor_one_that_was_idle_for_long(
    serve: Serve, make_client: Callable[[float], Client]
) -> None:
    server = serve([OK, OK], then_wait=True)
    hasty = make_client(0.0)
    ask(hasty, server.url)
    server.release()
    ask(hasty, server.url)
    assert server.connections == 2


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED,
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\n\r\nhello",  # up to the connection's end
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
def test_bodies_of_every_form(serve: Serve, client: Client, answer: bytes) -> None:
    server = serve([answer])
    assert ask(client, server.url).content == b"hello"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("DELETE", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        ("GET", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ],
)
def test_answers_without_a_body(serve: Serve, client: Client, method: str, answer: bytes) -> None:
    server = serve([answer, answer])
    for _ in range(2):
        assert ask(client, server.url, method).content == b""
    assert server.connections == 1


def test_a_body_of_unknown_length_goes_in_chunks(serve: Serve, client: Client) -> None:
    server = serve([OK])
    ask(client, server.url, "PUT", [b"ab", b"", b"c" * 20])
    assert server.requests[0].endswith(b"\r\n\r\n2\r\nab\r\n14\r\n" + b"c" * 20 + b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhe",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    ],
)
def test_half_an_answer_is_an_error(serve: Serve, client: Client, answer: bytes) -> None:
    server = serve([answer])
    with pytest.raises(httpx.RemoteProtocolError):
        ask(client, server.url)


def test_headers_without_end_are_an_error(serve: Serve, client: Client) -> None:
    server = serve([b"HTTP/1.1 200 OK\r\n" + b"x-more: y\r\n" * 100_000])
    with pytest.raises(httpx.RemoteProtocolError, match="no end"):
        ask(client, server.url)


def test_a_second_answer_reaches_nobody(serve: Serve, client: Client) -> None:
    server = serve([OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"])
    assert ask(client, server.url).content == b"hello"
    assert ask(client, server.url).content == b"hello"
    assert server.connections == 2


def test_silence_is_a_timeout(serve: Serve, client: Client) -> None:
    server = serve([b""], then_wait=True)
    with pytest.raises(httpx.ReadTimeout):
        ask(client, server.url, read_s=0.05)


def test_nobody_there_is_a_connect_error(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(httpx.ConnectError):
        ask(client, f"http://127.0.0.1:{port}")


def test_a_refusal_is_read_though_the_upload_broke(client: Client) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    refused = threading.Event()

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(1)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 4\r\n\r\nmore")
        connection.shutdown(socket.SHUT_RDWR)
        refused.wait(30)
        connection.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        response = ask(client, url, "PUT", [b"x" * 65536] * 2000)
        assert (response.status_code, response.content) == (413, b"more")
    finally:
        refused.set()
        thread.join()
        listener.close()


def test_many_threads_never_share_an_answer() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            while True:
                body = _one_request(connection).partition(b"\r\n\r\n")[2]
                head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
                connection.sendall(head + body)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    transport = KeepAliveTransport(idle_s=30.0, socket_options=())
    wrong: list[bytes] = []

    def ask_often(number: int) -> None:
        for round_ in range(50):
            body = b"%d/%d" % (number, round_)
            response = transport.handle_request(httpx.Request("POST", url, content=body))
            if response.read() != body:
                wrong.append(body)
            response.close()

    threads = [threading.Thread(target=ask_often, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    acceptor.join()
    transport.close()
    assert wrong == []
