"""From a reference to a `Source`: the table of schemes."""

from __future__ import annotations

import platform
from contextlib import ExitStack
from importlib import import_module
from typing import Final, cast

from sif_tools.errors import BadSource
from sif_tools.format import ARCH_CODES, UNKNOWN_ARCH, machine_arch
from sif_tools.sources.source import Backend, Request, Source, SourceOptions

FORMS: Final = (
    "docker://[HOST/]NAME[:TAG|@DIGEST]",
    "oci:DIR[:TAG]",
    "oci-archive:FILE[:TAG]",
    "docker-archive:FILE[:NAME:TAG]",
    "rootfs:DIR",
    "sif:FILE",
)

# By name, so that a node that only mounts SIFs never loads an HTTP client.
_BACKENDS: Final = {
    "docker": ("registry", "open_registry"),
    "oci": ("oci_layout", "open_directory"),
    "oci-archive": ("oci_layout", "open_archive"),
    "docker-archive": ("docker_archive", "open_docker_archive"),
    "rootfs": ("rootfs_directory", "open_rootfs"),
    "sif": ("sif_file", "open_sif"),
}


def open_source(
    reference: str, architecture: str | None = None, options: SourceOptions | None = None
) -> Source:
    """Resolve a reference (see `FORMS`); BadSource for one that cannot be understood."""
    scheme, colon, rest = reference.partition(":")
    if scheme == "docker":
        rest = rest[2:] if rest.startswith("//") else ""
    wanted, _, variant = (architecture or machine_arch(platform.machine())).partition("/")
    if wanted not in ARCH_CODES or wanted == UNKNOWN_ARCH:
        known = ", ".join(name for name in ARCH_CODES if name != UNKNOWN_ARCH)
        raise BadSource(f"architecture {wanted!r} is not known", hint=f"one of: {known}")
    if not colon or not rest or scheme not in _BACKENDS:
        raise BadSource(
            f"cannot read a source like {reference!r}", hint=f"give one of {', '.join(FORMS)}"
        )
    module, function = _BACKENDS[scheme]
    backend = cast(Backend, getattr(import_module(f"sif_tools.sources.{module}"), function))
    request = Request(rest, wanted, variant, options or SourceOptions())
    resources = ExitStack()
    with ExitStack() as undo:
        undo.push(resources)
        source = backend(request, resources)
        undo.pop_all()  # the source has them now
    return source
