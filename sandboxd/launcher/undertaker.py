"""The worker that holds the last references to roots, and pays for dropping them.

Freeing a 500 MB tmpfs takes 100 ms or more in whoever closes its last descriptor. With these held
here, the death of a sandbox's PID 1 drops nothing that is large, and a delete answers at once. Its
mount namespace is held for the same reason: a process that is the last one of it takes down all its
mounts, with an RCU grace period, before anybody is told of its death.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sandboxd.launcher.worker import Handler


def handlers() -> Mapping[str, Handler]:
    held: dict[str, list[int]] = {}

    def hold(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        held.setdefault(request["key"], []).extend(fds)
        fds.clear()  # kept, not to be closed after the answer
        return {}, ()

    def drop(request: dict[str, Any], fds: list[int]) -> tuple[Any, tuple[int, ...]]:
        del fds
        for fd in held.pop(request["key"], []):
            os.close(fd)
        return {}, ()

    return {"hold": hold, "drop": drop}
