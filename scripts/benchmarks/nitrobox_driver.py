"""Takes samples of nitrobox, as `floor/floor.h` describes: counts come in, milliseconds go out.

    nitrobox_driver.py ROOT STATE together|exec|reset

Runs in nitrobox's own environment, with Python 3.12; imports nothing of the bench.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from nitrobox import Sandbox, SandboxConfig, sandbox


def main() -> None:
    root, state, mode = sys.argv[1:]
    # It would ask a BuildKit daemon of its own about the image, which is a directory here: 38 s,
    # for that daemon does not start in this namespace.
    sandbox._apply_image_defaults = lambda config: None
    actions: dict[str, Callable[[], None]] = {}

    def make(name: str) -> Sandbox:
        config = SandboxConfig(
            image=root,
            env_base_dir=state,
            rootfs_cache_dir=str(Path(state, "cache")),
            net_isolate=True,
        )
        return Sandbox(config, name=name)

    def run(box: Sandbox) -> None:
        output, code = box.run("/bin/true")
        if code != 0:
            sys.exit(f"/bin/true ended with {code}: {output}")

    def together() -> None:
        box = make("together")
        run(box)
        box.delete()

    actions["together"] = together
    box = make(mode) if mode in ("exec", "reset") else None
    if box is not None:
        actions |= {"exec": lambda: run(box), "reset": box.reset}
    action = actions[mode]
    for line in sys.stdin:
        for _ in range(int(line)):
            started = time.perf_counter()
            action()
            print(f"{(time.perf_counter() - started) * 1000:.4f}")
        print(".", flush=True)
    if box is not None:
        box.delete()


if __name__ == "__main__":
    main()
