"""What a reload of the configuration is answered with."""

from __future__ import annotations

from pydantic import Field

from sandboxd.api.schemas.base import Answer


class SettingChange(Answer):
    setting: str = Field(examples=["max_sandboxes"])
    before: str | int | float
    after: str | int | float


class ReloadAnswer(Answer):
    changed: list[SettingChange]
    """In force from now on."""
    needs_restart: list[SettingChange]
    """Changed in the configuration; the daemon goes on as before until it is restarted."""
