"""`sif-tools report STORE`: what it holds, and what sharing saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from sif_tools.cli.output import human_bytes, print_json
from sif_tools.errors import StoreUnreadable
from sif_tools.store.layout import open_store
from sif_tools.store.report import StoreReport, store_report

_BASES_SHOWN: Final = 10


def register(app: typer.Typer) -> None:
    app.command("report")(report_command)


def report_command(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Show bytes kept once, bytes saved, and images per base."""
    try:
        report = store_report(open_store(store))
    except OSError as error:
        raise StoreUnreadable(f"{store}: {error.strerror}") from error
    if as_json:
        print_json(report.node())
    else:
        _print(report)


def _print(report: StoreReport) -> None:
    print(f"images        {report.images}, under {report.names} names")
    for role, count in report.sifs.items():
        size = human_bytes(report.bytes_by_role[role])
        print(f"{role:<13} {count} SIFs, {size}")
    print(f"kept once     {human_bytes(report.kept_bytes)}")
    print(f"if not shared {human_bytes(report.apart_bytes)}")
    print(f"saved         {human_bytes(report.saved_bytes)}")
    bases = list(report.images_by_base.items())
    if bases:
        print("images per base")
    for digest, count in bases[:_BASES_SHOWN]:
        print(f"  {digest[:16]}…  {human_bytes(report.base_bytes[digest]):>10}  {count}")
    if len(bases) > _BASES_SHOWN:
        print(f"  and {len(bases) - _BASES_SHOWN} more bases")
