"""A changed configuration, taken over while the daemon serves.

What is listed here is looked at when it is used; all else is built into something (a socket, a
mount, a process) and needs a restart, which is said. A configuration that is wrong changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.config import Config
from sandboxd.model import KernelCaps, Limits
from sandboxd.runtime.manager import Runtime

log = logging.getLogger(__name__)

RELOADABLE: Final = frozenset(
    {
        "default_limits",
        "default_output_bytes",
        "default_timeout_s",
        "cpu_overcommit",
        "default_ttl_s",
        "image_idle_s",
        "log_level",
        "max_file_bytes",
        "max_limits",
        "max_output_bytes",
        "max_processes",
        "max_sandboxes",
        "max_timeout_s",
        "max_ttl_s",
        "memory_overcommit",
        "memory_reserve_mb",
        "pids_overcommit",
        "pressure_cpu_percent",
        "pressure_io_percent",
        "pressure_memory_percent",
        "process_spool_bytes",
        "run_ended_s",
        "run_max_creates_per_s",
        "run_max_sandboxes",
        "stop_grace_s",
        "stream_detached_s",
        "stream_heartbeat_s",
        "stream_replay_bytes",
        "stream_resume_s",
        "stream_total_bytes",
        "stream_unsent_bytes",
    }
)
"""Settings of ``Config`` that a running daemon takes over. Sandboxes that are there keep what they
were made with."""


@dataclass(frozen=True, slots=True)
class Change:
    setting: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Reloaded:
    changed: list[Change]
    needs_restart: list[Change]
    """Changed in the file, and not here."""


class Reloader:
    """Reads the configuration as it was read at the start: ``load`` raises ConfigError."""

    def __init__(self, runtime: Runtime, load: Callable[[], Config]) -> None:
        self._runtime = runtime
        self._load = load

    def read(self) -> Config:
        """The configuration as it is now; may block. Raises ConfigError."""
        return self._load()

    def take_over(self, new: Config) -> Reloaded:
        """Go by it, as far as a running daemon can."""
        old = self._runtime.config
        changed: list[Change] = []
        needs_restart: list[Change] = []
        for name, change in _changes(old, new):
            (changed if name in RELOADABLE else needs_restart).append(change)
        taken = {name: getattr(new, name) for name in RELOADABLE}
        self._runtime.reconfigure(dataclasses.replace(old, **taken, origins=new.origins))
        logging.getLogger().setLevel(new.log_level.upper())
        for change in changed:
            log.info("%s is %s now, was %s", change.setting, change.after, change.before)
        for change in needs_restart:
            log.warning("%s needs a restart to be %s", change.setting, change.after)
        return Reloaded(changed, needs_restart)


def _changes(old: Config, new: Config) -> list[tuple[str, Change]]:
    """Each with the field it belongs to; those of a table one by one."""
    found = []
    for field in dataclasses.fields(Config):
        if not field.compare:
            continue
        before, after = getattr(old, field.name), getattr(new, field.name)
        if isinstance(before, Limits | KernelCaps):
            for key, value in dataclasses.asdict(before).items():
                now = getattr(after, key)
                if value != now:
                    found.append((field.name, Change(f"{field.name}.{key}", value, now)))
        elif before != after:
            found.append((field.name, Change(field.name, before, after)))
    return found
