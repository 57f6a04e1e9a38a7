"""`sif-tools sign FILE`, and what `verify` prints of signatures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sif_tools.cli.output import print_json, safe_text
from sif_tools.signing.sign import sign_sif
from sif_tools.signing.verify import Verification, verify_sif


def register(app: typer.Typer) -> None:
    app.command("sign")(sign_command)


def sign_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a SIF file")],
    key: Annotated[
        str | None, typer.Option(help="gpg key: fingerprint or address [default: gpg's]")
    ] = None,
    group: Annotated[int | None, typer.Option(help="only this group [default: all]")] = None,
) -> None:
    """Sign every group of objects with PGP, as `apptainer sign` does; prints the new ids."""
    for one in sign_sif(file, key, group):
        print(one)


def verify_file(path: Path, keys: list[Path], *, legacy: bool, as_json: bool) -> None:
    """Print what the signatures of a SIF prove; exit status 1 unless they prove all of it.

    Keys in PEM are for DSSE, all others for PGP.
    """
    pem = [key for key in keys if key.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")]
    found = verify_sif(
        path,
        pgp_keys=[key for key in keys if key not in pem],
        dsse_keys=pem,
        legacy=legacy,
    )
    if as_json:
        print_json(asdict(found) | {"is_valid": found.is_valid})
    else:
        _print(found)
    if not found.is_valid:
        raise typer.Exit(1)


def _print(found: Verification) -> None:
    for one in found.signatures:
        state = "valid" if one.is_valid else "NOT VALID"
        over = ", ".join(map(str, one.covers)) or "nothing"
        print(f"signature {one.object_id}: {state}, {one.form}, over objects {over}")
        if one.signer:
            print(f"  by {safe_text(one.signer)}")
        for problem in one.problems:
            print(f"  {safe_text(problem)}")
    for group in found.unsigned_groups:
        print(f"group {group}: not signed as a whole")
    if not found.signatures:
        print("no signature")
    print("verified" if found.is_valid else "NOT VERIFIED")
