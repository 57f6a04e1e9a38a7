"""`oci:DIR[:TAG]` and `oci-archive:FILE[:TAG]`: an OCI image layout."""

from __future__ import annotations

from contextlib import ExitStack

from sif_tools.archive import ArchiveFiles
from sif_tools.oci.image import BlobStore, Image, resolve_image
from sif_tools.oci.layer import OciLayer
from sif_tools.oci.layout import DirectoryFiles, LayoutFiles, OciLayout, split_reference
from sif_tools.sources.source import Request, Source


def open_directory(request: Request, resources: ExitStack) -> Source:
    """Implements `Backend`."""
    path, tag = split_reference(request.reference)
    return layout_source(DirectoryFiles(path), tag, request, resources)


def open_archive(request: Request, resources: ExitStack) -> Source:
    """Implements `Backend`."""
    path, tag = split_reference(request.reference)
    files = ArchiveFiles(path, request.options.limits, resources)
    return layout_source(files, tag, request, resources)


def layout_source(
    files: LayoutFiles, tag: str | None, request: Request, resources: ExitStack
) -> Source:
    """The image of one layout, wherever its files are."""
    layout = OciLayout(files)
    image = resolve_image(layout, layout.images(tag), request.architecture, request.variant)
    return image_source(layout, image, request, resources)


def image_source(store: BlobStore, image: Image, request: Request, resources: ExitStack) -> Source:
    """A resolved image with its layers read from `store`.

    Always of the same kind: the same image gives the same SIF, wherever it was found.
    """
    layers = [
        OciLayer(store, layer, number, request.options.limits)
        for number, layer in enumerate(image.layers, start=1)
    ]
    return Source(
        "oci", layers, image.config, image.architecture, image.manifest_digest, resources=resources
    )
