"""Does the file system do, from here, what the store's protocol needs of it? By doing it.

What cannot be seen from one host is whether another sees a new name at once; the protocol does not
need that (a reader that comes too early finds nothing, and a second converter does the work again).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sif_tools.store.files import file_digest, server_time, sync_directory
from sif_tools.store.layout import key_of

_SKEW_S: Final = 5.0
_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """`needed`: without it the store must not be used from here."""

    name: str
    holds: bool
    needed: bool
    detail: str


class _DoesNotHold(Exception):
    """Carries the detail."""


def sync_check(root: Path) -> list[Check]:
    """All checks, in a directory of their own below `root`, which is removed again.

    Raises OSError where not even that can be made.
    """
    directory = root / f".sync-check.{secrets.token_hex(8)}"
    directory.mkdir()
    try:
        return [_run(directory, *one) for one in _CHECKS]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(directory: Path, name: str, needed: bool, check: Callable[[Path], str]) -> Check:
    scratch = directory / name.replace(" ", "-")
    scratch.mkdir()
    try:
        return Check(name, True, needed, check(scratch))
    except _DoesNotHold as reason:
        return Check(name, False, needed, str(reason))
    except OSError as error:
        return Check(name, False, needed, f"{error.strerror} (errno {error.errno})")


def _create(path: Path, data: bytes = b"") -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _exclusive(scratch: Path) -> str:
    _create(scratch / "one")
    try:
        _create(scratch / "one")
    except FileExistsError:
        return "a second O_EXCL of one name fails"
    raise _DoesNotHold("two O_EXCL of one name both made it")


def _link(scratch: Path) -> str:
    _create(scratch / "one", b"1")
    _create(scratch / "two", b"2")
    os.link(scratch / "one", scratch / "name")
    if os.stat(scratch / "one").st_nlink != 2:
        raise _DoesNotHold("a second name does not show in the link count")
    try:
        os.link(scratch / "two", scratch / "name")
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
    else:
        raise _DoesNotHold("link replaces what is there")
    os.unlink(scratch / "one")
    if (scratch / "name").read_bytes() != b"1":
        raise _DoesNotHold("the file is not what its first name had")
    return "a second name never replaces, and stays when the first goes"


def _rename(scratch: Path) -> str:
    _create(scratch / "one", b"1")
    _create(scratch / "two", b"2")
    with (scratch / "two").open("rb") as before:
        os.rename(scratch / "one", scratch / "two")
        if before.read() != b"2":
            raise _DoesNotHold("an open file changed when its name was replaced")
    if (scratch / "two").read_bytes() != b"1" or (scratch / "one").exists():
        raise _DoesNotHold("rename did not replace")
    return "it replaces, and who has the old file open keeps it"


def _sync(scratch: Path) -> str:
    started_at = time.monotonic()
    _create(scratch / "one", os.urandom(_BYTES))
    sync_directory(scratch)
    return (
        f"a file of {_BYTES >> 20} MiB and its directory in {time.monotonic() - started_at:.3f} s"
    )


def _read_back(scratch: Path) -> str:
    data = os.urandom(_BYTES)
    path = scratch / "one"
    _create(path, data)
    os.chmod(path, 0o444)
    (scratch / "same").write_bytes(data)
    if file_digest(path) != file_digest(scratch / "same"):
        raise _DoesNotHold("what is read is not what was written")
    return "what is read is what was written"


def _touch(scratch: Path) -> str:
    path = scratch / "one"
    _create(path)
    os.utime(path, (1, 1))
    fd = os.open(path, os.O_RDWR)
    try:
        os.rename(path, scratch / "two")
        os.utime(fd)
        age_s = server_time(scratch) - os.fstat(fd).st_mtime
    finally:
        os.close(fd)
    if abs(age_s) > _SKEW_S:
        raise _DoesNotHold(f"a file touched now is {age_s:.1f} s old to a file made now")
    return "a file can be touched after it was renamed"


def _skew(scratch: Path) -> str:
    skew_s = server_time(scratch) - time.time()
    if abs(skew_s) > _SKEW_S:
        raise _DoesNotHold(
            f"its time stamps are {skew_s:+.1f} s from this host's clock; claims are judged by "
            "the former, so this costs nothing unless hosts stamp files themselves"
        )
    return f"{skew_s:+.3f} s from this host's clock"


def _many_names(scratch: Path) -> str:
    path = scratch / key_of("a")[:2] / key_of("b")[:2] / ("n" * 250)
    path.parent.mkdir(parents=True)
    _create(path)
    return "names of 250 bytes"


_CHECKS: Final[tuple[tuple[str, bool, Callable[[Path], str]], ...]] = (
    ("exclusive creation", True, _exclusive),
    ("link", True, _link),
    ("rename", True, _rename),
    ("fsync", True, _sync),
    ("read back", True, _read_back),
    ("touch", True, _touch),
    ("long names", True, _many_names),
    ("clock", False, _skew),
)
