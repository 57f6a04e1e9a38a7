"""``sandboxd config show``: the settings as the daemon would have them, and where each is from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import print_json, print_table, reporting
from sandboxd.config import Config, load_config
from sandboxd.model import KernelCaps, Limits


def build() -> typer.Typer:
    """The group of verbs."""
    group = typer.Typer(no_args_is_help=True, help="The configuration.")
    group.callback()(lambda: None)  # or a group of one verb would be that verb
    group.command("show")(show)
    return group


def show(
    *,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each is from.")] = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Print every setting: the file and the environment over the defaults."""
    with reporting():
        loaded = load_config(config)
    if as_json:
        print_json(with_origins(loaded))
        return
    settings = _settings(loaded)
    columns = ["SETTING", "VALUE", "ORIGIN"] if origin else ["SETTING", "VALUE"]
    rows = [[key, str(value), where][: len(columns)] for key, value, where in settings]
    print_table(columns, rows)


def with_origins(config: Config) -> dict[str, object]:
    """Every setting's value, and where it is from."""
    return {key: {"value": value, "origin": where} for key, value, where in _settings(config)}


def _settings(config: Config) -> Iterator[tuple[str, object, str]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Limits | KernelCaps):
            for name, one in dataclasses.asdict(value).items():
                key = f"{field.name}.{name}"
                yield key, one, config.origins.get(key, "default")
        elif field.name != "origins":
            yield field.name, value, config.origins.get(field.name, "default")
