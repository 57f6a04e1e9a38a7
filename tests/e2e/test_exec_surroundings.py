"""What a command finds around it: environment, directory, user, standard streams."""

from __future__ import annotations

import pytest

from tests.e2e.refusals import refusal
from tests.framework.daemon import Daemon


def environment(daemon: Daemon, sandbox: str, **request: object) -> dict[str, str]:
    out = daemon.exec(sandbox, ["env"], **request)["stdout"]
    return dict(line.split("=", 1) for line in out.splitlines())


def exec_refused(daemon: Daemon, sandbox: str, status: int, code: str, **request: object):
    body = {"command": ["true"], **request}
    return refusal(
        daemon.http.post(f"/v1/sandboxes/{sandbox}/exec", json=body), status, code, "request"
    )


def test_the_environment_is_the_images_then_the_sandboxs_then_the_execs(configured_daemon: Daemon):
    given = {"OVERRIDDEN": "sandbox", "FROM_SANDBOX": "sandbox", "TWICE": "sandbox"}
    with configured_daemon.sandbox("configured", env=given) as sandbox:
        found = environment(configured_daemon, sandbox, env={"TWICE": "exec", "FROM_EXEC": "exec"})
        again = environment(configured_daemon, sandbox)
    assert found["FROM_IMAGE"] == "image"
    assert found["WITH_EQUALS"] == "a=b=c"
    assert found["PATH"] == "/opt/tools:/bin"
    assert found["OVERRIDDEN"] == "sandbox"
    assert found["FROM_SANDBOX"] == "sandbox"
    assert found["TWICE"] == "exec"
    assert found["FROM_EXEC"] == "exec"
    # One exec's variables are not the next one's.
    assert again["TWICE"] == "sandbox"
    assert "FROM_EXEC" not in again


def test_nothing_of_the_daemons_environment_is_in_a_command(daemon: Daemon, sandbox: str):
    assert set(environment(daemon, sandbox)) == {"PATH", "HOME", "HOSTNAME"}


def test_an_image_gives_user_and_working_directory_which_is_made(configured_daemon: Daemon):
    with configured_daemon.sandbox("configured") as sandbox:
        result = configured_daemon.exec(sandbox, "id -u; id -g; pwd")
        assert result["stdout"] == "1000\n1000\n/work/made/by/the/daemon\n"
        seen = configured_daemon.http.get(f"/v1/sandboxes/{sandbox}").json()
        assert (seen["user"], seen["workdir"]) == ("agent", "/work/made/by/the/daemon")


def test_the_sandbox_overrides_the_images_user_and_directory(configured_daemon: Daemon):
    with configured_daemon.sandbox("configured", user="root", workdir="/made/too") as sandbox:
        assert configured_daemon.exec(sandbox, "id -u; pwd")["stdout"] == "0\n/made/too\n"
        elsewhere = configured_daemon.exec(sandbox, "id -u; pwd", user="nobody", cwd="/tmp")
        assert elsewhere["stdout"] == "65534\n/tmp\n"


def test_a_working_directory_that_is_not_there_is_named(daemon: Daemon, sandbox: str):
    for missing in ("/no/such/dir", "/etc/passwd"):
        error = exec_refused(daemon, sandbox, 422, "cwd-not-found", cwd=missing)
        assert missing in error["message"]
        assert error["detail"]["cwd"] == missing


def test_a_working_directory_the_user_may_not_enter_is_refused(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "mkdir -m 700 /closed")
    exec_refused(daemon, sandbox, 422, "cwd-not-found", cwd="/closed", user="agent")
    assert daemon.exec(sandbox, ["pwd"], cwd="/closed")["stdout"] == "/closed\n"


def test_a_working_directory_may_be_a_link_within_the_sandbox(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "mkdir /real; ln -s /real /link; touch /real/here")
    assert daemon.exec(sandbox, ["ls"], cwd="/link")["stdout"] == "here\n"


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("root", "0 0"),
        ("agent", "1000 1000"),
        ("1000", "1000 1000"),
        ("nobody", "65534 65534"),
        ("agent:nogroup", "1000 65534"),
        ("1000:0", "1000 0"),
        ("4242", "4242 0"),
        ("4242:4343", "4242 4343"),
        ("0", "0 0"),
    ],
)
def test_a_user_is_found_by_name_or_number(daemon: Daemon, sandbox: str, user: str, ids: str):
    assert daemon.exec(sandbox, 'echo "$(id -u) $(id -g)"', user=user)["stdout"] == ids + "\n"


@pytest.mark.parametrize("user", ["mallory", "agent:nosuchgroup", "65536", "4294967295", "-1"])
def test_a_user_that_is_not_there_is_named(daemon: Daemon, sandbox: str, user: str):
    error = exec_refused(daemon, sandbox, 422, "user-not-found", user=user)
    assert user in error["message"]
    assert error["detail"]["user"] == user


def test_users_are_those_of_the_sandboxs_own_files(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "echo 'late:x:777:888::/late:/bin/sh' >> /etc/passwd")
    daemon.exec(sandbox, "echo 'extra:x:999:other,late' >> /etc/group")
    result = daemon.exec(sandbox, "id -u; id -g; id -G; echo $HOME", user="late")
    assert result["stdout"] == "777\n888\n888 999\n/late\n"


def test_home_is_the_users(daemon: Daemon, sandbox: str):
    homes = {"root": "/root", "agent": "/home/agent", "nobody": "/", "4242": "/"}
    for user, home in homes.items():
        assert environment(daemon, sandbox, user=user)["HOME"] == home
    assert environment(daemon, sandbox, env={"HOME": "/given"})["HOME"] == "/given"


def test_a_user_that_is_not_root_has_no_capability(daemon: Daemon, sandbox: str):
    status = daemon.exec(sandbox, ["cat", "/proc/self/status"], user="agent")["stdout"]
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert f"{name}:\t0000000000000000\n" in status


@pytest.mark.parametrize("user", ["root", "agent", "4242"])
def test_the_standard_streams_can_be_opened_again(daemon: Daemon, sandbox: str, user: str):
    script = "read x < /dev/stdin; echo out:$x > /dev/stdout; echo err:$x > /dev/stderr"
    result = daemon.exec(sandbox, script, user=user, stdin="line\n")
    assert (result["stdout"], result["stderr"]) == ("out:line\n", "err:line\n")
    assert result["exit_code"] == 0


def test_a_command_starts_with_no_descriptor_beyond_its_streams(daemon: Daemon, sandbox: str):
    # ls itself opens 3 for the directory it lists.
    assert daemon.exec(sandbox, ["ls", "/proc/self/fd"])["stdout"] == "0\n1\n2\n3\n"


def test_every_command_is_the_leader_of_its_own_session(daemon: Daemon, sandbox: str):
    fields = daemon.exec(sandbox, ["cat", "/proc/self/stat"])["stdout"].rpartition(") ")[2].split()
    pid = daemon.exec(sandbox, ["sh", "-c", "echo $$"])["stdout"]
    _, _, group, session, terminal = fields[:5]
    assert group == session
    assert terminal == "0"
    assert int(pid) > int(group)


def test_no_signal_is_blocked_or_ignored_at_the_start(daemon: Daemon, sandbox: str):
    status = daemon.exec(sandbox, ["cat", "/proc/self/status"])["stdout"]
    for name in ("SigBlk", "SigIgn"):
        assert f"{name}:\t0000000000000000\n" in status


def test_hostname_is_what_was_asked_for(daemon: Daemon):
    with daemon.sandbox("busybox", hostname="worker-7") as sandbox:
        assert daemon.exec(sandbox, "hostname; echo $HOSTNAME")["stdout"] == "worker-7\nworker-7\n"


def test_what_one_exec_leaves_is_there_for_the_next(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "echo kept > /work/note; mkdir -p /tmp/d")
    assert daemon.exec(sandbox, "cat /work/note; ls -d /tmp/d")["stdout"] == "kept\n/tmp/d\n"


def test_two_sandboxes_of_one_image_share_nothing(daemon: Daemon):
    with daemon.sandbox("busybox") as one, daemon.sandbox("busybox") as other:
        daemon.exec(one, "echo mine > /work/note; rm /etc/group; echo x > /dev/shm/x")
        seen = daemon.exec(other, "ls /work /dev/shm; ls /etc/group; ps | wc -l")
        assert seen["stdout"].splitlines()[-2] == "/etc/group"
        assert "note" not in seen["stdout"]
        assert "x" not in seen["stdout"].split()
