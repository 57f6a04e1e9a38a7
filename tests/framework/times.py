"""Time-outs of the tests, and the factor by which a slow machine lengthens them.

`SANDBOXD_TESTS_TIME_FACTOR`: how many times slower than usual this machine is, for an emulated CPU.
A time-out in a test is there to end what hangs; none is ever an expectation of speed.
"""

from __future__ import annotations

import os

FACTOR = "SANDBOXD_TESTS_TIME_FACTOR"


def factor() -> float:
    """At least 1. Raises ValueError for what is no number."""
    return max(1.0, float(os.environ.get(FACTOR) or 1))


def scaled(seconds: float) -> float:
    """`seconds` of an ordinary machine, on this one."""
    return seconds * factor()
