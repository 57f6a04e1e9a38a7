"""Runs inside the virtual machine and does what the host asks for over a virtio serial port.

Lines of JSON both ways. In: `{"id", "argv", "env", "cwd", "timeout_s"}` starts a command as root.
Out: `{"id", "data"}` is a piece of its output (base64; stdout and stderr are one), `{"id", "exit"}`
its status (negative: a signal), `{"id", "error"}` that it could not be started. After `timeout_s`
its process group is killed. Standard library only: it is copied into the image.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

PORT = "org.sandboxd.vm"


def main() -> None:
    port = os.open(_port(), os.O_RDWR)
    lock = threading.Lock()

    def tell(**message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with lock:
            while data:
                data = data[os.write(port, data) :]

    tell(id=0, exit=0)  # hello
    waiting = b""
    while True:
        waiting += os.read(port, 1 << 16)
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            threading.Thread(target=_run, args=(json.loads(line), tell), daemon=True).start()


def _port() -> str:
    for name in Path("/sys/class/virtio-ports").glob("*/name"):
        if name.read_text().strip() == PORT:
            return f"/dev/{name.parent.name}"
    raise SystemExit(f"no port {PORT}")


def _run(request: dict[str, Any], tell: Any) -> None:
    number = request["id"]
    try:
        process = subprocess.Popen(
            request["argv"],
            env={"PATH": os.environ["PATH"], "HOME": "/root", **request["env"]},
            cwd=request["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        tell(id=number, error=str(error))
        return

    def end() -> None:
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(request["timeout_s"], end)
    timer.start()
    assert process.stdout is not None
    while data := os.read(process.stdout.fileno(), 1 << 15):
        tell(id=number, data=base64.b64encode(data).decode())
    status = process.wait()
    timer.cancel()
    tell(id=number, exit=status)


if __name__ == "__main__":
    main()
