"""Seccomp profiles of a caller's own: read, compiled, and kept compiled by what is in them.

Such a profile can only take away. It is loaded by each command of its sandbox just before the exec,
on top of the filter that everything in a sandbox has: of two the kernel takes the stricter answer.
File operations and PID 1 are ours and run without it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sandboxd.errors import SeccompInvalid, SeccompNotFound
from sandboxd.linux import seccomp
from sandboxd.model import SeccompChoice

KEPT: Final = 64
"""Programs of at most 32 KiB."""


@dataclass(frozen=True, slots=True)
class CompiledProfile:
    choice: SeccompChoice
    program: bytes


class Profiles:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    async def find(self, asked: str | Mapping[str, Any]) -> CompiledProfile:
        """The profile of that name, or the one that is given. Raises SeccompNotFound for a name
        that the node does not know, SeccompInvalid for what cannot be enforced."""
        name = asked if isinstance(asked, str) else ""
        if isinstance(asked, str):
            text = await asyncio.to_thread(self._read, asked)
        else:
            text = json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()
        if len(text) > seccomp.MAX_PROFILE_BYTES:
            raise SeccompInvalid(
                f"seccomp: {len(text)} bytes, {seccomp.MAX_PROFILE_BYTES} is the most"
            )
        digest = hashlib.sha256(text).hexdigest()
        program = self._kept.get(digest)
        if program is None:
            program = await asyncio.to_thread(_compile, text)
            self._kept[digest] = program
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(digest)
        return CompiledProfile(SeccompChoice(name, f"sha256:{digest}"), program)

    def _read(self, name: str) -> bytes:
        """The name was checked to be one of a file, without a slash."""
        unknown = SeccompNotFound(f"no seccomp profile {name!r} on this node")
        if not self._directory:
            raise unknown
        try:
            path = os.path.join(self._directory, f"{name}.json")
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise unknown from None
        with open(fd, "rb") as file:
            return file.read(seccomp.MAX_PROFILE_BYTES + 1)


def _compile(text: bytes) -> bytes:
    try:
        profile = json.loads(text)
        if not isinstance(profile, dict):
            raise SeccompInvalid("seccomp: an object is expected")
        return seccomp.compile_profile(profile)
    except (seccomp.ProfileError, RecursionError) as error:
        raise SeccompInvalid(f"seccomp: {error}") from error
    except ValueError as error:
        raise SeccompInvalid(f"seccomp: not JSON: {error}") from error
