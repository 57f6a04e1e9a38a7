"""gcc and make, and what looks into programs: sanitizers, gdb, strace."""

from __future__ import annotations

import re
import zlib

import pytest

from tests.e2e.workloads.conftest import MakeMachine

pytestmark = pytest.mark.e2e

CRC_H = "unsigned crc32(const unsigned char *data, unsigned long size);\n"
CRC_C = """
#include "crc.h"
unsigned crc32(const unsigned char *data, unsigned long size) {
    unsigned crc = ~0u;
    while (size--) {
        crc ^= *data++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}
"""
MAIN_C = """
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "crc.h"
static void *work(void *text) {
    printf("%08x\\n", crc32(text, strlen(text)));
    return NULL;
}
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, argv[i]) || pthread_join(thread, NULL))
            return 1;
    }
    return 0;
}
"""
MAKEFILE = """
CFLAGS = -O2 -Wall -Werror -pthread
LDFLAGS = -pthread
app: main.o libcrc.a
main.o crc.o: crc.h
libcrc.a: crc.o
\tar rcs $@ $^
app:
\t$(CC) $(LDFLAGS) -o $@ $^
"""
LOOP_C = """
#include <unistd.h>
volatile int answer = 41;
static int work(int n) {
    answer = n + 1;
    return answer;
}
int main(void) {
    for (;;) {
        work(41);
        usleep(1000);
    }
}
"""


def test_make_builds_in_parallel_and_knows_what_is_old(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        for name, text in (("crc.h", CRC_H), ("crc.c", CRC_C), ("main.c", MAIN_C)):
            box.put(f"src/{name}", text)
        box.put("src/Makefile", MAKEFILE)
        box.run("make -C src -j$(nproc)")
        words = ["123456789", "sandbox"]
        found = box.run(["src/app", *words]).split()
        assert found == [f"{zlib.crc32(word.encode()):08x}" for word in words]
        assert "'app' is up to date" in box.run("make -C src")
        # By times of files, which a writable layer must keep.
        again = box.run("touch src/crc.h; make -C src")
        assert sorted(re.findall(r"-o (\S+)|rcs (\S+)", again)) == sorted(
            [("main.o", ""), ("crc.o", ""), ("", "libcrc.a"), ("app", "")]
        )


def test_a_failing_compiler_says_so(tools: MakeMachine) -> None:
    with tools("agent") as box:
        box.put("bad.c", "int main(void) { return missing; }\n")
        result = box.try_to(["gcc", "bad.c"])
        assert result["exit_code"] == 1
        assert re.search("error: .missing. undeclared", result["stderr"])


# Each changes its own address space's layout or traces itself, and is the first to say if it may
# not.
@pytest.mark.parametrize(
    ("kind", "program", "finding"),
    [
        ("address", "int *p = malloc(4); free(p); return p[0];", "heap-use-after-free"),
        (
            "address",
            "void *volatile p = malloc(77); p = 0; return 0;",
            "LeakSanitizer: detected memory leaks",
        ),
        (
            "undefined",
            "volatile int k = 2147483647; k = k + 1; return 0;",
            "signed integer overflow",
        ),
        (
            "thread",
            "pthread_t t; pthread_create(&t, 0, race, 0); n++; pthread_join(t, 0); return 0;",
            "data race",
        ),
    ],
)
def test_sanitizers_find_what_they_are_for(
    tools: MakeMachine, user: str, kind: str, program: str, finding: str
) -> None:
    text = "#include <pthread.h>\n#include <stdlib.h>\nint n;\n"
    text += "void *race(void *x) { n++; return x; }\n"
    with tools(user) as box:
        box.put("a.c", f"{text}int main(void) {{ {program} }}\n")
        flags = [f"-fsanitize={kind}", "-g", "-pthread", "-fno-sanitize-recover=all"]
        box.run(["gcc", *flags, "-o", "a", "a.c"])
        result = box.try_to(["./a"])
        assert result["exit_code"] != 0, result
        assert finding in result["stderr"], result


def test_gdb_starts_a_program_and_stops_it(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        box.put("loop.c", LOOP_C)
        box.run("gcc -g -O0 -o loop loop.c")
        steps = ["break work", "run", "backtrace", "print n", "finish", "print answer", "kill"]
        command = ["gdb", "-nx", "-batch", *(w for step in steps for w in ("-ex", step)), "./loop"]
        result = box.try_to(command)
        assert result["exit_code"] == 0, result
        assert re.search(r"#0  work \(n=41\) at loop\.c:5\n#1 .* main \(\)", result["stdout"])
        assert "$1 = 41\n" in result["stdout"]
        assert "$3 = 42\n" in result["stdout"]
        # personality(2) is what that needs.
        assert "address space randomization" not in result["stderr"]


def test_gdb_attaches_to_a_running_process(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        box.put("loop.c", LOOP_C)
        box.run("gcc -g -O0 -o loop loop.c")
        script = """
            ./loop & pid=$!
            gdb -nx -batch -p $pid -ex 'break work' -ex continue -ex 'print n' \\
                -ex 'call (int) getpid()' -ex 'delete' -ex detach
            kill -0 $pid; kill $pid; echo pid $pid
        """
        out = box.run(script)
        assert "$1 = 41\n" in out
        (pid,) = re.findall(r"^pid (\d+)$", out, re.MULTILINE)
        assert f"$2 = {pid}\n" in out


def test_gdb_reads_a_core(tools: MakeMachine) -> None:
    """The kernel writes none (`RLIMIT_CORE`); gdb can."""
    with tools("agent") as box:
        box.put("loop.c", LOOP_C)
        box.run("gcc -g -O0 -o loop loop.c")
        core = "gdb -nx -batch ./loop -ex 'break work' -ex run -ex 'generate-core-file core'"
        box.run(f"{core} -ex kill")
        out = box.run("gdb -nx -batch ./loop core -ex backtrace")
        assert re.search(r"#0 .*work \(n=41\)", out)


def test_strace_follows_a_tree(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        command = [
            "strace",
            "-f",
            "-o",
            "log",
            "sh",
            "-c",
            "cat /etc/passwd >out; (exit 3); exit 4",
        ]
        assert box.try_to(command)["exit_code"] == 4
        log = box.run(["cat", "log"])
        assert re.search(r'execve\("/usr/bin/cat", \["cat", "/etc/passwd"\]', log)
        assert re.search(r'openat\(AT_FDCWD, "/etc/passwd", O_RDONLY\) += 3', log)
        ends = re.findall(r"\+\+\+ exited with (\d+) \+\+\+", log)
        assert sorted(ends) == ["0", "3", "4"]
        assert log.rstrip().endswith("+++ exited with 4 +++")


def test_strace_attaches_and_injects(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        script = """
            sh -c 'while :; do sleep 0.05; done' & pid=$!
            timeout --signal=INT 2 strace -f -o log -p $pid || true
            kill $pid
            strace -o /dev/null -e inject=openat:error=ENOENT:when=1 true 2>&1 || true
            grep -c clock_nanosleep log
        """
        lines = box.run(script).splitlines()
        assert int(lines[-1]) > 1
