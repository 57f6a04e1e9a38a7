"""Which layers of which images become a file that others share.

An image is cut into at most `MAX_SIFS` runs of layers, bottom to top: a base, perhaps a shared
part, and what is the image's own. A node mounts as many file systems, and a lookup in a sandbox
passes through all of them, so there are three and not one for each layer.

Where to cut is decided image by image, with what a run costs *this* image as the price: its bytes
divided by how many images have the same run (a base: the same from the bottom up; a shared part:
the same layers, on whatever base), and nothing where the store has it already. The top run is
nobody else's and costs all of its bytes. Cuts are considered only where the
number of images that have a layer changes, as only there anything can be gained, and where the
store was cut before. Every image prices a run alike, so those that could share one do choose it.

Without others to compare with, an image's lowest layer is its base: what is likeliest to come
again. So a list given as a whole is stored smaller than its images given one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final

MAX_SIFS: Final = 3


@dataclass(frozen=True, slots=True)
class Chain:
    """An image's layers, bottom first: what they hold (diff_id), and how many bytes that is."""

    layers: tuple[str, ...]
    sizes: tuple[int, ...]


# Where an image is cut: the numbers of layers below the shared part and below its own. Ascending;
# fewer than MAX_SIFS, none is 0.
Cuts = tuple[int, ...]

IsStored = Callable[[Sequence[str], int], bool]


def not_stored(layers: Sequence[str], below: int) -> bool:
    """What an empty store says of a run of layers above `below` others."""
    del layers, below
    return False


class Planner:
    """Counts what images have in common, then cuts each."""

    def __init__(self, chains: Sequence[Chain], is_stored: IsStored = not_stored) -> None:
        self._is_stored = is_stored
        self._having: Counter[str] = Counter()
        self._bases: Counter[tuple[str, ...]] = Counter()
        self._runs: Counter[tuple[str, ...]] = Counter()
        self._planned: dict[tuple[str, ...], Cuts] = {}
        self._count(chains)

    def _count(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            self._having.update(set(chain.layers))
        for chain in chains:
            places = self._places(chain)
            self._bases.update(chain.layers[:end] for end in places)
            # A run twice in one image is still one image that has it.
            self._runs.update({chain.layers[low:high] for low, high in combinations(places, 2)})

    def _places(self, chain: Chain) -> list[int]:
        """Numbers of layers below which an image may be cut: where sharing changes."""
        having = [self._having[layer] for layer in chain.layers]
        places = [at for at in range(1, len(having)) if having[at - 1] != having[at]]
        if having and having[-1] > 1:
            # All layers are somebody else's, too: then nothing but what is generated is its own.
            places.append(len(having))
        if not places and having:
            places.append(1)
        return places

    def _stored_places(self, chain: Chain) -> set[int]:
        """Those where the store has been cut before."""
        layers = chain.layers
        # All of an image's layers under another config are too rare to be looked for.
        bases = [at for at in range(1, len(layers)) if self._is_stored(layers[:at], 0)]
        shared = {
            at
            for below in bases
            for at in range(below + 1, len(layers))
            if self._is_stored(layers[:at], below)
        }
        return shared.union(bases)

    def cuts(self, chain: Chain) -> Cuts:
        """Where to cut this image, which should be one of those counted."""
        found = self._planned.get(chain.layers)
        if found is None:
            found = self._planned[chain.layers] = self._choose(chain)
        return found

    def _choose(self, chain: Chain) -> Cuts:
        sums = [0]
        for size in chain.sizes:
            sums.append(sums[-1] + size)
        best: tuple[float, int, Cuts] | None = None
        places = sorted({*self._places(chain), *self._stored_places(chain)})
        for number in range(1, MAX_SIFS):
            for cuts in combinations(places, number):
                price = self._price(chain, sums, cuts)
                # Of equals the one with fewer files, then the smaller base.
                if best is None or (price, number, cuts) < best:
                    best = (price, number, cuts)
        return () if best is None else best[2]

    def _price(self, chain: Chain, sums: Sequence[int], cuts: Cuts) -> float:
        base = chain.layers[: cuts[0]]
        price = 0.0
        if not self._is_stored(base, 0):
            price += sums[cuts[0]] / max(self._bases[base], 1)
        for low, high in pairwise(cuts):
            if not self._is_stored(chain.layers[:high], low):
                price += (sums[high] - sums[low]) / max(self._runs[chain.layers[low:high]], 1)
        return price + sums[-1] - sums[cuts[-1]]
