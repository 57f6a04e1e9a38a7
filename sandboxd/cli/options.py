"""Options that several verbs share, and what they mean together."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sandboxd.cli.http import Daemon, DaemonError
from sandboxd.config import Config, load_config

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
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND...", help="What to run. Our own options stand before the first argument."
    ),
]


def daemon(url: str | None, token_file: Path | None, config_file: Path | None) -> Daemon:
    """The daemon that the options and the environment name."""
    config = load_config(config_file)
    return Daemon(url or _url(config), _token(config, token_file))


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
        raise DaemonError("token-unreadable", f"{path}: {reason}", hint) from None


def command_body(
    command: list[str],
    *,
    timeout_s: float | None,
    cwd: str | None,
    user: str | None,
    env: list[str] | None,
    stdin: bool,
) -> dict[str, Any]:
    """The body of an exec request; what is not given is left to the daemon."""
    # Behind the first argument "--" is no longer ours to interpret, so it arrives with the rest.
    if command and command[0] == "--":
        command = command[1:]
    if not command:
        raise typer.BadParameter("no command is given", param_hint="COMMAND")
    body: dict[str, Any] = {"command": command, "encoding": "base64"}
    given = {"timeout_s": timeout_s, "cwd": cwd, "user": user, "env": _environment(env)}
    if stdin:
        given["stdin_base64"] = base64.b64encode(sys.stdin.buffer.read()).decode("ascii")
    return body | {name: value for name, value in given.items() if value is not None}


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
