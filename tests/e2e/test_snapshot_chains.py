"""Long chains of snapshots, many forks of one, and what is left when they are let go of."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.host_processes import wait_for
from tests.e2e.refusals import refusal
from tests.e2e.test_snapshots import fork_of, reset, rollback, sh, take
from tests.framework.daemon import Daemon

MIB = 1024 * 1024


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


def lowers_of(daemon: Daemon, sandbox: str) -> int:
    """How many layers and images the sandbox's root stands on, as the kernel says."""
    options = sh(daemon, sandbox, "grep ' / / ' /proc/self/mountinfo").split(" - ")[1].split()[2]
    names = [one for one in options.split(",") if one.startswith("lowerdir")]
    return sum(len(one.split("=", 1)[1].split(":")) for one in names)


LOOK = (
    # Of a directory's size OverlayFS tells that of its uppermost layer.
    "cd /; find c d e bin etc -type d 2>/dev/null | sort | xargs stat -c '%n %f %u %g %Y';"
    "find c d e bin etc ! -type d 2>/dev/null | sort | xargs stat -c '%n %f %u %g %s %Y';"
    "md5sum $(find c d -type f | sort);ls -AR c d e"
)


def test_a_merged_stack_shows_what_the_layers_did(daemon: Daemon, box: str):
    """Every mark that OverlayFS makes, spread over more layers than are kept apart."""
    steps = (
        "mkdir -p /c /d/one /d/two /e; echo 1 > /c/f; echo 1 > /d/one/x; echo 1 > /d/two/x",
        "rm /bin/true; rm -r /home; chmod 700 /etc; echo 2 > /c/g; ln /c/g /c/h",
        "rm -r /d/one; mkdir /d/one; echo 3 > /d/one/y",  # opaque over a layer
        "rm -r /etc; mkdir /etc; echo 4 > /etc/four",  # opaque over the image
        "rm /c/f; mkdir /c/f; echo 5 > /c/f/in; ln -s /c/f /c/s; mkfifo /c/p",
        "rm /d/two/x; rmdir /d/two; echo 6 > /d/two",  # a file in the place of a directory
        "echo 7 > /e/k; rm /e/k; mkdir /e/new; echo 7 > /e/new/k",
        "rm /e/new/k; chown 5:6 /c/g; touch -d '2001-01-01 00:00:00' /c/g",  # whiteout, pure parent
        "truncate -s 1000000 /c/hole; chmod 4755 /c/g",
        "rm -r /c/f; echo 10 > /c/f",
        "echo 11 > /c/last",
    )
    for step in steps:
        sh(daemon, box, step)
        last = take(daemon, box)["id"]
    expected = sh(daemon, box, LOOK)
    assert "new/k" not in expected
    fork = ""

    def is_merged() -> bool:
        nonlocal fork
        if fork:
            daemon.delete(fork)
        fork = fork_of(daemon, last)
        return lowers_of(daemon, fork) <= 8

    wait_for(is_merged, "the merging of layers")
    try:
        assert sh(daemon, fork, LOOK) == expected
        # And it can be written to like any other.
        sh(daemon, fork, "echo more > /etc/more; rm /c/last; rm -r /d; mkdir /d")
        assert sh(daemon, fork, "ls /etc; ls /d; cat /etc/four") == "four\nmore\n4\n"
    finally:
        daemon.delete(fork)
    changed = daemon.http.get(f"/v1/snapshots/{last}/diff").json()["changes"]
    assert {"/etc/four", "/home", "/bin/true"} <= {one["path"] for one in changed}


def test_two_hundred_snapshots_in_a_row(daemon: Daemon, box: str):
    ids = []
    for i in range(200):
        sh(daemon, box, f"echo {i} > /f{i}; echo {i} > /last; rm -f /f{i - 3}")
        ids.append(take(daemon, box)["id"])
    assert sh(daemon, box, "cd /; ls -d f*; cat last") == "f197\nf198\nf199\n199\n"
    assert lowers_of(daemon, box) <= 33
    rollback(daemon, box, ids[10])
    assert sh(daemon, box, "cd /; ls -d f*; cat last") == "f10\nf8\nf9\n10\n"
    rollback(daemon, box, ids[-1])
    assert sh(daemon, box, "cd /; ls -d f*; cat last") == "f197\nf198\nf199\n199\n"


def test_two_hundred_rollbacks_in_a_row(daemon: Daemon, box: str):
    """Each goes on from the last snapshot, and lets go of the one before."""
    kept = take(daemon, box)["id"]
    for i in range(200):
        sh(daemon, box, f"echo {i} >> /log")
        now = take(daemon, box)["id"]
        sh(daemon, box, "echo lost >> /log")
        rollback(daemon, box, now)
        assert daemon.http.delete(f"/v1/snapshots/{kept}").status_code == 204
        kept = now
    assert sh(daemon, box, "cat /log").split() == [str(i) for i in range(200)]
    assert lowers_of(daemon, box) <= 33


def test_layers_that_cannot_be_merged_end_in_a_refusal(daemon: Daemon, box: str):
    deep = "i=0; cd /tmp; while [ $i -lt 300 ]; do i=$((i+1)); mkdir d; cd d; done"
    sh(daemon, box, deep)
    url = f"/v1/sandboxes/{box}/snapshots"
    for _ in range(60):
        answer = daemon.http.post(url, json={})
        if answer.status_code != 201:
            break
        # The innermost anew: all the directories on the way are copied up into this layer too.
        sh(daemon, box, f"rmdir $(cd /tmp; find . -type d | tail -1 | sed 's,^,/tmp/,'); {deep}")
    refusal(answer, 422, "snapshot-too-deep", "request")
    assert sh(daemon, box, "echo usable") == "usable\n"


def test_a_hundred_forks_at_once_are_each_their_own(daemon: Daemon):
    limits = {"disk_mb": 16, "memory_mb": 32}
    origin = daemon.create("busybox", limits=limits)
    sh(daemon, origin, f"mkdir /w; head -c {4 * MIB} /dev/urandom > /w/data")
    digest = sh(daemon, origin, "md5sum < /w/data")
    snapshot = take(daemon, origin)["id"]
    daemon.delete(origin)

    def fork(number: int) -> str:
        body = {"snapshot": snapshot, "limits": limits}
        answer = daemon.http.post("/v1/sandboxes", json=body, timeout=60)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    with ThreadPoolExecutor(16) as pool:
        forks = list(pool.map(fork, range(100)))
        assert len(set(forks)) == 100
        # The snapshot goes while they live: they stand on its layer themselves.
        assert daemon.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
        write = "echo {0} > /w/own; md5sum < /w/data"
        got = list(pool.map(lambda n: sh(daemon, forks[n], write.format(n)), range(100)))
        assert got == [digest] * 100
        own = list(pool.map(lambda n: sh(daemon, forks[n], "cat /w/own"), range(100)))
        assert own == [f"{n}\n" for n in range(100)]
        list(pool.map(daemon.delete, forks))


def test_memory_goes_with_the_last_who_stands_on_a_layer(daemon: Daemon, box: str):
    def free_mib() -> int:
        with open("/proc/meminfo", encoding="ascii") as lines:
            shmem = next(line for line in lines if line.startswith("Shmem:"))
        return int(shmem.split()[1]) // 1024

    before = free_mib()
    sh(daemon, box, f"head -c {48 * MIB} /dev/zero > /big")
    snapshot = take(daemon, box)["id"]
    fork = fork_of(daemon, snapshot)
    reset(daemon, box)
    assert daemon.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    assert sh(daemon, fork, "stat -c %s /big") == f"{48 * MIB}\n"
    assert free_mib() - before > 24  # positive control: the fork keeps it
    daemon.delete(fork)
    wait_for(lambda: free_mib() - before < 24, "the layer's memory to be given back")


def test_a_merge_is_charged_to_the_sandbox(daemon: Daemon, box: str):
    """Or snapshots would take what was written out of its memory limit, turn by turn."""
    for i in range(10):
        sh(daemon, box, f"head -c {MIB} /dev/urandom > /f{i}")
        take(daemon, box)
    for snapshot in daemon.http.get("/v1/snapshots").json()["snapshots"]:
        assert daemon.http.delete(f"/v1/snapshots/{snapshot['id']}").status_code == 204

    def stands_on_one() -> bool:
        take(daemon, box)
        return lowers_of(daemon, box) <= 8

    def used() -> int:
        stats = daemon.http.get(f"/v1/sandboxes/{box}/stats").json()
        return int(stats["memory"]["used_bytes"])

    wait_for(stands_on_one, "the merge")
    wait_for(lambda: used() < 18 * MIB, "the layers that were merged to go")
    assert used() > 9 * MIB


def test_sandboxes_that_die_while_their_layers_are_merged_leave_nothing(daemon: Daemon):
    for _ in range(5):
        box = daemon.create("busybox", limits={"disk_mb": 64, "memory_mb": 128})
        sh(daemon, box, f"head -c {20 * MIB} /dev/urandom > /a")
        for i in range(10):
            sh(daemon, box, f"echo {i} > /f{i}")
            take(daemon, box)
        daemon.delete(box)
    # What is left the leak check of this tier would tell.
