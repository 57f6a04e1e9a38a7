"""One GET that succeeds or says why it cannot: redirects, authentication, retries, patience.

The steps of a request, and what breaks if one moves:
1. send, with the Authorization this host has been found to want;
2. a redirect is followed, to another host without Authorization (it may be anybody's storage);
3. 401 from the registry itself is answered once with what it asks for, then it is a refusal;
4. 429 and 503 wait as long as they say, within the patience; other 5xx and broken connections
   are tried again a few times, later each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Final

import httpx

from sif_tools.errors import (
    ConvertError,
    ImageNotFound,
    RegistryBusy,
    RegistryDenied,
    RegistryFailed,
)
from sif_tools.registry.challenge import Challenge, parse_challenges
from sif_tools.registry.credentials import Credentials
from sif_tools.registry.patience import Patience
from sif_tools.registry.reference import Endpoint

_TIMEOUT: Final = httpx.Timeout(30, connect=15)
_MAX_REDIRECTS: Final = 8
_MAX_TRIES: Final = 5
_MAX_TOKEN_BYTES: Final = 1 << 20
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_BUSY: Final = frozenset({429, 503})


def make_client() -> httpx.Client:
    """One for an image; usable from several threads."""
    # Bytes as they are stored: an encoding of the transport would change them under the digest.
    headers = {"Accept-Encoding": "identity", "User-Agent": "sif-tools"}
    return httpx.Client(timeout=_TIMEOUT, headers=headers, follow_redirects=False)


class Transport:
    """Requests to one endpoint; usable from several threads. `stop` ends all waiting."""

    def __init__(
        self,
        client: httpx.Client,
        endpoint: Endpoint,
        credentials: Credentials | None,
        *,
        plain_http: bool,
        stop: threading.Event,
        patience: Patience,
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._plain_http = plain_http
        self._stop = stop
        self._patience = patience
        self._authorization: str | None = None
        self._lock = threading.Lock()
        self._repository = endpoint.repository
        self.host = endpoint.host
        scheme = "http" if plain_http else "https"
        try:
            self._base = httpx.URL(f"{scheme}://{endpoint.api_host}/v2/{endpoint.repository}/")
        except httpx.InvalidURL as error:
            raise RegistryFailed(f"{endpoint.host}: {error}") from error

    @contextmanager
    def get(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """The answer with status 200 or 206, its body still to be read. Raises ConvertError.

        Errors of the body are the caller's: httpx.TransportError.
        """
        deadline = self.deadline()
        authorization, tries = self._authorization, 0
        while True:
            try:
                response = self._follow(self._base.join(path), headers, authorization)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                tries += 1
                if tries >= _MAX_TRIES:
                    hint = None if self._plain_http else "has it no TLS? --plain-http"
                    raise RegistryFailed(f"{self.host}: {describe(error)}", hint=hint) from error
                self.pause(self.delay(tries), deadline, "the connection fails")
                continue
            try:
                status = response.status_code
                if status in (200, 206):
                    yield response
                    return
                if status == 401 and self._is_own(response.url):
                    authorization = self._authorize(response, authorization)
                    continue
                if status not in _BUSY and (status < 500 or tries + 1 >= _MAX_TRIES):
                    raise self._refusal(status, path)
            finally:
                response.close()
            tries += 1
            delay = _retry_after(response.headers.get("Retry-After"))
            if status not in _BUSY or delay is None:
                delay = self.delay(tries)
            self.pause(delay, deadline, f"it answers {status}")

    def deadline(self) -> float:
        """Until when something that starts now may be put off."""
        return time.monotonic() + self._patience.total_s

    def delay(self, tries: int) -> float:
        """Seconds before another try, more each time."""
        return self._patience.first_delay_s * (1 << min(tries, 8))

    def pause(self, seconds: float, deadline: float, why: str) -> None:
        """Wait, unless that would be past the deadline."""
        if time.monotonic() + seconds > deadline:
            raise RegistryBusy(
                f"{self.host}: {why}, and asks to wait {seconds:.0f} s",
                hint="try again later; a mirror (--mirror) or credentials may have more quota",
            )
        if self._stop.wait(seconds):
            raise ConvertError("the download was stopped")

    def _is_own(self, url: httpx.URL) -> bool:
        return _origin(url) == _origin(self._base)

    def _follow(
        self, url: httpx.URL, headers: Mapping[str, str], authorization: str | None
    ) -> httpx.Response:
        for _ in range(_MAX_REDIRECTS):
            own = {"Authorization": authorization} if authorization and self._is_own(url) else {}
            request = self._client.build_request("GET", url, headers={**headers, **own})
            response = self._client.send(request, stream=True)
            if response.status_code not in _REDIRECTS:
                return response
            location = response.headers.get("Location", "")
            response.close()
            url = url.join(location)
            if url.scheme != "https" and not (url.scheme == "http" and self._plain_http):
                raise RegistryFailed(
                    f"{self.host}: redirects to {url.scheme or 'nothing'}, which is not HTTPS",
                    hint="--plain-http allows HTTP",
                )
            if not self._is_own(url):
                # It need not be ours for long: a way back must not get it again either.
                authorization = None
        raise RegistryFailed(f"{self.host}: more than {_MAX_REDIRECTS} redirects")

    def _refusal(self, status: int, path: str) -> ConvertError:
        what = f"{self.host}/{self._repository}"
        if status == 404:
            return ImageNotFound(f"{what}: no {path}")
        if status in (401, 403):
            return RegistryDenied(f"{what}: access denied ({status})", hint=_LOGIN_HINT)
        return RegistryFailed(f"{what}: {path}: status {status}")

    # ── authentication ──────────────────────────────────────────────────────────────────────────

    def _authorize(self, response: httpx.Response, sent: str | None) -> str:
        """What to send after a 401; RegistryDenied where there is nothing better than before."""
        with self._lock:
            if self._authorization is not None and self._authorization != sent:
                return self._authorization  # another thread was faster
            challenges = parse_challenges(response.headers.get_list("WWW-Authenticate"))
            answer = self._answer(challenges)
            # A fresh token may replace one that has run out; the same thing again cannot help.
            if answer is None or answer == sent:
                raise self._refusal(401, "")
            self._authorization = answer
            return answer

    def _answer(self, challenges: list[Challenge]) -> str | None:
        for one in challenges:
            if one.scheme == "bearer" and one.parameters.get("realm"):
                return f"Bearer {self._token(one.parameters)}"
        user = self._credentials
        for one in challenges:
            if one.scheme == "basic" and user is not None and not user.identity_token:
                return user.basic()
        return None

    def _token(self, parameters: dict[str, str]) -> str:
        try:
            realm = httpx.URL(parameters["realm"])
        except httpx.InvalidURL as error:
            raise RegistryFailed(f"{self.host}: its token realm is no URL") from error
        if realm.scheme != "https" and not (realm.scheme == "http" and self._plain_http):
            raise RegistryFailed(f"{self.host}: its token realm is not HTTPS")
        scope = parameters.get("scope") or f"repository:{self._repository}:pull"
        query = {"scope": scope}
        if service := parameters.get("service"):
            query["service"] = service
        node = self._ask_realm(realm, query)
        token = node.get("token") or node.get("access_token")
        # It goes into a header as it is.
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise RegistryFailed(f"{realm.host}: gave no token")
        return token

    def _ask_realm(self, realm: httpx.URL, query: dict[str, str]) -> dict[str, object]:
        user = self._credentials
        for number in range(1, _MAX_TRIES + 1):
            try:
                if user is not None and user.identity_token:
                    form = query | {
                        "grant_type": "refresh_token",
                        "refresh_token": user.identity_token,
                        "client_id": "sif-tools",
                    }
                    response = self._client.post(realm, data=form)
                else:
                    headers = {} if user is None else {"Authorization": user.basic()}
                    merged = realm.copy_merge_params(query)
                    response = self._client.get(merged, headers=headers)
            except httpx.HTTPError as error:
                problem = describe(error)
            else:
                if response.status_code in (400, 401, 403):
                    raise RegistryDenied(
                        f"{realm.host}: gives us no token ({response.status_code})",
                        hint=_LOGIN_HINT,
                    )
                if response.status_code == 200 and len(response.content) <= _MAX_TOKEN_BYTES:
                    return _object(response)
                problem = f"status {response.status_code}"
            if number < _MAX_TRIES and self._stop.wait(self.delay(number)):
                break
        raise RegistryFailed(f"{realm.host}: no token: {problem}")


_LOGIN_HINT: Final = "log in (skopeo login, podman login, docker login) or name an --auth-file"


def describe(error: Exception) -> str:
    """An error of httpx in words; some of them have none."""
    return str(error) or type(error).__name__


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    port = url.port or {"https": 443, "http": 80}.get(url.scheme)
    return url.scheme, url.host, port


def _object(response: httpx.Response) -> dict[str, object]:
    try:
        node = response.json()
    except (ValueError, RecursionError):
        return {}
    return node if isinstance(node, dict) else {}


def _retry_after(text: str | None) -> float | None:
    """Seconds from now; the header is a number or a date (RFC 9110 section 10.2.3)."""
    if text is None:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
