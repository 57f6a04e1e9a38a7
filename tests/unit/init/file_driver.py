"""Runs ``file_driver.c``: the C file operations, with sanitizers, on a directory of the test."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from sandboxd.init import build, protocol
from sandboxd.init.protocol import Exited, FileEntry, FileFlag, FileOp, Step

HERE = Path(__file__).parent
PARTS = (
    *("file_child", "file", "emit", "fresh", "tree", "walk", "glob", "tar", "untar"),
    *("path", "sys", "wire"),
)
EVERYTHING = (1 << 63) - 1
# A leak check would need ptrace(2), and what ends at once need not free anything.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0"}


def build_driver(output: Path) -> Path:
    sources = [build.SOURCE_DIR / f"{name}.c" for name in PARTS]
    return build.build(output, sanitize=True, c_files=[HERE / "file_driver.c", *sources])


@dataclass
class Done:
    """How an operation ended, and what came over its pipes."""

    exited: Exited
    data: bytes
    report: bytes

    @property
    def step(self) -> Step:
        return Step(self.exited.failure.step)

    @property
    def index(self) -> int:
        return self.exited.failure.index

    @property
    def errno(self) -> int:
        return self.exited.failure.err

    @property
    def entries(self) -> list[FileEntry]:
        return all_entries(self.data)


def all_entries(data: bytes) -> list[FileEntry]:
    found, at = [], 0
    while at < len(data):
        one = protocol.unpack_entry(data, at)
        assert one is not None, "an entry is cut"
        found.append(one[0])
        at = one[1]
    return found


class Driver:
    def __init__(self, program: Path, root: Path) -> None:
        self.program = program
        self.root = root

    def __call__(
        self, op: FileOp, path: str | bytes = "/", given: bytes | None = None, **request: object
    ) -> Done:
        """Do one operation; ``given`` goes into its data pipe."""
        settings = {"user": "0", "depth": 1 << 20, "length": EVERYTHING, "entries": EVERYTHING}
        payload = protocol.file_payload(op, path=path, **{**settings, **request})  # type: ignore[arg-type]
        return self.raw(payload, given, archive=op in (FileOp.FILE_PACK, FileOp.FILE_UNPACK))

    def raw(self, payload: bytes, given: bytes | None = None, *, archive: bool = False) -> Done:
        with tempfile.TemporaryFile() as data, tempfile.TemporaryFile() as report:
            reader = writer = None
            if given is not None:
                reader, writer = os.pipe()
            fds = [data.fileno() if reader is None else reader]
            if archive:
                fds.append(report.fileno())
            process = subprocess.Popen(
                [self.program, self.root, *map(str, fds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                env=ENVIRONMENT,
            )
            feeder = None
            if reader is not None and writer is not None:
                os.close(reader)
                feeder = threading.Thread(target=_feed, args=(writer, given or b""))
                feeder.start()
            out, err = process.communicate(payload, timeout=100)
            if feeder is not None:
                feeder.join()
            assert process.returncode == 0, err.decode(errors="replace")
            exited = protocol.unpack_exited(out)
            # A sanitizer ends the child with a status of its own.
            assert exited.status in (0, 1 << 8), (exited, err.decode(errors="replace"))
            assert (exited.status == 0) == (exited.failure.step == Step.STEP_NONE), exited
            data.seek(0)
            report.seek(0)
            return Done(exited, data.read(), report.read())

    def read(self, path: str, **request: object) -> bytes:
        done = self(FileOp.FILE_READ, path, **request)
        assert done.step == Step.STEP_NONE, done
        return done.data

    def pack(self, path: str = "/", **request: object) -> bytes:
        done = self(FileOp.FILE_PACK, path, **request)
        assert done.step == Step.STEP_NONE, done
        return done.data

    def unpack(self, archive: bytes, path: str = "/", **request: object) -> Done:
        return self(
            FileOp.FILE_UNPACK, path, archive, **{"flags": FileFlag.FILE_PARENTS, **request}
        )


def _feed(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view[: 1 << 20]) :]
    except BrokenPipeError:
        pass
    finally:
        os.close(fd)
