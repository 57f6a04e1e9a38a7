"""The one machine of a run, booted when the first test needs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.framework import vm as machine
from tests.framework.vm import IN_VM, Vm

collect_ignore_glob = [] if os.environ.get(IN_VM) else ["guest/*"]


@pytest.fixture(scope="session")
def vm(request: pytest.FixtureRequest) -> Iterator[Vm]:
    """Its console's log is kept where a test failed."""
    handle, name = tempfile.mkstemp(prefix="sandboxd-vm-console-", suffix=".log")
    os.close(handle)
    console = Path(name)
    failed_before = request.session.testsfailed
    try:
        with machine.booted(console) as booted:
            yield booted
    except BaseException:
        print(f"the machine's console: {console}")
        raise
    if request.session.testsfailed > failed_before:
        print(f"the machine's console: {console}")
    else:
        console.unlink()
