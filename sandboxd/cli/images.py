"""``sandboxd images``: what the node's store has, making some ready, letting go of one."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import image_names
from sandboxd.cli.output import (
    EXIT_FAILED,
    age,
    complain,
    mebibytes,
    print_json,
    print_table,
    reporting,
)

Names = Annotated[
    list[str], typer.Argument(metavar="IMAGE...", help="Names.", autocompletion=image_names)
]


def build() -> typer.Typer:
    """The group of verbs."""
    group = typer.Typer(no_args_is_help=True, help="The images of a node.")
    group.command("ls")(ls)
    group.command("prefetch")(prefetch)
    group.command("evict")(evict)
    return group


def ls(
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """List the images of the node's store."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = daemon.images()
    if as_json:
        print_json({"images": found})
        return
    now = datetime.datetime.now(datetime.UTC)
    rows = [
        [
            image.name,
            mebibytes(image.size_bytes),
            "-" if image.modified_at is None else age(image.modified_at, now),
            "yes" if image.mounted else "no",
            "yes" if image.local else "no",
            str(image.users),
        ]
        for image in found
    ]
    print_table(["IMAGE", "SIZE", "AGE", "MOUNTED", "LOCAL", "SANDBOXES"], rows)


def prefetch(
    images: Names,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Check and mount images, so that their first sandboxes need not wait for that."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = daemon.prefetch(images)
    if as_json:
        print_json({"images": found})
    for image in found:
        if image.failure is not None:
            complain(image.failure)
        elif not as_json:
            typer.echo(image.name)
    if any(image.failure for image in found):
        raise typer.Exit(EXIT_FAILED)


def evict(
    images: Names,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Unmount images that have no sandboxes. Their files stay."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        for image in images:
            daemon.evict_image(image)
            if not as_json:
                typer.echo(image)
    if as_json:
        print_json({"evicted": images})
