"""PGP clearsigned messages, through `gpg`.

What gpg says on its status fd decides, never what a message looks like (doc/DETAILS of GnuPG).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sif_tools.errors import SigningFailed

_TOOL: Final = "gpg"
_HEADER: Final = b"-----BEGIN PGP SIGNED MESSAGE-----"
# gpg reads clearsigned text in lines of at most this, with a margin for what it adds.
_MAX_LINE_BYTES: Final = 19_000
_STATUS: Final = re.compile(rb"^\[GNUPG:\] ([A-Z_]+)(?: (.*))?$", re.MULTILINE)
# Any of these makes a signature one that proves nothing.
_BAD: Final = {
    b"BADSIG": "the signature is broken",
    b"ERRSIG": "the key is not known",
    b"EXPSIG": "the signature has expired",
    b"EXPKEYSIG": "the key has expired",
    b"REVKEYSIG": "the key was revoked",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text` is what gpg took to be signed; `fingerprint` the primary key's, if it is known."""

    text: bytes
    fingerprint: bytes
    problem: str | None


def is_clearsigned(data: bytes) -> bool:
    return data.startswith(_HEADER)


def plain_text(data: bytes) -> bytes:
    """The text of a message, unverified: RFC 9580 section 7."""
    found = re.fullmatch(
        rb"-----BEGIN PGP SIGNED MESSAGE-----\r?\n(?:[^\r\n]+\r?\n)*\r?\n(.*?)\r?\n"
        rb"-----BEGIN PGP SIGNATURE-----.*",
        data,
        re.DOTALL,
    )
    return b"" if found is None else re.sub(rb"^- ", b"", found[1], flags=re.MULTILINE)


@contextmanager
def keyring(keys: Sequence[Path]) -> Iterator[Path | None]:
    """A GnuPG home with nothing but these public keys; None, the user's own, without any."""
    if not keys:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sif-tools-") as name:
        home = Path(name)
        for key in keys:
            ended = _run(["--import", str(key)], b"", home)
            if ended.returncode != 0:
                raise SigningFailed(f"{key} is no PGP public key: {_words(ended)}")
        yield home


def verify_clearsigned(data: bytes, home: Path | None) -> Verdict:
    """Let gpg look at one message."""
    if not data.startswith(_HEADER) or data.count(_HEADER) != 1:
        return Verdict(b"", b"", "not one clearsigned message and nothing else")
    with tempfile.TemporaryDirectory(prefix="sif-tools-") as scratch:
        text = Path(scratch, "text")
        ended = _run(["--output", str(text), "--decrypt"], data, home)
        signed = text.read_bytes() if text.exists() else b""
    said = [(found[1], found[2] or b"") for found in _STATUS.finditer(ended.stdout)]
    words = [word for word, _ in said]
    for word, problem in _BAD.items():
        if word in words:
            return Verdict(signed or plain_text(data), b"", problem)
    valid = [rest.split() for word, rest in said if word == b"VALIDSIG"]
    if ended.returncode != 0 or len(valid) != 1 or words.count(b"GOODSIG") != 1 or not signed:
        return Verdict(plain_text(data), b"", f"gpg does not verify it: {_words(ended)}")
    # The last field is the primary key's fingerprint; without it, it is the signing key's.
    fields = valid[0]
    fingerprint = fields[9] if len(fields) > 9 else fields[0]
    return Verdict(signed, bytes.fromhex(fingerprint.decode("ascii")), None)


def clearsign(data: bytes, key: str | None) -> tuple[bytes, bytes]:
    """The signed message, and the fingerprint of the primary key; with gpg's default key if None.

    A passphrase is asked for by gpg's own agent.
    """
    if max(map(len, data.split(b"\n"))) > _MAX_LINE_BYTES:
        raise SigningFailed("too many objects in a group: gpg cannot sign lines as long as these")
    user = [] if key is None else ["--local-user", key]
    ended = _run([*user, "--digest-algo", "SHA256", "--clearsign"], data, None, status_fd=2)
    made = re.search(rb"^\[GNUPG:\] SIG_CREATED .* ([0-9A-F]+)$", ended.stderr, re.MULTILINE)
    if ended.returncode != 0 or made is None:
        raise SigningFailed(f"gpg does not sign: {_words(ended)}")
    listed = _run(["--with-colons", "--list-keys", made[1].decode()], b"", None, status_fd=2)
    primary = re.search(rb"^pub:.*\n(?:(?!fpr:).*\n)*fpr:::::::::([0-9A-F]+):", listed.stdout, re.M)
    if primary is None:
        raise SigningFailed("gpg does not tell the fingerprint of the key it signed with")
    return ended.stdout, bytes.fromhex(primary[1].decode("ascii"))


def _run(
    arguments: list[str], data: bytes, home: Path | None, *, status_fd: int = 1
) -> subprocess.CompletedProcess[bytes]:
    tool = shutil.which(_TOOL)
    if tool is None:
        raise SigningFailed(f"{_TOOL} is not on PATH", hint="install the package gpg")
    # A ring of its own needs no agent, and must not leave one behind.
    own = [] if home is None else ["--homedir", str(home), "--no-autostart", "--trust-model=always"]
    common = ["--batch", "--no-tty", "--status-fd", str(status_fd), *own]
    try:
        return subprocess.run(
            [tool, *common, *arguments],
            input=data,
            capture_output=True,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except OSError as error:
        raise SigningFailed(f"{_TOOL} cannot be started: {error.strerror}") from error


def _words(ended: subprocess.CompletedProcess[bytes]) -> str:
    lines = ended.stderr.decode("utf-8", "replace").splitlines()
    said = [line for line in lines if line and not line.startswith("[GNUPG:]")]
    return " / ".join(said)[:500] or f"it ended with {ended.returncode}"
