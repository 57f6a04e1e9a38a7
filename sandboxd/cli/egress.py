"""``sandboxd egress``: where a sandbox went, and where it was stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import print_json, print_table, reporting
from sandboxd.client.results import EgressEntry


def egress(
    sandbox: options.SandboxId,
    *,
    after: Annotated[int, typer.Option(help="What is new since this number only.")] = 0,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Print the connections and DNS queries of a sandbox, the least recent first."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        found = daemon.connect(sandbox).egress(after)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            one.last_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "allowed" if one.allowed else "denied",
            one.protocol,
            _where(one),
            str(one.count),
        ]
        for one in found.entries
    ]
    print_table(["LAST", "VERDICT", "PROTOCOL", "WHERE", "COUNT"], rows)


def _where(entry: EgressEntry) -> str:
    if entry.kind == "dns":
        return " ".join((entry.name, *entry.addresses))
    return f"{entry.address}:{entry.port}" if entry.port else entry.address
