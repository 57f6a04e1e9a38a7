"""``sandboxd port-forward ID [LOCAL:]PORT``: a port of this machine that leads to one in a sandbox.

What a connection failed for is told once; the forward goes on, as the program may come later.
"""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from sandboxd.cli import options
from sandboxd.cli.output import complain, reporting, say

Ports = Annotated[str, typer.Argument(metavar="[LOCAL:]PORT", help="LOCAL 0: any that is free.")]
LOOK_S = 0.5


def port_forward(
    sandbox: options.SandboxId,
    ports: Ports,
    *,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST", help="To listen on.")
    ] = "127.0.0.1",
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Listen here, and carry each connection to a port in a sandbox, until Ctrl-C."""
    local, port = _split(ports)
    # Blocked before there is a thread: whichever got the signal, this one shall take it.
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with reporting(), options.daemon(url, token_file, config) as daemon:
        try:
            forward = daemon.connect(sandbox).forward(port, local, host=address)
        except OSError as error:
            raise typer.BadParameter(f"{address}:{local}: {error}") from None
        with forward:
            say(f"{address}:{forward.port} leads to port {port} of {sandbox}")
            told = None
            while signal.sigtimedwait(ends, LOOK_S) is None:
                if forward.last_error is not told and forward.last_error is not None:
                    told = forward.last_error
                    complain(told)


def _split(ports: str) -> tuple[int, int]:
    local, _, port = ports.rpartition(":")
    numbers = (local or port, port)
    for number in numbers:
        if not (number.isascii() and number.isdigit() and int(number) <= 65535):
            raise typer.BadParameter(f"{ports!r} is not [LOCAL:]PORT")
    if int(port) == 0:
        raise typer.BadParameter("port 0 is none")
    return int(numbers[0]), int(port)
