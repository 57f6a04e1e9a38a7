"""The ``sandboxd`` program: argv to configuration, and the administration verbs.

One file a verb. ``serve`` runs the daemon, ``doctor`` looks at the node itself; all others speak
HTTP to a running daemon. Tables are for people, ``--json`` for programs; an error is one line on
stderr with its code. Exit status: 0, 1 (ours failed), 2 (wrong usage); ``run`` and ``exec`` pass
the command's through, and use 125 where it did not run, as container tools do.
"""

from __future__ import annotations

import typer

from sandboxd import __version__
from sandboxd.cli import doctor, exec_, ls, rm, run, serve

# With interspersed arguments off, all behind IMAGE or ID is the command's, options included.
_COMMAND_SETTINGS = {"allow_interspersed_args": False}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sandboxd {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
    ),
) -> None:
    """Fast, isolated, disposable Linux sandboxes over HTTP."""
    del version


def build() -> typer.Typer:
    """The program."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, callback=_root
    )
    app.command("serve")(serve.serve)
    app.command("doctor")(doctor.doctor)
    app.command("ls")(ls.ls)
    app.command("run", context_settings=_COMMAND_SETTINGS)(run.run)
    app.command("exec", context_settings=_COMMAND_SETTINGS)(exec_.exec_)
    app.command("rm")(rm.rm)
    return app


def main() -> None:
    """Entry point of the console script."""
    build()(prog_name="sandboxd")
