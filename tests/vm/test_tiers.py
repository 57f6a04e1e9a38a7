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

SYSTEMD = "tests/vm/guest/test_systemd.py"
LAYERS, LIMITS = "tests/e2e/test_layers_on_disk.py", "tests/e2e/test_limits.py"
SHORT = [
    # First, as they want the machine for themselves.
    "tests/vm/guest/test_doctor.py",
    "tests/vm/guest/test_oom_score.py",
    SYSTEMD,
    f"--deselect={SYSTEMD}::test_the_watchdog_ends_an_api_that_hangs",
    "tests/vm/guest/test_limits_v2.py",
    "tests/vm/guest/test_delegation.py",
    "tests/vm/guest/test_security_attributes.py",
    "tests/kernel/test_features.py::test_agrees_with_the_test_suites_own_probe",
    "tests/kernel/test_features.py::test_everything_a_sandbox_needs_works",
    "tests/kernel/test_features.py::test_limits_that_can_be_set_are_held",
    "tests/kernel/test_features.py::test_seccomp_and_pidfd_probes_pass",
    "tests/kernel/test_linux_cgroup.py",
    "tests/kernel/test_linux_process.py::test_a_number_without_a_process_is_nobody",
    "tests/kernel/test_layers_on_disk.py",
    f"{LAYERS}::test_the_node_says_what_serves",
    f"{LAYERS}::test_files_of_the_image_are_changed_and_removed",
    f"{LAYERS}::test_exactly_so_many_bytes_as_promised",
    f"{LAYERS}::test_reset_begins_anew",
    f"{LAYERS}::test_snapshot_and_fork",
    f"{LAYERS}::test_one_device_a_sandbox_whose_file_has_no_name",
    f"{LIMITS}::test_the_limits_are_in_the_kernels_own_files",
    f"{LIMITS}::test_as_many_processes_as_the_limit_says_can_run",
    f"{LIMITS}::test_memory_within_the_limit_can_be_had",
    f"{LIMITS}::test_half_a_cpu_is_half_a_cpu",
    # Of each family one or two; of settings, mounts, PID 1, privileges and system calls some two
    # hundred tries, as root and as agent, by each way into a sandbox.
    "tests/security/test_channels.py::test_walls_hold[fresh]",
    "tests/security/test_attributes.py::test_security_attribute_is_refused[root-exec-x-/dev/shm]",
    "tests/security/test_attributes.py::test_attributes_on_a_tmpfs_are_bounded[agent-security_attributes]",
    "tests/security/test_archives.py::test_hostile_archive_is_refused[pax-a device]",
    "tests/security/test_cgroup.py::test_own_cgroup_shows_no_path_of_the_host",
    "tests/security/test_cgroup.py::test_cgroup_cannot_be_mounted",
    "tests/security/test_cgroup.py::test_cgroup_namespace_cannot_be_left",
    "tests/security/test_devices.py::test_dev_holds_the_allowed_nodes_only",
    "tests/security/test_devices.py::test_shared_device_inode_takes_no_attributes",
    "tests/security/test_exec_child.py::test_command_holds_three_descriptors",
    "tests/security/test_exclusive.py::test_killed_rivals_are_gone",
    "tests/security/test_exhaustion.py::test_memory",
    "tests/security/test_exhaustion.py::test_inodes",
    "tests/security/test_files_api.py::test_ordinary_user_does_not_write_for_root",
    "tests/security/test_http_api.py::test_control_the_token_opens",
    "tests/security/test_http_api.py::test_two_authorizations_are_none",
    "tests/security/test_information.py::test_mounts_are_those_of_the_sandbox_alone",
    "tests/security/test_information.py::test_hostname_is_the_sandboxs",
    "tests/security/test_ipc.py::test_posix_queue_of_another_sandbox_is_not_seen",
    "tests/security/test_network.py::test_there_is_no_route",
    "tests/security/test_network.py::test_daemons_port_is_not_reached",
    "tests/security/test_shared_limits.py::test_keys_are_refused_altogether",
    "tests/security/test_views.py::test_views_cannot_be_taken_off",
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
    assert status == 0, f"status {status}:\n{_failures(output)}"
    report = ET.fromstring(vm.check("cat /root/junit.xml"))
    cases = list(report.iter("testcase"))
    skips = [(case.get("name"), skip.get("message", "")) for case in cases for skip in case]
    unexplained = [skip for skip in skips if not ABSENT.search(skip[1])]
    assert not unexplained
    assert len(cases) > len(skips)


def _failures(output: str) -> str:
    """The part that says what failed: tables of probes, and a summary, come after it."""
    found = re.search(r"^=+ (ERRORS|FAILURES) =+$", output, re.MULTILINE)
    return output[found.start() :][:12_000] if found else output[-6000:]


def test_the_machine_is_what_it_is_for(vm: Vm) -> None:
    """Or everything else here proves nothing."""
    said = vm.check(
        "uname -r; cd /sys/fs/cgroup; cat cgroup.controllers; cat /proc/1/comm; stat -fc %T ."
    ).splitlines()
    assert said[0].startswith("6.1.")
    assert {"cpu", "memory", "pids", "io"} <= set(said[1].split())
    assert said[2:] == ["systemd", "cgroup2fs"]
