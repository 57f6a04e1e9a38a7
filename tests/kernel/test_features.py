"""The probes agree with outside probes, leave nothing, and tell failure from success."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandboxd.linux import (
    cgroup,
    child,
    features,
    id_ranges,
    mount,
    namespaces,
    process,
    programs,
)
from sandboxd.linux.child import ChildError
from sandboxd.linux.findings import Status, probe_to_json
from sandboxd.linux.id_ranges import IdRange
from sandboxd.linux.probes import cgroups, mounts, processes
from sandboxd.model import Enforcement
from tests.framework import probes as outside
from tests.framework import times

IDS = IdRange(2_000_000_000, 65_538)
TIMEOUT_S = times.scaled(20.0)


def map_many(pid):
    id_ranges.map_ids(pid, IDS, IDS)


@pytest.fixture(scope="module")
def found():
    return features.probe(ids=IDS, sandboxes=1)


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        ("overlay", "overlay"),
        ("fuse", "fuse"),
        ("seccomp", "seccomp"),
        ("cgroup-kill", "cgroup_kill"),
    ],
)
def test_agrees_with_the_test_suites_own_probe(found, feature, name):
    assert getattr(found[0], name) == (outside.missing(feature) is None)


@pytest.mark.needs("cgroup-limits")
def test_limits_that_can_be_set_are_held(found):
    assert found[0].limits["memory"] == Enforcement.ENFORCED
    assert found[0].limits["pids"] == Enforcement.ENFORCED


@pytest.mark.needs("namespaces", "overlay", "fuse")
def test_everything_a_sandbox_needs_works(found):
    result, probes = found
    assert result.ids == features.NODE_IDS
    assert result.squashfuse == str(programs.find_program("squashfuse_ll"))
    assert (result.overlay, result.fuse, result.proc, result.pidfd) == (True, True, True, True)
    assert all(probe.remedy for probe in probes if probe.status != Status.OK)
    assert len({probe.name for probe in probes}) == len(probes)


def test_features_and_probes_are_json(found):
    result, probes = found
    again = json.loads(json.dumps(result.to_json()))
    assert again["ids"] == result.ids
    assert again["limits"]["memory"] in {"enforced", "none"}
    assert json.loads(json.dumps([probe_to_json(probe) for probe in probes]))


def test_no_web_stack_is_imported():
    code = (
        "import sys, sandboxd.linux.features\n"
        "print(*{n.partition('.')[0] for n in sys.modules} "
        "& {'fastapi', 'pydantic', 'asyncio', 'httpx', 'starlette', 'trio'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_range_that_is_too_small_is_a_failure():
    _, probes = features.probe(ids=IdRange(2_000_000_000, 1000), sandboxes=1)
    (ids,) = [probe for probe in probes if probe.name == "id range"]
    assert ids.status == Status.FAIL
    assert str(features.NODE_IDS) in ids.remedy


def test_an_account_that_does_not_exist_is_named():
    _, probes = features.probe("no-such-account", sandboxes=1)
    by_name = {probe.name: probe for probe in probes}
    assert by_name["account"].status != Status.OK
    assert "useradd" in by_name["account"].remedy
    if os.geteuid() == 0:
        assert by_name["id range"].status == Status.FAIL
        assert "--add-subuids" in by_name["id range"].remedy


@pytest.mark.needs("root")
def test_an_ordinary_account_gets_an_answer():
    """Without ranges of ids, cgroups or /dev/fuse; what needs none of them works all the same."""

    def work():
        os.setgroups([])
        os.setresgid(65_534, 65_534, 65_534)
        os.setresuid(65_534, 65_534, 65_534)
        process.set_dumpable(True)
        found, probes = features.probe(sandboxes=1)
        return [found.to_json(), {probe.name: probe.status for probe in probes}]

    found, statuses = child.run(work, TIMEOUT_S)
    assert found["ids"] in (0, 1)
    # Another writable layer than tmpfs takes the host's root.
    on_tmpfs = found["ids"] == 1 and outside.missing("overlay-tmpfs") is None
    assert (found["overlay"], found["proc"]) == (on_tmpfs, found["ids"] == 1)
    assert (found["pidfd"], found["seccomp"]) == (True, True)
    assert found["limits"] == {"memory": "watchdog", "pids": "watchdog", "cpu": "none"}
    assert statuses["id range"] == Status.WARN


def test_a_squashfuse_without_fuse_need_not_be_reinstalled(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "/dev/fuse")

    monkeypatch.setattr(mounts, "fuse", refuse)
    monkeypatch.setattr(mounts, "squashfuse", refuse)
    _, probes = features.probe(ids=IDS, sandboxes=1)
    remedies = {probe.name: probe.remedy for probe in probes if probe.status == Status.FAIL}
    assert "/dev/fuse" in remedies["fuse"]
    assert "fuse" in remedies["squashfuse"]
    assert "install" not in remedies["squashfuse"]


def test_without_user_namespaces_nothing_is_tried_in_them(monkeypatch):
    def refuse(map_ids, nested_count):
        raise PermissionError(errno.EPERM, "Operation not permitted", "unshare")

    monkeypatch.setattr(mounts, "user_namespaces", refuse)
    found, probes = features.probe(ids=IDS, sandboxes=1)
    assert (found.ids, found.overlay, found.fuse, found.squashfuse) == (0, False, False, None)
    details = {probe.name: probe.detail for probe in probes if probe.status == Status.FAIL}
    assert details["user namespaces"] == "Operation not permitted (unshare)"
    assert details["overlay"] == "not tried"


def in_broken_place(breakage, action):
    """``action`` in a mount namespace that ``breakage`` has spoiled; its errno, or None."""

    def work():
        breakage()
        try:
            action()
        except OSError as error:
            return error.errno
        except ChildError as error:
            return str(error)
        return None

    return child.run(work, TIMEOUT_S, namespaces.CLONE_NEWNS)


@pytest.mark.needs("root", "loop", "overlay")
class TestWritableLayer:
    def test_ext4_serves_where_tmpfs_cannot(self, monkeypatch):
        def refuse(map_ids, detached):
            raise OSError(errno.EIO, "Input/output error", "directory")

        monkeypatch.setattr(mounts, "overlay", refuse)
        result, probes = features.probe()
        (told,) = [probe for probe in probes if probe.name == "overlay"]
        assert (result.overlay, result.writable_layer) == (True, "ext4")
        assert told.status == Status.WARN
        assert "not on tmpfs: Input/output error (directory)" in told.detail

        result, probes = features.probe(writable_layer="tmpfs")
        assert (result.overlay, result.writable_layer) == (False, None)
        assert Status.FAIL in [probe.status for probe in probes if probe.name == "overlay"]

    def test_neither_is_a_failure_that_names_both(self, tmp_path):
        result, probes = features.probe(
            writable_layer="ext4", layers_dir=str(tmp_path / "no-such-directory")
        )
        (told,) = [probe for probe in probes if probe.name == "overlay"]
        assert (result.overlay, result.writable_layer) == (False, None)
        assert told.status == Status.FAIL
        assert "no-such-directory" in told.detail


@pytest.mark.needs("root", "overlay", "fuse")
class TestBroken:
    """A control for each probe: where the feature is taken away, the probe says so."""

    def test_fuse_without_its_device(self):
        def cover_dev():
            mount.mount("tmpfs", "/dev", "tmpfs")

        assert in_broken_place(cover_dev, lambda: mounts.fuse(map_many)) == errno.ENOENT

    def test_squashfuse_that_is_another_program(self):
        false = programs.find_program("false")
        with pytest.raises(OSError, match="false"):
            mounts.squashfuse(map_many, false)

    def test_squashfuse_that_never_answers(self, monkeypatch):
        monkeypatch.setattr(mounts, "TIMEOUT_S", 0.2)
        # Not below mounts.SCRATCH, which the probe covers, nor where mapped ids may not go.
        with tempfile.TemporaryDirectory(prefix="sandboxd-test-", dir="/var/tmp") as name:
            os.chmod(name, 0o755)
            program = Path(name, "squashfuse_ll")
            program.write_text("#!/bin/sh\nexec sleep 60\n")
            program.chmod(0o755)
            with pytest.raises(TimeoutError):
                mounts.squashfuse(map_many, program)

    def test_proc_that_is_partly_covered(self):
        def cover():
            mount.mount("tmpfs", "/proc/sys", "tmpfs", mount.MS_RDONLY)

        broken = in_broken_place(cover, lambda: mounts.proc_visible(map_many))
        assert broken == errno.EPERM

    def test_user_namespaces_that_are_used_up(self):
        """user.max_user_namespaces of the namespace we stand in, so that the host keeps its own."""

        def work():
            with open("/proc/sys/user/max_user_namespaces", "w") as file:
                file.write("0")
            try:
                mounts.user_namespaces(id_ranges.map_self_only, 1)
            except OSError as error:
                return error.errno
            return None

        flags = namespaces.CLONE_NEWUSER
        assert child.run(work, TIMEOUT_S, flags, map_many) == errno.ENOSPC

    def test_cgroups_that_are_not_there(self):
        nothing = cgroup.CgroupLayout(None, frozenset())
        actions = (
            cgroups.clone_into_and_kill,
            cgroups.memory_limit,
            cgroups.pids_limit,
            cgroups.cpu_limit,
        )
        for action in actions:
            with pytest.raises(FileNotFoundError):
                action(nothing)

    def test_cgroups_that_are_read_only(self):
        def read_only():
            flags = mount.AT_RECURSIVE
            mount.mount_setattr(
                mount.AT_FDCWD, "/sys/fs/cgroup", flags, attr_set=mount.MOUNT_ATTR_RDONLY
            )

        layout = cgroup.layout()
        assert in_broken_place(read_only, lambda: cgroups.pids_limit(layout)) == errno.EROFS

    def test_a_limit_that_is_not_held(self, monkeypatch):
        """The same probe with the limit never written: it must not be believed."""
        layout = cgroup.layout()
        for controller in ("memory", "pids", "cpu"):
            shape = type(cgroups.limits_for(layout, controller))
            monkeypatch.setattr(shape, f"set_{controller}", lambda self, path, value: None)
            with pytest.raises(OSError, match="was granted"):
                getattr(cgroups, f"{controller}_limit")(layout)


def test_seccomp_and_pidfd_probes_pass():
    processes.seccomp_filter()
    processes.pidfds()
