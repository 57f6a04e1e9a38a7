"""Tiers: the folder a test lies in, the marker it gets for it, and whether it may be skipped.

`SANDBOXD_TESTS_MUST_RUN=kernel,e2e,security` turns a skip in these tiers into a failure: on a
machine that should be able to, a missing feature is a finding and not an excuse.

`SANDBOXD_TESTS_PARTS=e2e:1/4,e2e:2/4` (`scripts/test e2e:1/4 e2e:2/4`) leaves out the files of a
tier that are in none of its parts named, to even out what runs side by side.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

TIERS = {
    "unit": "needs nothing but the package",
    "kernel": "does real kernel operations; needs root or user namespaces",
    "e2e": "talks to a real daemon",
    "security": "tries one way out of a sandbox",
    "perf": "looks at cost without asserting a time",
    "vm": "runs in a virtual machine with another kernel",
    "slurm": "runs under a real Slurm",
    "workloads": "runs real programs in a sandbox, the long set",
    "load": "as much as a node is made for, and more than it can bear, for minutes",
    "faults": "breaks parts of the node at random, for minutes",
}
# Tiers after each of whose tests the host must be as it was.
LEAK_CHECKED = frozenset({"kernel", "e2e", "security", "workloads", "load", "slurm", "faults"})
MUST_RUN = "SANDBOXD_TESTS_MUST_RUN"
PARTS = "SANDBOXD_TESTS_PARTS"
_PART = re.compile(r"([a-z0-9]+):([1-9][0-9]*)/([1-9][0-9]*)")
_TESTS = Path(__file__).resolve().parents[1]


def tier_of(path: Path) -> str | None:
    """The innermost folder below `tests/` that names a tier."""
    if not path.is_relative_to(_TESTS):
        return None
    names = [part for part in path.relative_to(_TESTS).parts if part in TIERS]
    return names[-1] if names else None


def must_run() -> frozenset[str]:
    """Tiers in which a skip is a failure. Raises ValueError for a tier that does not exist."""
    names = frozenset(filter(None, (n.strip() for n in os.environ.get(MUST_RUN, "").split(","))))
    if unknown := names - TIERS.keys():
        raise ValueError(f"{MUST_RUN}: no such tier: {', '.join(sorted(unknown))}")
    return names


def skip_is_failure(path: Path) -> bool:
    """Also for a tier within a must-run tier's folder, such as e2e/workloads below e2e."""
    demanded = must_run()
    return path.is_relative_to(_TESTS) and any(
        part in demanded for part in path.relative_to(_TESTS).parts
    )


def parts() -> dict[str, list[tuple[int, int]]]:
    """Of a tier which parts of how many are to run; of those left out, all. Raises ValueError."""
    chosen: dict[str, list[tuple[int, int]]] = {}
    for text in filter(None, os.environ.get(PARTS, "").split(",")):
        found = _PART.fullmatch(text)
        if found is None or found[1] not in TIERS or int(found[2]) > int(found[3]):
            raise ValueError(f"{PARTS}: {text!r} is no part of a tier, such as e2e:1/4")
        chosen.setdefault(found[1], []).append((int(found[2]), int(found[3])))
    return chosen


def in_parts(path: Path) -> bool:
    """Whether a file of tests is in one of the parts that were chosen of its tier."""
    for tier, chosen in parts().items():
        at = _files(tier).get(path)
        if at is not None and not any(at % of == part - 1 for part, of in chosen):
            return False
    return True


@cache
def _files(tier: str) -> dict[Path, int]:
    """With its place in their order. A tier within another's folder may be run as that one's."""
    found = sorted(_TESTS.rglob("test_*.py"))
    within = [path for path in found if tier in path.relative_to(_TESTS).parts]
    return {path: at for at, path in enumerate(within)}
