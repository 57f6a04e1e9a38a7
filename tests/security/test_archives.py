"""Archives put into a sandbox: no member of one lands outside the directory it is meant for."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import Any

import pytest

from tests.framework.daemon import Daemon
from tests.security.probing import alive, get, put


def unpack(daemon: Daemon, sandbox: str, data: bytes, path: str = "/work/in", **query: str) -> Any:
    return daemon.http.put(
        f"/v1/sandboxes/{sandbox}/archive", params={"path": path, **query}, content=data
    )


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o666
    for key, value in more.items():
        setattr(info, key, value)
    return info


CONTENT = b"hostile"
ESCAPES = {
    "absolute": [(member("/tmp/victim"), CONTENT)],
    "upwards": [(member("../../tmp/victim"), CONTENT)],
    "upwards in the middle": [(member("a/../../../tmp/victim"), CONTENT)],
    "upwards by a directory": [(member("..", tarfile.DIRTYPE), b""), (member("x/.."), CONTENT)],
    "beneath a link": [
        (member("l", tarfile.SYMTYPE, "/tmp"), b""),
        (member("l/victim"), CONTENT),
    ],
    "beneath a relative link": [
        (member("l", tarfile.SYMTYPE, "../../tmp"), b""),
        (member("l/victim"), CONTENT),
    ],
    "beneath two links": [
        (member("a", tarfile.SYMTYPE, "b"), b""),
        (member("b", tarfile.SYMTYPE, "/tmp"), b""),
        (member("a/victim"), CONTENT),
    ],
    "a link beneath a link": [
        (member("l", tarfile.SYMTYPE, "/tmp"), b""),
        (member("l/victim", tarfile.SYMTYPE, "/etc/passwd"), b""),
    ],
    "hard link upwards": [(member("l", tarfile.LNKTYPE, "../../tmp/victim"), b"")],
    "hard link absolute": [(member("l", tarfile.LNKTYPE, "/tmp/victim"), b"")],
    "hard link through a link": [
        (member("d", tarfile.SYMTYPE, "/tmp"), b""),
        (member("l", tarfile.LNKTYPE, "d/victim"), b""),
    ],
    "a device": [(member("null", tarfile.CHRTYPE, devmajor=1, devminor=1), b"")],
    "a disk": [(member("disk", tarfile.BLKTYPE, devmajor=8, devminor=0), b"")],
    "an unknown kind": [(member("what", b"Z"), CONTENT)],
    "no name": [(member(""), CONTENT)],
    "a zero in the name": [(member("x", pax_headers={"path": "a\0b"}), CONTENT)],
    "a long name": [(member("d" * 300), CONTENT)],
    "a deep name": [(member("/".join(["d"] * 3000)), CONTENT)],
    "upwards in a pax header": [
        (member("x", pax_headers={"path": "../../tmp/victim"}), CONTENT),
    ],
    "a link's target in a pax header": [
        (member("x", tarfile.LNKTYPE, "y", pax_headers={"linkpath": "/tmp/victim"}), b""),
    ],
}


@pytest.fixture
def victim(daemon: Daemon, hostile: str) -> str:
    """A sandbox with a file beside the directory that archives go into."""
    daemon.exec(hostile, "echo untouched >/tmp/victim; mkdir -p /work/in")
    return hostile


@pytest.mark.parametrize("kind", ESCAPES)
@pytest.mark.parametrize("form", ["pax", "gnu"])
def test_hostile_archive_is_refused(kind: str, form: str, daemon: Daemon, victim: str) -> None:
    by_header = any(info.pax_headers for info, _ in ESCAPES[kind])
    data = tar(*ESCAPES[kind], form=tarfile.GNU_FORMAT if form == "gnu" else tarfile.PAX_FORMAT)
    answer = unpack(daemon, victim, data)
    told = daemon.exec(victim, "cat /tmp/victim; readlink /tmp/victim; ls /tmp")["stdout"]
    assert told.split() == ["untouched", "victim"]
    if form == "pax" or not by_header:
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["cause"] == "request"
    links = daemon.exec(victim, "find /work/in -links +1 -type f")["stdout"]
    assert links == ""
    alive(daemon, victim)


def test_control_ordinary_archive_is_unpacked(daemon: Daemon, victim: str) -> None:
    data = tar(
        (member("d", tarfile.DIRTYPE, mode=0o755), b""),
        (member("d/f"), b"content"),
        (member("d/l", tarfile.SYMTYPE, "f"), b""),
        (member("d/h", tarfile.LNKTYPE, "d/f"), b""),
    )
    assert unpack(daemon, victim, data).is_success
    assert daemon.exec(victim, "cat /work/in/d/l /work/in/d/h")["stdout"] == "contentcontent"
    assert unpack(daemon, victim, gzip.compress(data), compression="gzip").is_success


def test_link_that_is_there_already_is_not_followed_below_the_target(
    daemon: Daemon, victim: str
) -> None:
    """The target may be reached by a link, as by the sandbox's own programs; below it, never."""
    daemon.exec(victim, "ln -s /tmp /work/in/link")
    answer = unpack(daemon, victim, tar((member("link/victim"), CONTENT)))
    assert answer.status_code == 422
    assert get(daemon, victim, "/tmp/victim").content == b"untouched\n"


def test_ordinary_users_archive_writes_nothing_of_roots(daemon: Daemon, victim: str) -> None:
    for path in ("/etc", "/bin", "/root"):
        answer = unpack(daemon, victim, tar((member("passwd"), CONTENT)), path, user="agent")
        assert answer.status_code in (403, 422), answer.text
    assert "hostile" not in get(daemon, victim, "/etc/passwd").text


def test_setuid_file_of_an_archive_gains_nothing(daemon: Daemon, victim: str) -> None:
    data = tar((member("suid", mode=0o6755, uid=0, gid=0), CONTENT))
    unpack(daemon, victim, data, "/home/agent", user="agent", preserve_owner="true")
    assert daemon.exec(victim, "find / -xdev -user 0 -perm -4000 -name suid")["stdout"] == ""


def test_bomb_fills_its_own_sandbox_at_most(daemon: Daemon, programs: object) -> None:
    with daemon.sandbox("busybox", limits={"disk_mb": 8, "memory_mb": 64}) as small:
        zeros = tar((member("zeros"), bytes(32 << 20)))
        answer = unpack(daemon, small, gzip.compress(zeros), "/tmp", compression="gzip")
        # Whichever comes first: the ratio's bound or the disk's.
        assert answer.json()["error"]["code"] in ("archive-invalid", "disk-full"), answer.text
        answer = unpack(daemon, small, zeros, "/tmp")
        assert answer.json()["error"]["code"] == "disk-full", answer.text
        alive(daemon, small)
    del programs


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1023, 1500])
def test_broken_archive_is_refused(size: int, daemon: Daemon, victim: str) -> None:
    data = tar((member("f"), b"x" * 700))
    answer = unpack(daemon, victim, data[:size])
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["code"] == "archive-invalid"


def test_race_with_links_never_leads_out(daemon: Daemon, victim: str) -> None:
    flip = "rm -rf d; mkdir d; rm -rf d; ln -s /tmp d"
    daemon.exec(victim, f"cd /work/in; (while :; do {flip}; done) >/dev/null 2>&1 &")
    data = tar(*((member(f"d/{name}"), CONTENT) for name in ("a", "victim", "b")))
    for _ in range(100):
        answer = unpack(daemon, victim, data)
        if not answer.is_success:
            assert answer.json()["error"]["cause"] != "node", answer.text
    assert daemon.exec(victim, "cat /tmp/victim; ls /tmp")["stdout"].split() == [
        "untouched",
        "victim",
    ]


@pytest.mark.parametrize("path", ["/proc/self", "/proc/self/fd", "/proc/1", "/proc/self/task"])
def test_nothing_of_the_host_is_told_by_a_list_or_an_archive(
    path: str, daemon: Daemon, victim: str
) -> None:
    """Links of /proc/self, as the process that does it has them, would name what PID 1 holds."""
    answers = [
        daemon.http.get(f"/v1/sandboxes/{victim}/archive", params={"path": path}),
        daemon.http.get(f"/v1/sandboxes/{victim}/files/list", params={"path": path}),
    ]
    for answer in answers:
        assert b"sandboxd" not in answer.content.replace(victim.encode(), b"")
        assert b"cgroup/" not in answer.content
    put(daemon, victim, "/tmp/after", b"x")
