"""What a SIF holds of an image: what Apptainer and a node ask about it, and its file system."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from sif_tools.format import DataType, FsType, PartType
from sif_tools.image_config import INSPECT_METADATA_NAME, OCI_CONFIG_NAME, dump_image_config
from sif_tools.singularity_d import environment_script, run_script
from sif_tools.sources.source import Source
from sif_tools.writer import DataObject, FileContent, partition_object

SOURCE_DIGEST_LABEL: Final = "sif-tools.source.manifest-digest"


def source_labels(source: Source) -> dict[str, str]:
    """The image's labels, and those that say what it was made of."""
    labels = {
        "org.label-schema.schema-version": "1.0",
        "org.label-schema.build-arch": source.architecture,
        "org.label-schema.usage.singularity.deffile.bootstrap": source.kind,
    }
    if source.manifest_digest is not None:
        labels[SOURCE_DIGEST_LABEL] = source.manifest_digest
        labels["org.label-schema.usage.singularity.deffile.from"] = source.manifest_digest
    return source.config.labels | labels


def _definition(source: Source) -> str:
    """How one would say this to Apptainer; by digest, as names and paths are not the image's."""
    origin = source.manifest_digest or "a directory"
    return f"bootstrap: {source.kind}\nfrom: {origin}\n"


def sif_objects(
    source: Source,
    labels: dict[str, str],
    squashfs: FileContent,
    *,
    part_type: PartType = PartType.PRIMARY_SYSTEM,
    more: Sequence[DataObject] = (),
) -> list[DataObject]:
    """All objects of an image's SIF, the file system last; `more` before it."""
    definition = _definition(source)
    attributes = {
        "deffile": definition,
        "environment": {
            "/.singularity.d/env/10-docker2singularity.sh": environment_script(source.config)
        },
        "labels": dict(sorted(labels.items())),
        "runscript": run_script(source.config),
    }
    metadata = {"data": {"attributes": attributes}, "type": "container"}
    return [
        DataObject(DataType.DEFFILE, definition.encode(), name="deffile"),
        DataObject(
            DataType.JSON,
            json.dumps(metadata, separators=(",", ":")).encode(),
            name=INSPECT_METADATA_NAME,
        ),
        DataObject(DataType.JSON, dump_image_config(source.config), name=OCI_CONFIG_NAME),
        *more,
        squashfs_object(squashfs, part_type, source.architecture),
    ]


def squashfs_object(content: FileContent, part_type: PartType, arch: str) -> DataObject:
    """The file system: a whole root, or a layer to be laid over others."""
    name = "rootfs.squashfs" if part_type is PartType.PRIMARY_SYSTEM else "delta.squashfs"
    return partition_object(
        content, fs_type=FsType.SQUASHFS, part_type=part_type, arch=arch, name=name
    )
