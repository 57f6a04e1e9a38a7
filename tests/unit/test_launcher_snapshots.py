"""A snapshot that fails half-way: by what name, and what becomes of its sandbox."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from sandboxd.errors import ImageUnavailable, NodeError
from sandboxd.launcher.loop import Loop, Promise
from sandboxd.launcher.sandboxes import Sandbox, Sandboxes
from sandboxd.model import Limits, SandboxState


def freeze(error: Exception) -> tuple[BaseException | None, Sandbox]:
    """What `freeze_upper` raises where the new root cannot be put in place."""

    def put(*_: object, **__: object):
        raise error
        yield

    loop = Loop()
    sandboxes = Sandboxes.__new__(Sandboxes)
    sandboxes._loop = loop
    sandboxes._roots = SimpleNamespace(ask=lambda *_: Promise(), put=put)
    sandboxes._images = SimpleNamespace(by_key={}, mounted=lambda key: SimpleNamespace(name=key))
    sandboxes._slots = SimpleNamespace(zygote_dead=False)
    sandboxes._on_death = lambda _: None
    sandbox = Sandbox("sb", {}, Limits(), "h", ("image",), state=SandboxState.RUNNING)
    sandbox.slot = SimpleNamespace(kill=lambda: None)
    sandbox.root = SimpleNamespace(layers=())
    done = loop.spawn(sandboxes.freeze_upper(sandbox, 0))
    done.watch(loop.stop)
    loop.run()
    return done.error, sandbox


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ECONNABORTED])
def test_an_image_server_that_died_is_named(number: int):
    """Before its death is noticed: the mount of the new root is what meets it first."""
    error, _ = freeze(OSError(number, "mount"))
    assert isinstance(error, ImageUnavailable)
    assert error.retryable


def test_a_root_that_cannot_be_mounted_leaves_the_sandbox_as_it_was():
    error, sandbox = freeze(OSError(errno.ENOMEM, "mount"))
    assert type(error) is NodeError
    assert sandbox.state is SandboxState.RUNNING


def test_a_pid_1_that_may_still_swap_is_given_up():
    error, sandbox = freeze(TimeoutError("root swap"))
    assert isinstance(error, NodeError)
    assert (sandbox.state, sandbox.reason) == (SandboxState.FAILED, "snapshot-failed")
