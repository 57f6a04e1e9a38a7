"""`docker://[HOST/]NAME[:TAG|@DIGEST]`: an image in a registry."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from sif_tools.oci.image import resolve_image
from sif_tools.registry.credentials import find_credentials
from sif_tools.registry.images import RegistryImages
from sif_tools.registry.reference import Endpoint, endpoints, parse_reference
from sif_tools.registry.transport import Transport, make_client
from sif_tools.sources.oci_layout import image_source
from sif_tools.sources.source import Request, Source


def open_registry(request: Request, resources: ExitStack) -> Source:
    """Implements `Backend`. Downloading starts at once, so that it runs while layers are read."""
    options = request.options
    reference = parse_reference(request.reference)
    client = resources.enter_context(make_client())
    stop = threading.Event()

    def transport(endpoint: Endpoint) -> Transport:
        # Looked up for each place by its own name: a mirror never gets the registry's.
        credentials = find_credentials(endpoint.host, endpoint.repository, options.auth_file)
        return Transport(
            client,
            endpoint,
            credentials,
            plain_http=options.plain_http,
            stop=stop,
            patience=options.patience,
        )

    places = endpoints(reference, tuple(options.mirrors.get(reference.host, ())))
    images = RegistryImages([transport(one) for one in places], options.limits, stop)
    resources.callback(images.close)
    manifest = images.manifest(reference.manifest)
    image = resolve_image(images, [manifest], request.architecture, request.variant)
    images.download([layer.blob for layer in image.layers])
    return image_source(images, image, request, resources)
