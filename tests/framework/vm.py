"""A virtual machine: booted, given commands, and gone.

For: the vm tier. QEMU emulates the CPU (TCG): hardware virtualisation is not to be had inside most
virtual machines, and where it seems to be it may hang. All of it is slower by a factor, which is
measured at boot and by which the time-outs of what runs inside are multiplied (`times`). The
machine has no network; the host talks to `vm_agent` over a serial port.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.framework import tiers, times, vm_image
from tests.framework.images import REPOSITORY
from tests.framework.vm_agent import PORT

IN_VM = "SANDBOXD_TESTS_IN_VM"
"""Set inside: what lies in `tests/vm/guest` is for there alone, and `test_tiers` has it run."""

BOOT_TIMEOUT_S = 300.0
MEMORY_MIB = 3072
CPUS = 2

_REFERENCE = (
    "import os, subprocess, time\n"
    "t = time.perf_counter()\n"
    "for _ in range(10): subprocess.run(['/bin/true'])\n"
    "sum(i * i % 7 for i in range(1000000))\n"
    "print(time.perf_counter() - t)\n"
)
_REFERENCE_S = 0.09
"""What that takes on the CPU the tests' own time-outs were chosen for, a 2 GHz core of a server."""


class VmError(Exception):
    """The machine did not boot, or died; the message holds the end of its console."""


@dataclass
class Vm:
    """One running machine."""

    process: subprocess.Popen[bytes]
    console: Path
    port: socket.socket
    time_factor: int = 1
    _number: int = 0
    _unread: bytes = b""
    _environment: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stream: bool = False,
    ) -> tuple[int, str]:
        """Run a command as root; its status and output, which `stream` shows as it comes.

        After `timeout_s`, not scaled, it is killed (status -9). Raises VmError where the machine
        has died, or does not even answer then.
        """
        self._number += 1
        request = {
            "id": self._number,
            "argv": list(argv),
            "env": {**self._environment, **(env or {})},
            "cwd": cwd,
            "timeout_s": timeout_s,
        }
        self.port.sendall(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + timeout_s + 60
        output = bytearray()
        while True:
            message = self._receive(deadline)
            if message["id"] != self._number:
                continue
            if "data" in message:
                data = base64.b64decode(message["data"])
                output += data
                if stream:
                    sys.stdout.write(data.decode(errors="replace"))
                    sys.stdout.flush()
            elif "error" in message:
                raise VmError(message["error"])
            else:
                return message["exit"], output.decode(errors="replace")

    def check(self, script: str, timeout_s: float = 60.0) -> str:
        """The output of a shell script that must succeed; the time-out is scaled."""
        status, output = self.run(["/bin/sh", "-euc", script], timeout_s * self.time_factor)
        if status != 0:
            raise VmError(f"status {status} of: {script}\n{output}")
        return output

    def pytest(
        self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run pytest inside, on this repository; shown as it runs.

        What must not be skipped there is for the caller to judge: it is another kernel.
        """
        settings = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("SANDBOXD_TESTS_")
            and name not in ("SANDBOXD_TESTS_SHARED_HOST", tiers.MUST_RUN)
        }
        settings |= {times.FACTOR: str(self.time_factor), "XDG_CACHE_HOME": "/root/cache"}
        settings["PYTHONUNBUFFERED"] = "1"
        command = [f"{REPOSITORY}/.venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider"]
        # In the root of the hierarchy, which may hold processes and hand its controllers on: a
        # daemon started by a test would make room in the group of all of us otherwise.
        enter = ["/bin/sh", "-c", 'echo 0 > /sys/fs/cgroup/cgroup.procs; exec "$@"', "sh"]
        return self.run(
            [*enter, *command, *arguments],
            timeout_s,
            env=settings | dict(env or {}),
            cwd=str(REPOSITORY),
            stream=True,
        )

    def console_tail(self, lines: int = 40) -> str:
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise VmError(f"no answer from the machine\n{self.console_tail()}")
            if select.select([self.port], [], [], min(left_s, 5.0))[0]:
                data = self.port.recv(1 << 16)
                if not data:
                    raise VmError(f"the machine is gone\n{self.console_tail()}")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def booted(console: Path) -> Iterator[Vm]:
    """Boot a machine with the repository in it; killed at the end. Its console goes to `console`.

    Raises ImageError, VmError.
    """
    images = vm_image.boot_images()
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        raise VmError("no qemu-system-x86_64 (package qemu-system-x86): scripts/install --with vm")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sandboxd-test-vm-"))
        repository = Path(scratch, "repository.ext4")
        vm_image.repository_disk(repository)
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        with theirs:
            arguments = _arguments(images, repository, console, theirs.fileno())
            process = subprocess.Popen(
                # It must not outlive us, even where we are killed.
                ["setpriv", "--pdeathsig", "KILL", qemu, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Each machine's own changes to the shared root go there.
                env={**os.environ, "TMPDIR": scratch},
            )
        stack.callback(_end, process)
        vm = Vm(process, console, ours)
        vm._receive(time.monotonic() + BOOT_TIMEOUT_S)
        vm.check(
            f"mkdir -p {REPOSITORY} /root/cache && mount /dev/vdb {REPOSITORY}", BOOT_TIMEOUT_S
        )
        # Measured on its own, not beside what is started at boot.
        vm.run(["systemctl", "is-system-running", "--wait"], BOOT_TIMEOUT_S)
        _, took_s = vm.run(["python3", "-c", _REFERENCE], BOOT_TIMEOUT_S)
        vm.time_factor = max(1, math.ceil(float(took_s) / _REFERENCE_S))
        yield vm


def _arguments(
    images: vm_image.BootImages, repository: Path, console: Path, port_fd: int
) -> list[str]:
    # Nehalem: with what is newer (AVX, SMAP) the guest's libc and kernel choose what is quick on a
    # real CPU and slow on an emulated one.
    arguments = ["-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-machine", "pc"]
    arguments += ["-smp", str(CPUS), "-m", str(MEMORY_MIB), "-nodefaults", "-display", "none"]
    arguments += ["-no-reboot", "-kernel", str(images.kernel), "-initrd", str(images.initrd)]
    # panic=-1: end at once where nothing would go on; a hang would cost the whole time-out.
    # mitigations=off: each costs an emulated CPU dear, and none has anything to protect.
    # norandmaps: code that lies where it lay in the last process need not be translated anew, which
    # is a third of what starting a small program costs.
    options = "console=ttyS0 loglevel=5 panic=-1 mitigations=off norandmaps"
    arguments += ["-append", f"{options} systemd.show_status=0"]
    arguments += ["-serial", f"file:{console}", "-device", "virtio-rng-pci"]
    for disk in (images.root, repository):
        arguments += ["-drive", f"file={disk},format=raw,if=virtio,snapshot=on,cache=unsafe"]
    arguments += ["-device", "virtio-serial-pci", "-chardev", f"socket,id=port,fd={port_fd}"]
    arguments += ["-device", f"virtserialport,chardev=port,name={PORT}"]
    return arguments


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing in it is to be kept, so it is never asked."""
    process.kill()
    process.wait()


def shell() -> None:
    """`python -m tests.framework.vm`: boot one, and run each line of stdin in it."""
    with tempfile.TemporaryDirectory() as scratch, booted(Path(scratch, "console")) as vm:
        print(f"time factor {vm.time_factor}", flush=True)
        for line in sys.stdin:
            status, _ = vm.run(["/bin/sh", "-c", line], 3600, cwd=str(REPOSITORY), stream=True)
            print(f"[status {status}]", flush=True)


if __name__ == "__main__":
    shell()
