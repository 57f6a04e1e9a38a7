"""``sandboxd reload``: have the daemon read its configuration again."""

from __future__ import annotations

import dataclasses

from sandboxd.cli import options
from sandboxd.cli.output import print_json, print_table, reporting, say


def reload(
    *,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Have the daemon read its configuration again, and print what changed. What is wrong in it
    changes nothing, and is told with its line."""
    with reporting(), options.daemon(url, token_file, config) as client:
        done = client.reload()
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    if done.changed:
        rows = [[one.setting, str(one.before), str(one.after)] for one in done.changed]
        print_table(["SETTING", "BEFORE", "NOW"], rows)
    for one in done.needs_restart:
        say(f"{one.setting} needs a restart to be {one.after} (is {one.before})")
