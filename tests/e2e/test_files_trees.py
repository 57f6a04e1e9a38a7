"""Directories of a sandbox over HTTP: listed, searched, made, moved, removed, modes and owners."""

from __future__ import annotations

import base64
import socket
import time
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from tests.e2e.refusals import refusal
from tests.framework import times
from tests.framework.daemon import Daemon


class Files:
    """The routes of one sandbox."""

    def __init__(self, daemon: Daemon, sandbox: str) -> None:
        self.daemon = daemon
        self.sandbox = sandbox
        self.url = f"/v1/sandboxes/{sandbox}/files"

    def sh(self, script: str, **request: Any) -> str:
        result = self.daemon.exec(self.sandbox, script, **request)
        assert result["exit_code"] == 0, result
        return str(result["stdout"])

    def get(self, what: str, path: str, **params: Any) -> httpx.Response:
        return self.daemon.http.get(f"{self.url}{what}", params={"path": path, **params})

    def post(self, what: str, **body: Any) -> httpx.Response:
        return self.daemon.http.post(f"{self.url}/{what}", json=body)

    def delete(self, path: str, **params: Any) -> httpx.Response:
        return self.daemon.http.delete(self.url, params={"path": path, **params})

    def names(self, what: str, path: str, **params: Any) -> list[str]:
        answer = self.get(what, path, **params)
        assert answer.status_code == 200, answer.text
        assert answer.json()["truncated"] is False
        return [one["path"] for one in answer.json()["entries"]]


@pytest.fixture
def files(daemon: Daemon, sandbox: str) -> Files:
    return Files(daemon, sandbox)


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- look ------------------------------------------------------------------------------------


def test_stat_is_what_stat_1_says(files: Files):
    files.sh(
        "cd /work; echo x > f; chmod 4751 f; chown 1000:29 f; ln -s f l; ln -s none d; mkfifo p"
    )
    for name, kind in (("f", "file"), ("l", "symlink"), ("p", "fifo"), (".", "directory")):
        one = ok(files.get("/stat", f"/work/{name}"))
        said = files.sh(f"stat -c '%s %a %u %g %Y %h %i' /work/{name}").split()
        assert one["type"] == kind
        assert [one["size_bytes"], int(one["mode"], 8), one["uid"], one["gid"]] == [
            int(said[0]), int(said[1], 8), int(said[2]), int(said[3]),
        ]  # fmt: skip
        assert [one["mtime_ns"] // 10**9, one["links"]] == [int(said[4]), int(said[5])]
    assert ok(files.get("/stat", "/work/l"))["target"] == "f"
    assert ok(files.get("/stat", "/work/l", follow="true"))["type"] == "file"
    assert ok(files.get("/stat", "/work/d"))["target"] == "none"
    refusal(files.get("/stat", "/work/d", follow="true"), 404, "file-not-found", "request")
    assert ok(files.get("/stat", "/dev/null"))["type"] == "char-device"
    assert ok(files.get("/stat", "/"))["name"] == "/"


def test_list_one_level_or_all(files: Files):
    files.sh("mkdir -p /work/a/b/c; touch /work/a/b/c/f /work/z; ln -s .. /work/a/up")
    assert files.names("/list", "/work") == ["/work/a", "/work/z"]
    assert files.names("/list", "/work/") == ["/work/a", "/work/z"]
    every = ["/work/a", "/work/a/b", "/work/a/b/c", "/work/a/b/c/f", "/work/a/up", "/work/z"]
    assert files.names("/list", "/work", recursive="true") == every
    assert files.names("/list", "/work", recursive="true", depth=2) == [*every[:2], *every[4:]]
    answer = ok(files.get("/list", "/work", recursive="true", limit=3))
    assert (len(answer["entries"]), answer["truncated"]) == (3, True)
    assert ok(files.get("/list", "/work", limit=2))["truncated"] is False
    refusal(files.get("/list", "/work/z"), 422, "not-a-directory", "request")
    refusal(files.get("/list", "/work/z/below"), 404, "file-not-found", "request")
    refusal(files.get("/list", "/none"), 404, "file-not-found", "request")


def test_other_file_systems_are_named_and_not_entered(files: Files):
    found = files.names("/list", "/", recursive="true", limit=10_000)
    assert {"/proc", "/dev", "/sys"} <= set(found)
    assert not [path for path in found if path.startswith(("/proc/", "/sys/", "/dev/"))]
    assert "/dev/null" in files.names("/list", "/dev")


def test_what_the_user_may_not_look_into_is_told(files: Files):
    files.sh(
        "mkdir -p /work/closed/in /work/open; touch /work/open/f; chown 0 /work/*;"
        " chmod 700 /work/closed"
    )
    answer = ok(files.get("/list", "/work", recursive="true", user="agent"))
    errors = {one["path"]: one["error"] for one in answer["entries"]}
    assert errors == {"/work/closed": "EACCES", "/work/open": None, "/work/open/f": None}
    refusal(files.get("/list", "/work/closed", user="agent"), 403, "file-access-denied", "request")
    refusal(
        files.get("/stat", "/work/closed/in", user="agent"), 403, "file-access-denied", "request"
    )


def test_names_that_are_no_utf_8_are_shown_and_addressed_in_base64(files: Files):
    files.sh(
        r"cd /work; printf x > $(printf 'a\377b'); ln -s $(printf '\376') l;"
        " touch 'new\nline' 'tab\t' ü"
    )
    entries = {one["name"]: one for one in ok(files.get("/list", "/work"))["entries"]}
    assert set(entries) == {"a\ufffdb", "new\nline", "tab\t", "ü", "l"}
    assert entries["ü"]["path_base64"] is None
    assert base64.urlsafe_b64decode(entries["l"]["target_base64"]) == b"\xfe"
    name = entries["a\ufffdb"]["path_base64"]
    assert base64.urlsafe_b64decode(name) == b"/work/a\xffb"
    http, url = files.daemon.http, files.url
    assert http.get(url, params={"path_base64": name}).content == b"x"
    assert http.put(url, params={"path_base64": name}, content=b"yy").status_code == 200
    assert ok(http.get(f"{url}/stat", params={"path_base64": name}))["size_bytes"] == 2
    moved = ok(files.post("move", source_base64=name, destination="/work/plain"))
    assert (moved["path"], moved["size_bytes"]) == ("/work/plain", 2)
    ok(files.post("move", source="/work/plain", destination_base64=name))
    assert ok(http.delete(url, params={"path_base64": name})) == {"removed": 1}
    # Not guessed: the replacement character stands for any byte.
    answer = http.get(f"{url}?path=/work/{quote(b'a' + bytes([255]))}")
    assert "path_base64" in refusal(answer, 422, "request-invalid", "request")["hint"]
    for params in ({}, {"path": "/x", "path_base64": name}, {"path_base64": "%%"}):
        refusal(http.get(url, params=params), 422, "request-invalid", "request")


def test_find_by_name_type_size_and_time(files: Files):
    files.sh(
        "mkdir -p /work/src/deep/er /work/out; cd /work;"
        " touch src/a.py src/deep/b.py src/deep/er/c.py;"
        " head -c 5000 /dev/zero > out/big; head -c 10 /dev/zero > out/small; ln -s a.py src/l.py;"
        " touch -d @1000 out/small"
    )
    find = "/find"
    py = ["/work/src/a.py", "/work/src/deep/b.py", "/work/src/deep/er/c.py"]
    assert files.names(find, "/work", pattern="*.py", type="file") == py
    assert files.names(find, "/work", pattern="src/*.py", type="file") == py[:1]
    assert files.names(find, "/work", pattern="src/**/*.py", type="file") == py
    assert files.names(find, "/work", pattern="**/deep/*.py") == py[1:2]
    assert files.names(find, "/work", pattern="[b-c].py") == py[1:]
    assert files.names(find, "/work", pattern=["big", "a.?y"]) == ["/work/out/big", py[0]]
    assert files.names(find, "/work", pattern="*.py", exclude="deep", type="file") == py[:1]
    assert files.names(find, "/work", type="symlink") == ["/work/src/l.py"]
    assert files.names(find, "/work", min_size=11, type="file") == ["/work/out/big"]
    assert files.names(find, "/work", max_size=10, min_size=1, type="file") == ["/work/out/small"]
    assert files.names(find, "/work", modified_before=2000) == ["/work/out/small"]
    hour_ago = time.time() - 3600
    assert "/work/out/small" not in files.names(find, "/work", modified_after=hour_ago)
    assert files.names(find, "/work", depth=1) == ["/work/out", "/work/src"]
    said = files.sh("cd /work; find . -mindepth 1 | sort").split()
    assert files.names(find, "/work") == sorted(f"/work{one[1:]}" for one in said)
    refusal(files.get(find, "/work", pattern="x" * 600), 422, "request-invalid", "request")


# --- change ----------------------------------------------------------------------------------


def test_directories_are_made(files: Files):
    made = ok(files.post("mkdir", path="/work/a/b", mode="0750"))
    assert (made["type"], made["mode"], made["path"]) == ("directory", "0750", "/work/a/b")
    assert files.sh("stat -c %a /work/a").strip() == "755"
    assert ok(files.post("mkdir", path="/work/a/b/", mode="0700"))["mode"] == "0750"
    answer = files.post("mkdir", path="/work/a/b", parents=False)
    refusal(answer, 409, "file-exists", "request")
    answer = files.post("mkdir", path="/work/x/y", parents=False)
    refusal(answer, 404, "file-not-found", "request")
    files.sh("touch /work/f")
    refusal(files.post("mkdir", path="/work/f"), 409, "file-exists", "request")
    refusal(files.post("mkdir", path="/root/x", user="agent"), 403, "file-access-denied", "request")
    refusal(files.post("mkdir", path="/work/.."), 422, "request-invalid", "request")
    assert ok(files.post("mkdir", path="/home/agent/d", user="agent"))["uid"] == 1000


def test_removal(files: Files):
    files.sh("cd /work; mkdir -p d/e/f; touch d/1 d/e/2 x; ln -s /etc/passwd l; ln -s /etc d/e/out")
    refusal(files.delete("/work/d"), 409, "directory-not-empty", "request")
    assert ok(files.delete("/work/l")) == {"removed": 1}
    assert ok(files.delete("/work/d", recursive="true")) == {"removed": 6}
    assert files.sh("ls /work; test -e /etc/passwd").strip() == "x"
    refusal(files.delete("/work/d"), 404, "file-not-found", "request")
    assert ok(files.delete("/work/d", missing_ok="true")) == {"removed": 0}
    for path in ("/", "/work/.", "/work/..", "//"):
        refusal(files.delete(path, recursive="true"), 422, "request-invalid", "request")
    refusal(files.delete("/proc", recursive="true"), 422, "cross-device", "request")
    # A directory of the image, and what it has there.
    assert ok(files.delete("/usr", recursive="true"))["removed"] >= 2
    files.sh("mkdir -p /work/mine/s; touch /work/mine/s/f; chown 0 /work/mine /work/mine/s")
    error = refusal(
        files.delete("/work/mine", recursive="true", user="agent"),
        403, "file-access-denied", "request",
    )  # fmt: skip
    assert error["detail"]["path"].startswith("/work/mine")


def test_a_tree_of_four_thousand_levels(files: Files):
    # Two of half that, one moved to the end of the other: no path is as long as the whole.
    files.sh(
        "for top in a b; do mkdir /work/$top; cd /work/$top; i=1;"
        " while [ $i -lt 2000 ]; do mkdir d; cd d; i=$((i+1)); done; touch f; done;"
        " mv /work/a .",
        timeout_s=60,
    )
    answer = ok(files.get("/list", "/work", recursive="true", limit=10_000))
    # Down to where a path has its greatest length; the last one says why it was not entered.
    assert len(answer["entries"]) > 1900
    assert answer["entries"][-1]["error"] == "ENAMETOOLONG"
    archive = f"/v1/sandboxes/{files.sandbox}/archive"
    with pytest.raises(httpx.RemoteProtocolError):  # what cannot be told whole is broken off
        files.daemon.http.get(archive, params={"path": "/work"})
    assert ok(files.delete("/work/b", recursive="true")) == {"removed": 4002}
    assert files.sh("ls /work") == ""


def test_moves(files: Files):
    files.sh("cd /work; echo a > a; echo b > b; mkdir d e; touch e/in")
    assert (
        ok(files.post("move", source="/work/a", destination="/work/new/c"))["path"] == "/work/new/c"
    )
    assert files.sh("cat /work/new/c") == "a\n"
    refusal(
        files.post("move", source="/work/b", destination="/work/new/c"),
        409,
        "file-exists",
        "request",
    )
    ok(files.post("move", source="/work/b", destination="/work/new/c", overwrite=True))
    assert files.sh("cat /work/new/c; ls /work") == "b\nd\ne\nnew\n"
    answer = files.post("move", source="/work/d", destination="/work/e", overwrite=True)
    refusal(answer, 409, "directory-not-empty", "request")
    answer = files.post("move", source="/work/new/c", destination="/work/e", overwrite=True)
    refusal(answer, 409, "file-exists", "request")
    answer = files.post("move", source="/work/none", destination="/work/x")
    assert refusal(answer, 404, "file-not-found", "request")["detail"]["path"] == "/work/none"
    answer = files.post("move", source="/work/d", destination="/no/way", parents=False)
    assert refusal(answer, 404, "file-not-found", "request")["detail"]["path"] == "/no/way"
    answer = files.post("move", source="/usr", destination="/usr2")
    assert "mv" in refusal(answer, 422, "cross-device", "request")["hint"]


def test_moves_to_another_file_system(files: Files):
    """A file is copied; what cannot be whole in one step is not."""
    files.sh(
        "cd /work; head -c 3000000 /dev/urandom > a; sha256sum < a > /tmp/sum; chmod 4751 a;"
        " chown agent:agent a; chmod u+s a; touch -d @1000000000 a; mkdir d; ln -s a l;"
        " echo there > /dev/shm/old"
    )
    moved = ok(files.post("move", source="/work/a", destination="/dev/shm/new/a"))
    assert (moved["path"], moved["size_bytes"]) == ("/dev/shm/new/a", 3_000_000)
    assert (moved["mode"], moved["uid"], moved["mtime_ns"]) == ("4751", 1000, 10**18)
    assert files.sh("sha256sum < /dev/shm/new/a | cmp - /tmp/sum && ls -A /work") == "d\nl\n"
    answer = files.post("move", source="/dev/shm/new/a", destination="/work/d")
    refusal(answer, 409, "file-exists", "request")
    answer = files.post("move", source="/dev/shm/old", destination="/work/l")
    refusal(answer, 409, "file-exists", "request")
    ok(files.post("move", source="/dev/shm/old", destination="/work/l", overwrite=True))
    assert files.sh("cat /work/l; ls -A /dev/shm") == "there\nnew\n"
    for name in ("d", "/proc/version"):
        answer = files.post(
            "move", source=f"/work/{name}" if name == "d" else name, destination="/dev/shm/x"
        )
        assert answer.status_code in (403, 422), answer.text
    # What may not be taken away is not copied either, and nothing half-made is left.
    files.sh("mkdir -m 755 /work/roots; echo r > /work/roots/f")
    answer = files.post("move", source="/work/roots/f", destination="/dev/shm/f", user="agent")
    refusal(answer, 403, "file-access-denied", "request")
    assert files.sh("cat /work/roots/f; ls -A /dev/shm") == "r\nnew\n"


def test_modes_and_owners(files: Files):
    files.sh(
        "cd /work; mkdir -p d/e; touch d/f d/e/g; ln -s /etc/passwd d/l; ln -s d ld; chown -R 0 d"
    )
    changed = ok(files.post("chmod", path="/work/d/f", mode="0600"))
    assert (changed["changed"], changed["entry"]["mode"]) == (1, "0600")
    assert ok(files.post("chmod", path="/work/ld", mode="0711", recursive=True))["changed"] == 5
    assert files.sh("stat -c %a /work/d/e/g /etc/passwd").split() == ["711", "644"]
    changed = ok(files.post("chown", path="/work/d", owner="agent:29", recursive=True))
    assert (changed["changed"], changed["entry"]["uid"], changed["entry"]["gid"]) == (5, 1000, 29)
    assert files.sh("stat -c '%u %g' /work/d/l /etc/passwd").splitlines() == ["1000 29", "0 0"]
    changed = ok(files.post("chown", path="/work/d/f", owner="0"))
    assert (changed["entry"]["uid"], changed["entry"]["gid"]) == (0, 29)
    for body in ({"mode": "0777"}, {"owner": "agent"}):
        what = "chmod" if "mode" in body else "chown"
        answer = files.post(what, path="/etc/passwd", user="agent", **body)
        refusal(answer, 403, "file-access-denied", "request")
    error = refusal(
        files.post("chown", path="/work/d", owner="mallory"), 422, "user-not-found", "request"
    )
    assert "mallory" in error["message"]
    answer = files.daemon.http.put(
        files.url, params={"path": "/work/mine", "owner": "agent:29", "mode": "0400"}, content=b"x"
    )
    assert (ok(answer)["uid"], ok(answer)["gid"], ok(answer)["mode"]) == (1000, 29, "0400")


# --- ranges ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=5-9", slice(5, 10)),
        ("bytes=999990-", slice(999_990, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=0-", slice(None)),
        ("bytes=300000-800000", slice(300_000, 800_001)),
        ("bytes=999999-5000000", slice(999_999, None)),
        ("bytes=-9000000", slice(None)),
    ],
)
def test_ranges(files: Files, asked: str, expected: slice):
    files.sh("i=0; head -c 1000000 /dev/urandom > /work/f")
    http, params = files.daemon.http, {"path": "/work/f"}
    whole = http.get(files.url, params=params)
    assert (whole.status_code, whole.headers["content-length"]) == (200, "1000000")
    answer = http.get(files.url, params=params, headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.content == whole.content[expected]
    part = range(1_000_000)[expected]
    assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/1000000"
    assert answer.headers["content-length"] == str(len(answer.content))


def test_ranges_that_are_none_and_conditions(files: Files):
    files.sh(
        "printf 0123456789 > /work/f; : > /work/empty; chmod 640 /work/f; touch -d @86400 /work/f"
    )
    http, params = files.daemon.http, {"path": "/work/f"}
    for asked in ("bytes=10-", "bytes=-0", "bytes=99-100"):
        answer = http.get(files.url, params=params, headers={"Range": asked})
        refusal(answer, 416, "range-not-satisfiable", "request")
        assert answer.headers["content-range"] == "bytes */10"
    for asked in ("bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "bytes=-"):
        assert http.get(files.url, params=params, headers={"Range": asked}).status_code == 200
    empty = http.get(files.url, params={"path": "/work/empty"}, headers={"Range": "bytes=0-"})
    assert (empty.status_code, empty.content) == (200, b"")
    proc = http.get(files.url, params={"path": "/proc/version"}, headers={"Range": "bytes=3-"})
    assert (proc.status_code, proc.content[:5]) == (200, b"Linux")
    head = http.head(files.url, params=params)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == head.headers["x-file-size"] == "10"
    assert head.headers["last-modified"] == "Fri, 02 Jan 1970 00:00:00 GMT"
    assert (head.headers["x-file-mode"], head.headers["x-file-mtime-ns"]) == (
        "0640",
        "86400000000000",
    )
    assert http.head(files.url, params={"path": "/none"}).status_code == 404
    tag = head.headers["etag"]
    same = http.get(files.url, params=params, headers={"If-None-Match": f'"x", {tag}'})
    assert (same.status_code, same.content) == (304, b"")
    part = {"Range": "bytes=0-3", "If-Range": tag}
    assert http.get(files.url, params=params, headers=part).content == b"0123"
    http.put(files.url, params=params, content=b"abcdefghij")
    assert http.get(files.url, params=params, headers=part).content == b"abcdefghij"
    changed = http.get(files.url, params=params, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.headers["etag"] != tag) == (200, True)


def test_a_client_that_goes_ends_a_search(files: Files):
    """One with more to tell than a pipe holds: nobody to read it would be a process for ever."""
    files.sh("cd /work; for n in 1 2 3 4 5; do mkdir d$n; (cd d$n; touch $(seq 1000)); done")
    address = urlsplit(files.daemon.base_url)
    path = f"{files.url}/find?path=/work&pattern=**&limit=5000"
    token = f"Authorization: Bearer {files.daemon.token}"
    request = f"GET {path} HTTP/1.1\r\nHost: node\r\n{token}\r\n\r\n"
    for _ in range(5):
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(request.encode())
    left = "ls /proc | grep -c '^[0-9]*$'"
    deadline = time.monotonic() + times.scaled(10)
    while files.daemon.exec(files.sandbox, left)["stdout"] != "4\n":
        assert time.monotonic() < deadline
