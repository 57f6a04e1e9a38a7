"""A PID 1 in Python: speaks protocol.h over one control socket, runs real processes of this user.

No isolation at all. Each exec is a session of its own, and "tree" means its process group.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from pathlib import Path

from sandboxd.init import protocol
from sandboxd.init.protocol import ExecFlag, FileOp, KillScope, MsgType, Step

NO_FAILURE = (0, 0, 0, 0)


def exited(status=0, *, failure=NO_FAILURE, mode=0, uid=0, gid=0, size=0, mtime_ns=0):
    """Payload of R_EXIT."""
    return protocol.EXITED.pack(*failure, status, mode, uid, gid, size, mtime_ns, 1500, 2500, 4096)


def failed(step, err, index=0):
    """Payload of R_FAILED."""
    return protocol.FAILURE.pack(step, index, err, 0)


def split_strings(data):
    return [part.decode() for part in data.split(b"\0")[:-1]]


class FakePid1:
    """One sandbox. ``root`` is a directory that file operations see as ``/``; they are done by
    ``file_program`` (init/file_driver.c), and without it only whole files are written."""

    def __init__(self, sock, root, file_program=None):
        self._file_program = file_program
        self._sock = sock
        self._root = Path(root)
        self._lock = threading.Lock()
        self._children = {}
        self._files = set()
        self._stop_r, self._stop_w = os.pipe()
        self.execs = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _send(self, kind, request_id, payload=b"", fds=()):
        with self._lock:
            with contextlib.suppress(OSError):
                protocol.send(self._sock, protocol.pack(kind, request_id, payload), fds)

    def _run(self):
        while True:
            ready, _, _ = select.select([self._sock, self._stop_r], [], [])
            if self._stop_r in ready:
                break
            data, fds = protocol.receive(self._sock)
            if not data:
                break
            message = protocol.unpack(data)
            handler = {
                MsgType.M_EXEC: self._exec,
                MsgType.M_FILE: self._file,
                MsgType.M_KILL: self._kill,
                MsgType.M_PING: lambda message, _: self._send(MsgType.R_DONE, message.id),
            }[MsgType(message.type)]
            handler(message, fds)
            protocol.close_fds(fds)
        self._sock.close()
        for child in list(self._children.values()):
            _kill_group(child.pid, signal.SIGKILL)

    def _exec(self, message, fds):
        payload = message.payload
        if message.flags & ExecFlag.EXEC_PAYLOAD_FD:
            payload = os.pread(fds[0], protocol.PAYLOAD_MAX, 0)
        argc, envc, nofile, umask, _ = protocol.EXEC_REQ.unpack_from(payload)
        user, cwd, *words = split_strings(payload[protocol.EXEC_REQ.size :])
        argv, env = words[:argc], dict(word.split("=", 1) for word in words[argc:])
        assert len(words) == argc + envc
        self.execs.append(
            {"user": user, "cwd": cwd, "argv": argv, "env": env, "flags": message.flags,
             "nofile": nofile, "umask": umask}
        )  # fmt: skip
        if user == "nobody-here":
            self._send(MsgType.R_FAILED, message.id, failed(Step.STEP_USER, errno.ENOENT))
            return
        host_cwd = "/" if message.flags & ExecFlag.EXEC_CWD_CREATE else cwd
        if message.flags & ExecFlag.EXEC_SHELL:
            argv = ["/bin/sh", "-c", argv[0]]
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        in_r, in_w = os.pipe() if message.flags & ExecFlag.EXEC_STDIN else (None, None)
        started = [out_r, err_r] + ([in_w] if in_w is not None else [])
        self._send(MsgType.R_STARTED, message.id, protocol.STARTED.pack(42, 0), started)
        protocol.close_fds(started)
        failure = NO_FAILURE
        status = 0
        try:
            child = subprocess.Popen(
                argv,
                cwd=host_cwd,
                env=env,
                stdin=subprocess.DEVNULL if in_r is None else in_r,
                stdout=out_w,
                stderr=err_w,
                start_new_session=True,
            )
        except OSError as error:
            if error.filename == host_cwd and host_cwd != argv[0]:
                failure = (Step.STEP_CWD, 0, error.errno, 0)
            else:
                failure = (Step.STEP_EXEC, 0, error.errno, 0)
                status = (127 if error.errno == errno.ENOENT else 126) << 8
                os.write(err_w, b"cannot execute\n")
            child = None
        protocol.close_fds([out_w, err_w] + ([in_r] if in_r is not None else []))
        if child is None:
            self._send(MsgType.R_EXIT, message.id, exited(status, failure=failure))
            return
        self._children[message.id] = child
        threading.Thread(target=self._wait, args=(message.id, child), daemon=True).start()

    def _wait(self, request_id, child):
        _, status, _ = os.wait4(child.pid, 0)
        child.returncode = 0
        self._send(MsgType.R_EXIT, request_id, exited(status))

    def _kill(self, message, _fds):
        number, scope = protocol.KILL_REQ.unpack(message.payload)
        child = self._children.get(message.id)
        if child is None:
            self._send(MsgType.R_FAILED, message.id, failed(Step.STEP_MESSAGE, errno.ESRCH))
            return
        _kill_group(child.pid, number)
        if number == signal.SIGKILL and scope == KillScope.KILL_TREE:
            self._send(MsgType.R_GONE, message.id)

    def _file(self, message, fds):
        op, flags, mode, _, _, length, *_ = protocol.FILE_REQ.unpack_from(message.payload)
        user, path, *_ = split_strings(message.payload[protocol.FILE_REQ.size :])
        if op == FileOp.FILE_WRITE and path.endswith("/full"):
            failure = (Step.STEP_FILE_WRITE, 0, errno.ENOSPC, 0)
            self._send(MsgType.R_EXIT, message.id, exited(failure=failure))
        elif self._file_program is not None:
            self._run_file_program(message, fds)
        else:
            assert op == FileOp.FILE_WRITE
            data_fd = os.dup(fds[0])
            work = (self._root / path.lstrip("/"), data_fd, length, flags, mode)
            threading.Thread(
                target=self._write_file, args=(message.id, user, work), daemon=True
            ).start()

    def files_under_way(self):
        return len(self._files)

    def _run_file_program(self, message, fds):
        child = subprocess.Popen(
            [self._file_program, self._root, *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,
            env={"ASAN_OPTIONS": "detect_leaks=0"},
        )
        self._children[message.id] = child
        self._files.add(message.id)

        def run():
            answer, _ = child.communicate(message.payload)
            if child.returncode != 0:
                answer = exited(signal.SIGKILL)
            self._files.discard(message.id)
            self._send(MsgType.R_EXIT, message.id, answer)

        threading.Thread(target=run, daemon=True).start()

    def _write_file(self, request_id, user, work):
        try:
            answer = self._write(*work)
        except OSError as error:
            step = Step.STEP_FILE_OPEN if user != "nobody-here" else Step.STEP_USER
            answer = exited(failure=(step, 0, error.errno, 0))
        finally:
            protocol.close_fds([work[1]])
        self._send(MsgType.R_EXIT, request_id, answer)

    @staticmethod
    def _write(path, data_fd, length, flags, mode):
        if flags & protocol.FileFlag.FILE_PARENTS:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise OSError(errno.EISDIR, "is a directory")
        temporary = path.with_name(path.name + ".tmp")
        got = 0
        with temporary.open("wb") as file:
            while data := os.read(data_fd, 65536):
                file.write(data)
                got += len(data)
        if got != length:
            temporary.unlink()
            return exited(failure=(Step.STEP_FILE_LENGTH, 0, 0, 0))
        if flags & protocol.FileFlag.FILE_MODE:
            temporary.chmod(mode)
        temporary.rename(path)
        return _file_exited(path.stat())

    def die(self):
        """As PID 1 does when it is killed: everything goes with it."""
        os.write(self._stop_w, b"x")
        self._thread.join(10)
        protocol.close_fds([self._stop_r, self._stop_w])


def _file_exited(status):
    return exited(
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _kill_group(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def seqpacket_pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ScriptedPid1:
    """The other end of a control socket for tests that play PID 1 themselves."""

    def __init__(self, sock):
        self.sock = sock
        sock.settimeout(10)

    def receive(self):
        data, fds = protocol.receive(self.sock)
        message = protocol.unpack(data)
        return message, fds

    def send(self, kind, request_id, payload=b"", fds=()):
        protocol.send(self.sock, protocol.pack(kind, request_id, payload), fds)

    def start(self, request_id, count=2):
        """R_STARTED; returns our ends: writers of stdout and stderr, reader of stdin."""
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        theirs, ours = [out_r, err_r], [out_w, err_w]
        if count == 3:
            in_r, in_w = os.pipe()
            theirs.append(in_w)
            ours.append(in_r)
        self.send(MsgType.R_STARTED, request_id, struct.pack("=II", 7, 0), theirs)
        protocol.close_fds(theirs)
        return ours

    def exit(self, request_id, status=0, **fields):
        self.send(MsgType.R_EXIT, request_id, exited(status, **fields))
