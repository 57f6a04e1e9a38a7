"""``sandboxd ls``: the sandboxes of a node."""

from __future__ import annotations

import datetime
from typing import Any

from sandboxd.cli import options
from sandboxd.cli.output import print_json, print_table, reporting


def ls(
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """List the sandboxes."""
    with reporting(), options.daemon(url, token_file, config) as daemon:
        sandboxes = list(daemon.sandboxes())
    if as_json:
        print_json({"sandboxes": sandboxes})
        return
    now = datetime.datetime.now(datetime.UTC)
    columns = ["ID", "STATE", "AGE", "RUN", "NAME", "IMAGE"]
    print_table(columns, [_row(sandbox, now) for sandbox in sandboxes])


def _row(sandbox: dict[str, Any], now: datetime.datetime) -> list[str]:
    return [
        str(sandbox.get("id", "")),
        str(sandbox.get("state", "")),
        age(sandbox.get("created_at"), now),
        str(sandbox.get("run") or "-"),
        str(sandbox.get("name") or "-"),
        str(sandbox.get("image", "")),
    ]


def age(created_at: object, now: datetime.datetime) -> str:
    """Time since then in one or two units: ``3m12s``. Takes RFC 3339 text or Unix seconds."""
    try:
        if isinstance(created_at, str):
            created = datetime.datetime.fromisoformat(created_at)
            created = created if created.tzinfo else created.replace(tzinfo=datetime.UTC)
        elif isinstance(created_at, int | float):
            created = datetime.datetime.fromtimestamp(created_at, datetime.UTC)
        else:
            return "-"
    except (ValueError, OverflowError, OSError):
        return "-"
    seconds = max(0, int((now - created).total_seconds()))
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // lower_size}{lower}"
    return f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"
