"""The tiers inside the machine: Linux 6.1, cgroup v2 with every controller, systemd as PID 1.

A short set by default, some minutes; all of it with SANDBOXD_TESTS_VM_FULL=1 (`scripts/test vm
--full`), an hour and more. What is skipped inside must be a feature that this kernel has not, or a
program that only the host needs; anything else is a failure here.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET

import pytest

from tests.framework.vm import IN_VM, Vm

FULL = os.environ.get("SANDBOXD_TESTS_VM_FULL") == "1"
SHORT_TIMEOUT_S, FULL_TIMEOUT_S = 1500.0, 2.5 * 3600
"""To end what hangs: with room for a machine on which others work."""

SHORT = [
    # First, as they want the machine for themselves.
    "tests/vm/guest/test_oom_score.py",
    "tests/vm/guest/test_systemd_units.py",
    "tests/kernel/test_linux_cgroup.py",
    "tests/kernel/test_linux_process.py::test_a_number_without_a_process_is_nobody",
    "tests/kernel/test_layers_on_disk.py",
    "tests/e2e/test_layers_on_disk.py::test_the_node_says_what_serves",
    "tests/e2e/test_layers_on_disk.py::test_files_of_the_image_are_changed_and_removed",
    "tests/e2e/test_layers_on_disk.py::test_exactly_so_many_bytes_as_promised",
    "tests/e2e/test_layers_on_disk.py::test_reset_begins_anew",
    "tests/e2e/test_layers_on_disk.py::test_snapshot_and_fork",
    "tests/security/test_cgroup.py",
]
"""In one run: to start pytest, and a daemon, is dear on an emulated CPU."""
WHOLE = {
    "kernel": ["tests/kernel"],
    "e2e": [
        "tests/e2e/test_layers_on_disk.py",
        "tests/e2e/test_lifecycle.py",
        "tests/e2e/test_limits.py",
        "tests/e2e/test_exec_exit.py",
        "tests/e2e/test_exec_lifetime.py",
        "tests/e2e/test_pause_and_stats.py",
        "tests/e2e/test_snapshots.py",
        "tests/e2e/test_faults_processes.py",
    ],
    "security": ["tests/security"],
    "guest": ["tests/vm/guest"],
}
CHOSEN = WHOLE if FULL else {"short": SHORT}

ABSENT = re.compile(
    # Linux 6.6 and 6.13
    r"overlay-tmpfs does not work here|overlay-detached does not work here"
    # of the host: the machine has neither compilers nor sources of packages
    r"|mmdebstrap does not work here|no mmdebstrap|compiler does not work here|no SIF vectors"
    # what a test says of cgroup v1 and other hierarchies
    r"|cgroup v1|in another hierarchy"
)
"""Why a test may be skipped inside."""


@pytest.mark.timeout((FULL_TIMEOUT_S if FULL else SHORT_TIMEOUT_S) + 600)
@pytest.mark.parametrize("tier", CHOSEN)
def test_tier(vm: Vm, tier: str) -> None:
    chosen = CHOSEN[tier]
    timeout_s = FULL_TIMEOUT_S if FULL else SHORT_TIMEOUT_S
    status, output = vm.pytest(
        ["-q", "--junit-xml=/root/junit.xml", *chosen], timeout_s, {IN_VM: "1"}
    )
    assert status == 0, f"status {status}; the end of what it said:\n{output[-6000:]}"
    report = ET.fromstring(vm.check("cat /root/junit.xml"))
    cases = list(report.iter("testcase"))
    skips = [(case.get("name"), skip.get("message", "")) for case in cases for skip in case]
    unexplained = [skip for skip in skips if not ABSENT.search(skip[1])]
    assert not unexplained
    assert len(cases) > len(skips)


def test_the_machine_is_what_it_is_for(vm: Vm) -> None:
    """Or everything else here proves nothing."""
    said = vm.check(
        "uname -r; cd /sys/fs/cgroup; cat cgroup.controllers; cat /proc/1/comm; stat -fc %T ."
    ).splitlines()
    assert said[0].startswith("6.1.")
    assert {"cpu", "memory", "pids", "io"} <= set(said[1].split())
    assert said[2:] == ["systemd", "cgroup2fs"]
