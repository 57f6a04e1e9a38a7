"""Probes of what the kernel offers around processes."""

from __future__ import annotations

import errno
import os
import signal
import struct
from typing import Final

from sandboxd.linux import _libc, child, pidfd, process, procfs, seccomp

TIMEOUT_S: Final = 15.0
"""What works answers in milliseconds, but not on a node that is overrun: which must start all the
same, and only a kernel that hangs is to be given up on."""

# <linux/bpf_common.h>, <linux/seccomp.h>
_LD_W_ABS: Final = 0x20
_JEQ_K: Final = 0x15
_RET_K: Final = 0x06
_RET_ERRNO: Final = 0x0005_0000
_RET_ALLOW: Final = 0x7FFF_0000
NR_SCHED_YIELD: Final = _libc.by_machine(24, 124)  # <asm/unistd.h>


def pidfds() -> None:
    """A child is signalled and waited for by its pidfd."""
    with child.running(signal.pause) as paused:
        pidfd.pidfd_send_signal(paused.pidfd, signal.SIGKILL)
        if pidfd.reap(paused.pidfd, TIMEOUT_S) is None:
            raise _libc.oserror(errno.ETIMEDOUT, "a child killed by its pidfd did not end")


def seccomp_filter() -> None:
    """A filter is loaded without privilege, and refuses one harmless call."""

    def work() -> None:
        program = b"".join(
            struct.pack("=HBBI", *instruction)
            for instruction in (
                (_LD_W_ABS, 0, 0, 0),
                (_JEQ_K, 0, 1, NR_SCHED_YIELD),
                (_RET_K, 0, 0, _RET_ERRNO | errno.EXDEV),
                (_RET_K, 0, 0, _RET_ALLOW),
            )
        )
        process.set_no_new_privs()
        seccomp.load(program)
        try:
            os.sched_yield()
        except OSError as error:
            if error.errno == errno.EXDEV and procfs.status()["Seccomp"] == "2":
                return
        raise _libc.oserror(errno.EIO, "a loaded filter has no effect")

    child.run(work, TIMEOUT_S)
