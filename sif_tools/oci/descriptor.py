"""OCI content descriptors, and picking an image for one platform out of an index.

A descriptor names bytes by digest and size; here it is only parsed from JSON that nobody vouches
for. Fetching and verifying the bytes is the blob store's matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from sif_tools.errors import BadLayout, NoMatchingPlatform

INDEX_TYPES: Final = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
MANIFEST_TYPES: Final = frozenset(
    {
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    }
)
REF_NAME: Final = "org.opencontainers.image.ref.name"
# How BuildKit marks what describes an image and is none.
_REFERENCE_TYPE: Final = "vnd.docker.reference.type"

# A digest becomes a file name: nothing but these two forms is ever accepted.
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")

# What a bare "arm" or "arm64" means (containerd's normalisation).
_DEFAULT_VARIANTS: Final = {"arm": "v7", "arm64": "v8"}


@dataclass(frozen=True, slots=True)
class Platform:
    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


@dataclass(frozen=True, slots=True)
class BlobDescriptor:
    """`platform` is None where the index does not say."""

    media_type: str
    digest: str
    size_bytes: int
    platform: Platform | None = None
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_TYPES


def parse_descriptor(node: Any) -> BlobDescriptor:
    """One descriptor; BadLayout for anything else."""
    if not isinstance(node, dict):
        raise BadLayout("a descriptor is not a JSON object")
    digest, size = node.get("digest"), node.get("size")
    if not is_digest(digest):
        raise BadLayout(f"digest {str(digest)[:160]!r} is neither sha256 nor sha512")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadLayout(f"descriptor of {digest}: size {str(size)[:32]!r}")
    annotations = node.get("annotations")
    return BlobDescriptor(
        media_type=_text(node.get("mediaType")),
        digest=digest,
        size_bytes=size,
        platform=_platform(node.get("platform")),
        annotations={key: _text(value) for key, value in annotations.items()}
        if isinstance(annotations, dict)
        else {},
    )


def is_digest(node: Any) -> TypeGuard[str]:
    """Whether this is a digest of a kind that can be verified here."""
    return isinstance(node, str) and _DIGEST.fullmatch(node) is not None


def parse_descriptors(node: Any, what: str) -> list[BlobDescriptor]:
    """A list of descriptors; `what` names it in an error."""
    if not isinstance(node, list):
        raise BadLayout(f"{what} is not a list")
    return [parse_descriptor(one) for one in node]


def choose_platform(
    candidates: Sequence[BlobDescriptor], architecture: str, variant: str = ""
) -> list[BlobDescriptor]:
    """The images (and nested indexes) of an index that may fit, best first.

    Those that name no platform come last: only their config can tell. Attestations are dropped.
    """
    wanted = variant or _DEFAULT_VARIANTS.get(architecture, "")
    ranked = []
    for position, one in enumerate(candidates):
        if _REFERENCE_TYPE in one.annotations:
            continue
        if one.platform is None:
            ranked.append((2, position, one))
        elif (one.platform.os, one.platform.architecture) == ("linux", architecture):
            has = one.platform.variant or _DEFAULT_VARIANTS.get(architecture, "")
            if has == wanted:
                ranked.append((0, position, one))
            elif not variant:
                ranked.append((1, position, one))
    if not ranked:
        offered = sorted({str(one.platform) for one in candidates if one.platform is not None})
        raise NoMatchingPlatform(
            f"no image for linux/{architecture}{'/' + variant if variant else ''}; "
            f"there is {', '.join(offered)[:500] or 'none at all'}",
            hint="choose one with --arch",
        )
    return [one for _, _, one in sorted(ranked, key=lambda item: item[:2])]


def _platform(node: Any) -> Platform | None:
    if not isinstance(node, dict):
        return None
    return Platform(
        _text(node.get("os")), _text(node.get("architecture")), _text(node.get("variant"))
    )


def _text(node: Any) -> str:
    return node if isinstance(node, str) else ""
