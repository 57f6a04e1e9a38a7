"""The program as a person or a script runs it, against a test's daemon.

For: tests of the command line. What it printed is read as JSON where it looks like that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.framework.daemon import Daemon

Done = subprocess.CompletedProcess[bytes]
PROGRAM = (sys.executable, "-m", "sandboxd")


def environment(daemon: Daemon) -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if "SANDBOXD_" not in key}
    return ours | {"SANDBOXD_URL": daemon.base_url, "SANDBOXD_TOKEN": daemon.token}


class CommandLine:
    def __init__(self, daemon: Daemon) -> None:
        self.environment = environment(daemon)

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Done:
        """Run it to its end."""
        return subprocess.run(
            [*PROGRAM, *arguments],
            input=stdin,
            capture_output=True,
            env=self.environment,
            check=False,
            timeout=60,
        )

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start it, in a process group of its own, as a shell does."""
        return subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            process_group=0,
        )

    def complete(self, *words: str) -> list[str]:
        """What a shell is offered for the last of these words."""
        asked = {
            "_SANDBOXD_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["sandboxd", *words]),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            PROGRAM, env=self.environment | asked, capture_output=True, check=False, timeout=60
        )
        return done.stdout.decode().split()


def good(done: Done) -> Any:
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout) if done.stdout.startswith((b"{", b"[")) else done.stdout.decode()


def rows(done: Done) -> Sequence[list[str]]:
    """A table's lines in words, its head first."""
    return [line.split() for line in good(done).splitlines()]
