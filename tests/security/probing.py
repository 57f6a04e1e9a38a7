"""How the tries of `probe/probe.c` and `probe/hog.c` are made, inside a sandbox and on the host.

For the tests beside it. Not for judging: an answer is what the kernel said, an errno's name or
``ok N``; which of them is a wall that held is the tests' to say.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.framework import times
from tests.framework.daemon import Daemon

SOURCES = Path(__file__).parent / "probe"
IDENTITIES = ("root", "agent")
CHANNELS = ("exec",)
"""Of tries made one by one; `test_channels` makes many at once through each of the others."""

REACHED = frozenset(
    {"EINVAL", "EFAULT", "EBADF", "ENODEV", "ENOENT", "EOPNOTSUPP", "ESRCH", "ENOEXEC"}
)
"""What the kernel itself says to arguments that are wrong on purpose."""


def build(name: str, directory: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (package gcc)")
    program = directory / name
    source = SOURCES / f"{name}.c"
    subprocess.run([compiler, "-O1", "-static", "-pthread", "-o", program, source], check=True)
    return program


def put(daemon: Daemon, sandbox: str, path: str, content: bytes, **query: str) -> Any:
    return daemon.http.put(
        f"/v1/sandboxes/{sandbox}/files", params={"path": path, **query}, content=content
    )


def get(daemon: Daemon, sandbox: str, path: str, **query: str) -> Any:
    return daemon.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": path, **query})


def install(daemon: Daemon, sandbox: str, programs: dict[str, Path]) -> None:
    for name, file in programs.items():
        answer = put(daemon, sandbox, f"/probes/{name}", file.read_bytes(), mode="0755")
        assert answer.is_success, answer.text


def alive(daemon: Daemon, sandbox: str) -> None:
    """Assert that the sandbox can still be used."""
    answer = daemon.exec(sandbox, ["/bin/echo", "alive"], timeout_s=times.scaled(20))
    assert (answer["exit_code"], answer["stdout"]) == (0, "alive\n"), answer


@dataclass(frozen=True)
class Inside:
    """Makes tries in one sandbox, as one user, through one channel."""

    daemon: Daemon
    sandbox: str
    identity: str
    channel: str = "exec"

    def run(self, command: str | list[str], **request: Any) -> dict[str, Any]:
        if self.channel != "exec":
            raise ValueError(f"no such channel: {self.channel}")
        return self.daemon.exec(self.sandbox, command, user=self.identity, **request)

    def shell(self, script: str, **request: Any) -> str:
        """What a script prints; that it fails is no matter."""
        return str(self.run(script, **request)["stdout"])

    def ask(self, word: str) -> str:
        """The answer to one try of `probe`."""
        return parse(self.run(["/probes/probe", word])["stdout"], word)

    def hog(self, mode: str, limit: int | None = None, **request: Any) -> tuple[int, str]:
        """How much of something could be taken, and why not more."""
        command = ["/probes/hog", mode, *([] if limit is None else [str(limit)])]
        answer = self.run(command, **request)
        assert answer["exit_code"] == 0, answer
        taken, why = answer["stdout"].split()
        return int(taken), why

    def hold(self, mode: str, limit: int | None = None) -> tuple[int, str]:
        """The same, by a process that keeps what it has and lives on."""
        words = ["/probes/hog", "hold", mode, *([] if limit is None else [str(limit)])]
        said = f"/tmp/hog-{mode}-{self.identity}"
        script = f"{shlex.join(words)} >{said} 2>&1 </dev/null &\n"
        script += f"until [ -s {said} ]; do usleep 2000; done; cat {said}"
        taken, why = self.shell(script).split()
        return int(taken), why


@dataclass(frozen=True)
class Host:
    """Makes the same tries as the host's root."""

    program: Path

    def ask(self, word: str) -> str:
        done = subprocess.run(
            [self.program, word],
            capture_output=True,
            text=True,
            check=True,
            timeout=times.scaled(60),
            cwd="/",
        )
        return parse(done.stdout, word)


def parse(output: str, word: str) -> str:
    for line in output.splitlines():
        if line.startswith(word + " "):
            return line.removeprefix(word + " ")
    raise AssertionError(f"no answer to {word!r} in {output!r}")
