"""What a rollout does: look at a repository, edit it, run its tests, again and again.

The peer runs the same 30 commands and the same edits, each by a `bwrap` of its own over one root
that stays; sandboxd also makes the sandbox and deletes it.
"""

from __future__ import annotations

import shlex

from benchmarks.measurements import Key
from benchmarks.rig import IMAGE, Rig
from sandboxd.client import Sandbox

SCENARIO = "episode: 30 commands, edits, pytest"
DIRECTORY = "/work/project"
FIXED = "def median(values):\n    ordered = sorted(values)\n    n = len(ordered)\n"
FIXED += "    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2\n"
BROKEN = "def median(values):\n    return sorted(values)[len(values) // 2]\n"
TESTS = "from averages import median\n\n\n"
TESTS += "def test_odd():\n    assert median([3, 1, 2]) == 2\n\n\n"
TESTS += "def test_even():\n    assert median([4, 1, 3, 2]) == 2.5\n"
FILES = {"averages.py": BROKEN, "test_averages.py": TESTS, "README": "Averages.\n"}
LOOK = (
    "ls -la",
    "cat averages.py",
    "cat test_averages.py",
    "grep -rn median .",
    "find . -name '*.py' | sort",
    "wc -l *.py",
    "head -2 README",
    "sed -n 1,2p averages.py",
    "python3 -c 'import averages; print(averages.median([1, 2]))'",
)
GIT = (
    "rm -rf .git; git init -q .",
    "git add -A",
    "git -c user.name=x -c user.email=x@invalid commit -q --allow-empty -m first",
    "git status --short",
    "git diff",
    "git log --oneline",
)
TEST = "python3 -m pytest -q -p no:cacheprovider"
# Before the edit, and after it; with the two runs of pytest they are 30.
BEFORE = (*GIT[:3], *LOOK, *GIT[3:])
AFTER = ("git diff --stat", "git status --short", *LOOK, "git stash list", "git rev-parse HEAD")


def episode(rig: Rig) -> None:
    for number in range(-1, rig.size.slow_rounds):
        if number < 0:  # the first reads the image from its file
            with rig.client.create(IMAGE) as sandbox:
                work(rig, sandbox)
            continue
        with rig.measured.timed(SCENARIO, "episode"), rig.client.create(IMAGE) as sandbox:
            work(rig, sandbox)
        peer(rig)


def work(rig: Rig, sandbox: Sandbox) -> None:
    for name, text in FILES.items():
        sandbox.write_file(f"{DIRECTORY}/{name}", text)
    for command in BEFORE:
        run(rig, sandbox, command)
    run(rig, sandbox, TEST, wanted=1)
    sandbox.write_file(f"{DIRECTORY}/averages.py", FIXED)
    for command in AFTER:
        run(rig, sandbox, command)
    run(rig, sandbox, TEST)


def run(rig: Rig, sandbox: Sandbox, command: str, wanted: int = 0) -> None:
    result = sandbox.exec(command, cwd=DIRECTORY, timeout_s=120)
    if result.exit_code != wanted:
        rig.measured.fail(f"{SCENARIO}: {command}: {result.exit_code}: {result.stderr}")


def peer(rig: Rig) -> None:
    total = 0.0
    for command in peer_commands():
        took = rig.yardsticks.take("bwrap", command=["sh", "-c", command])
        if not took:
            return
        total += took[0]
    rig.measured.add(Key(SCENARIO, "episode", "bwrap"), total)


def peer_commands() -> list[str]:
    """The whole episode as commands that may be repeated."""

    def put(name: str, text: str) -> str:
        return f"mkdir -p {DIRECTORY}; printf %s {shlex.quote(text)} >{DIRECTORY}/{name}"

    def there(command: str) -> str:
        return f"mkdir -p {DIRECTORY}; cd {DIRECTORY}; {command}"

    commands = [put(name, text) for name, text in FILES.items()]
    commands += [there(command) for command in BEFORE]
    commands += [there(f"{TEST}; test $? = 1"), put("averages.py", FIXED)]
    return [*commands, *(there(command) for command in AFTER), there(TEST)]
