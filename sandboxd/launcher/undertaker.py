"""The worker that holds the last references to roots, and pays for dropping them.

Freeing a 500 MB tmpfs takes 100 ms or more in whoever closes its last descriptor. With these held
here, the death of a sandbox's PID 1 drops nothing that is large, and a delete answers at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from sandboxd.launcher import usage
from sandboxd.launcher.worker import Handler


def handlers() -> Mapping[str, Handler]:
    held: dict[str, list[int]] = {}

    def hold(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        held.setdefault(request["sandbox"], []).extend(fds)
        fds.clear()  # kept, not to be closed after the answer
        return {}, ()

    def drop(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        for fd in held.pop(request["sandbox"], []):
            os.close(fd)
        return {}, ()

    def statvfs(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        layers = held.get(request["sandbox"])
        if not layers:
            raise FileNotFoundError(errno.ENOENT, "no such sandbox")
        return usage.statvfs(layers[-1]), ()  # the writable layer comes last in `hold`

    return {"hold": hold, "drop": drop, "statvfs": statvfs}
