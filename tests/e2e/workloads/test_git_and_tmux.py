"""git, whose answers are digests, and tmux, which needs a terminal of its own."""

from __future__ import annotations

import hashlib

import pytest

from tests.e2e.workloads.conftest import MakeMachine

pytestmark = pytest.mark.e2e

WHO = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "1700000000 +0000",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_COMMITTER_DATE": "1700000000 +0000",
}


def git_object(kind: str, body: bytes) -> str:
    """gitformat-pack: SHA-1 over "KIND SIZE\\0" and the body."""
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body).hexdigest()


def first_commit(name: str, content: bytes) -> str:
    blob = bytes.fromhex(git_object("blob", content))
    tree = git_object("tree", f"100644 {name}".encode() + b"\0" + blob)
    who = "A <a@example.org> 1700000000 +0000"
    return git_object("commit", f"tree {tree}\nauthor {who}\ncommitter {who}\n\nfirst\n".encode())


def test_commit_clone_and_merge(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        box.put("one/file", "line\n")
        box.run("cd one; git init -q -b main; git add .; git commit -qm first", env=WHO)
        first = first_commit("file", b"line\n")
        assert box.run("git -C one rev-parse HEAD").strip() == first
        box.run("git clone -q file://$HOME/one two; git -C two checkout -qb side")
        assert box.run("git -C two rev-parse origin/main").strip() == first
        change = "echo {0} >> {1}/file; git -C {1} commit -qam {0}"
        box.run(change.format("here", "one"), env=WHO)
        box.run(change.format("there", "two"), env=WHO)
        pull = ["git", "-C", "two", "pull", "-q", "--no-rebase", "origin", "main"]
        result = box.try_to(pull, env=WHO)
        assert result["exit_code"] == 1
        assert "CONFLICT (content): Merge conflict in file" in result["stdout"]
        box.run("printf 'line\\nhere\\nthere\\n' > two/file", env=WHO)
        box.run("cd two; git commit -qam merged; git push -q origin side", env=WHO)
        assert box.run("git -C one cat-file -p side:file") == "line\nhere\nthere\n"
        assert box.run("git -C one rev-list --count side").strip() == "4"
        box.run("git -C one gc -q --prune=now; git -C one fsck --full --strict")


def test_a_tree_of_a_thousand_files(tools: MakeMachine) -> None:
    """Threads, mmap and many small files; git's index trusts what stat(2) says."""
    with tools("agent") as box:
        box.run("mkdir big; cd big; git init -q; for n in $(seq 1000); do echo $n > $n; done")
        box.run("cd big; git add .; git commit -qm all; git status --porcelain > s", env=WHO)
        assert box.run("cat big/s") == "?? s\n"
        box.run("cd big; git checkout -qb gone; git rm -q [1-4]*; git commit -qm gone", env=WHO)
        kept = [n for n in range(1, 1001) if str(n)[0] not in "1234"]
        assert box.run("git -C big ls-files | wc -l").strip() == str(len(kept))
        box.run("cd big; git checkout -q -; git worktree add -q ../other gone; git stash -qu")
        assert box.run("ls other | wc -l").strip() == str(len(kept))
        assert box.run("sort -n big/* | tail -1") == "1000\n"


def test_tmux_runs_a_shell_in_a_pane(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        term = {"TERM": "xterm-256color", "SHELL": "/bin/bash"}
        box.run(["tmux", "new-session", "-d", "-s", "main", "-x", "90", "-y", "20"], env=term)
        # The server lives on between commands; a channel of its own says when one is done.
        keys = "stty size; echo $((6*7)); tty; tmux wait-for -S done"
        box.run(["tmux", "send-keys", "-t", "main", keys, "Enter"], env=term)
        box.run(["tmux", "wait-for", "done"], env=term)
        lines = box.run(["tmux", "capture-pane", "-p", "-t", "main"], env=term).splitlines()
        assert {"20 90", "42"} <= {line.strip() for line in lines} or {"19 90", "42"} <= {
            line.strip() for line in lines
        }, lines
        assert any(line.startswith("/dev/pts/") for line in lines), lines
        box.run(["tmux", "split-window", "-t", "main", "sleep 600"], env=term)
        assert len(box.run(["tmux", "list-panes", "-t", "main"], env=term).splitlines()) == 2
        box.run(["tmux", "kill-server"], env=term)
