"""The blocking client and the one in asyncio: the same names, arguments and results."""

import inspect
import re

import pytest

from sandboxd import client
from sandboxd.client.aio_files import AsyncSandboxFiles
from sandboxd.client.aio_run import AsyncRun
from sandboxd.client.sync_files import SandboxFiles
from sandboxd.client.sync_run import Run

PAIRS = {
    client.Client: client.AsyncClient,
    client.Sandbox: client.AsyncSandbox,
    SandboxFiles: AsyncSandboxFiles,
    client.Process: client.AsyncProcess,
    client.Session: client.AsyncSession,
    client.ExecStream: client.AsyncExecStream,
    Run: AsyncRun,
}
ONLY_IN_ASYNCIO = {"start": "the blocking stream starts when it is made"}


def public(kind):
    return {
        name: getattr(kind, name)
        for name in dir(kind)
        if not name.startswith("_") or name in ("__init__",)
    }


def plain(annotation):
    """An annotation as the blocking client would have it."""
    text = str(annotation).replace("Async", "")
    text = re.sub(r"^Awaitable\[(.*)\]$", r"\1", text)
    # What is on its way to be a sandbox is one.
    return "Sandbox" if text == "Pending" else text


def shown(member):
    """Parameters and result. What is a property in one (``exit``) is a method in the other, as
    nothing can be awaited in a property."""
    if isinstance(member, property):
        member = member.fget
    signature = inspect.signature(member)
    parameters = [
        (one.name, one.kind, one.default, plain(one.annotation))
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    return parameters, plain(signature.return_annotation)


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS.items())
def test_the_same_names(blocking, asynchronous):
    assert public(asynchronous).keys() - public(blocking).keys() <= ONLY_IN_ASYNCIO.keys()
    assert public(blocking).keys() <= public(asynchronous).keys()


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS.items())
def test_the_same_arguments_and_results(blocking, asynchronous):
    theirs = public(asynchronous)
    for name, member in public(blocking).items():
        if callable(member) or isinstance(member, property):
            assert shown(theirs[name]) == shown(member), f"{blocking.__name__}.{name}"


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS.items())
def test_the_same_words_about_them(blocking, asynchronous):
    for name, member in public(blocking).items():
        theirs = public(asynchronous)[name]
        if member.__doc__ and not re.search(r"``ExecStream|context manager", member.__doc__):
            assert theirs.__doc__.replace("Async", "") == member.__doc__, name
