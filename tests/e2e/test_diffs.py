"""What changed in a sandbox or a snapshot: as a list, as a layer's tar."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.host_processes import new_marker, pids_with, wait_for_marker
from tests.e2e.refusals import refusal
from tests.e2e.test_snapshots import fork_of, rollback, sh, take
from tests.framework.daemon import Daemon

TAR = {"Accept": "application/x-tar"}


@pytest.fixture
def box(daemon: Daemon) -> Iterator[str]:
    sandbox = daemon.create("busybox", limits={"disk_mb": 64, "memory_mb": 128})
    yield sandbox
    daemon.delete(sandbox)


@pytest.fixture(autouse=True)
def no_snapshot_left(daemon: Daemon) -> Iterator[None]:
    yield
    for snapshot in daemon.http.get("/v1/snapshots").json()["snapshots"]:
        assert daemon.http.delete(f"/v1/snapshots/{snapshot['id']}").status_code == 204


def diff(daemon: Daemon, what: str, **query: Any) -> dict[str, Any]:
    answer = daemon.http.get(f"/v1/{what}/diff", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(found: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Path: what became of it."""
    return {one["path"]: (one["change"], *one["what"]) for one in found["changes"]}


def layer(daemon: Daemon, what: str, **query: Any) -> dict[str, tarfile.TarInfo]:
    answer = daemon.http.get(f"/v1/{what}/diff", params=query, headers=TAR)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        return {member.name: member for member in tar.getmembers()}


def test_nothing_written_is_no_change(daemon: Daemon, box: str):
    assert diff(daemon, f"sandboxes/{box}") == {"changes": [], "more": False, "next": None}
    assert layer(daemon, f"sandboxes/{box}") == {}


def test_each_kind_of_change_is_told_for_what_it_is(daemon: Daemon, box: str):
    sh(
        daemon,
        box,
        "mkdir -p /n/sub; echo 12345 > /n/file; ln -s file /n/link; mkfifo /n/fifo;"
        "rm /bin/true; rm -r /home; chmod 700 /tmp; echo more >> /etc/passwd;"
        "chown 7:8 /etc/group; rm /bin/false; mkdir /bin/false; echo > /bin/false/x;"
        "touch /etc/passwd /usr; echo gone > /n/gone; rm /n/gone",
    )
    found = diff(daemon, f"sandboxes/{box}")
    assert told(found) == {
        "/bin/false": ("changed", "type"),
        "/bin/false/x": ("added",),
        "/bin/true": ("removed",),
        "/etc/group": ("changed", "owner"),
        "/etc/passwd": ("changed", "content"),
        "/home": ("removed",),
        "/n": ("added",),
        "/n/fifo": ("added",),
        "/n/file": ("added",),
        "/n/link": ("added",),
        "/n/sub": ("added",),
        "/tmp": ("changed", "mode"),
    }
    by_path = {one["path"]: one for one in found["changes"]}
    assert [one["path"] for one in found["changes"]] == sorted(by_path)
    assert (by_path["/n/file"]["size_bytes"], by_path["/n/file"]["type"]) == (6, "file")
    assert by_path["/n/link"]["target"] == "file"
    assert by_path["/tmp"]["mode"] == "0700"
    assert (by_path["/etc/group"]["uid"], by_path["/etc/group"]["gid"]) == (7, 8)


def test_what_is_as_it_was_is_no_change(daemon: Daemon, box: str):
    sh(
        daemon,
        box,
        "cp -p /etc/passwd /tmp/p; echo x >> /etc/passwd; cat /tmp/p > /etc/passwd; rm /tmp/p;"
        "m=$(stat -c %a /etc/group); chmod 600 /etc/group; chmod $m /etc/group",
    )
    assert told(diff(daemon, f"sandboxes/{box}")) == {}


def test_a_directory_made_anew_hides_what_was_in_it(daemon: Daemon, box: str):
    here = sh(daemon, box, "stat -c %a /etc; ls /etc").split()
    mode, names = here[0], here[1:]
    assert "passwd" in names
    sh(
        daemon,
        box,
        f"cat /etc/passwd > /p; m=$(stat -c %a /etc/passwd); rm -r /etc; mkdir -m {mode} /etc;"
        "cat /p > /etc/passwd; chmod $m /etc/passwd; rm /p; echo 1 > /etc/own",
    )
    expected = {f"/etc/{name}": ("removed",) for name in names if name != "passwd"}
    assert told(diff(daemon, f"sandboxes/{box}")) == {**expected, "/etc/own": ("added",)}
    tar = layer(daemon, f"sandboxes/{box}")
    whiteouts = {f"etc/.wh.{name}" for name in names if name != "passwd"}
    assert set(tar) == {".", "etc", "etc/own", *whiteouts}


def test_links_are_told_of_every_name(daemon: Daemon, box: str):
    sh(daemon, box, "ln /etc/passwd /p; echo one > /a; ln /a /b")
    found = diff(daemon, f"sandboxes/{box}")
    assert told(found) == {
        "/a": ("added",),
        "/b": ("added",),
        "/etc/passwd": ("changed", "links"),
        "/p": ("added",),
    }
    tar = layer(daemon, f"sandboxes/{box}")
    assert (tar["b"].type, tar["b"].linkname) == (tarfile.LNKTYPE, "a")
    assert (tar["p"].type, tar["p"].linkname) == (tarfile.LNKTYPE, "etc/passwd")


def test_since_a_snapshot_only_what_came_after(daemon: Daemon, box: str):
    sh(daemon, box, "mkdir /w; echo 1 > /w/one; rm /bin/true")
    first = take(daemon, box)["id"]
    sh(daemon, box, "echo 2 > /w/two; rm /w/one")
    second = take(daemon, box)["id"]
    sh(daemon, box, "echo 3 > /three")
    everything = {
        "/bin/true": ("removed",),
        "/three": ("added",),
        "/w": ("added",),
        "/w/two": ("added",),
    }
    assert told(diff(daemon, f"sandboxes/{box}")) == everything
    since_first = {"/three": ("added",), "/w/one": ("removed",), "/w/two": ("added",)}
    assert told(diff(daemon, f"sandboxes/{box}", since=first)) == since_first
    assert told(diff(daemon, f"sandboxes/{box}", since=second)) == {"/three": ("added",)}
    of_first = {"/bin/true": ("removed",), "/w": ("added",), "/w/one": ("added",)}
    assert told(diff(daemon, f"snapshots/{first}")) == of_first
    backwards = {"/w/one": ("added",), "/w/two": ("removed",)}
    assert told(diff(daemon, f"snapshots/{first}", since=second)) == backwards

    # One that took another way: what the two do not share is looked at on both sides.
    fork = fork_of(daemon, first)
    try:
        sh(daemon, fork, "rm -r /w; echo f > /fork")
        assert told(diff(daemon, f"sandboxes/{fork}", since=second)) == {
            "/fork": ("added",),
            "/w": ("removed",),
        }
        rollback(daemon, box, first)
        assert told(diff(daemon, f"sandboxes/{box}", since=first)) == {}
    finally:
        daemon.delete(fork)


def test_a_list_comes_in_pages_that_miss_nothing(daemon: Daemon, box: str):
    sh(
        daemon,
        box,
        "mkdir -p /d/a/b /d/a-b /d/a.b; i=0;"
        "while [ $i -lt 30 ]; do i=$((i+1)); echo > /d/a/$i; echo > /d/a-b/$i; done;"
        "mkdir /d/a/b/c; echo > /d/a/b/c/x; echo > /d/b",
    )
    whole = diff(daemon, f"sandboxes/{box}")["changes"]
    assert len(whole) == 1 + 3 + 60 + 2 + 1 + 1
    paged: list[Any] = []
    query: dict[str, Any] = {"limit": 7}
    while True:
        page = diff(daemon, f"sandboxes/{box}", **query)
        assert len(page["changes"]) == 7 or not page["more"]
        paged += page["changes"]
        if not page["more"]:
            break
        query["after_base64"] = page["next"]
    assert paged == whole


def test_names_that_are_no_text_come_as_bytes(daemon: Daemon, box: str):
    sh(daemon, box, r"echo > $(printf '/\377x')")
    (one,) = diff(daemon, f"sandboxes/{box}")["changes"]
    assert one["path_base64"] == "L_94"
    (member,) = (name for name in layer(daemon, f"sandboxes/{box}") if name != ".")
    assert member == "\udcffx"


def test_a_name_that_a_layer_would_take_for_a_whiteout_is_refused(daemon: Daemon, box: str):
    sh(daemon, box, "echo > /etc/.wh.passwd")
    assert told(diff(daemon, f"sandboxes/{box}")) == {"/etc/.wh.passwd": ("added",)}
    answer = daemon.http.get(f"/v1/sandboxes/{box}/diff", headers=TAR)
    refusal(answer, 422, "diff-unspeakable", "request")


def test_trees_that_are_too_deep_are_refused_by_name(daemon: Daemon, box: str):
    sh(daemon, box, "i=0; cd /tmp; while [ $i -lt 300 ]; do i=$((i+1)); mkdir d; cd d; done")
    for headers in ({}, TAR):
        answer = daemon.http.get(f"/v1/sandboxes/{box}/diff", headers=headers)
        refusal(answer, 422, "tree-too-large", "request")
    assert sh(daemon, box, "echo usable") == "usable\n"


def test_a_file_larger_than_any_costs_nothing(daemon: Daemon, box: str):
    sh(daemon, box, "truncate -s 1000000000000 /huge /same")
    snapshot = take(daemon, box)["id"]
    sh(daemon, box, "chmod 600 /same")
    assert told(diff(daemon, f"sandboxes/{box}", since=snapshot)) == {"/same": ("changed", "mode")}
    answer = daemon.http.get(f"/v1/snapshots/{snapshot}/diff", headers=TAR)
    refusal(answer, 422, "tree-too-large", "request")


def test_ten_thousand_files_are_all_told(daemon: Daemon, box: str):
    sh(daemon, box, "mkdir /m; cd /m; i=0; while [ $i -lt 10000 ]; do i=$((i+1)); : > $i; done")
    found = diff(daemon, f"sandboxes/{box}", limit=20_000)
    assert (len(found["changes"]), found["more"]) == (10_001, False)
    assert len(layer(daemon, f"sandboxes/{box}")) == 10_002  # the root too


def test_a_running_sandbox_is_looked_at_and_goes_on(daemon: Daemon, box: str):
    marker = new_marker()
    sh(daemon, box, f"(echo > /by; exec sleep {marker}) >/dev/null 2>&1 &")
    wait_for_marker(marker)
    assert told(diff(daemon, f"sandboxes/{box}")) == {"/by": ("added",)}
    assert pids_with(marker) != []
    done = "cat /proc/[0-9]*/stat 2>/dev/null | grep '(sleep)' | cut -d' ' -f3"
    assert sh(daemon, box, done).strip() == "S"  # thawed
    assert set(layer(daemon, f"sandboxes/{box}")) == {".", "by"}


def test_content_and_attributes_are_in_the_tar(daemon: Daemon, box: str):
    sh(
        daemon,
        box,
        "mkdir -m 1770 /d; head -c 100000 /bin/busybox > /d/f; chown 3:4 /d/f; chmod 4755 /d/f;"
        "touch -d '2001-02-03 04:05:06' /d/f",
    )
    answer = daemon.http.get(f"/v1/sandboxes/{box}/diff", headers=TAR)
    expected = sh(daemon, box, "md5sum < /d/f").split()[0]
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        file = tar.getmember("d/f")
        assert (file.mode, file.uid, file.gid, file.mtime) == (0o4755, 3, 4, 981173106)
        content = tar.extractfile(file)
        assert content is not None
        assert hashlib.md5(content.read()).hexdigest() == expected
        assert tar.getmember("d").mode == 0o1770


def test_what_cannot_be_compared_is_named(daemon: Daemon, box: str):
    unknown = "sn-" + "a" * 26
    answer = daemon.http.get(f"/v1/sandboxes/{box}/diff", params={"since": unknown})
    refusal(answer, 404, "snapshot-not-found", "request")
    answer = daemon.http.get(f"/v1/snapshots/{unknown}/diff")
    refusal(answer, 404, "snapshot-not-found", "request")


def test_a_tree_that_changes_all_the_time_is_never_the_nodes_fault(daemon: Daemon, box: str):
    marker = new_marker()
    churn = (
        "cd /tmp; while :; do mkdir -p a/b; echo x > a/b/f; rm -rf a; ln -s b a; rm a; echo > a;"
        "head -c 100000 /bin/busybox > big; : > big; mkfifo p; rm p a; done"
    )
    sh(daemon, box, f"(sh -c '{churn}' {marker}) >/dev/null 2>&1 &")
    wait_for_marker(marker)
    for _ in range(15):
        told = daemon.http.get(f"/v1/sandboxes/{box}/diff")
        assert told.status_code == 200, told.text
        try:
            answer = daemon.http.get(f"/v1/sandboxes/{box}/diff", headers=TAR)
        except httpx.RemoteProtocolError:
            continue  # broken off, so that it cannot be taken for whole
        if answer.status_code == 200:
            with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
                assert "." in tar.getnames()
        else:
            refusal(answer, 409, "file-changed", "request")
    assert pids_with(marker) != []


def test_readers_that_go_away_hold_nobody_up(daemon: Daemon, box: str):
    sh(daemon, box, "head -c 20000000 /dev/urandom > /big")
    for _ in range(8):  # twice as many as are served at once
        with daemon.http.stream("GET", f"/v1/sandboxes/{box}/diff", headers=TAR) as answer:
            next(answer.iter_raw())
    assert told(diff(daemon, f"sandboxes/{box}")) == {"/big": ("added",)}


def test_a_sandbox_that_ran_out_of_memory_can_still_be_judged(daemon: Daemon, box: str):
    sh(daemon, box, "echo > /made")
    hog = "a=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#a}"
    daemon.http.post(f"/v1/sandboxes/{box}/exec", json={"command": hog})
    assert "/made" in told(diff(daemon, f"sandboxes/{box}"))
