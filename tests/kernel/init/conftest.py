"""A zygote of the run's own, as shipped and with the sanitizers; and sandboxes under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.init import build
from tests.framework.leaks import LeakCheck
from tests.kernel.init.harness import Client, Node, Sandbox

# A finding ends PID 1, which every test notices; what it was is told on nobody's stderr.
SANITIZER = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:disable_coredump=1",
    "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1",
}


@pytest.fixture(scope="session", params=["release", "sanitize"])
def node(
    request: pytest.FixtureRequest,
    leak_check: LeakCheck,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Node]:
    scratch = tmp_path_factory.mktemp("init")
    sanitize = request.param == "sanitize"
    binary = build.build(scratch / "sandbox_init", sanitize=sanitize)
    probe = build.build(scratch / "probe", c_files=[Path(__file__).with_name("probe.c")])
    with leak_check.around("the zygote"):
        node = Node(binary, {"probe": probe.read_bytes()}, SANITIZER if sanitize else {})
        try:
            yield node
        finally:
            node.close()


@pytest.fixture
def sandbox(node: Node) -> Iterator[Sandbox]:
    with node.sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def client(sandbox: Sandbox) -> Client:
    """A control socket as the daemon has it."""
    return sandbox.attach()
