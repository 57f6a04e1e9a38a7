"""The Python client of sandboxd: ``Client`` and ``Sandbox``, ``AsyncClient`` and ``AsyncSandbox``.

::

    from sandboxd.client import Sandbox

    with Sandbox.create("debian", limits={"memory_mb": 512}) as sandbox:
        sandbox.write_file("/work/t.py", "print(6 * 7)")
        print(sandbox.exec(["python3", "/work/t.py"], timeout_s=10).stdout)

    async with AsyncClient(url, token) as client, client.create("debian") as sandbox:
        async with sandbox.exec_stream("pytest -q", timeout_s=300) as stream:
            async for output in stream:
                print(output.stream, output.data)

All that can be asked, and what answers mean, is written once and does no input or output; two thin
drivers send it. A call has the same name, arguments and result in both; in one it blocks, in the
other it is awaited::

                    calls ----------- Call[T]: method, path, body, how to read the answer
                      | make            retries --- Tries, Resumes: when to send again
                    results, frames     failures -- errors.SandboxdError from an answer
                      |                    |
          +-----------+--------------------+-----------+
          |                                            |
    sync_driver.Driver  <- driver ->      aio_driver.AsyncDriver
       do, upload, stream                    do, upload, stream
       sync_transport (httpx's)              aio_transport (httpx's)
          ^                                            ^
          | is a                                       | is an
    sync.Client ---create, connect--->      aio.AsyncClient ---create, connect--->
                    sync.Sandbox                              aio.AsyncSandbox
                      exec_stream -> ExecStream                 exec_stream -> AsyncExecStream
                      start_process -> Process                  start_process -> AsyncProcess
                      open_session -> Session                   open_session -> AsyncSession

``Client.from_slurm()`` is the daemon of this process's node in its Slurm job;
``client.slurm.nodes`` has those of all nodes.

``client.run(...)`` is a run of this process's (``sync_run``, ``aio_run``): its sandboxes end with
its block, or soon after the process has died.

Errors are the tree of ``sandboxd.errors``: by class, or by ``code``, ``cause`` and ``retryable``.
A command that fails is a result and no error.

What a worker leaves behind when it is cancelled or killed: its foreground commands are killed by
the node when their connections close, a create that was not answered is undone, and a sandbox lives
until its TTL or idle timeout is up. Nothing needs a finaliser.

Imports only ``model`` and ``errors`` of the package; the daemon's parts are not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandboxd.client.diff_calls import Diff, DiffEntry
from sandboxd.client.eyes_calls import HistoryPoint, NodeEvent
from sandboxd.client.failures import (
    AnswerTimeout,
    ClientMisused,
    ConnectionFailed,
    ConnectionLost,
    NotSandboxd,
)
from sandboxd.client.process_calls import ProcessInfo
from sandboxd.client.results import (
    Deleted,
    Event,
    ExecExit,
    ExecResult,
    FileInfo,
    Image,
    Node,
    Output,
    Prefetched,
    PreparedImage,
    SandboxInfo,
    Snapshot,
    Stats,
    StreamExit,
)
from sandboxd.client.run_calls import DrainInfo, RunEnd, RunInfo
from sandboxd.client.session_calls import SessionInfo, SessionResult
from sandboxd.client.sync import Client, Sandbox
from sandboxd.client.sync_process import Process
from sandboxd.client.sync_run import Run
from sandboxd.client.sync_session import Session
from sandboxd.client.sync_stream import ExecStream
from sandboxd.errors import SandboxdError

if TYPE_CHECKING:
    from sandboxd.client.aio import AsyncClient, AsyncSandbox
    from sandboxd.client.aio_process import AsyncProcess
    from sandboxd.client.aio_run import AsyncRun
    from sandboxd.client.aio_session import AsyncSession
    from sandboxd.client.aio_stream import AsyncExecStream

__all__ = [
    "AnswerTimeout",
    "AsyncClient",
    "AsyncExecStream",
    "AsyncProcess",
    "AsyncRun",
    "AsyncSandbox",
    "AsyncSession",
    "Client",
    "ClientMisused",
    "ConnectionFailed",
    "ConnectionLost",
    "Deleted",
    "Diff",
    "DiffEntry",
    "DrainInfo",
    "Event",
    "ExecExit",
    "ExecResult",
    "ExecStream",
    "FileInfo",
    "HistoryPoint",
    "Image",
    "Node",
    "NodeEvent",
    "NotSandboxd",
    "Output",
    "Prefetched",
    "PreparedImage",
    "Process",
    "ProcessInfo",
    "Run",
    "RunEnd",
    "RunInfo",
    "Sandbox",
    "SandboxInfo",
    "SandboxdError",
    "Session",
    "SessionInfo",
    "SessionResult",
    "Snapshot",
    "Stats",
    "StreamExit",
]


def __getattr__(name: str) -> Any:
    """The asynchronous half when it is first asked for: asyncio takes as long to import as all else
    together, and the command line does without."""
    if name not in (
        "AsyncClient",
        "AsyncExecStream",
        "AsyncProcess",
        "AsyncRun",
        "AsyncSandbox",
        "AsyncSession",
    ):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sandboxd.client import aio  # noqa: PLC0415

    return getattr(aio, name)
