"""The whole tree of errors that sandboxd raises on purpose.

Every error has a kebab-case ``code`` that is part of the API, a ``cause`` that tells a trainer
whose fault it was, and whether the same request may succeed if it is sent again. What a workload
can bring about is never ``node`` and never retryable: a policy that loses would learn to crash
else.

Only ``api/exception_handlers.py`` knows which HTTP status belongs to an error. A command that exits
non-zero is a result, not an error. This module imports nothing of ours.
"""

from typing import Literal

Cause = Literal["workload", "request", "node"]


class SandboxdError(Exception):
    """Base of all errors with a public code.

    ``hint`` is for the operator or caller who can act on it; ``detail`` holds further fields of the
    JSON error body (never a traceback, never a host path).
    """

    # Of the class; an instance may say more exactly what another node answered (``client``).
    code: str = "internal-error"
    cause: Cause = "node"
    retryable: bool = False

    def __init__(self, message: str, *, hint: str | None = None, **detail: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail


class ConfigError(SandboxdError):
    """The configuration is wrong: an unknown key, an impossible value, a missing file."""

    code = "config-invalid"


class FeatureMissing(SandboxdError):
    """The node lacks something without which a sandbox would be less than promised."""

    code = "feature-missing"


# --- the caller's mistakes -------------------------------------------------------------------


class RequestError(SandboxdError):
    """The request is wrong and will be wrong again."""

    code = "request-invalid"
    cause = "request"


class SandboxNotFound(RequestError):
    code = "sandbox-not-found"


class ImageNotFound(RequestError):
    code = "image-not-found"


class ImageInvalid(RequestError):
    """The file is there, but is no SIF whose primary partition this node may mount."""

    code = "image-invalid"


class ImageInUse(RequestError):
    """The image has sandboxes and cannot be unmounted."""

    code = "image-in-use"


class SandboxPaused(RequestError):
    """Nothing can be started in a paused sandbox; resume it first."""

    code = "sandbox-paused"


class SandboxExists(RequestError):
    """The launcher has a sandbox of this id already."""

    code = "sandbox-exists"


class SandboxBusy(RequestError):
    """A reset or snapshot of the sandbox is under way."""

    code = "sandbox-busy"
    retryable = True


class SandboxExclusive(RequestError):
    """An exclusive command has the sandbox to itself until it ends."""

    code = "sandbox-exclusive"
    retryable = True


class SandboxReset(RequestError):
    """The sandbox was reset while the request was under way in it."""

    code = "sandbox-reset"


class SandboxRunning(RequestError):
    """Processes live in the sandbox, and the request needs that none does."""

    code = "sandbox-running"


class SnapshotNotFound(RequestError):
    code = "snapshot-not-found"


class SnapshotTooDeep(RequestError):
    """The sandbox stands on as many layers as it may."""

    code = "snapshot-too-deep"


class CheckpointUnsupported(RequestError):
    """Processes cannot be part of a snapshot on this node; the node's features say why."""

    code = "checkpoint-unsupported"


class FreezeUnsupported(RequestError):
    """Processes of a sandbox are alive, and this node has no cgroups to freeze them with: no pause,
    no exclusive command, and no copy of what they may write to."""

    code = "freeze-unsupported"


class RunNotFound(RequestError):
    """Nobody has set this run up, and it has no sandbox on this node."""

    code = "run-not-found"


class RunEnded(RequestError):
    """The run was ended a while ago, or its lease ran out; its name is free again later."""

    code = "run-ended"


class QuotaExceeded(RequestError):
    """The run has as much as it may; ``detail["retry_after_s"]`` says when to come back."""

    code = "quota-exceeded"
    retryable = True


class SeccompInvalid(RequestError):
    """The seccomp profile is none that can be enforced here; the message names the rule."""

    code = "seccomp-invalid"


class SeccompNotFound(RequestError):
    """The node has no seccomp profile of this name."""

    code = "seccomp-not-found"


class MountNotAllowed(RequestError):
    """The source lies below none of the node's ``mount_roots``, or may only be read there."""

    code = "mount-not-allowed"


class MountSourceNotFound(RequestError):
    """There is nothing on the node at the source of a mount."""

    code = "mount-source-not-found"


class MountSourceInvalid(RequestError):
    """The source of a mount is a symlink, leads over one, or is no directory or regular file."""

    code = "mount-source-invalid"


class MountTargetInvalid(RequestError):
    """The target of a mount is in the sandbox a symlink, leads over one, or is of another kind."""

    code = "mount-target-invalid"


class CpusetUnavailable(RequestError):
    """``limits.cpuset`` names a CPU that sandboxes of this node cannot have."""

    code = "cpuset-unavailable"


class LimitUnenforceable(RequestError):
    """This node has nothing that could hold the limit that was asked for."""

    code = "limit-unenforceable"


class NetworkNotAllowed(RequestError):
    """This node's configuration does not allow the network that was asked for."""

    code = "network-not-allowed"


class IdempotencyConflict(RequestError):
    """The Idempotency-Key was used before with another body."""

    code = "idempotency-conflict"


class CwdNotFound(RequestError):
    code = "cwd-not-found"


class UserNotFound(RequestError):
    code = "user-not-found"


class UserNotMapped(RequestError):
    """The user's id does not exist in sandboxes of this node, whose account has too few ids."""

    code = "user-not-mapped"


class ExecNotFound(RequestError):
    """No streamed exec of this id, or it ended too long ago."""

    code = "exec-not-found"


class ProcessNotFound(RequestError):
    code = "process-not-found"


class ExecIdTaken(RequestError):
    """The exec id that was asked for is that of a command that runs, or whose stream is kept."""

    code = "exec-id-taken"


class ProcessExists(RequestError):
    """The launcher has a process of this id already."""

    code = "process-exists"


class ProcessEnded(RequestError):
    """It has ended: nothing can be sent to it any more."""

    code = "process-ended"


class StdinClosed(RequestError):
    """The process reads no stdin: it was started without, or it is closed."""

    code = "stdin-closed"


class NotATerminal(RequestError):
    """The process was started without a terminal, so it has no size."""

    code = "not-a-terminal"


class SessionNotFound(RequestError):
    code = "session-not-found"


class SessionBusy(RequestError):
    """The session runs a command; it runs one at a time."""

    code = "session-busy"


class StreamPositionLost(RequestError):
    """The frames from this seq on are not kept any more; ``detail``: ``first_seq last_seq``."""

    code = "stream-position-lost"


class CommandTooLong(RequestError):
    """Arguments and environment are larger than the kernel or the protocol takes (E2BIG)."""

    code = "command-too-long"


class FileError(RequestError):
    """A file operation failed inside the sandbox; ``detail["errno"]`` names why."""

    code = "file-error"


class FileNotFound(FileError):
    code = "file-not-found"


class FileAccessDenied(FileError):
    code = "file-access-denied"


class NotARegularFile(FileError):
    code = "not-a-regular-file"


class NotADirectory(FileError):
    code = "not-a-directory"


class SymlinkInPath(FileError):
    """The path is a symlink, or leads over one, and none is followed here."""

    code = "symlink-in-path"


class DirectoryNotEmpty(FileError):
    """A directory is removed with what is in it only if that was asked for."""

    code = "directory-not-empty"


class FileExists(FileError):
    """Something is there already, and was not to be replaced or cannot be."""

    code = "file-exists"


class FileBusy(FileError):
    """A mount point, or a program that is running and may not be written to."""

    code = "file-busy"


class CrossDevice(FileError):
    """Source and destination are on two file systems, or the directory is the image's own."""

    code = "cross-device"


class FileChanged(FileError):
    """A process of the sandbox changed it while it was being worked on."""

    code = "file-changed"


class TreeTooLarge(FileError):
    """More entries, bytes or levels than one request may take."""

    code = "tree-too-large"


class DiffUnspeakable(FileError):
    """A name or an attribute of the sandbox that a layer's tar cannot have."""

    code = "diff-unspeakable"


class ArchiveInvalid(FileError):
    """No tar, or one that is damaged, unsafe or too large; ``detail["reason"]`` says which."""

    code = "archive-invalid"


class RangeNotSatisfiable(FileError):
    """The file ends before the range begins; ``detail["size_bytes"]`` says where."""

    code = "range-not-satisfiable"


# --- the caller's, and there only because there is HTTP ----------------------------------------


class Unauthorized(RequestError):
    """No bearer token, or not this node's."""

    code = "unauthorized"


class RouteNotFound(RequestError):
    code = "route-not-found"


class MethodNotAllowed(RequestError):
    code = "method-not-allowed"


class BodyTooLarge(RequestError):
    code = "body-too-large"


class LengthRequired(RequestError):
    """A large upload without Content-Length."""

    code = "length-required"


class HttpError(RequestError):
    """What the HTTP layer refused for a reason of its own."""

    code = "http-error"


# --- what the workload brought about ---------------------------------------------------------


class WorkloadError(SandboxdError):
    code = "workload-error"
    cause = "workload"


class SandboxDead(WorkloadError):
    """The sandbox's PID 1 is gone; ``detail["reason"]`` says how, where it is known."""

    code = "sandbox-dead"


class OomKilled(WorkloadError):
    """The sandbox's memory limit killed what the request depended on."""

    code = "oom-killed"


class PidsExhausted(WorkloadError):
    """The sandbox is at its process limit, so nothing more can be started in it."""

    code = "pids-exhausted"


class DiskFull(WorkloadError):
    """The writable layer is at its limit of bytes or inodes."""

    code = "disk-full"


class TooManyExecs(WorkloadError):
    """More execs and file operations at once than one PID 1 keeps track of."""

    code = "too-many-execs"


class ProcessesStuck(WorkloadError):
    """A process of the sandbox can be neither frozen nor killed in time."""

    code = "processes-stuck"


class TooManyProcesses(WorkloadError):
    """The sandbox has as many background processes, ended ones included, as it may."""

    code = "too-many-processes"


class StdinBlocked(WorkloadError):
    """The process does not read its stdin; ``detail["written_bytes"]`` were taken in time."""

    code = "stdin-blocked"


class SessionEnded(WorkloadError):
    """The session's interpreter has ended; ``detail["exit_code"]`` says how, where it is known."""

    code = "session-ended"


class PortClosed(WorkloadError):
    """Nothing in the sandbox listens on the port."""

    code = "port-closed"


class PortTimeout(WorkloadError):
    """What listens on the port did not take the connection, or did not answer, in time."""

    code = "port-timeout"


class PortBroken(WorkloadError):
    """What listens on the port hung up, or its answer is none of the protocol."""

    code = "port-broken"


class TooManyPortConnections(WorkloadError):
    """The ports of the sandbox have as many connections as they may."""

    code = "too-many-port-connections"


class ExecSetupFailed(WorkloadError):
    """A step between the fork and the exec failed for a reason that lies in the sandbox."""

    code = "exec-setup-failed"


class FileStalled(WorkloadError):
    """No byte of a file operation moved for long. Its process is the sandbox's root's to stop; an
    image's server that hangs is killed sooner, and its sandboxes with it."""

    code = "file-stalled"


class FileKilled(WorkloadError):
    """The process of a file operation was killed: by the sandbox's root, or for want of memory."""

    code = "file-operation-killed"


# --- the node's own --------------------------------------------------------------------------


class NodeError(SandboxdError):
    code = "node-error"
    retryable = True


class NodeUnavailable(NodeError):
    """The launcher does not answer: it is starting, restarting or gone."""

    code = "node-unavailable"


class NodeVersionMismatch(NodeError):
    """The node's root part runs another version, which this daemon cannot speak to."""

    code = "node-version-mismatch"
    retryable = False


class NodeOverloaded(NodeError):
    """There is no room now; ``detail["retry_after_s"]`` says when to come back."""

    code = "node-overloaded"


class NodeDraining(NodeError):
    """The node takes on no more sandboxes; those it has go on for now."""

    code = "node-draining"


class TooManyConnections(NodeError):
    """As many clients are connected as the node has descriptors for."""

    code = "too-many-connections"


class ImageUnavailable(NodeError):
    """The image's file system server died, or the store does not answer."""

    code = "image-unavailable"


class ImageUnverified(NodeError):
    """This node's kernel serves its images, and is given only those whose bytes are known: of a
    store, with the right digest, and for nobody but root to change."""

    code = "image-unverified"
    retryable = False


class ExportFailed(NodeError):
    """No SIF could be made of a snapshot: a tool or room is missing on the node."""

    code = "export-failed"
    retryable = False


class NetworkUnavailable(NodeError):
    """The node gives sandboxes no network: it is not set up for it, or it failed."""

    code = "network-unavailable"
    retryable = False


class SandboxLost(NodeError):
    """The sandbox died with something of ours: its image's server, its launcher."""

    code = "sandbox-lost"


class SandboxSetupError(NodeError):
    """A step of setting a sandbox up failed; it was refused, not made without that wall.

    ``detail``: ``step`` (name of the step), ``index`` (which of several), ``errno`` (its symbol).
    """

    code = "sandbox-setup-failed"
    retryable = False


def subclasses(root: type[SandboxdError] = SandboxdError) -> list[type[SandboxdError]]:
    """Every error class below ``root``, itself included, in definition order."""
    found = [root]
    for child in root.__subclasses__():
        found.extend(subclasses(child))
    return found
