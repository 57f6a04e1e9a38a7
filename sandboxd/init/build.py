"""Compiles the C init into its one static binary, and the library that goes into squashfuse.

For: the packaging hook, `scripts/build-init` and the tests, which all call `build()`, so that what
is tested is what is shipped. Run as a program it builds the shipped binary, or with `--sanitize`
the one for tests. Not for: anything at run time; an installed package only looks the binary up.

Imports nothing outside the standard library and nothing of ours: the hook loads this file by path
in a build environment where the package itself is not importable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
BINARY = SOURCE_DIR / "sandbox_init"
PRELOAD = SOURCE_DIR / "squashfuse_keep.so"
"""Preloaded into squashfuse_ll, which is linked against libfuse3."""
PRELOAD_SOURCE = SOURCE_DIR / "preload" / "squashfuse_keep.c"

WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Werror")

# Static, so that a clone needs no file of the sandbox's root (nor can that root lend it one).
# Position independent all the same: PID 1 parses what the untrusted side of its socket causes.
RELEASE = (
    "-O2",
    "-static-pie",
    "-fPIE",
    "-fstack-protector-strong",
    "-fstack-clash-protection",
    "-D_FORTIFY_SOURCE=2",
    "-Wl,-z,relro,-z,now,-z,noexecstack",
)

LIBRARY = (
    "-O2",
    "-shared",
    "-fPIC",
    "-fstack-protector-strong",
    "-fstack-clash-protection",
    "-D_FORTIFY_SOURCE=2",
    "-Wl,-z,relro,-z,now,-z,noexecstack",
)

# The sanitizers need a dynamic libc. A finding ends the program: a test must not read past it.
SANITIZE = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


class BuildError(Exception):
    """The C init could not be built; the message is for a person and names the remedy."""


def find_compiler() -> str:
    """Path of the C compiler: `$CC` if set, else the first of cc, gcc and clang."""
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    missing = f"the compiler named by CC ({wanted}) is" if wanted else "cc, gcc and clang are"
    raise BuildError(
        f"{missing} not on PATH: sandboxd's init is written in C and compiled at installation. "
        "On Debian: apt-get install gcc libc6-dev"
    )


def sources(source_dir: Path = SOURCE_DIR) -> list[Path]:
    """Every C file of the init; together they are one program."""
    found = sorted(source_dir.glob("*.c"))
    if not found:
        raise BuildError(f"no C sources in {source_dir}")
    return found


def build(
    output: Path = BINARY,
    *,
    sanitize: bool = False,
    c_files: Sequence[Path] | None = None,
    extra_flags: Sequence[str] = (),
) -> Path:
    """Compile `c_files` (default: `sources()`) into `output` and return it.

    Nothing is done if `output` is newer than the sources, the headers and this file. The new
    binary replaces the old one by rename: a running daemon may hold the old one open, and writing
    to it would be ETXTBSY. Raises BuildError with the compiler's own words.
    """
    files = list(c_files) if c_files is not None else sources()
    headers = [header for folder in {f.parent for f in files} for header in folder.glob("*.h")]
    if not extra_flags and _is_current(output, [*files, *headers, Path(__file__)]):
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sandbox_init-", dir=output.parent) as scratch:
        result = Path(scratch) / output.name
        flags = (*(SANITIZE if sanitize else RELEASE), *extra_flags)
        _compile(flags, files, result)
        result.chmod(0o755)
        result.replace(output)
    return output


def build_preload(output: Path = PRELOAD) -> Path:
    """The same of the library. Raises BuildError."""
    if _is_current(output, [PRELOAD_SOURCE, Path(__file__)]):
        return output
    with tempfile.TemporaryDirectory(prefix=".squashfuse_keep-", dir=output.parent) as scratch:
        result = Path(scratch) / output.name
        _compile((*LIBRARY, *_fuse_flags()), [PRELOAD_SOURCE], result)
        result.chmod(0o755)
        result.replace(output)
    return output


def _compile(flags: Sequence[str], files: Sequence[Path], result: Path) -> None:
    command = [find_compiler(), *WARNINGS, *flags, "-o", str(result), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


def _fuse_flags() -> list[str]:
    try:
        done = subprocess.run(
            ["pkg-config", "--cflags", "fuse3"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            "no headers of libfuse3. On Debian: apt-get install libfuse3-dev pkg-config"
        ) from error
    return done.stdout.split()


def _is_current(output: Path, inputs: Sequence[Path]) -> bool:
    try:
        built = output.stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return all(path.stat().st_mtime_ns < built for path in inputs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile sandboxd's C init.")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan, for tests")
    parser.add_argument("--output", type=Path, help=f"default: {BINARY}")
    options = parser.parse_args(argv)
    if options.sanitize and options.output is None:
        parser.error("--sanitize needs --output: it must not become the shipped binary")
    try:
        print(build(options.output or BINARY, sanitize=options.sanitize))
        if options.output is None:
            print(build_preload())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
