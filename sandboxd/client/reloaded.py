"""What became of a reload of a daemon's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sandboxd.client.results import Json


@dataclass(frozen=True, slots=True)
class SettingChange:
    setting: str
    before: str | int | float
    after: str | int | float


@dataclass(frozen=True, slots=True)
class Reloaded:
    changed: list[SettingChange]
    needs_restart: list[SettingChange]
    """Changed in the configuration; the daemon goes on as before until it is restarted."""

    @classmethod
    def from_json(cls, row: Json) -> Self:
        return cls(
            *(
                [SettingChange(one["setting"], one["before"], one["after"]) for one in row[name]]
                for name in ("changed", "needs_restart")
            )
        )
