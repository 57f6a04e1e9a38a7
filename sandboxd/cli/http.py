"""The few requests the administration verbs make. Not a client library: that is ``client``."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 120.0
"""For anything but an exec: creating may have to mount an image first."""

EXEC_MARGIN_S: Final = 30.0
"""Beyond an exec's own timeout, for killing its processes and sending what it wrote."""


class DaemonError(Exception):
    """What went wrong, in the words of the API's error body."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class Daemon:
    """A connection to one daemon, as a context manager. Every method raises DaemonError."""

    def __init__(self, url: str, token: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        # Proxies of the environment are for the world outside, not for a node's own daemon.
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make a sandbox; its representation."""
        return self._request("POST", "/v1/sandboxes", json=body)

    def sandboxes(self) -> Iterator[dict[str, Any]]:
        """Every sandbox, over all pages."""
        after: str | None = None
        while True:
            page = self._request("GET", "/v1/sandboxes", params={"after": after} if after else None)
            yield from page["sandboxes"]
            after = page.get("next")
            if after is None:
                return

    def execute(self, sandbox: str, body: dict[str, Any]) -> dict[str, Any]:
        """Run a command to its end. Without ``timeout_s`` in the body the daemon decides on one."""
        timeout_s = body.get("timeout_s")
        answer_s = None if timeout_s is None else timeout_s + EXEC_MARGIN_S
        return self._request(
            "POST",
            f"{_sandbox_path(sandbox)}/exec",
            json=body,
            timeout=httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S),
        )

    def delete(self, sandbox: str) -> None:
        """Delete a sandbox. Answers when none of its processes lives."""
        self._request("DELETE", _sandbox_path(sandbox))

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **options)
        except httpx.TimeoutException:
            raise DaemonError("daemon-timeout", f"{self.url} did not answer in time") from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise DaemonError(
                "daemon-unreachable",
                f"{self.url}: {error}",
                hint="start it with sandboxd serve, or name it with --url or SANDBOXD_URL",
            ) from None
        except httpx.HTTPError as error:
            raise DaemonError("daemon-unreachable", f"{self.url}: {error}") from None
        if response.is_success:
            return _object(response) if response.content else {}
        raise _error(response)


def _sandbox_path(sandbox: str) -> str:
    return f"/v1/sandboxes/{quote(sandbox, safe='')}"


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise DaemonError("not-sandboxd", f"{response.url} is not answered by sandboxd")
    return body


def _error(response: httpx.Response) -> DaemonError:
    error = _object(response).get("error")
    if not isinstance(error, dict):
        return DaemonError(f"http-{response.status_code}", response.reason_phrase)
    return DaemonError(
        str(error.get("code", f"http-{response.status_code}")),
        str(error.get("message", "")),
        error.get("hint"),
    )
