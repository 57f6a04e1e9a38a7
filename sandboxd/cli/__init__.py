"""The ``sandboxd`` program: argv to configuration, and the administration verbs.

One file a verb, or a few that belong together. ``serve`` runs the daemon, ``doctor`` looks at the
node itself, ``config show`` at its settings; all others speak to a running daemon through
``sandboxd.client``. Tables are for people, ``--json`` for programs; an error is one line on stderr
with its code. Exit status: 0, 1 (ours failed), 2 (wrong usage); ``run`` and ``exec`` pass the
command's through, and use 125 where it did not run, as container tools do. With
``--install-completion`` the shell completes verbs, options, ids and image names.
"""

from __future__ import annotations

import typer

from sandboxd import __version__
from sandboxd.cli import (
    config_show,
    cp,
    diff,
    doctor,
    drain,
    egress,
    events,
    exec_,
    images,
    inspect,
    lifecycle,
    logs,
    ls,
    node,
    port_forward,
    reload,
    rm,
    run,
    runs,
    serve,
    shell,
    slurm,
    snapshots,
    support_bundle,
    sweep,
    top,
)

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
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, callback=_root)
    app.command("serve")(serve.serve)
    app.command("node")(node.node)
    app.command("reload")(reload.reload)
    app.command("doctor")(doctor.doctor)
    app.command("ls")(ls.ls)
    app.command("ps")(logs.ps)
    app.command("logs")(logs.logs)
    app.command("kill")(logs.kill)
    app.command("run", context_settings=_COMMAND_SETTINGS)(run.run)
    app.command("exec", context_settings=_COMMAND_SETTINGS)(exec_.exec_)
    app.command("shell")(shell.shell)
    app.command("port-forward")(port_forward.port_forward)
    app.command("cp")(cp.cp)
    app.command("diff")(diff.diff)
    app.command("inspect")(inspect.inspect)
    app.command("events")(events.events)
    app.command("egress")(egress.egress)
    app.command("top")(top.top)
    app.command("pause")(lifecycle.pause)
    app.command("resume")(lifecycle.resume)
    app.command("renew")(lifecycle.renew)
    app.command("reset")(lifecycle.reset)
    app.command("rm")(rm.rm)
    app.command("prune")(rm.prune)
    app.command("support-bundle")(support_bundle.support_bundle)
    app.command("sweep")(sweep.sweep)
    app.command("drain")(drain.drain)
    app.command("undrain")(drain.undrain)
    app.add_typer(runs.build(), name="runs")
    app.add_typer(images.build(), name="images")
    app.add_typer(snapshots.build(), name="snapshots")
    app.add_typer(slurm.build(), name="slurm")
    app.add_typer(config_show.build(), name="config")
    return app


def main() -> None:
    """Entry point of the console script."""
    build()(prog_name="sandboxd")
