"""Finding a process that hangs (stopped, or in an endless loop), and what ends hostd then.

Who waits counts its own ticks, never the clock alone: where a whole job was suspended and goes on
(``scontrol suspend``, a virtual machine), the time has gone for everybody, and nobody hangs.

hostd is watched by a process of its own, ``python -m sandboxd.guard``: it has root as hostd has,
does nothing else, and reads from a pipe by when hostd will be heard of again. With hostd's death
everything of its node ends (PR_SET_PDEATHSIG), and whoever started hostd starts anew.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Final

from sandboxd.log_lines import fold_stderr

TICKS: Final = 10
"""How often who hangs is looked at before it is taken for dead."""
_WORD: Final = "{:.3f}\n"


class Silence:
    """Counts how long somebody has not answered, in ticks of ``limit_s / TICKS``."""

    def __init__(self, limit_s: float) -> None:
        self.tick_s = limit_s / TICKS
        self._ticks = 0
        self._due = time.monotonic() + self.tick_s

    def broken(self) -> None:
        """It was heard of."""
        self._ticks = 0

    def lasts(self) -> bool:
        """Look; True once a tick when a tick has passed."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self.tick_s
        self._ticks += 1
        return True

    @property
    def is_too_long(self) -> bool:
        return self._ticks > TICKS

    @property
    def left_s(self) -> float:
        """Until the next tick."""
        return max(0.0, self._due - time.monotonic())


class Guard:
    """hostd's end. ``heard_by`` says that it lives, and when it will say so again."""

    def __init__(self, limit_s: float) -> None:
        """Without a limit (0) nobody watches."""
        self.limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._said_at = 0.0
        self._allowed_s = 0.0

    def heard_by(self, allowed_s: float | None = None) -> None:
        """It may be silent for ``allowed_s`` from now on; by default for the limit."""
        if not self.limit_s:
            return
        allowed_s = self.limit_s if allowed_s is None else max(allowed_s, self.limit_s)
        now = time.monotonic()
        if allowed_s == self._allowed_s and now < self._said_at + self.limit_s / TICKS:
            return
        self._said_at, self._allowed_s = now, allowed_s
        if self._process is None:
            self._start()
        word = _WORD.format(allowed_s).encode()
        try:
            os.write(self._pipe, word)
        except BlockingIOError:
            pass  # it does not read, and so will do no harm either
        except BrokenPipeError:
            self.stop()
            self._start()
            os.write(self._pipe, word)

    def _start(self) -> None:
        read, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-m", "sandboxd.guard", str(os.getpid()), str(read)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(read,))
        finally:
            os.close(read)

    def stop(self) -> None:
        if self._process is not None:
            os.close(self._pipe)
            self._process.kill()
            self._process.wait()
            self._process = None


def watch(pid: int, pipe: int) -> int:
    """Until the pipe is at its end, or what it promised was not kept: then ``pid`` is killed."""
    pidfd = os.pidfd_open(pid)
    if os.getppid() != pid:
        return 1  # its parent was gone before, and the number another's
    silence: Silence | None = None
    while True:
        timeout_s = None if silence is None else silence.left_s
        ready, _, _ = select.select([pipe, pidfd], [], [], timeout_s)
        if pidfd in ready:
            return 0  # a child of its may still hold the pipe
        if ready:
            words = os.read(pipe, 4096).split()
            if not words:
                return 0
            silence = Silence(float(words[-1]))
        elif silence is not None and silence.lasts() and silence.is_too_long:
            limit_s = silence.tick_s * TICKS
            print(f"hostd: it does not go on for {limit_s:g} s; killed", file=sys.stderr)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return 0


def main() -> int:
    fold_stderr("hostd")
    # It ends with hostd, and not before.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return watch(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
