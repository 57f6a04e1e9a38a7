"""What an image says about running it: the inner `config` object of the OCI image config.

Read from the SIF's `oci-config.json`; written there by `convert`. Not for the environment that
Apptainer's own scripts make (`/.singularity.d/env/*.sh` inside the image): those are run by
whoever starts a process there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from sif_tools.errors import BadImageConfig
from sif_tools.format import DataType
from sif_tools.reader import FdOrPath, Sif, read_object

OCI_CONFIG_NAME: Final = "oci-config.json"
INSPECT_METADATA_NAME: Final = "inspect-metadata.json"
MAX_CONFIG_BYTES: Final = 4 << 20
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Env as `NAME=value` strings in order, argv lists, and strings that are empty when unset."""

    env: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    labels: dict[str, str] = field(default_factory=dict)


DEFAULT_IMAGE_CONFIG: Final = ImageConfig(env=(f"PATH={DEFAULT_PATH}",))


def image_config(sif: Sif, source: FdOrPath) -> ImageConfig:
    """The config of the image in a SIF; a PATH and nothing else where it carries none.

    Raises BadImageConfig for one that is not an OCI config, BadSif for one of more than 4 MiB.
    """
    descriptor = sif.named(OCI_CONFIG_NAME, DataType.JSON)
    if descriptor is None:
        return DEFAULT_IMAGE_CONFIG
    return parse_image_config(
        load_json(read_object(source, descriptor, limit_bytes=MAX_CONFIG_BYTES))
    )


def image_labels(sif: Sif, source: FdOrPath) -> dict[str, str]:
    """The labels in `inspect-metadata.json`, which hold those of the build too; {} if absent."""
    descriptor = sif.named(INSPECT_METADATA_NAME, DataType.JSON)
    if descriptor is None:
        return {}
    node = load_json(read_object(source, descriptor, limit_bytes=MAX_CONFIG_BYTES))
    for key in ("data", "attributes", "labels"):
        node = node.get(key) if isinstance(node, dict) else None
    return _string_map(node, "labels")


def load_json(data: bytes) -> Any:
    """Parse JSON that nobody vouches for; BadImageConfig whatever is wrong with it."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, huge number
        raise BadImageConfig(f"not JSON: {error}") from error


def parse_image_config(node: Any) -> ImageConfig:
    """Check the types of an OCI `config` object (None and absent fields count as unset)."""
    if node is None:
        return ImageConfig()
    if not isinstance(node, dict):
        raise BadImageConfig("the config is not a JSON object")
    return ImageConfig(
        env=_string_list(node.get("Env"), "Env"),
        cmd=_string_list(node.get("Cmd"), "Cmd"),
        entrypoint=_string_list(node.get("Entrypoint"), "Entrypoint"),
        working_dir=_string(node.get("WorkingDir"), "WorkingDir"),
        user=_string(node.get("User"), "User"),
        labels=_string_map(node.get("Labels"), "Labels"),
    )


def dump_image_config(config: ImageConfig) -> bytes:
    """The JSON of a config as OCI spells it, unset fields left out, always the same bytes."""
    node: dict[str, Any] = {}
    if config.user:
        node["User"] = config.user
    if config.env:
        node["Env"] = list(config.env)
    if config.entrypoint:
        node["Entrypoint"] = list(config.entrypoint)
    if config.cmd:
        node["Cmd"] = list(config.cmd)
    if config.working_dir:
        node["WorkingDir"] = config.working_dir
    if config.labels:
        node["Labels"] = dict(sorted(config.labels.items()))
    return json.dumps(node, separators=(",", ":")).encode()


def _string(node: Any, what: str) -> str:
    if node is None:
        return ""
    # A NUL would end the string early in execve(2) and in every C program after it.
    if not isinstance(node, str) or "\0" in node:
        raise BadImageConfig(f"{what} is not a string without NUL")
    # JSON can spell half a surrogate pair, which is no character and cannot be encoded again.
    return node.encode("utf-8", "replace").decode("utf-8")


def _string_list(node: Any, what: str) -> tuple[str, ...]:
    if node is None:
        return ()
    if not isinstance(node, list):
        raise BadImageConfig(f"{what} is not a list")
    return tuple(_string(one, f"an item of {what}") for one in node)


def _string_map(node: Any, what: str) -> dict[str, str]:
    if node is None:
        return {}
    if not isinstance(node, dict):
        raise BadImageConfig(f"{what} is not an object")
    return {
        _string(key, f"a key of {what}"): _string(one, f"a value of {what}")
        for key, one in node.items()
    }
