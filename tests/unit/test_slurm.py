"""The published files, the directories on a node and what Slurm's programs say; without Slurm."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from sandboxd.client import AsyncClient, Client
from sandboxd.client import slurm as published
from sandboxd.client.failures import ClientMisused
from sandboxd.client.slurm import SlurmNode
from sandboxd.errors import ConfigError, FeatureMissing
from sandboxd.slurm import instances, jobs, step
from sandboxd.slurm.publish import Publication

NODE = SlurmNode("4711", "node1", "http://127.0.0.1:9", "secret-token-of-node1", 2, 1767225600.0)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    where = tmp_path / "4711"
    where.mkdir(mode=0o700)
    return where


def test_what_is_written_is_read(directory: Path, tmp_path: Path):
    old = os.umask(0)
    try:
        Publication(directory, NODE).write()
    finally:
        os.umask(old)
    assert os.listdir(directory) == ["node1.json"]  # nothing half made is left
    assert stat.S_IMODE((directory / "node1.json").stat().st_mode) == 0o600
    assert published.nodes(4711, tmp_path) == [NODE]
    assert published.node("node1", "4711", tmp_path) == NODE
    assert NODE.token not in repr(NODE)


def test_a_client_finds_its_own_node(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Publication(directory, NODE).write()
    monkeypatch.setenv("SANDBOXD_SLURM_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    for kind in (Client, AsyncClient):
        found = kind.from_slurm()
        assert found.url == "http://127.0.0.1:9"
        assert found.address.authorization == "Bearer secret-token-of-node1"
    with pytest.raises(ClientMisused, match="node2 is published"):
        Client.from_slurm("node2")
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ClientMisused, match="no Slurm job"):
        Client.from_slurm()


@pytest.mark.parametrize("name", ["../4711/node1", "", ".hidden", "a/b", "node1\n", "x" * 65])
def test_no_name_leads_out_of_the_directory(name: str):
    with pytest.raises(ClientMisused):
        published.file_name(name)


@pytest.mark.parametrize("job", ["..", "1/2", "-1", "x", "१"])
def test_no_job_leads_out_of_the_directory(job: str, tmp_path: Path):
    with pytest.raises(ClientMisused, match="no id of a Slurm job"):
        published.job_directory(job, tmp_path)


def test_what_others_could_have_written_is_refused(directory: Path, tmp_path: Path):
    Publication(directory, NODE).write()
    file = directory / "node1.json"
    file.chmod(0o620)
    with pytest.raises(ClientMisused, match="others can"):
        published.nodes(4711, tmp_path)
    file.chmod(0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClientMisused, match="symbolic links"):
        published.nodes(4711, tmp_path)


def test_another_user_s_file_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Publication(directory, NODE).write()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ClientMisused, match="another user"):
        published.nodes(4711, tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "{}", '{"version": 2}', json.dumps(NODE.to_json() | {"url": ""})],
)
def test_what_is_no_publication_is_said(content: str, directory: Path, tmp_path: Path):
    (directory / "node1.json").write_text(content)
    (directory / "node1.json").chmod(0o600)
    with pytest.raises(ClientMisused, match=r"node1\.json"):
        published.nodes(4711, tmp_path)


def test_a_file_has_to_be_gone_twice(directory: Path):
    one = Publication(directory, NODE)
    one.write()
    assert not one.is_gone()
    (directory / "node1.json").unlink()
    assert not one.is_gone()
    assert one.is_gone()
    one.write()
    assert not one.is_gone()


def test_another_run_s_file_is_its_own(directory: Path, tmp_path: Path):
    """A node that was lost does not take away what the requeued job has published there."""
    lost = Publication(directory, NODE)
    lost.write()
    again = SlurmNode("4711", "node1", "http://127.0.0.1:10", "another-token-of-it", 3)
    Publication(directory, again).write()
    assert not lost.is_gone()
    assert lost.is_gone()
    lost.remove()
    assert published.nodes(4711, tmp_path) == [again]


def test_storage_that_fails_has_taken_nothing_away(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    one = Publication(directory, NODE)
    one.write()

    def stale(*_: object, **__: object) -> str:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "read_text", stale)
    assert not any(one.is_gone() for _ in range(5))


def test_a_directory_that_is_missing_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be published"):
        Publication(tmp_path / "4711", NODE).write()


def test_an_instance_is_its_step_s_alone(tmp_path: Path):
    first = instances.claim("1", "node1", where=tmp_path)
    other = instances.claim("1", "node2", where=tmp_path)
    assert first.path != other.path
    with pytest.raises(ConfigError, match="another sandboxd of job 1 serves on node node1"):
        instances.claim("1", "node1", where=tmp_path)
    assert list(instances.remove_dead(tmp_path)) == []  # both live
    assert first.runtime_dir.is_dir()
    os.close(first.lock)  # as its process's end does
    assert list(instances.remove_dead(tmp_path)) == [(first.path, [])]
    assert [path.name for path in tmp_path.iterdir()] == [other.path.name]
    assert other.remove() == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_let_be(tmp_path: Path):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").touch()
    name = f"{instances.PREFIX}-{os.geteuid()}"
    (tmp_path / f"{name}-7-node1").symlink_to(target)
    (tmp_path / f"{instances.PREFIX}-{os.geteuid() + 1}-7-node1").mkdir()
    assert list(instances.remove_dead(tmp_path)) == []
    with pytest.raises(ConfigError, match="another user"):
        instances.claim("7", "node1", where=tmp_path)
    assert (target / "file").exists()


def test_scontrol_s_lines():
    """As Slurm 22.05 prints them; a value may hold spaces and what looks like a key."""
    line = (
        "JobId=2 JobName=a b UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) "
        "ReqNodeList=(null) NodeList=node[1-2] NumNodes=2 TRES=cpu=2,node=2,billing=2 "
        "MinMemoryNode=0 Command=/x y.sh --flag=1 StdOut=/tmp/slurm-2.out Power="
    )
    fields = jobs.parse(line)
    assert fields["JobName"] == "a b"
    assert fields["TRES"] == "cpu=2,node=2,billing=2"
    assert fields["Command"] == "/x y.sh --flag=1"
    assert fields["StdOut"] == "/tmp/slurm-2.out"
    assert fields["Power"] == ""


def test_outside_of_a_job_it_says_so():
    with pytest.raises(FeatureMissing, match="no step of a Slurm job"):
        step.place({"SLURM_JOB_ID": "1"}, None)
    here = step.place(
        {
            "SLURM_JOB_ID": "1",
            "SLURMD_NODENAME": "node1",
            "SLURM_JOB_END_TIME": "1767225600",
            "SLURM_RESTART_COUNT": "2",
        },
        "/shared",
    )
    assert here == step.Place("1", "node1", 2, 1767225600.0, Path("/shared/1"))


def test_without_slurm_it_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FeatureMissing) as missing:
        jobs.show("1")
    assert "slurm-client" in str(missing.value.hint)


@pytest.mark.parametrize("found", ["symlink", "file"])
def test_the_batch_script_takes_no_directory_of_another_s(found: str, tmp_path: Path):
    """Tokens would be written where somebody else has them."""
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    base.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept.json").touch()
    if found == "symlink":
        (base / "4711").symlink_to(elsewhere)
    else:
        (base / "4711").touch()
    done = subprocess.run(
        ["/bin/bash", REPOSITORY / "deploy/slurm/sandboxd.sbatch"],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "SLURM_JOB_ID": "4711",
            "SANDBOXD_SLURM_DIR": str(base),
            "SANDBOXD_SLURM_PROGRAM": "/bin/true",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "is not ours" in done.stderr
    assert (elsewhere / "kept.json").exists()


def programs(directory: Path, **scripts: str) -> str:
    """A PATH on which these come first."""
    directory.mkdir()
    for name, script in scripts.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("said", "told"),
    [("2026-01-01T01:00:00", "1767229200"), ("N/A", "none"), ("", "none"), ("Unknown", "none")],
)
def test_the_daemons_are_told_when_this_job_ends(said: str, told: str, tmp_path: Path):
    """And not when the one ends that it was submitted from."""
    path = programs(
        tmp_path / "bin", squeue=f"echo {said}", srun='echo "${SLURM_JOB_END_TIME-none}"'
    )
    done = subprocess.run(
        ["/bin/bash", REPOSITORY / "deploy/slurm/sandboxd.sbatch"],
        env={
            "PATH": path,
            "TZ": "UTC",
            "HOME": str(tmp_path),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_END_TIME": "1",
            "SANDBOXD_SLURM_PROGRAM": "/bin/true",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, told)
    assert list((tmp_path / ".sandboxd/slurm").iterdir()) == []


def test_a_job_knows_nothing_of_the_one_it_is_submitted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = tmp_path / "seen"
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch=f"env >{seen}; echo '12;cluster'"))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    assert jobs.submit(Path("/script"), ["--nodes=1"], []) == "12"
    names = [line.partition("=")[0] for line in seen.read_text().splitlines()]
    assert [name for name in names if name.startswith("SLURM")] == ["SLURM_CONF"]
