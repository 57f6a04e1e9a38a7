"""A registry on loopback that misbehaves as told. Standard library only.

Serves blobs and manifests that a test puts into it. What it was asked is in `requests`, as
(path, headers); a test's `fault` sees each request first and may answer it itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class FakeRegistry:
    port: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    fault: Callable[[Handler], bool] | None = None
    # Set: a token is asked for, and given to this user.
    token_user: tuple[str, str] | None = None
    basic_user: tuple[str, str] | None = None
    tokens: set[str] = field(default_factory=set)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def put(self, data: bytes, media_type: str) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def put_manifest(self, node: Any, tag: str | None = None) -> dict[str, Any]:
        data = json.dumps(node).encode()
        for key in filter(None, (tag, digest_of(data))):
            self.manifests[key] = (node["mediaType"], data)
        return {"mediaType": node["mediaType"], "digest": digest_of(data), "size": len(data)}

    def image(self, layers: list[tuple[bytes, bytes]], tag: str, arch: str = "amd64") -> str:
        """An image of (tar, blob) layers; returns the manifest's digest."""
        config = {
            "architecture": arch,
            "os": "linux",
            "config": {"User": tag},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(tar) for tar, _ in layers]},
        }
        node = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.put(json.dumps(config).encode(), CONFIG),
            "layers": [self.put(stored, LAYER) for _, stored in layers],
        }
        return str(self.put_manifest(node, tag)["digest"])

    def asked(self, part: str) -> list[dict[str, str]]:
        """Headers of the requests whose path holds this."""
        return [headers for path, headers in list(self.requests) if part in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: FakeRegistry

    def do_GET(self) -> None:
        registry = self.registry
        registry.requests.append((self.path, dict(self.headers)))
        if registry.fault is not None and registry.fault(self):
            return
        path, _, query = self.path.partition("?")
        if path == "/token":
            self._token(query)
        elif not self._is_allowed():
            pass
        elif "/manifests/" in path:
            found = registry.manifests.get(path.rpartition("/")[2])
            if found is None:
                self.answer(404)
            else:
                self.answer(200, found[1], {"Content-Type": found[0]})
        elif (blob := registry.blobs.get(path.rpartition("/")[2])) is not None:
            self.blob(blob)
        else:
            self.answer(404)

    def blob(self, data: bytes) -> None:
        """With Range, as the specification says."""
        wanted = self.headers.get("Range")
        if wanted is None:
            self.answer(200, data)
            return
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        part = data[int(start) : int(end) + 1]
        self.answer(206, part, {"Content-Range": f"bytes {start}-{end}/{len(data)}"})

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def broken(self, data: bytes, keep: int) -> None:
        """Promise all, send a part, and hang up."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:keep])
        self.wfile.flush()
        self.close_connection = True

    def _basic(self, user: tuple[str, str]) -> bool:
        wanted = "Basic " + base64.b64encode(":".join(user).encode()).decode()
        return self.headers.get("Authorization") == wanted

    def _token(self, query: str) -> None:
        user = self.registry.token_user
        if user is None or not self._basic(user):
            self.answer(401)
            return
        token = f"token-{len(self.registry.tokens)}"
        self.registry.tokens.add(token)
        self.answer(200, json.dumps({"token": token, "asked": query}).encode())

    def _is_allowed(self) -> bool:
        registry = self.registry
        if registry.token_user is not None:
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if given in registry.tokens:
                return True
            realm = f'Bearer realm="http://{registry.host}/token",service="fake"'
            self.answer(401, headers={"WWW-Authenticate": realm})
            return False
        if registry.basic_user is not None and not self._basic(registry.basic_user):
            self.answer(401, headers={"WWW-Authenticate": 'Basic realm="fake"'})
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def fake_registry() -> Iterator[FakeRegistry]:
    """Serves until the end of the `with`."""
    registry = FakeRegistry()
    handler = type("BoundHandler", (Handler,), {"registry": registry})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        registry.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
