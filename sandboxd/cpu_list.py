"""Lists of CPUs as the kernel reads and writes them: ``0-3,8`` (cpuset(7), "List format")."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

CPU_MAX: Final = 8191
"""The highest number that a kernel can be built for (NR_CPUS_RANGE_END of x86)."""
TEXT_MAX: Final = 1024

_PART: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


@lru_cache(maxsize=64)
def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs in it, in order. Raises ValueError that says what is wrong."""
    if len(text) > TEXT_MAX:
        raise ValueError(f"is longer than {TEXT_MAX} characters")
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"must look like 0-3,8, not {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"has a range that ends before it begins: {part!r}")
        if last > CPU_MAX:
            raise ValueError(f"has a CPU above {CPU_MAX}: {part!r}")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def cpu_list(cpus: Iterable[int]) -> str:
    """As the kernel writes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
