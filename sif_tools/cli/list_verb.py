"""`sif-tools list FILE`: its data objects, one a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sif_tools.cli.describe import descriptor_node
from sif_tools.cli.output import print_json, safe_text
from sif_tools.reader import read_sif


def register(app: typer.Typer) -> None:
    app.command("list")(list_command)


def list_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """List the data objects of a SIF file."""
    nodes = [descriptor_node(one) for one in read_sif(file).descriptors]
    if as_json:
        print_json(nodes)
        return
    print_objects(nodes)


def print_objects(nodes: list[dict[str, Any]]) -> None:
    """A table that another program can still split at blanks."""
    print(f"{'ID':>3} {'GROUP':>5} {'LINK':>5} {'OFFSET':>12} {'SIZE':>12}  TYPE")
    for node in nodes:
        link = str(node["linked_id"] or "-")
        if node["linked_group"]:
            link = f"g{node['linked_group']}"
        what = node["type"]
        if "fs_type" in node:
            what += f" ({node['part_type']}, {node['fs_type']}, {node['arch']})"
        name = f"  {safe_text(node['name'])}" if node["name"] else ""
        print(
            f"{node['id']:>3} {node['group'] or '-':>5} {link:>5} "
            f"{node['offset_bytes']:>12} {node['size_bytes']:>12}  {what}{name}"
        )
