"""Sessions over real interpreters of this machine, without a sandbox around them."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxd.errors import SandboxDead, SandboxLost, SessionBusy, SessionEnded
from sandboxd.init.protocol import STATUS_FD, KillScope
from sandboxd.model import Truncate
from sandboxd.runtime import shells
from sandboxd.runtime.output import Capture
from sandboxd.runtime.session import Session, new_nonce
from sandboxd.runtime.shells import Dialect, SessionKind

SHELLS = {
    "bash": ["bash", "--noprofile", "--norc", "--noediting", "-i"],
    "dash": ["dash", "-i"],
    "busybox": ["busybox", "sh", "-i"],
}
MIB = 1 << 20


class Bench:
    """One interpreter, its session and what a launcher does for it."""

    def __init__(self, argv):
        pipes = [os.pipe() for _ in range(4)]
        (out_r, out_w), (err_r, err_w), (in_r, in_w), (status_r, status_w) = pipes

        def status_fd():
            os.setsid()
            os.dup2(status_w, STATUS_FD)

        self.child = subprocess.Popen(
            argv, stdin=in_r, stdout=out_w, stderr=err_w,
            preexec_fn=status_fd,  # noqa: PLW1509 - as there is one thread
            close_fds=False, env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )  # fmt: skip
        for fd in (out_w, err_w, in_r, status_w):
            os.close(fd)
        sandbox = SimpleNamespace(is_sound=True)
        self.process = SimpleNamespace(exit=None, on_exit=None, on_failure=None, sandbox=sandbox)
        self.session = Session(self.process, [out_r, err_r, in_w, status_r], self.signal)
        self.waiter = asyncio.ensure_future(self._reap())

    async def _reap(self):
        pidfd = os.pidfd_open(self.child.pid)
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        loop.add_reader(pidfd, gone.set_result, None)
        try:
            await gone
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        status = self.child.wait()
        self.process.exit = SimpleNamespace(
            exit_code=status if status >= 0 else 128 - status,
            signal=-status if status < 0 else None,
            oom_killed=False,
            failure=None,
        )
        if self.process.on_exit:
            self.process.on_exit()

    def signal(self, number, scope):
        with contextlib.suppress(ProcessLookupError):
            if scope == KillScope.KILL_MAIN:
                os.kill(self.child.pid, number)
            else:
                for pid in self._tree():
                    if scope == KillScope.KILL_TREE or pid != self.child.pid:
                        os.kill(pid, number)

    def _tree(self):
        found = [self.child.pid]
        for pid in found:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
                found += map(int, file.read().split())
        return found

    async def greet(self, kind):
        nonce = NONCE if kind is SessionKind.PYTHON else new_nonce()
        await self.session.greet(nonce, shells.hello(nonce) if kind is SessionKind.SHELL else b"")

    async def run(self, command, timeout_s=20.0, **options):
        if self.session.unsure:
            nonce = new_nonce()
            await self.session.greet(nonce, shells.hello_again(nonce, self.kind))
        sinks = (Capture(4 * MIB, Truncate.BOTH), Capture(MIB, Truncate.BOTH))
        running = self.session.start(command, timeout_s=timeout_s, sinks=sinks, **options)
        return await running.done

    async def out(self, command, **options):
        result = await self.run(command, **options)
        assert (result.exit_code, result.stderr.data) == (0, b""), result
        return result.stdout.data

    async def close(self):
        self.signal(signal.SIGKILL, KillScope.KILL_TREE)
        await self.waiter
        self.session.release(SandboxDead("test is over"))


NONCE = "0" * 32


def play(name, part):
    async def main():
        if name == "python":
            argv = [sys.executable, "-u", "-c", shells.START_PYTHON, NONCE]
            kind = SessionKind.PYTHON
        else:
            argv, kind = SHELLS[name], SessionKind.SHELL
        if shutil.which(argv[0]) is None:
            pytest.skip(f"no {argv[0]}")
        bench = Bench(argv)
        bench.kind = kind
        try:
            async with asyncio.timeout(60):
                await bench.greet(kind)
                await part(bench)
        finally:
            await bench.close()

    before = sorted(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture(params=SHELLS)
def shell(request):
    return lambda part: play(request.param, part)


def test_it_knows_which_shell_it_is():
    async def bash(bench):
        assert bench.session.dialect is Dialect.BASH

    async def sh(bench):
        assert bench.session.dialect is Dialect.SH

    play("bash", bash)
    play("dash", sh)


def test_a_command_whose_images_server_died_has_no_result():
    """It may have seen reads fail: a status of its own making would be a wrong reward."""

    async def part(bench):
        assert (await bench.run("exit_of() { return 5; }; exit_of")).exit_code == 5
        bench.process.sandbox.is_sound = False
        with pytest.raises(SandboxLost) as lost:
            await bench.run("exit_of")
        assert (lost.value.cause, lost.value.retryable) == ("node", True)

    play("dash", part)


def test_a_command_whose_sandbox_has_failed_ends_with_that():
    """Nobody may be left to tell of the interpreter's own end."""

    async def part(bench):
        sinks = (Capture(9, Truncate.BOTH), Capture(9, Truncate.BOTH))
        running = bench.session.start("sleep 100", timeout_s=100, sinks=sinks)
        bench.process.on_failure(SandboxLost("a part of the node died"))
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(running.done, 10)

    play("dash", part)


def test_state_lasts_and_status_is_each_commands_own(shell):
    async def part(bench):
        assert await bench.out("cd /usr; X=1; f() { echo f$X; }") == b""
        assert await bench.out("pwd; f") == b"/usr\nf1\n"
        result = await bench.run("echo out; echo err >&2; (exit 9)")
        assert (result.exit_code, result.stdout.data, result.stderr.data) == (9, b"out\n", b"err\n")
        assert await bench.out("echo $?") == b"9\n"
        assert await bench.out("cat <<'E'\n$X '\nE\n") == b"$X '\n"

    shell(part)


@pytest.mark.parametrize("command", ["echo 'open", "if", "echo )", "echo $(", "{ echo a"])
def test_a_syntax_error_is_the_shells_to_tell(shell, command):
    async def part(bench):
        result = await bench.run(command)
        assert result.exit_code != 0
        assert result.stderr.data
        assert await bench.out("echo on") == b"on\n"

    shell(part)


def test_errors_that_end_a_script_do_not_end_a_session(shell):
    async def part(bench):
        await bench.out("X=kept")
        for command in ("set -u; echo $NOPE", ": ${Y:?missing}", "readonly R=1; R=2", ". /no/such"):
            result = await bench.run(command, timeout_s=5)
            assert not result.timed_out, command
            assert result.exit_code != 0, command
        assert await bench.out("set +u; echo $X") == b"kept\n"

    shell(part)


def test_ends_of_the_interpreter(shell):
    async def part(bench):
        result = await bench.run("echo a; exit 7")
        assert (result.exit_code, result.stdout.data, result.stderr.data) == (7, b"a\n", b"")
        with pytest.raises(SessionEnded) as ended:
            await bench.run("echo")
        assert ended.value.detail["exit_code"] == 7

    async def killed(bench):
        result = await bench.run("kill -9 $$")
        assert (result.exit_code, result.signal) == (137, 9)

    async def replaced(bench):
        result = await bench.run("exec sh -c 'echo new; exit 3'")
        assert (result.exit_code, result.stdout.data) == (3, b"new\n")

    async def strict(bench):
        result = await bench.run("set -e; false; echo not")
        assert (result.exit_code, result.stdout.data) == (1, b"")
        assert bench.session.ended

    for one in (part, killed, replaced, strict):
        shell(one)


def test_an_interrupt_spares_the_session_and_what_runs_in_its_background(shell):
    async def part(bench):
        await bench.run("X=kept; sleep 600 & true")
        for command in ("echo a; sleep 600; echo b", "echo a; while :; do :; done"):
            began = time.monotonic()
            result = await bench.run(command, timeout_s=0.3)
            assert (result.exit_code, result.timed_out) == (124, True)
            assert result.stdout.data == b"a\n"
            assert time.monotonic() - began < 15
            assert await bench.out("echo $X; kill -0 $!") == b"kept\n"
        running = asyncio.ensure_future(bench.run("sleep 600"))
        await asyncio.sleep(0.3)
        with pytest.raises(SessionBusy):
            bench.session.check_free()
        assert bench.session.interrupt()
        assert (await running).exit_code == 130

    shell(part)


def test_what_does_not_end_is_ended(shell):
    async def part(bench):
        result = await bench.run("sh -c 'trap \"\" INT; sleep 600'", timeout_s=0.2)
        assert result.timed_out
        assert await bench.out("echo on") == b"on\n"
        result = await bench.run("trap '' INT; while :; do :; done", timeout_s=0.2)
        assert (result.exit_code, result.timed_out) == (124, True)
        assert bench.session.ended

    shell(part)


def test_a_background_job_holds_nothing_up(shell):
    async def part(bench):
        result = await bench.run("(sleep 600; echo late) & echo now")
        assert result.stdout.data == b"now\n"
        result = await bench.run("yes 2>/dev/null & echo on")
        assert b"on\n" in result.stdout.data
        # Not TERM, which a child of an interactive dash ignores for a moment after the fork.
        await bench.run("kill -9 $!; wait $!")

    shell(part)


def test_much_in_and_much_out(shell):
    async def part(bench):
        for size in (999, 1000, 1001, 4095, 4096, 4097, 70_000):
            assert await bench.out(f"printf %s {'x' * size} | wc -c") == f"{size}\n".encode()
        assert await bench.out("head -c 3000000 /dev/zero") == bytes(3_000_000)

    shell(part)


@settings(max_examples=25, deadline=None)
@given(lines=st.lists(st.binary(min_size=0, max_size=60).filter(lambda b: 0 not in b), max_size=8))
@pytest.mark.parametrize("name", SHELLS)
def test_nothing_that_is_printed_ends_a_command(name, lines):
    """Any bytes, among them what the status pipe carries and the very text of the script."""

    async def part(bench):
        hostile = [b"0 " + b"0" * 32, b"eval 'x' </dev/null", b"printf '%s %s\\n' \"$?\" x >&9"]
        words = [word.decode("utf-8", "surrogateescape") for word in (*lines, *hostile)]
        if name != "bash":  # others take what is no UTF-8 differently
            words = [word for word in words if word.isascii()]
        command = "".join(f"printf '%s\\n' {shells.quote(word)}; " for word in words)
        expected = "".join(word + "\n" for word in words)
        result = await bench.run(command.encode("utf-8", "replace").decode())
        assert result.exit_code == 0
        assert result.stdout.data == expected.encode("utf-8", "replace")
        assert await bench.out("echo on") == b"on\n"

    play(name, part)


def test_python_keeps_its_names():
    async def part(bench):
        assert await bench.out("import math\nx = 3\ndef f(): return x * 2") == b""
        assert await bench.out("f()") == b"6\n"
        assert await bench.out("for i in range(2):\n    print(i)\n'last'") == b"0\n1\n'last'\n"
        result = await bench.run("print('a'); 1 / 0")
        assert (result.exit_code, result.stdout.data) == (1, b"a\n")
        assert b"ZeroDivisionError" in result.stderr.data
        result = await bench.run("def broken(:")
        assert result.exit_code == 1
        assert b"SyntaxError" in result.stderr.data
        assert await bench.out("import sys; sys.stdin.read()") == b"''\n"
        result = await bench.run("import time; time.sleep(600)", timeout_s=0.3)
        assert (result.exit_code, result.timed_out) == (124, True)
        result = await bench.run("while True: pass", timeout_s=0.3)
        assert result.timed_out
        assert await bench.out("x") == b"3\n"
        result = await bench.run("print('end'); sys.exit(4)")
        assert (result.exit_code, result.stdout.data) == (4, b"end\n")
        assert bench.session.ended

    play("python", part)


def test_python_that_exits_by_words():
    async def part(bench):
        result = await bench.run("raise SystemExit('why')")
        assert (result.exit_code, result.stderr.data) == (1, b"why\n")

    play("python", part)
