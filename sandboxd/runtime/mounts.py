"""What the launcher is asked for a sandbox's mounts of the host, and what it tells of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sandboxd.model import SandboxSpec


def mounts_request(spec: SandboxSpec) -> list[dict[str, Any]]:
    return [
        {"source": one.source, "target": one.target, "read_only": one.read_only}
        for one in spec.mounts or ()
    ]


def with_ids(spec: SandboxSpec, mapped: Iterable[Any]) -> SandboxSpec:
    """``spec`` with the word on whether each mount is idmapped."""
    words = ["mapped" if one is True else "unmapped" for one in mapped]
    mounts = spec.mounts or ()
    if len(words) != len(mounts):
        return spec
    return replace(
        spec, mounts=tuple(replace(one, ids=word) for one, word in zip(mounts, words, strict=True))
    )
