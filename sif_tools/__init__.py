"""sif_tools: task images become SIF files, once; SIF files become something a node can mount.

From the file format up; each layer knows only those above it in this list::

    errors                     the error tree
    format                     the bytes on disk
    reader, writer             parse and check a SIF; write one
    table, edit, signing       change one in place, sign it, verify it
    superblock, partition,
    image_config               what a node asks of a SIF: where to mount, how to run
    compression, prefetch,
    tarstream                  bytes of a layer to entries, and entries to a tar stream
    merge                      layers to one tree, the tree to one stream
    oci, registry, archive,
    rootfs, singularity_d      where layers come from
    sources                    a reference to an image: one shape, a backend for each scheme
    squashfs                   a tar stream to a squashfs
    image_objects,
    progress, convert          a source to a SIF
    store                      SIFs that are made once and share what they have in common
    cli                        the `sif-tools` command, one verb a file

Never imports sandboxd. The names below are the public interface.
"""

from sif_tools.convert import ConvertOptions, ConvertResult, convert
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
from sif_tools.progress import ProgressCallback, Stage
from sif_tools.reader import Descriptor, Header, Sif, read_object, read_sif
from sif_tools.squashfs import Compression, SquashfsOptions
from sif_tools.superblock import Superblock
from sif_tools.writer import DataObject, FileContent, partition_object, write_sif

__all__ = [
    "BadImageConfig",
    "BadSif",
    "BadSquashfs",
    "Compression",
    "ConvertError",
    "ConvertOptions",
    "ConvertResult",
    "DataObject",
    "Descriptor",
    "FileContent",
    "Header",
    "ImageConfig",
    "NoPrimaryPartition",
    "NotASif",
    "Partition",
    "ProgressCallback",
    "Sif",
    "SifError",
    "SquashfsOptions",
    "Stage",
    "Superblock",
    "Unreadable",
    "UnsupportedPartition",
    "UnsupportedVersion",
    "WrongArchitecture",
    "convert",
    "image_config",
    "image_labels",
    "mountable_partition",
    "partition_object",
    "primary_partition",
    "read_object",
    "read_sif",
    "write_sif",
]
