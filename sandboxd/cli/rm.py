"""``sandboxd rm`` and ``prune``: delete sandboxes, by id, by run or label, or what nobody needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.completion import sandbox_ids
from sandboxd.cli.output import EXIT_FAILED, complain, failures_json, print_json, reporting, say
from sandboxd.errors import SandboxdError
from sandboxd.model import SandboxState


@dataclass
class _Outcome:
    """What became of each. ``evicted`` are images."""

    deleted: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    failed: dict[str, SandboxdError] = field(default_factory=dict)

    def each(self, names: Iterable[str], do: Callable[[str], None], good: list[str]) -> None:
        for name in names:
            try:
                do(name)
                good.append(name)
            except SandboxdError as error:
                self.failed[name] = error

    def tell(self, *, as_json: bool) -> None:
        """Print it. Raises Exit where not all is done."""
        if as_json:
            told = {"deleted": self.deleted, "evicted": self.evicted, "pending": self.pending}
            print_json({**told, "failed": failures_json(self.failed)})
        else:
            for name in (*self.deleted, *self.evicted):
                typer.echo(name)
            for name in self.pending:
                say(f"{name}: not done yet; it goes on by itself")
            for error in self.failed.values():
                complain(error)
        if self.pending or self.failed:
            raise typer.Exit(EXIT_FAILED)


def rm(
    sandboxes: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Of the sandboxes.", autocompletion=sandbox_ids),
    ] = None,
    *,
    all_: Annotated[bool, typer.Option("--all", help="Delete every sandbox of the node.")] = False,
    run: options.RunName = None,
    label: options.Label = None,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Delete sandboxes, and print the IDs of those that are gone."""
    many = run is not None or bool(label)
    if bool(sandboxes) + all_ + many != 1:
        raise typer.BadParameter("give IDs, or --run and --label, or --all")
    outcome = _Outcome()
    with reporting(), options.daemon(url, token_file, config) as daemon:
        if many:
            told = daemon.delete_many(run=run, labels=options.labels(label))
            outcome = _Outcome(list(told.deleted), [], list(told.pending), told.failed)
        else:
            # The whole list first: pages would shift under the deletions.
            ids = [info.id for info in list(daemon.list())] if all_ else sandboxes or []
            outcome.each(ids, daemon.delete, outcome.deleted)
    outcome.tell(as_json=as_json)


def prune(
    *,
    as_json: options.Json = False,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Delete the sandboxes that have failed, and unmount the images that have none."""
    outcome = _Outcome()
    with reporting(), options.daemon(url, token_file, config) as daemon:
        failed = [info.id for info in daemon.list(state=SandboxState.FAILED)]
        outcome.each(failed, daemon.delete, outcome.deleted)
        unused = [one.name for one in daemon.images() if one.mounted and not one.users]
        outcome.each(unused, daemon.evict_image, outcome.evicted)
    outcome.tell(as_json=as_json)
