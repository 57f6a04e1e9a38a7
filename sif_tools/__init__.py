"""sif_tools: task images become SIF files, once; SIF files become something a node can mount.

From the file format up; each layer knows only those above it in this list::

    errors                     the error tree
    format                     the bytes on disk
    reader, writer             parse and check a SIF; write one
    partition, image_config    what a node asks of a SIF: where to mount, how to run

Never imports sandboxd. The names below are the public interface.
"""

from sif_tools.errors import (
    BadImageConfig,
    BadSif,
    BadSquashfs,
    ConvertError,
    NoPrimaryPartition,
    NotASif,
    SifError,
    Unreadable,
    UnsupportedPartition,
    UnsupportedVersion,
    WrongArchitecture,
)
from sif_tools.image_config import ImageConfig, image_config, image_labels
from sif_tools.partition import Partition, mountable_partition, primary_partition
from sif_tools.reader import Descriptor, Header, Sif, read_object, read_sif
from sif_tools.writer import DataObject, FileContent, partition_object, write_sif

__all__ = [
    "BadImageConfig",
    "BadSif",
    "BadSquashfs",
    "ConvertError",
    "DataObject",
    "Descriptor",
    "FileContent",
    "Header",
    "ImageConfig",
    "NoPrimaryPartition",
    "NotASif",
    "Partition",
    "Sif",
    "SifError",
    "Unreadable",
    "UnsupportedPartition",
    "UnsupportedVersion",
    "WrongArchitecture",
    "image_config",
    "image_labels",
    "mountable_partition",
    "partition_object",
    "primary_partition",
    "read_object",
    "read_sif",
    "write_sif",
]
