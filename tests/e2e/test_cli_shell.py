"""``sandboxd shell``: a real terminal in a sandbox."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios

from tests.e2e.command_line import PROGRAM, environment
from tests.framework.daemon import Daemon


def test_a_terminal(daemon: Daemon, sandbox: str):
    ours, theirs = pty.openpty()
    command = [*PROGRAM, "shell", sandbox]
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment(daemon)
    ) as process:
        os.close(theirs)
        try:
            seen = b""
            while b"# " not in seen:  # the shell's prompt: from now on keys are its own
                seen += os.read(ours, 65536)
            os.write(ours, b"stty size; tty; exit $((40 + 2))\r")
            while True:
                try:
                    seen += os.read(ours, 65536)
                except OSError:  # EIO: nobody has the other end any more
                    break
            assert process.wait(30) == 42, (seen, process.stderr and process.stderr.read())
        finally:
            process.kill()
            os.close(ours)
    assert b"40 100" in seen
    assert b"/dev/pts/" in seen
    assert daemon.http.get(f"/v1/sandboxes/{sandbox}/processes").json() == {"processes": []}
