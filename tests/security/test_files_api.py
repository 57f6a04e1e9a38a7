"""Files over the API: done inside the sandbox, as the asked user, wherever a path seems to lead."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.framework import times
from tests.framework.daemon import Daemon
from tests.security.probing import Inside, alive, get, put

MARKER = Path("/tmp/sandboxd-test-outside")


@pytest.fixture
def outside():
    """A file of the host that everyone may read and write."""
    MARKER.write_text("outside")
    MARKER.chmod(0o666)
    yield MARKER
    MARKER.unlink()


UPWARDS = [
    "/../../../../../../..{}",
    "/tmp/../../../../..{}",
    "/proc/self/root/../../..{}",
    "/proc/1/root{}",
    "/proc/self/cwd/..{}",
    "/proc/thread-self/root{}",
    "/dev/fd/3/..{}",
    "/proc/self/fd/4/../../../..{}",
    "/proc/self/fd/5/../../../..{}",
    "/proc/self/fd/6/../../../..{}",
    "/proc/self/fd/7/../../../..{}",
    "/proc/self/fd/8/../../../..{}",
    "/./..//..///..{}",
]


@pytest.mark.parametrize("shape", UPWARDS)
def test_read_does_not_leave_the_root(shape: str, inside: Inside, outside: Path) -> None:
    answer = get(inside.daemon, inside.sandbox, shape.format(outside), user=inside.identity)
    assert answer.status_code in (403, 404, 422), answer.text
    assert "outside" not in answer.text.replace(str(outside), "").replace(MARKER.name, "")


@pytest.mark.parametrize("shape", UPWARDS)
def test_write_does_not_leave_the_root(
    shape: str, hostile: str, daemon: Daemon, outside: Path
) -> None:
    put(daemon, hostile, shape.format(outside), b"inside")
    assert outside.read_text() == "outside"


LINKS = [
    "/../../../../..{}",
    "{}",
    "/proc/1/root{}",
    "/proc/self/root/../..{}",
    "/proc/self/fd/6/../../../..{}",
    "/proc/self/cwd/../../..{}",
]


@pytest.mark.parametrize("shape", LINKS)
def test_link_does_not_lead_out(shape: str, daemon: Daemon, hostile: str, outside: Path) -> None:
    daemon.exec(hostile, ["/bin/ln", "-s", shape.format(outside), "/work/link"])
    daemon.exec(hostile, ["/bin/ln", "-s", shape.format("/tmp"), "/work/directory"])
    paths = ("/work/link", f"/work/directory/{MARKER.name}")
    for path in paths:
        answer = get(daemon, hostile, path)
        assert answer.status_code in (403, 404, 422), answer.text
    for path in paths:
        put(daemon, hostile, path, b"inside")
    assert outside.read_text() == "outside"


def test_control_links_inside_are_followed(daemon: Daemon, hostile: str) -> None:
    daemon.exec(hostile, "echo inside >/tmp/file; ln -s ../tmp/file /work/link; ln -s /tmp /work/d")
    assert get(daemon, hostile, "/work/link").content == b"inside\n"
    assert put(daemon, hostile, "/work/d/new", b"new").is_success
    assert daemon.exec(hostile, "cat /tmp/new")["stdout"] == "new"


@pytest.mark.parametrize(
    "path",
    [
        *("/proc/self/mem", "/proc/self/exe", "/proc/self/fd/0", "/proc/self/fd/4", "/dev/stdin"),
        *("/proc/1/mem", "/proc/1/environ", "/proc/1/exe", "/proc/1/maps", "/proc/1/fd/3"),
        *("/proc/self/environ", "/proc/self/ns/mnt", "/proc/kcore", "/proc/kmsg"),
    ],
)
def test_magic_file_is_not_read(path: str, inside: Inside) -> None:
    answer = get(inside.daemon, inside.sandbox, path, user=inside.identity)
    assert answer.status_code in (403, 404, 422), answer.content[:200]


def test_what_can_be_read_of_the_childs_own_is_nothing_of_the_host(as_root: Inside) -> None:
    for name in ("maps", "smaps", "cmdline", "mountinfo", "cgroup", "status", "auxv"):
        text = get(as_root.daemon, as_root.sandbox, f"/proc/self/{name}").text
        assert "sandbox_init" not in text
        assert str(as_root.daemon.runtime_dir) not in text
        assert "/sandboxd" not in text


SPECIAL = {
    "fifo": "mkfifo /tmp/special",
    "directory": "mkdir /tmp/special",
    "link to a device": "ln -s /dev/zero /tmp/special",
    "link to a terminal": "ln -s /dev/ptmx /tmp/special",
    "link to itself": "ln -s special /tmp/special",
    "loop of links": "ln -s b /tmp/special; ln -s special /tmp/b",
    "link to a descriptor": "ln -s /proc/self/fd/0 /tmp/special",
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_is_refused_at_once(kind: str, daemon: Daemon, hostile: str) -> None:
    daemon.exec(hostile, SPECIAL[kind], timeout_s=times.scaled(10))
    for answer in (
        get(daemon, hostile, "/tmp/special"),
        put(daemon, hostile, "/tmp/special", b"x"),
    ):
        assert answer.status_code in (403, 404, 422), answer.text
        assert answer.json()["error"]["cause"] == "request"
    alive(daemon, hostile)


@pytest.mark.parametrize(
    "path", ["relative", "", "/a\0b", "/" + "x" * 5000, "/" + "/".join(["d" * 200] * 30)]
)
def test_impossible_path_is_refused(path: str, inside: Inside) -> None:
    answer = get(inside.daemon, inside.sandbox, path)
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("mode", ["7777", "4755", "0"])
def test_mode_makes_no_more_than_a_file_of_the_sandbox(
    mode: str, daemon: Daemon, hostile: str
) -> None:
    answer = put(daemon, hostile, "/tmp/tool", b"x", mode=mode, user="agent")
    assert answer.status_code in (200, 422)
    if answer.is_success:
        assert daemon.exec(hostile, "stat -c %u:%g /tmp/tool")["stdout"] == "1000:1000\n"


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/new", "/root/file", "/bin/new", "/new/file"])
def test_ordinary_user_does_not_write_for_root(path: str, daemon: Daemon, hostile: str) -> None:
    before = daemon.exec(hostile, f"cat {path}")["stdout"]
    assert put(daemon, hostile, path, b"hostile", user="agent").status_code == 403
    assert daemon.exec(hostile, f"cat {path}")["stdout"] == before
    assert put(daemon, hostile, path, b"allowed", user="root").is_success  # the control


def test_ordinary_user_does_not_read_for_root(daemon: Daemon, hostile: str) -> None:
    daemon.exec(hostile, "echo secret >/root/secret; chmod 600 /root/secret")
    assert get(daemon, hostile, "/root/secret", user="agent").status_code == 403
    assert get(daemon, hostile, "/root/secret").content == b"secret\n"


def test_races_with_links_never_lead_out(daemon: Daemon, hostile: str, outside: Path) -> None:
    """A name that is a directory, then a link upwards, then a file, as fast as the shell can."""
    flip = f"""
        cd /work; mkdir -p real
        while :; do
            rm -rf name; mkdir name; rm -rf name; ln -s /proc/1/root/tmp name; rm -f name
            ln -s ../../../../tmp name; rm -f name; ln -s {outside} name; rm -f name
        done
    """
    daemon.exec(hostile, f"({flip}) >/dev/null 2>&1 &")
    for number in range(150):
        for path in (f"/work/name/{MARKER.name}", "/work/name"):
            answer = get(daemon, hostile, path)
            assert answer.content != b"outside", number
            told = put(daemon, hostile, path, b"inside")
            if not told.is_success:
                assert told.json()["error"]["cause"] != "node", told.text
    assert outside.read_text() == "outside"


def test_hard_links_to_files_of_the_image_are_the_sandboxs_own(
    daemon: Daemon, hostile: str
) -> None:
    daemon.exec(hostile, "ln /etc/group /tmp/group; echo hostile >>/tmp/group")
    with daemon.sandbox("busybox") as other:
        assert "hostile" not in get(daemon, other, "/etc/group").text


def test_temporary_names_are_not_left_and_not_taken(daemon: Daemon, hostile: str) -> None:
    body = b"x" * 1_000_000
    with (
        ThreadPoolExecutor(4) as pool,
        httpx.Client(
            base_url=daemon.base_url, headers={"Authorization": f"Bearer {daemon.token}"}
        ) as client,
    ):
        list(
            pool.map(
                lambda n: client.put(
                    f"/v1/sandboxes/{hostile}/files",
                    params={"path": f"/work/f{n % 3}"},
                    content=body,
                ),
                range(24),
            )
        )
    assert daemon.exec(hostile, "ls -A /work")["stdout"].split() == ["f0", "f1", "f2"]


def test_nothing_of_the_sandboxs_is_on_the_hosts_disk(daemon: Daemon, hostile: str) -> None:
    put(daemon, hostile, "/work/only-inside-3141", b"x")
    for directory in (daemon.runtime_dir, daemon.state_dir):
        for _, directories, files in os.walk(directory):
            assert "only-inside-3141" not in (*directories, *files)
