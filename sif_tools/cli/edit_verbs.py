"""`sif-tools add`, `del` and `setprim`: change what is in a SIF file."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sif_tools.edit import add_object, delete_object, set_primary
from sif_tools.errors import BadObject
from sif_tools.format import ARCH_CODES, DataType, FsType, PartType
from sif_tools.reader import opened
from sif_tools.writer import DataObject, FileContent, partition_object


def _words(kind: type[DataType] | type[FsType] | type[PartType]) -> dict[str, str]:
    return {one.name: one.name.lower().replace("_", "-") for one in kind}


TypeName = StrEnum("TypeName", _words(DataType))  # type: ignore[misc]
FsName = StrEnum("FsName", _words(FsType))  # type: ignore[misc]
PartName = StrEnum("PartName", _words(PartType))  # type: ignore[misc]


def register(app: typer.Typer) -> None:
    app.command("add")(add_command)
    app.command("del")(delete_command)
    app.command("setprim")(set_primary_command)


def add_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    content: Annotated[Path, typer.Argument(metavar="CONTENT", help="the object's bytes")],
    *,
    kind: Annotated[TypeName, typer.Option("--type", help="what the object is")],
    name: Annotated[str, typer.Option(help="the object's name [default: CONTENT's]")] = "",
    group: Annotated[int, typer.Option(min=0, help="group it belongs to, 0 for none")] = 1,
    link: Annotated[int, typer.Option(min=0, help="id of the object it is about")] = 0,
    link_group: Annotated[int, typer.Option(min=0, help="group it is about")] = 0,
    fs_type: Annotated[FsName | None, typer.Option(help="of a partition")] = None,
    part_type: Annotated[PartName | None, typer.Option(help="of a partition")] = None,
    arch: Annotated[str, typer.Option(help="of a partition")] = "unknown",
) -> None:
    """Add a data object to a SIF file; prints its id."""
    with opened(content) as fd:
        source = FileContent(fd, 0, os.fstat(fd).st_size)
        title = name or content.name
        if kind is not TypeName["PARTITION"]:
            item = DataObject(
                DataType[kind.name],
                source,
                name=title,
                group_id=group,
                linked_object_id=link,
                linked_group_id=link_group,
            )
        elif fs_type is None or part_type is None:
            raise BadObject("a partition needs --fs-type and --part-type")
        elif arch not in ARCH_CODES:
            raise BadObject(f"architecture {arch!r} has no code in a SIF")
        else:
            item = partition_object(
                source,
                fs_type=FsType[fs_type.name],
                part_type=PartType[part_type.name],
                arch=arch,
                name=title,
                group_id=group,
            )
        print(add_object(file, item))


def delete_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    object_id: Annotated[int, typer.Argument(metavar="ID", help="as `list` shows it")],
) -> None:
    """Delete a data object from a SIF file, its bytes included."""
    delete_object(file, object_id)


def set_primary_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    object_id: Annotated[int, typer.Argument(metavar="ID", help="a system partition")],
) -> None:
    """Make a system partition the one that is mounted."""
    set_primary(file, object_id)
