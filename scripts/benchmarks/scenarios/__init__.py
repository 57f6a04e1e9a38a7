"""One file a subject. A scenario takes a `Rig` and measures; nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.rig import Rig
from benchmarks.scenarios.crowd import crowd
from benchmarks.scenarios.episode import episode
from benchmarks.scenarios.exec import exec_live
from benchmarks.scenarios.files import copy, files, forks
from benchmarks.scenarios.image import image
from benchmarks.scenarios.lifecycle import lifecycle, slotless
from benchmarks.scenarios.python_start import python_start

SCENARIOS: dict[str, Callable[[Rig], None]] = {
    "lifecycle": lifecycle,
    "slotless": slotless,
    "exec": exec_live,
    "files": files,
    "copy": copy,
    "forks": forks,
    "episode": episode,
    "python": python_start,
    "image": image,
    "crowd": crowd,
}
"""In the order in which they are run: what may disturb others comes last."""
