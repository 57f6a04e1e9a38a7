"""Whole files in and out of a sandbox, byte for byte, as the asked user and never of the host."""

from __future__ import annotations

import hashlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.at_once import at_once, client_of
from tests.e2e.host_processes import wait_for
from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon

MIB = 1 << 20
SIZES = [0, 1, 65_535, 65_536, 65_537, 262_144, 262_145, 3 * MIB + 1]


def put(daemon: Daemon, sandbox: str, path: str, data: bytes, **params: Any) -> httpx.Response:
    return daemon.http.put(
        f"/v1/sandboxes/{sandbox}/files", params={"path": path, **params}, content=data
    )


def get(daemon: Daemon, sandbox: str, path: str, **params: Any) -> httpx.Response:
    return daemon.http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": path, **params})


def write(daemon: Daemon, sandbox: str, path: str, data: bytes, **params: Any) -> dict[str, Any]:
    answer = put(daemon, sandbox, path, data, **params)
    assert answer.status_code == 200, answer.text
    info: dict[str, Any] = answer.json()
    return info


def read(daemon: Daemon, sandbox: str, path: str, **params: Any) -> bytes:
    answer = get(daemon, sandbox, path, **params)
    assert answer.status_code == 200, answer.text
    return answer.content


def stat(daemon: Daemon, sandbox: str, path: str, form: str) -> str:
    return str(daemon.exec(sandbox, ["stat", "-c", form, path])["stdout"]).strip()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_what_is_read(daemon: Daemon, sandbox: str, size: int):
    data = random.Random(size).randbytes(size)
    info = write(daemon, sandbox, "/work/data", data)
    assert info["size_bytes"] == size
    assert read(daemon, sandbox, "/work/data") == data
    digest = daemon.exec(sandbox, ["sha256sum", "/work/data"])["stdout"].split()[0]
    assert digest == hashlib.sha256(data).hexdigest()


def test_fifty_mebibytes_go_in_and_out_at_little_memory(daemon: Daemon, sandbox: str):
    data = random.Random(50).randbytes(50 * MIB)
    peak = Path(f"/proc/{daemon.api_pid}/clear_refs")
    peak.write_text("5")  # proc(5): resets VmHWM
    status = Path(f"/proc/{daemon.api_pid}/status")

    def kib(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    before = kib("VmRSS")
    write(daemon, sandbox, "/work/large", data)
    assert read(daemon, sandbox, "/work/large") == data
    assert kib("VmHWM") - before < 16 * 1024


def test_a_file_written_by_a_program_is_read(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, r"printf 'a\000b\377' > /tmp/made")
    assert read(daemon, sandbox, "/tmp/made") == b"a\0b\xff"


def test_a_file_of_the_image_can_be_read_and_replaced(daemon: Daemon, sandbox: str):
    assert read(daemon, sandbox, "/etc/group").startswith(b"root:x:0:\n")
    write(daemon, sandbox, "/etc/group", b"new\n")
    assert daemon.exec(sandbox, ["cat", "/etc/group"])["stdout"] == "new\n"


def test_a_file_of_proc_is_read_though_it_says_it_has_no_bytes(daemon: Daemon, sandbox: str):
    assert read(daemon, sandbox, "/proc/sys/kernel/ostype") == b"Linux\n"


def test_missing_parents_are_made_unless_not_wanted(daemon: Daemon, sandbox: str):
    write(daemon, sandbox, "/a/b/c/file", b"deep")
    assert daemon.exec(sandbox, ["cat", "/a/b/c/file"])["stdout"] == "deep"
    assert stat(daemon, sandbox, "/a/b", "%a %u") == "755 0"
    answer = put(daemon, sandbox, "/x/y/file", b"", parents="false")
    refusal(answer, 404, "file-not-found", "request")
    assert daemon.exec(sandbox, ["ls", "/x"])["exit_code"] != 0


def test_a_new_file_is_0644_or_what_was_asked(daemon: Daemon, sandbox: str):
    assert write(daemon, sandbox, "/work/plain", b"")["mode"] == "0644"
    assert stat(daemon, sandbox, "/work/plain", "%a") == "644"
    assert write(daemon, sandbox, "/work/tool", b"", mode="0750")["mode"] == "0750"
    assert stat(daemon, sandbox, "/work/tool", "%a") == "750"
    assert write(daemon, sandbox, "/work/special", b"", mode="4755")["mode"] == "4755"


def test_a_replaced_file_keeps_mode_and_owner_unless_a_mode_is_given(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "echo old > /work/f; chmod 751 /work/f; chown 1000:65534 /work/f")
    info = write(daemon, sandbox, "/work/f", b"new")
    assert (info["mode"], info["uid"], info["gid"]) == ("0751", 1000, 65534)
    assert stat(daemon, sandbox, "/work/f", "%a %u %g") == "751 1000 65534"
    write(daemon, sandbox, "/work/f", b"new", mode="600")
    assert stat(daemon, sandbox, "/work/f", "%a %u %g") == "600 1000 65534"


def test_a_file_belongs_to_the_user_who_wrote_it(daemon: Daemon, sandbox: str):
    info = write(daemon, sandbox, "/home/agent/new/f", b"x", user="agent")
    assert (info["uid"], info["gid"]) == (1000, 1000)
    assert stat(daemon, sandbox, "/home/agent/new", "%u %g") == "1000 1000"


@pytest.mark.parametrize("mode", ["8", "644x", "99", "0o644", "-644", "77777"])
def test_a_mode_that_is_none_is_refused(daemon: Daemon, sandbox: str, mode: str):
    refusal(put(daemon, sandbox, "/tmp/f", b"", mode=mode), 422, "request-invalid", "request")


def test_a_symlink_is_followed_and_stays_one(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "mkdir /real; echo old > /real/f; ln -s /real/f /tmp/l; ln -s l /tmp/ll")
    assert read(daemon, sandbox, "/tmp/ll") == b"old\n"
    write(daemon, sandbox, "/tmp/ll", b"new\n")
    assert daemon.exec(sandbox, "cat /real/f; readlink /tmp/l")["stdout"] == "new\n/real/f\n"
    daemon.exec(sandbox, "ln -s ../work/through /tmp/dangling; ln -s /real /tmp/dir")
    write(daemon, sandbox, "/tmp/dangling", b"made\n")
    write(daemon, sandbox, "/tmp/dir/g", b"below\n")
    assert daemon.exec(sandbox, "cat /work/through /real/g")["stdout"] == "made\nbelow\n"
    daemon.exec(sandbox, "ln -s loop /tmp/loop")
    for answer in (put(daemon, sandbox, "/tmp/loop", b""), get(daemon, sandbox, "/tmp/loop")):
        error = refusal(answer, 422, "file-error", "request")
        assert error["detail"]["errno"] == "ELOOP"


def test_what_is_not_there_is_named(daemon: Daemon, sandbox: str):
    for path in ("/no/such/file", "/tmp/none", "/etc/passwd/below"):
        error = refusal(get(daemon, sandbox, path), 404, "file-not-found", "request")
        assert path in error["message"]
        assert error["detail"]["path"] == path


def test_what_is_no_regular_file_is_refused_at_once(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "mkfifo /tmp/fifo; nc -lU /tmp/socket & mkdir /tmp/dir; mkdir -p /t")
    made = "until ls /tmp/dir; do :; done; mkfifo /tmp/reader; cat /tmp/reader & true"
    daemon.exec(sandbox, made)
    for path in ("/tmp", "/", "/tmp/dir", "/tmp/fifo", "/tmp/reader", "/dev/zero", "/dev/null"):
        refusal(get(daemon, sandbox, path), 422, "not-a-regular-file", "request")
        refusal(put(daemon, sandbox, path, b"x"), 422, "not-a-regular-file", "request")
    for path in ("/tmp/dir/", "/tmp/dir/.", "/tmp/dir/.."):
        refusal(put(daemon, sandbox, path, b"x"), 422, "not-a-regular-file", "request")


def test_another_user_reads_and_writes_only_what_it_may(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "echo secret > /work/s; chmod 600 /work/s; chown root /work/s; mkdir /own")
    refusal(get(daemon, sandbox, "/work/s", user="agent"), 403, "file-access-denied", "request")
    # The directory is the agent's, so that rename(2) alone would let it replace the file.
    answer = put(daemon, sandbox, "/work/s", b"mine", user="agent")
    refusal(answer, 403, "file-access-denied", "request")
    answer = put(daemon, sandbox, "/own/f", b"mine", user="agent")
    refusal(answer, 403, "file-access-denied", "request")
    answer = put(daemon, sandbox, "/proc/sys/kernel/ostype", b"mine")
    refusal(answer, 403, "file-access-denied", "request")
    assert read(daemon, sandbox, "/work/s") == b"secret\n"
    answer = get(daemon, sandbox, "/work/s", user="mallory")
    refusal(answer, 422, "user-not-found", "request")


def test_no_path_leads_out_of_the_sandbox(daemon: Daemon, sandbox: str, tmp_path: Path):
    host = tmp_path / "host-only"
    host.write_text("of the host")
    climbing = f"/work{'/..' * 20}{host}"
    refusal(get(daemon, sandbox, climbing), 404, "file-not-found", "request")
    daemon.exec(sandbox, f"ln -s {'../' * 20}etc/passwd /work/up; ln -s /proc/1/root /work/root")
    assert read(daemon, sandbox, "/work/up").startswith(b"root:x:0:0:root:/root:/bin/sh\n")
    assert b"agent:x:1000" in read(daemon, sandbox, "/work/../../../etc/passwd")
    for path in ("/work/root/etc/passwd", f"/proc/1/root{host}", "/proc/self/root/etc/passwd"):
        answer = get(daemon, sandbox, path)
        assert answer.status_code in (403, 404, 422), answer.text
        assert put(daemon, sandbox, path, b"x").status_code in (403, 404, 422)
    write(daemon, sandbox, f"/{'../' * 20}{host.name}-written", b"x")
    assert daemon.exec(sandbox, ["ls", f"/{host.name}-written"])["exit_code"] == 0
    assert not Path(f"/{host.name}-written").exists()
    assert host.read_text() == "of the host"


@pytest.mark.parametrize(
    "name",
    [
        "with space", "per%cent", "plus+and&amp", "quote'\"", "new\nline", "tab\t", "ünïcödé",
        "漢字", "#hash?query", "-rf", "back\\slash", ".hidden", "…", "\x01\x7f", "x" * 255,
    ],
)  # fmt: skip
def test_odd_names_are_names_like_others(daemon: Daemon, sandbox: str, name: str):
    write(daemon, sandbox, f"/work/odd/{name}", name.encode())
    assert read(daemon, sandbox, f"/work/odd/{name}") == name.encode()
    listed = daemon.exec(sandbox, ["find", "/work/odd", "-type", "f", "-print0"])["stdout"]
    assert listed == f"/work/odd/{name}\0"


@pytest.mark.parametrize(
    "path", ["", "relative", "./x", "/nul\0byte", "/" + "x/" * 2100 + "y", "~/x"]
)
def test_a_path_that_is_none_is_refused(daemon: Daemon, sandbox: str, path: str):
    for answer in (get(daemon, sandbox, path), put(daemon, sandbox, path, b"")):
        refusal(answer, 422, "request-invalid", "request")


def test_a_name_that_is_too_long_is_told_as_such(daemon: Daemon, sandbox: str):
    error = refusal(put(daemon, sandbox, "/work/" + "x" * 256, b""), 422, "file-error", "request")
    assert error["detail"]["errno"] == "ENAMETOOLONG"


def test_a_full_disk_is_named_and_the_old_file_stays(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"disk_mb": 16}) as sandbox:
        write(daemon, sandbox, "/work/f", b"old" * 1000)
        answer = put(daemon, sandbox, "/work/f", bytes(40 * MIB))
        error = refusal(answer, 409, "disk-full", "workload")
        assert error["detail"]["path"] == "/work/f"
        assert read(daemon, sandbox, "/work/f") == b"old" * 1000
        assert daemon.exec(sandbox, ["ls", "-A", "/work"])["stdout"] == "f\n"
        write(daemon, sandbox, "/work/f", bytes(8 * MIB))


def test_no_inode_left_is_named(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"inodes": 64}) as sandbox:
        daemon.exec(sandbox, "i=0; while : > /tmp/$i; do i=$((i+1)); done")
        refusal(put(daemon, sandbox, "/work/f", b"x"), 409, "disk-full", "workload")


def unfinished(daemon: Daemon, sandbox: str, path: str, said: int, sent: bytes) -> socket.socket:
    """An upload that has sent less than it said; closing the socket breaks it off."""
    host, _, port = daemon.base_url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"PUT /v1/sandboxes/{sandbox}/files?path={path} HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {daemon.token}\r\nContent-Length: {said}\r\n\r\n"
    )
    connection.sendall(head.encode() + sent)
    return connection


def processes(daemon: Daemon, sandbox: str) -> int:
    """PID 1, a shell and the two programs of its pipe, and what else there is."""
    return int(daemon.exec(sandbox, "ls /proc | grep -c '^[0-9]*$'")["stdout"])


def in_work(daemon: Daemon, sandbox: str) -> list[str]:
    return str(daemon.exec(sandbox, ["ls", "-A", "/work"])["stdout"]).split()


def used_kib(daemon: Daemon, sandbox: str) -> int:
    return int(str(daemon.exec(sandbox, "df -k / | tail -n 1")["stdout"]).split()[2])


def test_an_upload_that_breaks_off_changes_nothing_and_leaves_nothing(daemon: Daemon, sandbox: str):
    write(daemon, sandbox, "/work/f", b"old")
    with unfinished(daemon, sandbox, "/work/f", 10 * MIB, bytes(2 * MIB)):
        # The control: the upload is under way. It takes up space, but has no name yet.
        wait_for(lambda: used_kib(daemon, sandbox) > 1024, "an upload under way")
        assert in_work(daemon, sandbox) == ["f"]
        assert read(daemon, sandbox, "/work/f") == b"old"
    for size in range(0, 3 * MIB, MIB // 8):
        unfinished(daemon, sandbox, "/work/f", 10 * MIB, bytes(size)).close()
    wait_for(lambda: processes(daemon, sandbox) == 4, "the end of broken uploads", 10)
    assert in_work(daemon, sandbox) == ["f"]
    assert read(daemon, sandbox, "/work/f") == b"old"


def test_an_upload_without_a_length_is_taken_as_it_comes(daemon: Daemon, sandbox: str):
    def pieces(count: int) -> Iterator[bytes]:
        for n in range(count):
            yield bytes([n % 256]) * 65_536

    url, path = f"/v1/sandboxes/{sandbox}/files", {"path": "/work/chunked"}
    assert daemon.http.put(url, params=path, content=pieces(8)).status_code == 200
    assert read(daemon, sandbox, "/work/chunked") == b"".join(pieces(8))
    assert daemon.http.put(url, params=path, content=pieces(40)).status_code == 200
    assert read(daemon, sandbox, "/work/chunked") == b"".join(pieces(40))
    assert daemon.http.put(url, params=path, content=pieces(0)).status_code == 200
    assert read(daemon, sandbox, "/work/chunked") == b""


def test_a_reader_that_goes_leaves_nothing_behind(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "truncate -s 1500M /work/sparse")
    with daemon.http.stream(
        "GET", f"/v1/sandboxes/{sandbox}/files", params={"path": "/work/sparse"}
    ) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_raw(65_536)) == bytes(65_536)
    wait_for(lambda: processes(daemon, sandbox) == 4, "the end of the read", 10)


def test_writers_at_once_leave_one_of_the_files_whole(daemon: Daemon, sandbox: str):
    contents = [bytes([n]) * 300_000 for n in range(8)]
    with client_of(daemon) as client:

        def store(data: bytes) -> int:
            url = f"/v1/sandboxes/{sandbox}/files"
            return client.put(url, params={"path": "/work/f"}, content=data).status_code

        assert at_once(store, contents, threads=8) == [200] * 8
    assert read(daemon, sandbox, "/work/f") in contents
    assert daemon.exec(sandbox, ["ls", "-A", "/work"])["stdout"] == "f\n"


def test_the_host_has_no_file_of_it(daemon: Daemon, sandbox: str):
    name = f"sandbox-file-{os.getpid()}"
    write(daemon, sandbox, f"/{name}", b"inside")
    write(daemon, sandbox, f"/tmp/{name}", b"inside")
    assert not Path(f"/{name}").exists()
    assert not Path(f"/tmp/{name}").exists()


@pytest.mark.parametrize("path", ["/proc/self/exe", "/work/to-exe", "/proc/self/root/x"])
@pytest.mark.parametrize("parents", [True, False])
def test_a_magic_link_of_proc_leads_nowhere(daemon: Daemon, sandbox: str, path: str, parents: bool):
    """Its text is a path of the node, which must not be made in the sandbox."""
    daemon.exec(sandbox, "ln -s /proc/self/exe /work/to-exe; touch /tmp/before")
    answer = daemon.http.put(
        f"/v1/sandboxes/{sandbox}/files",
        params={"path": path, "parents": parents},
        content=b"#!/bin/sh\n",
    )
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["cause"] == "request"
    found = "find / -xdev -newer /tmp/before -not -path '/proc/*' -type f"
    assert daemon.exec(sandbox, found)["stdout"] == ""
    assert daemon.exec(sandbox, "true")["exit_code"] == 0
