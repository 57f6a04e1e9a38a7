"""A daemon started under an administrator's strict umask serves as under any other."""

from __future__ import annotations

import contextlib
import shutil
import stat
import tempfile
from pathlib import Path

from tests.framework import host_state
from tests.framework.daemon import start
from tests.framework.leaks import LeakCheck

STRICT = 'umask 077; rmdir "$0/state" "$0/run" "$0/images"; exec "$@"'


def test_serve_under_a_umask_of_077(leak_check: LeakCheck, busybox: Path):
    """It makes its directories itself, and its account has to get through to them."""
    with leak_check.around("the daemon"), contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix=host_state.OWN_PREFIX))
        stack.callback(shutil.rmtree, home)
        home.chmod(0o755)
        daemon = start(home, before=["sh", "-c", STRICT, str(home)])
        stack.callback(daemon.stop)
        daemon.wait_ready()
        shutil.copyfile(busybox, home / "images" / "busybox.sif")
        (home / "images" / "busybox.sif").chmod(0o444)
        with daemon.sandbox("busybox") as sandbox:
            # The daemon's is nobody's business in a sandbox: it has the usual one.
            made = daemon.exec(sandbox, "umask; touch /root/a; stat -c %a /root/a")
            assert made["stdout"] == "0022\n644\n"
        # What is a secret stays one.
        assert stat.S_IMODE((home / "state" / "token").stat().st_mode) & 0o007 == 0
