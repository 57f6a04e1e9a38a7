"""A sandbox in which real programs are run, as one of its users.

For: the workloads beside it. A command that fails fails the test, with all it said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.framework import times
from tests.framework.daemon import Daemon

LIMITS = {"cpus": 2, "memory_mb": 1024, "disk_mb": 512, "shm_mb": 64, "pids": 512}
HOMES = {"root": "/root", "agent": "/home/agent"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Machine:
    """One sandbox, seen as `user`, who starts in their home."""

    daemon: Daemon
    sandbox: str
    user: str

    @property
    def home(self) -> str:
        return HOMES[self.user]

    def try_to(self, command: str | list[str], **request: Any) -> dict[str, Any]:
        """The result of a command, whatever it is."""
        timeout_s = times.scaled(request.pop("timeout_s", 100))
        env = {"HOME": self.home, "PATH": PATH, "LANG": "C.UTF-8", **request.pop("env", {})}
        request = {"cwd": self.home, "user": self.user, "env": env, **request}
        return self.daemon.exec(self.sandbox, command, timeout_s=timeout_s, **request)

    def run(self, command: str | list[str], **request: Any) -> str:
        """What a command prints that succeeds. A script ends at the first command that fails."""
        if isinstance(command, str):
            command = ["bash", "-euo", "pipefail", "-c", command]
        result = self.try_to(command, **request)
        assert result["exit_code"] == 0, f"{command}\n{result['stdout']}\n{result['stderr']}"
        return str(result["stdout"])

    def put(self, path: str, text: str | bytes, mode: str = "0644") -> None:
        content = text.encode() if isinstance(text, str) else text
        answer = self.daemon.http.put(
            f"/v1/sandboxes/{self.sandbox}/files",
            params={"path": f"{self.home}/{path}", "mode": mode, "user": self.user},
            content=content,
        )
        assert answer.is_success, answer.text

    def as_root(self) -> Machine:
        return replace(self, user="root")


@contextlib.contextmanager
def machine(daemon: Daemon, image: str, user: str = "root", **limits: Any) -> Iterator[Machine]:
    """A fresh sandbox with a user `agent` (1000), made by Debian's own program."""
    with daemon.sandbox(image, limits={**LIMITS, **limits}) as sandbox:
        Machine(daemon, sandbox, "root").run(
            ["useradd", "--create-home", "--uid", "1000", "--shell", "/bin/bash", "agent"], cwd="/"
        )
        yield Machine(daemon, sandbox, user)
