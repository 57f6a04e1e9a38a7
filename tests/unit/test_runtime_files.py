"""What the daemon makes of a file operation whose child says what cannot be."""

import asyncio
import errno
import os

import pytest

from sandboxd.errors import ArchiveInvalid, DiskFull, FileKilled
from sandboxd.init import protocol
from sandboxd.init.protocol import ArchiveFlaw, MsgType, Step
from sandboxd.runtime.archives import ArchiveWrite
from sandboxd.runtime.control import Control
from sandboxd.runtime.file_trees import FileTrees
from sandboxd.runtime.files import FileRead
from tests.unit.fakes_pid1 import ScriptedPid1, seqpacket_pair


def entry(path=b"", target=b"", err=0, path_len=None):
    sizes = (len(path) if path_len is None else path_len, len(target))
    return protocol.FILE_ENTRY.pack(err, 0o100644, 0, 0, 1, *sizes, 0, 5, 1, 0) + path + target


def play(ask, part):
    """Run ``ask(control)`` while ``part(pid1, message, fds)`` plays PID 1."""

    async def run():
        ours, theirs = seqpacket_pair()
        control = Control(ours, lambda _: None)
        pid1 = ScriptedPid1(theirs)
        before = len(os.listdir("/proc/self/fd"))
        asked = asyncio.get_running_loop().create_task(ask(control))

        def other_side():
            message, fds = pid1.receive()
            assert message.type == MsgType.M_FILE
            try:
                part(pid1, message, fds)
            finally:
                protocol.close_fds(fds)

        await asyncio.to_thread(other_side)
        try:
            return await asked
        finally:
            assert len(os.listdir("/proc/self/fd")) == before
            theirs.close()
            control.fail(FileKilled("end of the test"))

    return asyncio.run(run())


def answers(data, status=0, **fields):
    def part(pid1, message, fds):
        os.write(fds[0], data)
        os.close(fds.pop(0))
        pid1.exit(message.id, status, **fields)

    return part


@pytest.mark.parametrize(
    "part",
    [
        answers(b""),
        answers(entry()[:10]),
        answers(entry() * 2),
        answers(entry() * 50),
        answers(entry(path_len=1 << 31)),
        answers(entry(), status=9),
        answers(os.urandom(5000)),
    ],
)
def test_nonsense_is_the_workloads_doing(part):
    with pytest.raises(FileKilled) as caught:
        play(lambda control: FileTrees(control, "0").stat(b"/x"), part)
    assert (caught.value.cause, caught.value.retryable) == ("workload", False)


@pytest.mark.parametrize("data", [b"", b"short", entry(path_len=5000)])
def test_a_read_without_its_entry(data):
    with pytest.raises(FileKilled):
        play(lambda control: FileRead.open(control, user="0", path="/x"), answers(data))


def test_a_list_longer_than_was_asked_for():
    with pytest.raises(FileKilled):
        play(
            lambda control: FileTrees(control, "0").list(b"/", depth=1, limit=3),
            answers(entry(b"a") * 6),
        )


def test_a_list_that_is_sorted_and_cut():
    listing = play(
        lambda control: FileTrees(control, "0").list(b"/d/", depth=1, limit=3),
        answers(entry(b"b") + entry(b"a") + entry(err=errno.E2BIG)),
    )
    assert ([one.path for one in listing.entries], listing.truncated) == ([b"/d/a", b"/d/b"], True)


def test_where_it_failed_is_named():
    async def upload(control):
        with ArchiveWrite.open(
            control, user="0", path=b"/t", filter=protocol.EVERYTHING, length_max=9
        ) as write:
            await write.finish()

    def part(pid1, message, fds):
        os.write(fds[1], entry(b"a/\xff", err=errno.EBADMSG))
        pid1.exit(message.id, 1 << 8, failure=(step, index, err, 0))

    step, index, err = Step.STEP_ARCHIVE, ArchiveFlaw.ARCHIVE_NAME, errno.EBADMSG
    with pytest.raises(ArchiveInvalid) as invalid:
        play(upload, part)
    assert invalid.value.detail == {"reason": "name", "member": "a/\ufffd"}
    step, index, err = Step.STEP_FILE_WRITE, 4, errno.ENOSPC
    with pytest.raises(DiskFull) as full:
        play(upload, part)
    assert full.value.detail["path"] == "/t/a/\ufffd"
