"""`[HOST[:PORT]/]NAME[:TAG][@DIGEST]`, as Docker reads it.

The first part is a host if it has a dot or a colon or is `localhost`; all else is Docker Hub's,
where names of one part are in `library/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sif_tools.errors import BadSource
from sif_tools.oci.descriptor import is_digest

DEFAULT_HOST: Final = "docker.io"
# The hub's name in references is not the name of its registry.
_API_HOSTS: Final = {
    DEFAULT_HOST: "registry-1.docker.io",
    "index.docker.io": "registry-1.docker.io",
}
_DEFAULT_TAG: Final = "latest"

_HOST: Final = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d+)?"
)
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME: Final = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class Reference:
    """`digest`, where there is one, decides; `tag` is then only a word."""

    host: str
    repository: str
    tag: str
    digest: str | None

    @property
    def manifest(self) -> str:
        """What to ask the registry for."""
        return self.digest or self.tag

    def __str__(self) -> str:
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.host}/{self.repository}{end}"


def parse_reference(text: str) -> Reference:
    """BadSource for what is no reference."""
    rest, at, digest = text.partition("@")
    first, slash, after = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, rest = first, after
    else:
        host = DEFAULT_HOST
    name, colon, tag = rest.partition(":")
    if host == DEFAULT_HOST and "/" not in name:
        name = f"library/{name}"
    if not _HOST.fullmatch(host) or not _NAME.fullmatch(name) or len(name) > 255:
        raise BadSource(
            f"{text!r} is no image name",
            hint="[HOST[:PORT]/]NAME[:TAG|@DIGEST], NAME in lower case",
        )
    if colon and not _TAG.fullmatch(tag):
        raise BadSource(f"{text!r}: {tag!r} is no tag")
    if at and not is_digest(digest):
        raise BadSource(f"{text!r}: {digest!r} is no sha256 or sha512 digest")
    return Reference(host, name, tag or _DEFAULT_TAG, digest or None)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A repository at one place: the registry itself, or a mirror of it."""

    host: str
    repository: str

    @property
    def api_host(self) -> str:
        return _API_HOSTS.get(self.host, self.host)


def endpoints(reference: Reference, mirrors: tuple[str, ...]) -> list[Endpoint]:
    """Where to look, in order: each mirror (`HOST[/PREFIX]`), then the registry itself."""
    found = []
    for mirror in mirrors:
        host, slash, prefix = mirror.partition("/")
        if not _HOST.fullmatch(host) or (slash and not _NAME.fullmatch(prefix)):
            raise BadSource(f"{mirror!r} is no mirror", hint="HOST[:PORT][/PREFIX]")
        found.append(Endpoint(host, f"{prefix}/{reference.repository}".lstrip("/")))
    return [*found, Endpoint(reference.host, reference.repository)]
