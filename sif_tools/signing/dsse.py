"""DSSE envelopes (github.com/secure-systems-lab/dsse), verified through `openssl`.

    {"payloadType": "application/vnd.sylabs.sif-metadata+json", "payload": base64,
     "signatures": [{"keyid": …, "sig": base64}, …]}

Signed is `DSSEv1 LENGTH TYPE LENGTH PAYLOAD` (lengths in decimal). One signature by a key that the
caller trusts is enough; `keyid` is a hint that nobody has to give, so each key is tried.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sif_tools.errors import BadSif, SigningFailed

PAYLOAD_TYPE: Final = "application/vnd.sylabs.sif-metadata+json"
_TOOL: Final = "openssl"
_MAX_SIGNATURES: Final = 100


@dataclass(frozen=True, slots=True)
class Envelope:
    payload: bytes
    signatures: tuple[bytes, ...]

    def signed_bytes(self) -> bytes:
        kind = PAYLOAD_TYPE.encode()
        head = b"DSSEv1 %d %s %d " % (len(kind), kind, len(self.payload))
        return head + self.payload


def parse_envelope(data: bytes) -> Envelope | None:
    """None for what is no envelope of this payload type; BadSif for a broken one."""
    try:
        node = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(node, dict) or node.get("payloadType") != PAYLOAD_TYPE:
        return None
    try:
        signatures = tuple(_decoded(one["sig"]) for one in node["signatures"])
        payload = _decoded(node["payload"])
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BadSif("a DSSE envelope is broken") from error
    if len(signatures) > _MAX_SIGNATURES:
        raise BadSif(f"a DSSE envelope with {len(signatures)} signatures")
    return Envelope(payload, signatures)


def verified_by(envelope: Envelope, keys: Sequence[Path]) -> list[Path]:
    """The keys (PEM public keys: Ed25519, ECDSA, RSA) of which one signature is."""
    with tempfile.TemporaryDirectory(prefix="sif-tools-") as scratch:
        signed = Path(scratch, "signed")
        signed.write_bytes(envelope.signed_bytes())
        files = []
        for number, one in enumerate(envelope.signatures):
            files.append(Path(scratch, f"{number}.sig"))
            files[-1].write_bytes(one)
        return [key for key in keys if any(_is_by(key, signed, file) for file in files)]


def _is_by(key: Path, signed: Path, signature: Path) -> bool:
    tool = shutil.which(_TOOL)
    if tool is None:
        raise SigningFailed(f"{_TOOL} is not on PATH", hint="install the package openssl")
    command = [tool, "pkeyutl", "-verify", "-pubin", "-inkey", str(key), "-rawin"]
    command += ["-in", str(signed), "-sigfile", str(signature)]
    # SHA-256 is what it takes for RSA and ECDSA, and what Apptainer signs with.
    ended = subprocess.run(command, capture_output=True, check=False)
    return ended.returncode == 0 and b"Signature Verified Successfully" in ended.stdout


def _decoded(text: str) -> bytes:
    """Standard or URL alphabet, as the specification allows."""
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
