"""Who we are to a registry: containers' `auth.json` and Docker's `config.json`.

    {"auths": {"HOST[/NAMESPACE[/NAME]]": {"auth": base64("USER:PASSWORD"), "identitytoken": …}},
     "credHelpers": {"HOST": "PROGRAM"}, "credsStore": "PROGRAM"}

The longest key that is a prefix of the repository decides (containers-auth.json(5)). Read anew
for each image, never written, and never part of a message.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sif_tools.errors import BadAuthFile

_MAX_BYTES: Final = 4 << 20
_HELPER_TIMEOUT_S: Final = 30
# What credential helpers answer as the user's name when the secret is a token.
_TOKEN_USER: Final = "<token>"
# Under which key Docker keeps the hub's credentials.
_HUB_KEY: Final = "index.docker.io"
_HUB_HOST: Final = "docker.io"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user and a password, or an identity token (OAuth 2 refresh token)."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_credentials(
    host: str,
    repository: str,
    auth_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Credentials | None:
    """The credentials for a repository, from the first file that has any; BadAuthFile if broken.

    A file that was named must be there; those in the usual places need not.
    """
    if auth_file is not None:
        return _from_file(auth_file, host, repository, must_exist=True)
    for path in usual_files(os.environ if environment is None else environment):
        found = _from_file(path, host, repository, must_exist=False)
        if found is not None:
            return found
    return None


def usual_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """In the order in which podman and skopeo look."""
    if named := environment.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
        return
    home = Path(environment.get("HOME") or Path.home())
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers/auth.json")
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "containers/auth.json")
    yield Path(environment.get("DOCKER_CONFIG") or home / ".docker", "config.json")


def _from_file(path: Path, host: str, repository: str, *, must_exist: bool) -> Credentials | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        if not must_exist:
            return None
        raise BadAuthFile(f"{path}: no such file") from None
    except OSError as error:
        raise BadAuthFile(f"{path}: {error.strerror}") from error
    try:
        node = json.loads(data)
    except (ValueError, RecursionError):
        raise BadAuthFile(f"{path} is not JSON") from None
    if not isinstance(node, dict):
        raise BadAuthFile(f"{path} is not a JSON object")
    helpers = node.get("credHelpers")
    helper = helpers.get(host) if isinstance(helpers, dict) else None
    if isinstance(helper, str):
        return _from_helper(helper, host)
    auths = node.get("auths")
    by_key = {_normal(key): one for key, one in (auths if isinstance(auths, dict) else {}).items()}
    for key in _keys(host, repository):
        if isinstance(one := by_key.get(key), dict) and (found := _entry(one, path)) is not None:
            return found
    store = node.get("credsStore")
    return _from_helper(store, host) if isinstance(store, str) and store else None


def _keys(host: str, repository: str) -> Iterator[str]:
    """`host/a/b`, `host/a`, `host`; for the hub its old name too."""
    parts = repository.split("/")
    for count in range(len(parts), -1, -1):
        yield "/".join([host, *parts[:count]])
    if host == _HUB_HOST:
        yield _HUB_KEY


def _normal(key: str) -> str:
    """Docker's keys may be URLs (`https://index.docker.io/v1/`)."""
    found = re.fullmatch(r"https?://([^/]+)(?:/v[12])?/?", key)
    return found[1] if found else key


def _entry(node: dict[str, Any], path: Path) -> Credentials | None:
    token = node.get("identitytoken")
    if isinstance(token, str) and token:
        return Credentials(identity_token=token)
    auth = node.get("auth")
    if not isinstance(auth, str) or not auth:
        return None
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise BadAuthFile(f"{path}: an auth is not base64") from None
    if not colon:
        raise BadAuthFile(f"{path}: an auth is not USER:PASSWORD")
    return Credentials(user, password.rstrip("\0"))


def _from_helper(name: str, host: str) -> Credentials | None:
    """Ask `docker-credential-NAME`; None where it knows nothing of the host."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise BadAuthFile(f"credential helper {name!r} is no program's name")
    program = f"docker-credential-{name}"
    key = "https://index.docker.io/v1/" if host == _HUB_HOST else host
    try:
        ended = subprocess.run(
            [program, "get"],
            input=key.encode(),
            capture_output=True,
            timeout=_HELPER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadAuthFile(f"{program} cannot be asked: {error}") from error
    if ended.returncode != 0:
        return None
    try:
        node = json.loads(ended.stdout)
        user, secret = node["Username"], node["Secret"]
    except (ValueError, KeyError, TypeError):
        raise BadAuthFile(f"{program} did not answer with a user and a secret") from None
    if user == _TOKEN_USER:
        return Credentials(identity_token=secret)
    return Credentials(user, secret)
