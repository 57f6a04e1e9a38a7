"""A parsed SIF as plain data, for `inspect` and `list` to print in either form."""

from __future__ import annotations

from typing import Any

from sif_tools.format import FsType, PartType
from sif_tools.reader import Descriptor, Header


def header_node(header: Header) -> dict[str, Any]:
    """The header's fields; times in Unix seconds."""
    return {
        "launch_script": header.launch_script.decode("utf-8", "backslashreplace"),
        "arch": header.arch,
        "uuid": header.uuid.hex(),
        "created_s": header.created_s,
        "modified_s": header.modified_s,
        "descriptors_total": header.descriptors_total,
        "descriptors_free": header.descriptors_free,
        "data_offset": header.data_offset,
        "data_size_bytes": header.data_size_bytes,
    }


def descriptor_node(one: Descriptor) -> dict[str, Any]:
    """A descriptor's fields; those of a partition only where it is one."""
    node: dict[str, Any] = {
        "id": one.object_id,
        "type": one.type_name,
        "group": one.group_id,
        "linked_id": one.linked_object_id,
        "linked_group": one.linked_group_id,
        "offset_bytes": one.offset_bytes,
        "size_bytes": one.size_bytes,
        "name": one.name,
    }
    if one.is_partition:
        node |= {
            "fs_type": _known(FsType, one.fs_type),
            "part_type": _known(PartType, one.part_type),
            "arch": one.arch,
        }
    return node


def _known(kind: type[FsType] | type[PartType], value: int) -> str:
    try:
        return kind(value).name.lower().replace("_", "-")
    except ValueError:
        return str(value)
