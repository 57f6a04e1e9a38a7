"""`sif-tools inspect FILE`: header, objects, and what the image says about running it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sif_tools.cli.describe import descriptor_node, header_node
from sif_tools.cli.list_verb import print_objects
from sif_tools.cli.output import print_json, safe_text
from sif_tools.errors import SifError
from sif_tools.image_config import image_config, image_labels
from sif_tools.partition import mountable_partition
from sif_tools.reader import Sif, opened, read_sif


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect_command)


def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Show header, data objects, configuration, labels and environment of a SIF file."""
    node = _describe(file)
    if as_json:
        print_json(node)
    else:
        _print(node)


def _describe(file: Path) -> dict[str, Any]:
    with opened(file) as fd:
        sif = read_sif(fd)
        return {
            "header": header_node(sif.header),
            "descriptors": [descriptor_node(one) for one in sif.descriptors],
            "config": asdict(image_config(sif, fd)),
            "labels": image_labels(sif, fd),
            "mountable": _mountable(sif, fd),
        }


def _mountable(sif: Sif, fd: int) -> dict[str, Any]:
    try:
        return {"here": True} | asdict(mountable_partition(sif, fd))
    except SifError as error:
        return {"here": False, "code": error.code, "message": error.message}


def _print(node: dict[str, Any]) -> None:
    header, config, mountable = node["header"], node["config"], node["mountable"]
    print(f"architecture  {header['arch']}")
    print(f"launch        {safe_text(header['launch_script'].strip()) or '-'}")
    print(
        f"objects       {header['descriptors_total'] - header['descriptors_free']} "
        f"of {header['descriptors_total']}"
    )
    if mountable["here"]:
        block = mountable["superblock"]
        print(
            f"mountable     yes: squashfs at {mountable['offset_bytes']}, {block['compression']}, "
            f"{block['block_size_bytes']} byte blocks, {block['inodes']} inodes"
        )
    else:
        print(f"mountable     no: {mountable['code']}: {mountable['message']}")
    for key, words in (("entrypoint", "entrypoint"), ("cmd", "command")):
        if config[key]:
            print(f"{words:<13} {safe_text(shlex.join(config[key]))}")
    for key, words in (("working_dir", "directory"), ("user", "user")):
        if config[key]:
            print(f"{words:<13} {safe_text(config[key])}")
    print("\nobjects")
    print_objects(node["descriptors"])
    _print_section("environment", list(config["env"]))
    labels = config["labels"] | node["labels"]
    _print_section("labels", [f"{key}={value}" for key, value in sorted(labels.items())])


def _print_section(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {safe_text(line)}")
