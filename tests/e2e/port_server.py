"""Runs in a sandbox: a server that is as good or as bad as the path it is asked for.

For: tests of ports. `python3 port_server.py PORT [FAMILY]` writes `ready` and serves HTTP by hand,
so that what it sends is exactly what a test wants; `websocket PORT` and `raw PORT` likewise.
"""

import contextlib
import hashlib
import json
import random
import socket
import sys
import threading
import time

MIB = 1 << 20


def listen(port, family=socket.AF_INET):
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", port))
    listener.listen(64)
    print("ready", flush=True)
    return listener


def read_head(file):
    line = file.readline().decode("latin-1").split()
    headers = []
    while (one := file.readline()) not in (b"\r\n", b""):
        name, _, value = one.decode("latin-1").partition(":")
        headers.append((name.strip().lower(), value.strip()))
    return line, headers


def read_body(file, headers):
    known = dict(headers)
    if known.get("transfer-encoding") == "chunked":
        while size := int(file.readline(), 16):
            yield file.read(size)
            file.readline()
        file.readline()
    else:
        left = int(known.get("content-length", 0))
        while left and (data := file.read(min(left, MIB))):
            left -= len(data)
            yield data


def answer(sock, head, body=b""):
    sock.sendall(b"HTTP/1.1 " + head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)


def whole(sock, body, head="200 OK"):
    answer(sock, f"{head}\nContent-Length: {len(body)}", body)


def for_ever(sock, data):
    while True:
        sock.sendall(data)


def serve_http(sock):
    file = sock.makefile("rb")
    (method, target, _), headers = read_head(file)
    path = target.partition("?")[0]
    if path == "/echo":
        seen = {"method": method, "target": target, "headers": headers}
        digest, size = hashlib.sha256(), 0
        for data in read_body(file, headers):
            digest.update(data)
            size += len(data)
        seen |= {"size": size, "sha256": digest.hexdigest()}
        whole(sock, json.dumps(seen).encode())
    elif path == "/steps":  # each answers one piece of the request
        answer(sock, "200 OK\nTransfer-Encoding: chunked")
        for data in read_body(file, headers):
            sock.sendall(b"%x\r\n%s\r\n" % (len(data) + 1, data + b"!"))
        sock.sendall(b"0\r\n\r\n")
    elif path == "/random":
        whole(sock, random.Random(int(target.partition("?")[2])).randbytes(50 * MIB))
    elif path == "/early":
        whole(sock, b"enough", "413 Too Much")
    elif path == "/redirect":
        answer(
            sock,
            "302 Found\nLocation: /next?a=1\nSet-Cookie: a=b; Path=/; HttpOnly\n"
            "X-Sandboxd-Error: sandbox-dead\nConnection: X-Secret\nX-Secret: s\n"
            "Strict-Transport-Security: max-age=1\nContent-Length: 0",
        )
    elif path == "/status":
        whole(sock, b"teapot", "418 I'm a teapot")
    elif path == "/old":
        sock.sendall(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
    elif path == "/nothing":
        answer(sock, "204 No Content\nContent-Length: 5")
    elif path == "/hint":
        sock.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        whole(sock, b"after the hint")
    elif path == "/endless-headers":
        sock.sendall(b"HTTP/1.1 200 OK\r\n")
        for_ever(sock, b"X-Header: " + b"x" * 1000 + b"\r\n")
    elif path == "/endless-line":
        for_ever(sock, b"x" * 4096)
    elif path == "/endless-hints":
        for_ever(sock, b"HTTP/1.1 103 Early Hints\r\n\r\n")
    elif path == "/dripping-head":
        while True:
            sock.sendall(b"H")
            time.sleep(0.2)
    elif path == "/short":
        answer(sock, "200 OK\nContent-Length: 100", b"only this")
    elif path == "/long":
        answer(sock, "200 OK\nContent-Length: 4", b"goodHTTP/1.1 200 OK\r\n\r\nsmuggled")
    elif path == "/two-lengths":
        answer(sock, "200 OK\nContent-Length: 4\nContent-Length: 5", b"good!")
    elif path == "/length-and-chunks":
        answer(
            sock, "200 OK\nContent-Length: 3\nTransfer-Encoding: chunked", b"4\r\ngood\r\n0\r\n\r\n"
        )
    elif path == "/huge-chunk":
        answer(sock, "200 OK\nTransfer-Encoding: chunked", b"f" * 15 + b"\r\nonly this")
    elif path == "/no-chunk":
        answer(sock, "200 OK\nTransfer-Encoding: chunked", b"zz\r\n")
    elif path == "/tiny-chunks":
        answer(sock, "200 OK\nTransfer-Encoding: chunked", b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n")
    elif path == "/split-header":
        answer(sock, "200 OK\nX-Bad: a\x00b\nContent-Length: 0")
    elif path == "/folded":
        answer(sock, "200 OK\nX-Folded: a\n b\nContent-Length: 0")
    elif path == "/status-999":
        whole(sock, b"", "999 No")
    elif path == "/switch":
        answer(sock, "101 Switching Protocols\nUpgrade: x\nConnection: upgrade", b"x" * 100)
    elif path == "/nonsense":
        sock.sendall(b"SSH-2.0-OpenSSH\r\n")
    elif path == "/hang-up":
        pass
    elif path == "/reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        file.close()
        sock.close()
    elif path == "/silent":
        threading.Event().wait()
    elif path == "/silent-body":
        answer(sock, "200 OK\nContent-Length: 100", b"some")
        threading.Event().wait()
    elif path == "/flood":
        answer(sock, "200 OK\nTransfer-Encoding: chunked")
        for_ever(sock, b"10000\r\n" + b"x" * 65536 + b"\r\n")
    else:
        whole(sock, b"not here", "404 Not Found")


def serve_raw(sock):
    """Echo until the end of what comes, then say how much that was, and end too."""
    total = 0
    while data := sock.recv(MIB):
        total += len(data)
        sock.sendall(data)
    sock.sendall(b"|%d" % total)
    sock.shutdown(socket.SHUT_WR)


def each(listener, serve):
    def one(sock):
        with sock:
            with contextlib.suppress(OSError):
                serve(sock)

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=one, args=(sock,), daemon=True).start()


def websocket(port):
    from websockets.sync.server import serve

    def handler(connection):
        path = connection.request.path.partition("?")[0]
        if path == "/close":
            connection.close(4321, "as asked")
            return
        if path == "/flood":
            while True:
                connection.send(b"x" * 65536)
        if path == "/large":
            connection.send(b"x" * (2 * MIB))
        if path == "/drop":
            connection.socket.close()
            return
        if path == "/head":
            connection.send(json.dumps([*connection.request.headers.raw_items()]))
        for message in connection:
            if path == "/pieces":
                connection.send([message, message])
            else:
                connection.send(message)

    with serve(
        handler,
        "127.0.0.1",
        port,
        select_subprotocol=lambda _, offered: "b" if "b" in offered else None,
        max_size=None,
        compression=None,
    ) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    mode, port = sys.argv[1], int(sys.argv[2])
    if mode == "websocket":
        websocket(port)
    elif mode == "full":  # takes no connection
        listener = listen(port)
        listener.listen(0)
        threading.Event().wait()
    else:
        family = socket.AF_INET6 if mode.endswith("6") else socket.AF_INET
        each(listen(port, family), serve_http if mode.startswith("http") else serve_raw)
