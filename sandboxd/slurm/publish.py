"""A node's file on shared storage: there if and only if its daemon serves, and never half there."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from sandboxd.client.slurm import SlurmNode, file_name
from sandboxd.errors import ConfigError

GONE_TWICE: Final = 2
"""So often in a row a file has to be missing before it is believed: a server of shared storage
that comes back may not have everything at once."""


class Publication:
    """The file of this node in ``directory``, which the batch script made."""

    def __init__(self, directory: Path, node: SlurmNode) -> None:
        self._path = directory / file_name(node.node)
        self._node = node
        self._missed = 0

    def write(self) -> None:
        """Replace what an earlier run of the job left. Raises ConfigError."""
        beside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(beside, flags, 0o600)
            try:
                with open(fd, "w", encoding="utf-8") as file:
                    json.dump(self._node.to_json(), file)
                    file.write("\n")
                    file.flush()
                    os.fsync(fd)
                os.rename(beside, self._path)
            except OSError:
                with suppress(OSError):
                    os.unlink(beside)
                raise
        except OSError as error:
            raise ConfigError(
                f"{self._path}: the daemon cannot be published: {error.strerror}",
                hint="the directory must be on storage that all nodes share",
            ) from error

    def is_gone(self) -> bool:
        """Whether somebody took it away, which ends the job for this node, or another run of the
        job has replaced it. Storage that does not answer has taken nothing away."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            missing = content.get("token") != self._node.token
        except FileNotFoundError:
            missing = True
        except (OSError, ValueError, AttributeError):
            return False
        self._missed = self._missed + 1 if missing else 0
        return self._missed >= GONE_TWICE

    def remove(self) -> None:
        """Take our own file away, and no other run's. Idempotent; does without the storage."""
        with suppress(OSError, ValueError, AttributeError):
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content.get("token") == self._node.token:
                self._path.unlink()
