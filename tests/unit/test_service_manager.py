"""What a service manager passes and hears: sd_listen_fds(3), sd_notify(3)."""

import os
import socket
import subprocess
import sys

import pytest

from sandboxd.service_manager import ServiceManager, take_listeners

TAKE = """
import os
from sandboxd.errors import ConfigError
from sandboxd.service_manager import take_listeners
environ = dict(os.environ)
environ["LISTEN_PID"] = environ["LISTEN_PID"].replace("mine", str(os.getpid()))
try:
    taken = take_listeners(environ)
    print([sock.getsockname()[1] for sock in taken], os.get_inheritable(3))
except ConfigError as error:
    print(error)
print(sorted(key for key in environ if key.startswith("LISTEN")))
"""

BECOME = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""


def take(sock: socket.socket, **env: str) -> list[str]:
    """In a process whose fd 3 is `sock`."""
    done = subprocess.run(
        [sys.executable, "-c", BECOME, str(sock.fileno()), TAKE],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(sock.fileno(),),
        check=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_sockets_of_this_very_process_are_taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        env = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "api"}
        assert take(listener, LISTEN_PID="mine", **env) == [f"[{port}] False", "[]"]
        # Those of a parent, which inherited the variables to us, are not ours.
        assert take(listener, LISTEN_PID="1", **env) == ["[] True", "[]"]
        assert take(listener, LISTEN_PID="mine", LISTEN_FDS="x")[0] == "[] True"


def test_a_socket_that_does_not_listen_is_refused():
    with socket.socket() as sock:
        said = take(sock, LISTEN_PID="mine", LISTEN_FDS="1")
    assert said[0] == "the service manager passed a socket that takes no connections (fd 3)"


def test_without_a_service_manager_nothing_is_taken():
    assert take_listeners({}) == []


@pytest.fixture
def heard(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield lambda: sock.recv(4096).decode()


def test_readiness_and_the_watchdog_are_told(heard):
    manager = ServiceManager({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
    assert manager.watchdog_s == 30
    manager.ready("well")
    assert heard() == "READY=1\nSTATUS=well"
    manager.reloading()
    assert heard().startswith("RELOADING=1\nMONOTONIC_USEC=")
    manager.alive()
    assert heard() == "WATCHDOG=1"
    manager.alive()  # at once again: it has heard it
    with pytest.raises(BlockingIOError):
        heard()


@pytest.mark.parametrize("env", [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}])
def test_a_watchdog_of_nobody_or_of_another_is_not_fed(heard, env):
    ServiceManager(env).alive()
    with pytest.raises(BlockingIOError):
        heard()
