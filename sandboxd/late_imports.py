"""Importing now what would be imported later: whoever gives root up may not be able to read
Python's own files after that (a clone or an interpreter in a closed home)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Final

CODECS: Final = "encodings"
"""Each codec is a module that is looked for when it is first named."""


def import_whole(packages: Iterable[str], leave_out: frozenset[str] = frozenset()) -> None:
    """Import packages that import parts of themselves when those are first used.

    ``leave_out``: the last parts of the names of modules that this process has no use for.
    """
    for name in packages:
        _import_below(importlib.import_module(name), leave_out | {"__main__"})


def _import_below(package: ModuleType, leave_out: frozenset[str]) -> None:
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2] in leave_out:
            continue
        try:
            module = importlib.import_module(found.name)
        except Exception:  # noqa: BLE001 - it needs what is not installed: never used then
            continue
        if found.ispkg:
            _import_below(module, leave_out)
