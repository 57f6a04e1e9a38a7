"""A caller's own seccomp profile holds for every command, only takes away, and errors name it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxd.client import Client
from tests.e2e.background import Background
from tests.framework.daemon import Daemon
from tests.framework.fixtures import StartDaemon
from tests.security.probing import build, install, parse

ALLOW = {"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": []}
CLONE_FILES = 0x400


def refusing(*names: str, **more: Any) -> dict[str, Any]:
    """All but these calls, which fail with EXDEV: an errno that nothing else here gives."""
    rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": 18, **more}
    return {**ALLOW, "syscalls": [rule]}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("probe", tmp_path_factory.mktemp("seccomp"))


def ask(daemon: Daemon, sandbox: str, word: str, channel: str = "exec") -> str:
    command = ["/probes/probe", word]
    if channel == "process":
        return parse(Background.start(daemon.http, sandbox, command).read().decode(), word)
    if channel == "session":
        url = f"/v1/sandboxes/{sandbox}/sessions"
        session = daemon.http.post(url, json={}).json()["id"]
        line = {"command": f"/probes/probe {word}"}
        return parse(daemon.http.post(f"{url}/{session}/exec", json=line).json()["stdout"], word)
    return parse(daemon.exec(sandbox, command)["stdout"], word)


@pytest.mark.parametrize("channel", ["exec", "session", "process"])
def test_it_holds_for_every_command_and_after_a_reset(
    daemon: Daemon, probe: Path, channel: str
) -> None:
    with daemon.sandbox("busybox", seccomp=refusing("unshare")) as sandbox:
        answer = daemon.http.get(f"/v1/sandboxes/{sandbox}").json()["seccomp"]
        assert answer["name"] == ""
        assert answer["digest"].startswith("sha256:")
        install(daemon, sandbox, {"probe": probe})
        assert ask(daemon, sandbox, f"unshare:{CLONE_FILES:x}", channel) == "EXDEV"
        assert daemon.http.post(f"/v1/sandboxes/{sandbox}/reset", json={}).is_success
        install(daemon, sandbox, {"probe": probe})
        assert ask(daemon, sandbox, f"unshare:{CLONE_FILES:x}", channel) == "EXDEV"
    with daemon.sandbox("busybox") as other:  # the control
        install(daemon, other, {"probe": probe})
        assert ask(daemon, other, f"unshare:{CLONE_FILES:x}", channel) == "ok 0"


def test_it_cannot_give_anything(daemon: Daemon, probe: Path) -> None:
    everything = {**ALLOW, "syscalls": [{"names": ["mount", "bpf"], "action": "SCMP_ACT_ALLOW"}]}
    with daemon.sandbox("busybox", seccomp=everything) as sandbox:
        install(daemon, sandbox, {"probe": probe})
        for word in ("mount", "bpf", "unshare:20000", "setns_file:/proc/self/ns/mnt"):
            assert ask(daemon, sandbox, word) == "EPERM"
        assert ask(daemon, sandbox, "int80_getpid") == "ENOSYS"
        filters = daemon.exec(sandbox, "grep Seccomp_filters /proc/self/status")["stdout"]
        assert filters.split() == ["Seccomp_filters:", "2"]


def test_conditions_on_arguments(daemon: Daemon, probe: Path) -> None:
    files = {"index": 0, "value": CLONE_FILES, "op": "SCMP_CMP_EQ"}
    fs = {"index": 0, "value": 0x200, "valueTwo": 0x200, "op": "SCMP_CMP_MASKED_EQ"}
    with daemon.sandbox("busybox", seccomp=refusing("unshare", args=[files])) as sandbox:
        install(daemon, sandbox, {"probe": probe})
        assert ask(daemon, sandbox, "unshare:400") == "EXDEV"
        assert ask(daemon, sandbox, "unshare:200") == "ok 0"
    with daemon.sandbox("busybox", seccomp=refusing("unshare", args=[fs])) as sandbox:
        install(daemon, sandbox, {"probe": probe})
        assert ask(daemon, sandbox, "unshare:600") == "EXDEV"
        assert ask(daemon, sandbox, "unshare:400") == "ok 0"


def test_what_is_ours_runs_without_it(daemon: Daemon) -> None:
    """A profile that refuses nearly all keeps nobody from looking into the sandbox, or its end."""
    with daemon.sandbox("busybox", seccomp=refusing("execve", "openat", "clone")) as sandbox:
        answer = daemon.exec(sandbox, ["/bin/true"])
        assert answer["exit_code"] == 126
        url = f"/v1/sandboxes/{sandbox}/files"
        assert daemon.http.put(url, params={"path": "/tmp/x"}, content=b"1").is_success
        assert daemon.http.get(url, params={"path": "/tmp/x"}).text == "1"
    kill = {"names": ["execve"], "action": "SCMP_ACT_KILL_PROCESS"}
    with daemon.sandbox("busybox", seccomp={**ALLOW, "syscalls": [kill]}) as sandbox:
        answer = daemon.exec(sandbox, ["/bin/true"])
        assert (answer["exit_code"], answer["signal"]) == (128 + 31, 31)
    nothing = {**ALLOW, "defaultAction": "SCMP_ACT_ERRNO"}
    with daemon.sandbox("busybox", seccomp=nothing) as sandbox:
        assert daemon.exec(sandbox, ["/bin/true"])["exit_code"] not in (0, 1)


FLAWS: dict[str, tuple[Any, str]] = {
    "no object": ({"syscalls": []}, "profile: key"),
    "unknown action": (refusing("read", action="SCMP_ACT_MAYBE"), "syscalls[0]"),
    "needs a supervisor": (refusing("read", action="SCMP_ACT_NOTIFY"), "syscalls[0]"),
    "foreign architecture": ({**ALLOW, "architectures": ["SCMP_ARCH_X86"]}, "architectures"),
    "argument out of range": (
        refusing("read", args=[{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}]),
        "syscalls[0].args[0].index",
    ),
    "unknown operator": (
        refusing("read", args=[{"index": 0, "value": 0, "op": "IS"}]),
        "syscalls[0].args[0]",
    ),
    "not a name": (refusing("read; rm"), "syscalls[0]"),
    "no such call": (refusing("reed"), "reed"),
    "too many": ({**ALLOW, "syscalls": [refusing("read")["syscalls"][0]] * 1025}, "syscalls"),
    "too large": (refusing(*["read" * 20] * 4000), "bytes"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_is_wrong_with_a_profile_is_said(daemon: Daemon, flaw: str) -> None:
    profile, place = FLAWS[flaw]
    answer = daemon.http.post("/v1/sandboxes", json={"image": "busybox", "seccomp": profile})
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["cause"]) == ("seccomp-invalid", "request")
    assert place in error["message"]


@pytest.fixture
def named(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with profiles by name, in a directory that its account can read."""
    directory = Path("/tmp/sandboxd-test-profiles")
    directory.mkdir(mode=0o755)
    (directory / "no-unshare.json").write_text(json.dumps(refusing("unshare")))
    (directory / "broken.json").write_text("{")
    (directory / "link.json").symlink_to("/etc/hostname")
    try:
        yield start_daemon(environment={"SANDBOXD_SECCOMP_PROFILES_DIR": str(directory)})
    finally:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


def test_a_profile_by_name(named: Daemon, probe: Path) -> None:
    with named.sandbox("busybox", seccomp="no-unshare") as sandbox:
        assert named.http.get(f"/v1/sandboxes/{sandbox}").json()["seccomp"]["name"] == "no-unshare"
        install(named, sandbox, {"probe": probe})
        assert ask(named, sandbox, "unshare:400") == "EXDEV"
    for name, code in (
        ("none", "seccomp-not-found"),
        ("link", "seccomp-not-found"),
        ("broken", "seccomp-invalid"),
        ("../no-unshare", "request-invalid"),
    ):
        answer = named.http.post("/v1/sandboxes", json={"image": "busybox", "seccomp": name})
        assert answer.json()["error"]["code"] == code


def test_by_the_client_alike_in_a_batch(daemon: Daemon, probe: Path) -> None:
    profile = refusing("unshare")
    with Client(daemon.base_url, token=daemon.token) as node:
        with node.create("busybox", seccomp=profile) as box:
            install(daemon, box.id, {"probe": probe})
            assert box.exec(["/probes/probe", "unshare:400"]).stdout == "unshare:400 EXDEV\n"
    body = {"count": 2, "sandbox": {"image": "busybox", "seccomp": profile}}
    made = daemon.http.post("/v1/sandboxes:batch", json=body).json()["items"]
    digests = {one["sandbox"]["seccomp"]["digest"] for one in made}
    assert len(digests) == 1
    for one in itertools.chain(made):
        daemon.delete(one["sandbox"]["id"])
