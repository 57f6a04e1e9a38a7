"""What is written to a session's interpreter, and what it says of a command's end.

A command is never typed: a shell reads ``eval 'the command, quoted'`` as one line of its script, so
nothing in the command can end it early; it gets a stdin of its own, and its status comes through a
pipe that it does not have (``STATUS_FD``), with a nonce that no earlier command can know. So no
output is ever taken for an end.

The shell is an interactive one without a terminal: that is what makes it survive what a person's
shell survives (an interrupt, ``set -u``, a syntax error), and leave the rest of the command then.
It also ignores SIGTERM; a dash lets its jobs inherit that until a moment after the fork, so that a
``kill $!`` just behind a ``job &`` may be lost there, as it is at a terminal.

    to a shell:    eval 'COMMAND' </dev/null 254>&-
                   builtin printf '%s %s\\n' "$?" NONCE >&254
    to Python:     NONCE LENGTH STDIN_PATH, a newline, then LENGTH bytes of source
    status pipe:   CODE NONCE [DIALECT], a newline
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sandboxd.init.protocol import STATUS_FD

BASH_FD: Final = 254
"""Where bash has the status pipe: out of the way of scripts, and of no other shell (a POSIX shell
takes one digit in a redirection)."""
INTERRUPTED: Final = 130


class SessionKind(StrEnum):
    SHELL = "shell"
    PYTHON = "python"


class Dialect(StrEnum):
    BASH = "bash"
    SH = "sh"
    PYTHON = "python"


START_SHELL: Final = (
    'if [ -n "${BASH_VERSION-}" ]; then exec bash --noprofile --norc --noediting -i; fi; exec sh -i'
)
"""Run by the sandbox's bash, else sh."""

START_PYTHON: Final = """
import ast, os, sys, traceback, types
commands = os.dup(0); status = os.dup(9); os.close(9)
nothing = os.open(os.devnull, os.O_RDONLY); os.dup2(nothing, 0); os.close(nothing)
commands = os.fdopen(commands, "rb", closefd=False)
driver = sys.modules["__main__"]
sys.modules["__main__"] = types.ModuleType("__main__")
names = sys.modules["__main__"].__dict__
def run(source):
    tree = ast.parse(source, "<session>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<session>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<session>", "eval"), names)
        if value is not None:
            print(repr(value))
def one():
    line = commands.readline()
    if not line:
        os._exit(0)
    nonce, length, path = line.split()
    source = commands.read(int(length))
    stdin = os.open(path, os.O_RDONLY); os.dup2(stdin, 0); os.close(stdin)
    sys.stdin = open(0, closefd=False)
    code = 0
    try:
        run(source)
    except KeyboardInterrupt:
        code = 130
        traceback.print_exc(limit=-1)
    except SystemExit as error:
        sys.stdout.flush(); sys.stderr.flush()
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit((error.code or 0) & 255)
    except BaseException as error:
        code = 1
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os.write(status, b"%d %s\\n" % (code, nonce))
os.write(status, b"0 " + sys.argv[1].encode() + b" python\\n")
while True:
    try:
        one()
    except KeyboardInterrupt:
        pass
"""


@dataclass(frozen=True, slots=True)
class Status:
    code: int
    nonce: str
    dialect: Dialect | None


def parse_status(line: bytes) -> Status | None:
    """One line of the status pipe; None for what a command of the session wrote there."""
    words = line.decode("ascii", "replace").split()
    if len(words) not in (2, 3) or not words[0].isdigit() or len(words[0]) > 3:
        return None
    dialect = words[2] if len(words) == 3 else None
    if dialect is not None and dialect not in list(Dialect):
        return None
    return Status(int(words[0]), words[1], Dialect(dialect) if dialect else None)


def quote(text: str) -> str:
    """As one word of a POSIX shell (2.2.2 Single-Quotes)."""
    return "'" + text.replace("'", "'\\''") + "'"


def hello(nonce: str) -> bytes:
    """The first lines to a shell: quiet, and telling which it is. ``exit`` says "exit" on stderr in
    an interactive bash, which no command of the caller's did."""
    bash = (
        "set +o history +o histexpand; unset HISTFILE; "
        'exit() { builtin exit "$@" 2>/dev/null; }; '
        f"exec {BASH_FD}>&{STATUS_FD} {STATUS_FD}>&-; "
        f'builtin printf "0 {nonce} bash\\n" >&{BASH_FD}'
    )
    text = (
        "PS1= PS2=\n"
        f'if [ -n "${{BASH_VERSION-}}" ]; then eval {quote(bash)}; '
        f"else printf '0 {nonce} sh\\n' >&{STATUS_FD}; fi\n"
    )
    return text.encode()


def hello_again(nonce: str, kind: SessionKind) -> bytes:
    """To an interpreter that was greeted before, perhaps by another daemon: whether it takes
    commands, and which it is."""
    if kind is SessionKind.PYTHON:
        return b"".join(command_text(Dialect.PYTHON, "", nonce, "/dev/null"))
    text = (
        f"eval {quote(_say('0', nonce, 'sh', STATUS_FD))} 2>/dev/null"
        f" || eval {quote(_say('0', nonce, 'bash', BASH_FD))}\n"
    )
    return text.encode()


def _say(code: str, nonce: str, dialect: str, fd: int) -> str:
    return f"command printf '%s %s %s\\n' {code} {nonce} {dialect} >&{fd}"


def command_text(
    dialect: Dialect, command: str, nonce: str, stdin_path: str, last_code: int = 0
) -> list[bytes]:
    """What runs one command and tells its end. ``last_code`` is what ``$?`` is to be before it.

    Each part is to be read by itself: busybox's shell reads its script through a buffer that it
    shares with the programs it contains, so a command that begins while something lies there finds
    that in its own stdin.
    """
    if dialect is Dialect.PYTHON:
        source = command.encode("utf-8", "surrogatepass")
        return [f"{nonce} {len(source)} {stdin_path}\n".encode() + source]
    fd = BASH_FD if dialect is Dialect.BASH else STATUS_FD
    # A syntax error in a special builtin ends a POSIX shell, but not through `command`.
    run = "eval" if dialect is Dialect.BASH else "command eval"
    line = f"{run} {quote(command)} <{stdin_path} {fd}>&-\n".encode("utf-8", "surrogatepass")
    before = [f"(exit {last_code})\n".encode()] if last_code else []
    return [*before, line, report_text(dialect, nonce)]


def size_text(dialect: Dialect, cols: int, rows: int) -> list[bytes]:
    """What tells the commands to come how wide a line is: a session has no terminal that could be
    asked, and COLUMNS and LINES are what programs go by then."""
    if dialect is Dialect.PYTHON:
        told = f"__import__('os').environ.update(COLUMNS='{cols}', LINES='{rows}')"
        return command_text(dialect, told, "size", "/dev/null")
    # Not without `command`: a shell that is no bash ends where a special builtin fails.
    return [f"command export COLUMNS={cols} LINES={rows} 2>/dev/null || :\n".encode()]


def report_text(dialect: Dialect, nonce: str) -> bytes:
    """Asks a shell for its last status. Some forget what they have read when they are interrupted,
    and so have to be asked again."""
    fd = BASH_FD if dialect is Dialect.BASH else STATUS_FD
    printf = "builtin printf" if dialect is Dialect.BASH else "command printf"
    return f"{printf} '%s %s\\n' \"$?\" {nonce} >&{fd}\n".encode()
