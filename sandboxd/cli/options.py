"""Options that several verbs share, and what they mean together."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sandboxd.cli.completion import sandbox_ids
from sandboxd.client.calls import ExecOptions
from sandboxd.client.sync import Client
from sandboxd.config import Config, load_config
from sandboxd.errors import RequestError

RETRY_S = 0.0

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", envvar="SANDBOXD_CONFIG", help="TOML configuration."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="SANDBOXD_URL",
        help="The daemon's address. By default the configuration's listen.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The bearer token's file. By default SANDBOXD_TOKEN, else SANDBOXD_TOKEN_FILE, "
        "else the configuration's. There is no --token: every user can read command lines.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.001, help="For the command to end."),
]
Cwd = Annotated[str | None, typer.Option("--cwd", help="Working directory in the sandbox.")]
User = Annotated[str | None, typer.Option("--user", help="Name or uid in the sandbox.")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Environment; may be repeated."),
]
Stdin = Annotated[
    bool,
    typer.Option("--stdin", "-i", help="Read our stdin to its end and give it to the command."),
]
SandboxId = Annotated[
    str, typer.Argument(metavar="ID", help="Of the sandbox.", autocompletion=sandbox_ids)
]
RunName = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Of this run only.")]
Label = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME[=VALUE]", help="With this label only; may be repeated."),
]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND...", help="What to run. Our own options stand before the first argument."
    ),
]


class TokenUnreadable(RequestError):
    """There is no token that this user can read."""

    code = "token-unreadable"


def daemon(url: str | None, token_file: Path | None, config_file: Path | None) -> Client:
    """The daemon that the options and the environment name. One that is not there is told at once:
    whoever types does not want to wait for it."""
    config = load_config(config_file)
    return Client(url or _url(config), _token(config, token_file), retry_s=RETRY_S)


def _url(config: Config) -> str:
    host, port = config.address
    # "All addresses" is where to listen, not where to go.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _token(config: Config, token_file: Path | None) -> str:
    if token_file is None and (token := os.environ.get("SANDBOXD_TOKEN")):
        return token
    # config.token_file is SANDBOXD_TOKEN_FILE where that is set.
    path = token_file or Path(config.token_file)
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        hint = "run as root or as the daemon's account, or set SANDBOXD_TOKEN"
        if isinstance(error, FileNotFoundError):
            hint = "the daemon makes it when it first starts; or set SANDBOXD_TOKEN"
        raise TokenUnreadable(f"{path}: {reason}", hint=hint) from None


def command_words(command: list[str]) -> list[str]:
    """The command, without the ``--`` before it."""
    # Behind the first argument "--" is no longer ours to interpret, so it arrives with the rest.
    if command and command[0] == "--":
        command = command[1:]
    if not command:
        raise typer.BadParameter("no command is given", param_hint="COMMAND")
    return command


def exec_options(
    *,
    timeout_s: float | None,
    cwd: str | None,
    user: str | None,
    env: list[str] | None,
    stdin: bool,
    exclusive: str | None = None,
) -> ExecOptions:
    """How to run it; what is not given is left to the daemon."""
    given: dict[str, Any] = {
        "timeout_s": timeout_s,
        "cwd": cwd,
        "user": user,
        "env": _environment(env),
        "stdin": sys.stdin.buffer.read() if stdin else None,
        "exclusive": exclusive,
    }
    options: Any = {name: value for name, value in given.items() if value is not None}
    chosen: ExecOptions = options
    return chosen


def labels(given: list[str] | None) -> dict[str, str | None]:
    """``NAME=VALUE``, or ``NAME`` for any value."""
    pairs = (one.partition("=") for one in given or ())
    return {name: value if equals else None for name, equals, value in pairs}


def _environment(assignments: list[str] | None) -> dict[str, str] | None:
    if not assignments:
        return None
    environment = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{assignment!r} is not NAME=VALUE", param_hint="--env")
        environment[name] = value
    return environment
