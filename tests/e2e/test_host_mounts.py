"""Files of the host in a sandbox: what is seen, by whom, and what outlives what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxd.client import Client
from tests.e2e.command_line import CommandLine
from tests.e2e.restarts import running_node
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two mount roots of the host: `data`, and `out` for writing."""
    base = tmp_path_factory.mktemp("host")
    data, out = base / "data", base / "out"
    (data / "sets" / "a").mkdir(parents=True)
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    (data / "sets" / "a" / "x.txt").write_text("rows\n")
    (data / "sets" / "secret").write_text("0600\n")
    (data / "sets" / "secret").chmod(0o600)
    (data / "sets" / "mine").write_text("of 1000\n")
    os.chown(data / "sets" / "mine", 1000, 1000)
    return base


def roots(shared: Path) -> dict[str, str]:
    return {"SANDBOXD_MOUNT_ROOTS": f"{shared}/data, {shared}/out:rw"}


@pytest.fixture(scope="module")
def mounting(leak_check: LeakCheck, busybox: Path, shared: Path) -> Iterator[Daemon]:
    with running_daemon(leak_check, {"busybox": busybox}, (), roots(shared)) as started:
        started.warm_up("busybox")
        yield started


def mount(source: Path, target: str, **more: Any) -> dict[str, Any]:
    return {"source": str(source), "target": target, **more}


def seen(daemon: Daemon, sandbox: str, command: str) -> str:
    return str(daemon.exec(sandbox, command)["stdout"])


def test_a_directory_and_a_file_are_seen_and_not_written_to(mounting: Daemon, shared: Path) -> None:
    sets = shared / "data" / "sets"
    mounts = [mount(sets, "/data/deep"), mount(sets / "a" / "x.txt", "/etc/rows")]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        told = mounting.http.get(f"/v1/sandboxes/{sandbox}").json()["mounts"]
        assert [(one["source"], one["target"], one["read_only"]) for one in told] == [
            (str(sets), "/data/deep", True),
            (str(sets / "a" / "x.txt"), "/etc/rows", True),
        ]
        assert seen(mounting, sandbox, "cat /data/deep/a/x.txt /etc/rows") == "rows\nrows\n"
        assert seen(mounting, sandbox, "touch /data/deep/new 2>&1; echo x 2>&1 >/etc/rows").count(
            "Read-only file system"
        )
        # Directories above a target are the sandbox's own.
        assert seen(mounting, sandbox, "stat -c '%u %g %a' /data") == "0 0 755\n"
        put = mounting.http.put(
            f"/v1/sandboxes/{sandbox}/files", params={"path": "/data/deep/f"}, content=b"x"
        )
        assert put.json()["error"]["cause"] == "request"
        got = mounting.http.get(
            f"/v1/sandboxes/{sandbox}/files", params={"path": "/data/deep/a/x.txt"}
        )
        assert got.content == b"rows\n"
    assert sorted(os.listdir(sets)) == ["a", "mine", "secret"]


def test_ids_are_the_hosts_where_the_answer_says_so(mounting: Daemon, shared: Path) -> None:
    sets = shared / "data" / "sets"
    with mounting.sandbox("busybox", mounts=[mount(sets, "/data")]) as sandbox:
        ids = mounting.http.get(f"/v1/sandboxes/{sandbox}").json()["mounts"][0]["ids"]
        owners = seen(mounting, sandbox, "stat -c '%u' /data/secret /data/mine")
        read = mounting.exec(sandbox, "cat /data/secret")["stdout"]
        mine = mounting.exec(sandbox, "cat /data/secret", user="1000")["exit_code"]
        if ids == "mapped":
            assert (owners, read, mine) == ("0\n1000\n", "0600\n", 1)
        else:
            assert (owners, read, mine) == ("65534\n65534\n", "", 1)


def test_a_writable_mount_writes_as_nobody_of_the_host(mounting: Daemon, shared: Path) -> None:
    mounts = [mount(shared / "out", "/out", read_only=False)]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        told = mounting.http.get(f"/v1/sandboxes/{sandbox}").json()["mounts"][0]
        assert (told["read_only"], told["ids"]) == (False, "unmapped")
        assert mounting.exec(sandbox, "echo done > /out/result; chmod 4755 /out/result")
        result = shared / "out" / "result"
        assert result.read_text() == "done\n"
        assert result.stat().st_uid > 65535  # an id of the sandboxes' range, not the host's root
        result.unlink()


def test_it_goes_with_the_sandbox(mounting: Daemon, shared: Path) -> None:
    """Through a reset, a snapshot, a rollback and a fork."""
    mounts = [mount(shared / "data", "/data"), mount(shared / "out", "/out", read_only=False)]
    read = "cat /data/sets/a/x.txt; echo $(cat /own 2>/dev/null); touch /out/w && rm /out/w"
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        url = f"/v1/sandboxes/{sandbox}"
        mounting.exec(sandbox, "echo kept > /own")
        snapshot = mounting.http.post(f"{url}/snapshots", json={}).json()["id"]
        assert mounting.exec(sandbox, read)["stdout"] == "rows\nkept\n"
        assert mounting.exec(sandbox, read)["exit_code"] == 0
        for body, own in (({}, ""), ({"snapshot": snapshot}, "kept")):
            reset = mounting.http.post(f"{url}/reset", json=body)
            assert reset.is_success, reset.text
            assert mounting.exec(sandbox, read)["stdout"] == f"rows\n{own}\n"
        fork = mounting.http.post("/v1/sandboxes", json={"snapshot": snapshot}).json()
        assert [one["target"] for one in fork["mounts"]] == ["/data", "/out"]
        assert mounting.exec(fork["id"], read)["stdout"] == "rows\nkept\n"
        mounting.delete(fork["id"])
        bare = {"snapshot": snapshot, "mounts": []}
        fork = mounting.http.post("/v1/sandboxes", json=bare).json()
        assert fork["mounts"] == []
        assert mounting.exec(fork["id"], "ls /data")["stdout"] == ""
        mounting.delete(fork["id"])
        assert mounting.http.delete(f"/v1/snapshots/{snapshot}").is_success


def test_a_daemon_that_starts_anew_knows_of_it(
    leak_check: LeakCheck, busybox: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in roots(shared).items():
        monkeypatch.setenv(name, value)
    with running_node(leak_check, {"busybox": busybox}, environment=roots(shared)) as node:
        first = node.serve()
        mounts = [mount(shared / "data", "/data")]
        sandbox = first.create("busybox", mounts=mounts)
        before = first.http.get(f"/v1/sandboxes/{sandbox}").json()["mounts"]
        node.kill_daemon(first)
        again = node.serve()
        assert again.http.get(f"/v1/sandboxes/{sandbox}").json()["mounts"] == before
        assert again.http.post(f"/v1/sandboxes/{sandbox}/reset", json={}).is_success
        assert again.exec(sandbox, "cat /data/sets/a/x.txt")["stdout"] == "rows\n"
        again.delete(sandbox)


def test_a_copy_leaves_it_out(mounting: Daemon, shared: Path) -> None:
    mounts = [mount(shared / "data", "/work/data")]
    with mounting.sandbox("busybox", mounts=mounts) as sandbox:
        mounting.exec(sandbox, "echo own > /work/own")
        body = {"copy_from": {"sandbox": sandbox, "paths": ["/work"]}}
        copy = mounting.http.post("/v1/sandboxes", json=body)
        assert copy.is_success, copy.text
        assert mounting.exec(copy.json()["id"], "cat /work/own; ls /work/data")["stdout"] == "own\n"
        mounting.delete(copy.json()["id"])
        # And a mount goes over what was copied.
        copy = mounting.http.post("/v1/sandboxes", json={**body, "mounts": mounts})
        assert copy.is_success, copy.text
        assert (
            mounting.exec(copy.json()["id"], "cat /work/own /work/data/sets/a/x.txt")["stdout"]
            == "own\nrows\n"
        )
        mounting.delete(copy.json()["id"])


def test_a_primed_slot_is_nobody_elses(mounting: Daemon, shared: Path) -> None:
    """Many of the same image, with and without a mount, one after another."""
    for _ in range(6):
        with mounting.sandbox("busybox") as plain:
            assert seen(mounting, plain, "ls /data 2>&1").count("No such file")
        with mounting.sandbox("busybox", mounts=[mount(shared / "data", "/data")]) as sandbox:
            assert seen(mounting, sandbox, "cat /data/sets/a/x.txt") == "rows\n"


def test_the_client_and_the_command_line(mounting: Daemon, shared: Path) -> None:
    with Client(mounting.base_url, mounting.token) as client:
        options = [{"source": str(shared / "data"), "target": "/data"}]
        with client.create("busybox", mounts=options) as box:
            assert box.info.mounts[0]["target"] == "/data"
            assert box.exec("cat /data/sets/a/x.txt").stdout == "rows\n"
    words = ["--mount", f"{shared}/data:/data", "--mount", f"{shared}/out:/out:rw"]
    done = CommandLine(mounting)("run", *words, "busybox", "--", "ls", "/data", "/out")
    assert (done.returncode, done.stdout) == (0, b"/data:\nsets\n\n/out:\n"), done.stderr
