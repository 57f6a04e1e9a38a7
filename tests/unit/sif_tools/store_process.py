"""A converter in a process of its own, for tests that kill it. Arguments: the store, the source, a
name, cuts (`1,2` or `-`), the step at which it ends itself, and how often it first passes there."""

from __future__ import annotations

import os
import signal
import sys

from sif_tools.errors import SifError
from sif_tools.sources.open import open_source
from sif_tools.store.claims import Claims
from sif_tools.store.keeper import Keeper, make_store
from sif_tools.store.steps import Step


def main() -> None:
    store, reference, name, cuts, step, passes = sys.argv[1:]
    left = int(passes)

    def on_step(reached: Step) -> None:
        nonlocal left
        if reached == step:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    layout = make_store(store)
    # Beats fast enough that a test can wait for it to be missed.
    claims = Claims(layout.claim, heartbeat_s=0.1, stale_s=1.0)
    keeper = Keeper(layout, claims=claims, on_step=on_step)
    try:
        with open_source(reference) as source:
            where = tuple(int(one) for one in cuts.split(",")) if cuts != "-" else ()
            kept = keeper.keep(source, where, name)
    except SifError as error:
        print(error.code)
        sys.exit(3)
    print(kept.key, kept.written_bytes)


if __name__ == "__main__":
    main()
