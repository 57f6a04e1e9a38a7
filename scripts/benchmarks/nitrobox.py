"""nitrobox as a peer: an environment of its own, since it needs Python 3.12.

Installed once below the cache directory, from the package index that this machine's pip is set up
with. Where that cannot be, the reason is what the bench says of it.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.floors import FloorError

VERSION = "0.1.0"
INSTALL_S = 180
DRIVER = Path(__file__).resolve().with_name("nitrobox_driver.py")
NOTE = (
    f"nitrobox {VERSION}, its Python API in one process, without HTTP: a shell that lives on, in"
    " pid, mount and network namespaces and under seccomp; no user namespace; limits need cgroup"
    " v2. Each of its commands waits a fixed 10 ms for late output. Its look-up of the image by"
    " a BuildKit daemon is left out."
)


def nitrobox_python() -> Path:
    """The interpreter that has it, installed if need be. Raises FloorError that says why not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(cache, "sandboxd", f"nitrobox-{VERSION}")
    python = home / "bin/python"
    if (home / "complete").exists():
        return python
    base = _python_3_12()
    shutil.rmtree(home, ignore_errors=True)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([str(base), "-m", "venv", str(home)])
    _run([str(python), *install, f"nitrobox=={VERSION}"])
    (home / "complete").touch()
    return python


def _python_3_12() -> Path:
    found = shutil.which("python3.12")
    candidates = [found] if found else []
    candidates += glob.glob(str(Path.home() / ".pyenv/versions/3.12.*/bin/python3.12"))
    for candidate in candidates:
        works = subprocess.run(
            [candidate, "-c", "import ensurepip"], capture_output=True, check=False
        )
        if works.returncode == 0:
            return Path(candidate)
    raise FloorError("nitrobox needs Python 3.12, which is not here")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise FloorError(f"nitrobox could not be installed in {INSTALL_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FloorError(f"nitrobox could not be installed: {last}")
