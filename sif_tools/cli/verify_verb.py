"""`sif-tools verify STORE`: all of a store, byte by byte; `verify FILE`: a SIF's signatures."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sif_tools.cli.output import human_bytes, print_json, safe_text
from sif_tools.cli.sign_verb import verify_file
from sif_tools.store.audit import Audit, audit
from sif_tools.store.layout import open_store


def register(app: typer.Typer) -> None:
    app.command("verify")(verify_command)


def verify_command(
    path: Annotated[Path, typer.Argument(metavar="STORE|FILE", help="a store, or a SIF file")],
    key: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="public key, PGP or PEM [default: gpg's keyring]"
        ),
    ] = None,
    legacy: Annotated[
        bool, typer.Option("--legacy", help="also count signatures of before Singularity 3.6")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """Check every digest, structure and reference of a store, or the signatures of a SIF."""
    if path.is_file():
        verify_file(path, key or [], legacy=legacy, as_json=as_json)
        return
    verify_store(path, as_json=as_json)


def verify_store(path: Path, *, as_json: bool) -> None:
    """Print what is wrong with a store; exit status 1 where something is."""
    found = audit(open_store(path), _progress if sys.stderr.isatty() else None)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(1)


def _progress(objects: int, object_bytes: int) -> None:
    print(f"\r{objects} objects, {human_bytes(object_bytes)}", end="", file=sys.stderr, flush=True)


def _print(found: Audit) -> None:
    for problem in found.problems:
        print(f"{safe_text(problem.path)}: {problem.code}: {safe_text(problem.message)}")
    print(
        f"{found.objects} objects of {human_bytes(found.object_bytes)} and "
        f"{found.records} records, {len(found.problems)} problems"
    )
