"""What the end of a background process means."""

from __future__ import annotations

import pytest

from sandboxd.runtime.processes import _exit


@pytest.mark.parametrize(
    ("reason", "code", "cause"),
    [
        ("image-lost", "sandbox-lost", "node"),
        ("exited", "sandbox-dead", "workload"),
        ("oom-killed", "oom-killed", "workload"),
    ],
)
def test_a_process_that_went_with_its_sandbox_has_the_sandboxs_fault(
    reason: str, code: str, cause: str
):
    end = _exit({"at": 1.0, "lost": reason, "oom": False}, user="root", cwd="/")
    assert end.failure is not None
    assert (end.failure.code, end.failure.cause) == (code, cause)
    assert (end.exit_code, end.signal) == (None, None)
