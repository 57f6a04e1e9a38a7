"""Directories in and out of a sandbox as tar streams, over HTTP."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.host_processes import wait_for
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

MIB = 1 << 20
BYTES_ENV = "SANDBOXD_TESTS_LARGE_FILE_BYTES"


def url_of(sandbox: str) -> str:
    return f"/v1/sandboxes/{sandbox}/archive"


def put(daemon: Daemon, sandbox: str, path: str, content: Any, **params: Any) -> httpx.Response:
    return daemon.http.put(url_of(sandbox), params={"path": path, **params}, content=content)


def get(daemon: Daemon, sandbox: str, path: str, **params: Any) -> httpx.Response:
    answer = daemon.http.get(url_of(sandbox), params={"path": path, **params})
    assert answer.status_code == 200, answer.text
    return answer


def packed(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for one in members:
            if isinstance(one, tarfile.TarInfo):
                archive.addfile(one)
                continue
            info = tarfile.TarInfo(one[0])
            info.size = len(one[1])
            archive.addfile(info, io.BytesIO(one[1]))
    return out.getvalue()


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return sorted(opened.getnames())


def sh(daemon: Daemon, sandbox: str, script: str, **request: Any) -> str:
    result = daemon.exec(sandbox, script, **request)
    assert result["exit_code"] == 0, result
    return str(result["stdout"])


def test_a_directory_goes_in_and_comes_out_as_tar_1_has_it(
    daemon: Daemon, sandbox: str, tmp_path: Path
):
    source = tmp_path / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "sub/large").write_bytes(os.urandom(3 * MIB))
    (source / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "l").symlink_to("sub/large")
    os.link(source / "run.sh", source / "again")
    (source / ("ü" * 60)).write_bytes(b"long")
    archive = subprocess.run(["tar", "-C", source, "-c", "."], capture_output=True, check=True)
    answer = put(daemon, sandbox, "/work/in", archive.stdout)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"path": "/work/in", "members": 7}
    assert sh(daemon, sandbox, "/work/in/again; readlink /work/in/l") == "ran\nsub/large\n"
    inside = sh(daemon, sandbox, "cd /work/in; sha256sum sub/large").split()[0]
    assert inside == hashlib.sha256((source / "sub/large").read_bytes()).hexdigest()
    (tmp_path / "out").mkdir()
    out = get(daemon, sandbox, "/work/in")
    assert out.headers["content-type"] == "application/x-tar"
    subprocess.run(["tar", "-xC", tmp_path / "out"], input=out.content, check=True)
    subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "out"], check=True)
    assert (tmp_path / "out/again").stat().st_nlink == 2


def test_ten_thousand_files(daemon: Daemon, sandbox: str):
    rng = random.Random(7)
    contents = {f"d{n % 100}/f{n}": rng.randbytes(rng.randrange(300)) for n in range(10_000)}
    answer = put(daemon, sandbox, "/work/many", packed(*contents.items()))
    assert answer.json() == {"path": "/work/many", "members": 10_000}
    with tarfile.open(fileobj=io.BytesIO(get(daemon, sandbox, "/work/many").content)) as archive:
        found = {
            one.name: archive.extractfile(one).read()  # type: ignore[union-attr]
            for one in archive
            if one.isfile()
        }
    assert found == contents
    removed = daemon.http.delete(
        f"/v1/sandboxes/{sandbox}/files", params={"path": "/work/many", "recursive": "true"}
    )
    assert removed.json() == {"removed": 10_101}


def test_gzip_both_ways(daemon: Daemon, sandbox: str):
    archive = packed(("a", b"x" * 100_000), ("b", os.urandom(1000)))
    for headers, params in (
        ({"Content-Type": "application/gzip"}, {}),
        ({"Content-Encoding": "gzip"}, {}),
        ({}, {"compression": "gzip"}),
    ):
        answer = daemon.http.put(
            url_of(sandbox),
            params={"path": "/work/z", **params},
            headers=headers,
            content=gzip.compress(archive[:5000]) + gzip.compress(archive[5000:]) + bytes(700),
        )
        assert answer.status_code == 200, answer.text
    answer = get(daemon, sandbox, "/work/z", compression="gzip")
    assert answer.headers["content-type"] == "application/gzip"
    assert names(gzip.decompress(answer.content)) == ["a", "b"]
    cut = put(daemon, sandbox, "/w", gzip.compress(archive)[:-20], compression="gzip")
    assert refusal(cut, 422, "archive-invalid", "request")["detail"]["reason"] == "gzip"
    junk = put(daemon, sandbox, "/w", archive, compression="gzip")
    assert refusal(junk, 422, "archive-invalid", "request")["detail"]["reason"] == "gzip"


def test_a_bomb_is_stopped_by_its_ratio(daemon: Daemon, sandbox: str):
    info = tarfile.TarInfo("zeros")
    info.size = 1 << 40
    bomb = gzip.compress(info.tobuf() + bytes(200 * MIB))
    answer = put(daemon, sandbox, "/work/bomb", bomb, compression="gzip")
    error = refusal(answer, 422, "archive-invalid", "request")
    assert error["detail"]["reason"] in ("ratio", "size")


def test_filters_and_owners(daemon: Daemon, sandbox: str):
    archive = packed(("src/a.py", b"a"), ("src/b.c", b"b"), (".git/config", b"c"))
    answer = put(daemon, sandbox, "/work/p", archive, exclude=[".git"], owner="agent:29")
    assert answer.json()["members"] == 2
    assert sh(daemon, sandbox, "stat -c '%u %g' /work/p/src/a.py").strip() == "1000 29"
    out = get(daemon, sandbox, "/work/p", include=["*.py"]).content
    assert names(out) == ["src/a.py"]
    info = tarfile.TarInfo("mine")
    info.uid = info.gid = 1234
    put(daemon, sandbox, "/work/q", packed(info), preserve_owner="true")
    assert sh(daemon, sandbox, "stat -c '%u %g' /work/q/mine").strip() == "1234 1234"
    info.uid = 2_000_000
    answer = put(daemon, sandbox, "/work/q", packed(info), preserve_owner="true")
    assert refusal(answer, 422, "file-error", "request")["detail"]["errno"] == "EINVAL"


def test_the_user_counts(daemon: Daemon, sandbox: str):
    sh(
        daemon,
        sandbox,
        "mkdir -m 755 /own; mkdir -p /work/r; echo s > /work/r/s; echo p > /work/r/p",
    )
    sh(daemon, sandbox, "chmod 600 /work/r/s; chown -R 0 /work/r")
    answer = put(daemon, sandbox, "/own", packed(("f", b"x")), user="agent")
    error = refusal(answer, 403, "file-access-denied", "request")
    assert error["detail"]["path"] == "/own/f"
    answer = put(daemon, sandbox, "/home/agent/x", packed(("d/f", b"x")), user="agent")
    assert answer.status_code == 200
    assert sh(daemon, sandbox, "stat -c %u /home/agent/x/d/f").strip() == "1000"
    info = tarfile.TarInfo("f")
    info.uid = 0
    answer = put(
        daemon, sandbox, "/home/agent/x", packed(info), user="agent", preserve_owner="true"
    )
    refusal(answer, 403, "file-access-denied", "request")
    answer = daemon.http.get(url_of(sandbox), params={"path": "/work/r", "user": "agent"})
    error = refusal(answer, 403, "file-access-denied", "request")
    assert error["detail"]["path"] == "/work/r/s"
    out = get(daemon, sandbox, "/work/r", user="agent", skip_unreadable="true")
    assert names(out.content) == ["p"]


def test_refusals_have_names(daemon: Daemon, sandbox: str):
    sh(daemon, sandbox, "touch /work/file; mkdir /work/outside")
    for path, status, code in (
        ("/none", 404, "file-not-found"), ("/work/file", 422, "not-a-directory"),
    ):  # fmt: skip
        answer = daemon.http.get(url_of(sandbox), params={"path": path})
        refusal(answer, status, code, "request")
    refusal(put(daemon, sandbox, "/work/file", packed()), 422, "not-a-directory", "request")
    answer = put(daemon, sandbox, "/no/where", packed(), parents="false")
    refusal(answer, 404, "file-not-found", "request")
    link = tarfile.TarInfo("l")
    link.type, link.linkname = tarfile.SYMTYPE, "/work/outside"
    device = tarfile.TarInfo("dev")
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
    for archive, reason, member in (
        (packed(("../x", b"x")), "name", "../x"),
        (packed(("/etc/passwd", b"x")), "name", "/etc/passwd"),
        (packed(link, ("l/x", b"x")), "link", "l/x"),
        (packed(device), "type", "dev"),
        (packed(("a", b"x"))[:600], "truncated", "a"),
        (b"", "truncated", ""),
        (b"no tar " * 200, "header", ""),
    ):
        error = refusal(put(daemon, sandbox, "/work/t", archive), 422, "archive-invalid", "request")
        assert (error["detail"]["reason"], error["detail"]["member"]) == (reason, member)
    assert sh(daemon, sandbox, "ls /work/outside; cat /etc/passwd").startswith("root:x:0:0:")


def test_a_full_disk_is_the_workloads(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"disk_mb": 16}) as sandbox:
        archive = packed(("small", b"x"), ("large", bytes(40 * MIB)))
        error = refusal(put(daemon, sandbox, "/work", archive), 409, "disk-full", "workload")
        assert error["detail"]["path"] == "/work/large"
        # Nothing of the file that did not fit is left.
        assert sh(daemon, sandbox, "ls -A /work").split() == ["small"]
    with daemon.sandbox("busybox", limits={"inodes": 300}) as sandbox:
        many = packed(*((f"f{n}", b"") for n in range(1000)))
        refusal(put(daemon, sandbox, "/work", many), 409, "disk-full", "workload")


def test_an_upload_that_breaks_off_leaves_only_whole_files(daemon: Daemon, sandbox: str):
    def pieces() -> Iterator[bytes]:
        yield packed(("whole", b"w"), ("part", bytes(9 * MIB)))[: 5 * MIB]
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        put(daemon, sandbox, "/work/b", pieces())
    wait_for(lambda: processes(daemon, sandbox) == 4, "the end of it", 10)
    assert sh(daemon, sandbox, "ls -A /work/b").split() == ["whole"]


def processes(daemon: Daemon, sandbox: str) -> int:
    """PID 1, a shell and the two programs of its pipe, and what else there is."""
    return int(daemon.exec(sandbox, "ls /proc | grep -c '^[0-9]*$'")["stdout"])


def test_directories_swapped_for_symlinks_meanwhile_lead_nowhere(daemon: Daemon, sandbox: str):
    """A process of the sandbox turns the directory that files go into to a symlink and back."""
    sh(daemon, sandbox, "mkdir -p /work/t/d /outside; chmod 777 /work/t /work/t/d /outside")
    swap = (
        "cd /work/t; (i=0; while :; do mv d x$i; ln -s /outside d; rm -f d; mkdir -m 777 d;"
        " i=$((i+1)); done) > /dev/null 2>&1 &"
    )
    sh(daemon, sandbox, swap, user="agent")
    archive = packed(*((f"d/f{n}", b"x") for n in range(2000)))
    codes = set()
    for count in range(60):
        answer = put(daemon, sandbox, "/work/t", archive)
        codes.add(200 if answer.status_code == 200 else answer.json()["error"]["code"])
        if count > 10 and "archive-invalid" in codes:
            break
    # It was a symlink when a file was to go in, or this shows nothing.
    assert "archive-invalid" in codes
    assert codes <= {200, "archive-invalid", "file-not-found", "file-error", "file-exists"}
    assert sh(daemon, sandbox, "ls -A /outside") == ""


def test_files_that_others_change_are_told_or_whole(daemon: Daemon, sandbox: str):
    sh(
        daemon, sandbox,
        "head -c 3000000 /dev/zero > /work/f; (while :; do : > /work/f;"
        " head -c 3000000 /dev/zero > /work/f; done) > /dev/null 2>&1 &",
    )  # fmt: skip
    for _ in range(30):
        try:
            answer = daemon.http.get(url_of(sandbox), params={"path": "/work"})
        except httpx.RemoteProtocolError:
            continue  # broken off
        if answer.status_code == 200:
            assert names(answer.content) == ["f"]
        else:
            refusal(answer, 409, "file-changed", "request")


def test_a_large_file_both_ways_at_flat_memory(daemon: Daemon):
    """By SANDBOXD_TESTS_LARGE_FILE_BYTES also of gigabytes."""
    size = int(os.environ.get(BYTES_ENV, 200 * MIB))
    block = random.Random(1).randbytes(MIB)
    peak = Path(f"/proc/{daemon.api_pid}/clear_refs")
    status = Path(f"/proc/{daemon.api_pid}/status")

    def kib(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    def content() -> Iterator[bytes]:
        for _ in range(size // MIB):
            yield block

    header = tarfile.TarInfo("large")
    header.size = size // MIB * MIB

    def archive() -> Iterator[bytes]:
        yield header.tobuf()
        yield from content()
        yield bytes(1024)

    digest = hashlib.sha256()
    for piece in content():
        digest.update(piece)
    with daemon.sandbox("busybox", limits={"disk_mb": size // MIB + 64}) as sandbox:
        files = f"/v1/sandboxes/{sandbox}/files"
        for url, path, body, name in (
            (files, "/work/large", content(), "/work/large"),
            (url_of(sandbox), "/work/t", archive(), "/work/t/large"),
        ):
            peak.write_text("5")  # proc(5): resets VmHWM
            before = kib("VmRSS")
            answer = daemon.http.put(url, params={"path": path}, content=body, timeout=600)
            assert answer.status_code == 200, answer.text
            said = sh(daemon, sandbox, f"sha256sum {name}", timeout_s=300).split()[0]
            assert said == digest.hexdigest()
            got = 0
            with daemon.http.stream("GET", url, params={"path": path}, timeout=600) as answer:
                for piece in answer.iter_raw():
                    got += len(piece)
            assert got == (header.size if url == files else header.size + 1536)
            assert kib("VmHWM") - before < 16 * 1024
            sh(daemon, sandbox, "rm -r /work/*")
