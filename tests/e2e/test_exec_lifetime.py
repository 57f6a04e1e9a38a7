"""When a command ends, what lives on, what must not; and many of them at once."""

from __future__ import annotations

import time

import httpx

from tests.e2e.at_once import at_once, client_of, in_background
from tests.e2e.host_processes import new_marker, pids_with, wait_for, wait_for_marker
from tests.framework.daemon import Daemon

# What a policy can do to outlive its command: ignore SIGTERM, leave the session, double-fork, and
# keep the pipes. An ignored signal stays ignored across exec.
STUBBORN = """
trap '' TERM HUP INT
( setsid sh -c "( sleep {marker} & ) & sleep {marker}" & ) &
setsid sleep {marker} &
echo started
echo warned >&2
sleep {marker}
"""


def test_an_exec_ends_with_its_main_process_and_the_rest_lives_on(daemon: Daemon, sandbox: str):
    marker = new_marker()
    result = daemon.exec(sandbox, f"sleep {marker} & echo started", timeout_s=60)
    assert (result["exit_code"], result["stdout"]) == (0, "started\n")
    assert result["wall_s"] < 30
    assert len(pids_with(marker)) == 1
    assert daemon.exec(sandbox, ["true"])["exit_code"] == 0
    assert len(pids_with(marker)) == 1


def test_a_background_process_may_go_on_writing(daemon: Daemon, sandbox: str):
    # 1 MB past what the pipe holds, then a word in a file: it was neither blocked nor killed.
    script = "(sleep 0.2; head -c 1000000 /dev/zero; echo $? > /tmp/ended) & echo started"
    assert daemon.exec(sandbox, script)["stdout"] == "started\n"
    waiting = "until [ -s /tmp/ended ]; do sleep 0.05; done; cat /tmp/ended"
    assert daemon.exec(sandbox, waiting, timeout_s=30)["stdout"] == "0\n"


def test_a_timeout_kills_the_whole_tree_before_it_answers(daemon: Daemon, sandbox: str):
    marker, earlier = new_marker(), new_marker()
    daemon.exec(sandbox, f"sleep {earlier} & true")
    request = {"timeout_s": 3, "grace_s": 0.5}

    with in_background(lambda: daemon.exec(sandbox, STUBBORN.format(marker=marker), **request)) as (
        answer
    ):
        wait_for_marker(marker, count=4)  # the control: all of them can be seen from here
        result = answer.result()
        left = pids_with(marker)
    assert left == []
    assert (result["exit_code"], result["timed_out"]) == (124, True)
    assert (result["stdout"], result["stderr"]) == ("started\n", "warned\n")
    assert len(pids_with(earlier)) == 1
    assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


def test_a_timeout_lets_a_program_that_heeds_sigterm_clean_up(daemon: Daemon, sandbox: str):
    script = "trap 'echo cleaned; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    result = daemon.exec(sandbox, script, timeout_s=1, grace_s=20)
    assert result["stdout"] == "ready\ncleaned\n"
    assert (result["exit_code"], result["timed_out"]) == (124, True)
    assert result["wall_s"] < 15


def test_a_timeout_of_a_thousandth_answers_as_well(daemon: Daemon, sandbox: str):
    for _ in range(30):
        marker = new_marker()
        result = daemon.exec(sandbox, f"sleep {marker}", timeout_s=0.001, grace_s=0)
        assert (result["exit_code"], result["timed_out"]) == (124, True)
        assert pids_with(marker) == []


def test_a_timeout_while_stdin_is_not_read_answers(daemon: Daemon, sandbox: str):
    marker = new_marker()
    result = daemon.exec(
        sandbox, ["sleep", marker], stdin="x" * (1 << 21), timeout_s=0.5, grace_s=0
    )
    assert (result["exit_code"], result["timed_out"]) == (124, True)
    assert pids_with(marker) == []


def test_a_timeout_ends_what_stopped_itself(daemon: Daemon, sandbox: str):
    marker = new_marker()
    script = f"sleep {marker} & kill -STOP $!; kill -STOP $$"
    result = daemon.exec(sandbox, script, timeout_s=1, grace_s=0.2)
    assert result["exit_code"] == 124
    assert pids_with(marker) == []


def test_a_client_that_goes_takes_its_command_along(daemon: Daemon, sandbox: str):
    marker = new_marker()
    script = STUBBORN.format(marker=marker)

    def impatient() -> None:
        with client_of(daemon, timeout_s=2) as client:
            client.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": script})

    with in_background(impatient) as call:
        wait_for_marker(marker, count=4)
        assert isinstance(call.exception(), httpx.ReadTimeout)
    wait_for(lambda: not pids_with(marker), "the end of an abandoned command")
    assert daemon.exec(sandbox, ["echo", "alive"])["stdout"] == "alive\n"


def test_orphans_are_reaped(daemon: Daemon, sandbox: str):
    daemon.exec(sandbox, "for i in 1 2 3 4 5; do (sleep 0.1 &) ; done")
    waiting = "while grep -qx sleep /proc/[0-9]*/comm; do :; done 2>/dev/null; echo ok"
    assert daemon.exec(sandbox, waiting, timeout_s=20)["stdout"] == "ok\n"


def test_fifty_at_once_in_one_sandbox_each_get_their_own(daemon: Daemon, sandbox: str):
    with client_of(daemon) as client:

        def run(n: int) -> tuple[int, str, str]:
            script = f"read x; sleep 0.2; echo out-{n}-$x; echo err-{n} >&2; exit {n}"
            answer = client.post(
                f"/v1/sandboxes/{sandbox}/exec", json={"command": script, "stdin": f"in-{n}\n"}
            )
            assert answer.status_code == 200, answer.text
            result = answer.json()
            return result["exit_code"], result["stdout"], result["stderr"]

        results = at_once(run, range(50), threads=50)
    assert results == [(n, f"out-{n}-in-{n}\n", f"err-{n}\n") for n in range(50)]


def test_many_in_a_row_use_nothing_up(daemon: Daemon, sandbox: str):
    # More than PID 1 keeps track of at once, and than there are process ids to spare.
    for n in range(700):
        assert daemon.exec(sandbox, ["echo", str(n)])["stdout"] == f"{n}\n"
    assert daemon.exec(sandbox, "ls /proc | grep -c '^[0-9]*$'")["stdout"] == "4\n"


def test_more_at_once_than_it_can_keep_is_refused_by_name(daemon: Daemon):
    with daemon.sandbox("busybox", limits={"pids": 2000}) as sandbox, client_of(daemon) as client:
        started = time.monotonic()
        codes = set()
        while "too-many-execs" not in codes and time.monotonic() - started < 60:
            answers = at_once(
                lambda _: client.post(
                    f"/v1/sandboxes/{sandbox}/exec", json={"command": "sleep 999 &"}
                ),
                range(40),
                threads=20,
            )
            for answer in answers:
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert (answer.status_code, error["cause"]) == (409, "workload"), error
                    codes.add(error["code"])
        assert codes == {"too-many-execs"}
