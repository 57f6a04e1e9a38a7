"""The one shape that every kind of source has, and what a caller can ask of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from sif_tools.image_config import ImageConfig
from sif_tools.limits import DEFAULT_LIMITS, Limits
from sif_tools.merge.merger import Layer
from sif_tools.registry.patience import DEFAULT_PATIENCE, Patience


class SizedLayer(Layer, Protocol):
    """A layer that knows how many bytes a pass over it reads (after the first, at least)."""

    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Source:
    """An image, resolved: what is needed to convert it. Close it, or use it in a `with`.

    `manifest_digest` is None where there is no manifest. `has_config`: the config is the image's
    own, not only what we assume for it.
    """

    kind: str
    layers: Sequence[SizedLayer]
    config: ImageConfig
    architecture: str
    manifest_digest: str | None
    has_config: bool = True
    resources: ExitStack = field(default_factory=ExitStack, compare=False, repr=False)

    def close(self) -> None:
        """Free what the source holds open; its layers cannot be read any more."""
        self.resources.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What is about where an image comes from, and not about the image.

    `plain_http`: registries are spoken to without TLS. `mirrors`: registry host to the places
    (`HOST[/PREFIX]`) that are tried before it. `auth_file` None looks in the usual places.
    """

    plain_http: bool = False
    auth_file: Path | None = None
    mirrors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    limits: Limits = DEFAULT_LIMITS
    patience: Patience = DEFAULT_PATIENCE


@dataclass(frozen=True, slots=True)
class Request:
    """A reference without its scheme, and the platform: Go's name, variant perhaps empty."""

    reference: str
    architecture: str
    variant: str
    options: SourceOptions


class Backend(Protocol):
    """One kind of source: resolves a reference; what it opens goes onto `resources`."""

    def __call__(self, request: Request, resources: ExitStack) -> Source: ...
