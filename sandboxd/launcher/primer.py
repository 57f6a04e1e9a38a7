"""Gives ready slots a root and limits ahead of need: what was asked for is asked for again.

A task's rollouts come one after another from the same image with the same limits. A slot that has
its root already makes a create two writes and an answer; the mount, the root swap and the cgroup's
limits, two thirds of the time, are then off the path. A wrong guess costs one overlay and one tmpfs
that nobody wrote to. So: few are primed, and only for what was asked for twice in a short time; a
burst of creates, which is over before anything could be primed, costs nothing more.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict, deque
from typing import Final

from sandboxd.errors import ImageUnavailable, SandboxdError
from sandboxd.launcher.images import Images
from sandboxd.launcher.layers import Stack
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.roots import Roots
from sandboxd.launcher.slots import Outfit, Slot, Slots

PAUSE_S: Final = 0.005
"""After a create: who made it wants the CPU for a first command."""
WINDOW_S: Final = 2.0
"""What was asked for longer ago says nothing of what comes."""
FORGOTTEN_S: Final = 10.0
EACH_MAX: Final = 4
OUTFITS_MAX: Final = 64


class Primer:
    def __init__(
        self, loop: Loop, *, slots: Slots, roots: Roots, images: Images, primed_max: int
    ) -> None:
        self._loop = loop
        self._images = images
        self._slots = slots
        self._roots = roots
        self._primed_max = primed_max
        self._asked: OrderedDict[Outfit, deque[float]] = OrderedDict()
        self._priming: Outfit | None = None

    def wanted(self, outfit: Outfit, stack: Stack) -> None:
        """A sandbox was made with ``outfit``, on the bare images of ``stack``."""
        times = self._asked.setdefault(outfit, deque(maxlen=2 * EACH_MAX))
        self._asked.move_to_end(outfit)
        if len(self._asked) > OUTFITS_MAX:
            self._asked.popitem(last=False)
        times.append(time.monotonic())
        self._loop.call_later(PAUSE_S, lambda: self._consider(outfit, stack))

    def keep_house(self) -> Task[None]:
        """For ever: let go of what nobody has asked for in a while."""
        while True:
            yield from self._loop.sleep(FORGOTTEN_S / 2)
            since = time.monotonic() - FORGOTTEN_S
            for outfit in [one for one, times in self._asked.items() if times[-1] < since]:
                del self._asked[outfit]
            if any(outfit not in self._asked for outfit in self._slots.primed()):
                self._slots.forget(lambda outfit: outfit not in self._asked)

    def _consider(self, outfit: Outfit, stack: Stack) -> None:
        if self._priming is not None or outfit not in self._asked:
            return
        since = time.monotonic() - WINDOW_S
        recent = sum(at > since for at in self._asked[outfit])
        primed = self._slots.primed()
        if len(primed) >= self._primed_max or primed.count(outfit) >= recent // 2:
            return
        slot = self._slots.borrow()
        if slot is not None:
            self._priming = outfit
            self._loop.spawn(self._prime(slot, outfit, stack))

    def _prime(self, slot: Slot, outfit: Outfit, stack: Stack) -> Task[None]:
        try:
            asked = self._roots.ask(stack, outfit.images, outfit.limits)
            slot.cgroups.limit(outfit.limits)
            slot.root = yield from self._roots.put(slot, stack, asked)
            slot.outfit = outfit
            if not self._images.are_mounted(outfit.images):
                raise ImageUnavailable("the image was unmounted meanwhile")
        except (OSError, TimeoutError, SandboxdError) as error:
            # The image may be gone by now. Whoever asks for it next is told.
            print(f"launcher: a slot could not be primed: {error}", file=sys.stderr)
            slot.kill()
            self._slots.discard(slot)
            self._asked.pop(outfit, None)
            return
        finally:
            self._priming = None
        self._slots.add(slot)
        self._consider(outfit, stack)
