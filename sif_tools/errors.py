"""The whole error tree of sif_tools; imports nothing of ours.

Every error a caller can meet carries a kebab-case `code` that never changes, a message for a
person, and a `hint` where the operator can do something about it. Not for programming mistakes:
those stay what Python raises.
"""

from __future__ import annotations

from typing import ClassVar


class SifError(Exception):
    """The root: catching it is catching everything that sif_tools raises on bad input."""

    code: ClassVar[str] = "sif-error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# ── reading a SIF ───────────────────────────────────────────────────────────────────────────────


class Unreadable(SifError):
    """The file cannot be opened or read (the operating system says no)."""

    code = "sif-unreadable"


class NotASif(SifError):
    """Too short, or no SIF magic: some other kind of file."""

    code = "not-a-sif"


class UnsupportedVersion(SifError):
    """A SIF, but of a version other than 01."""

    code = "sif-version-unsupported"


class BadSif(SifError):
    """A SIF whose structure contradicts itself or the file it is in."""

    code = "bad-sif"


class BadImageConfig(SifError):
    """`oci-config.json` is not what the OCI image specification calls a config."""

    code = "bad-image-config"


class NoPrimaryPartition(SifError):
    """A valid SIF without a primary system partition: there is nothing to mount."""

    code = "no-primary-partition"


class UnsupportedPartition(SifError):
    """The primary partition is of a file system type that is not squashfs."""

    code = "unsupported-partition"


class BadSquashfs(SifError):
    """The primary partition claims to be squashfs and is not, or its superblock is not sane."""

    code = "bad-squashfs"


class WrongArchitecture(SifError):
    """The image is made for another machine than this host."""

    code = "wrong-architecture"


# ── writing a SIF ───────────────────────────────────────────────────────────────────────────────


class DestinationExists(SifError):
    """A published file never changes: writing over one has to be asked for."""

    code = "destination-exists"


class WriteFailed(SifError):
    """The target directory cannot be written (missing, read-only, full …)."""

    code = "write-failed"


class BadObject(SifError):
    """A data object that the format has no room for (name too long, wrong extra field …)."""

    code = "bad-object"


class NoSuchObject(SifError):
    """The SIF has no data object of that id."""

    code = "no-such-object"


# ── signing ─────────────────────────────────────────────────────────────────────────────────────


class SigningFailed(SifError):
    """The program that signs or verifies is missing, or did not do it; its words are told."""

    code = "signing-failed"


class NotVerified(SifError):
    """The signatures do not prove all that they should."""

    code = "not-verified"


# ── converting ──────────────────────────────────────────────────────────────────────────────────


class ConvertError(SifError):
    """A conversion failed; names the layer and the entry where they are known.

    `layer` is what the source calls it (`layer 3 (sha256:…)`), `entry` the path inside it.
    """

    code = "convert-failed"

    def __init__(
        self,
        message: str,
        *,
        layer: str | None = None,
        entry: bytes | None = None,
        hint: str | None = None,
    ) -> None:
        self.layer = layer
        self.entry = entry
        self.reason = message
        super().__init__(self._sentence(), hint=hint)

    def _sentence(self) -> str:
        where = []
        if self.layer is not None:
            where.append(self.layer)
        if self.entry is not None:
            where.append(f"entry {printable(self.entry)}")
        return f"{', '.join(where)}: {self.reason}" if where else self.reason

    def located(self, *, layer: str | None = None, entry: bytes | None = None) -> ConvertError:
        """Fill in what the place that raised did not know; returns self, for `raise`."""
        if self.layer is None:
            self.layer = layer
        if self.entry is None:
            self.entry = entry
        self.message = self._sentence()
        self.args = (self.message,)
        return self


class BadSource(ConvertError):
    """The source reference cannot be understood, or is not there."""

    code = "bad-source"


class BadAuthFile(ConvertError):
    """A file of registry credentials, or the helper it names, cannot be used."""

    code = "bad-auth-file"


class RegistryFailed(ConvertError):
    """The registry cannot be reached, or does not answer as the specification says."""

    code = "registry-failed"


class RegistryDenied(ConvertError):
    """The registry does not let us read this with the credentials we have, or without any."""

    code = "registry-denied"


class RegistryBusy(ConvertError):
    """The registry asks for more patience than we have (429 or 503 with Retry-After)."""

    code = "registry-busy"


class ImageNotFound(ConvertError):
    """The registry has no such image, or blob."""

    code = "image-not-found"


class BadLayout(ConvertError):
    """An OCI layout whose index, manifest or config is not what the specification says."""

    code = "bad-oci-layout"


class NoMatchingPlatform(ConvertError):
    """The index has no image for the architecture asked for."""

    code = "no-matching-platform"


class DigestMismatch(ConvertError):
    """A blob's bytes are not those that its digest, size or diff_id names."""

    code = "digest-mismatch"


class UnsupportedCompression(ConvertError):
    """The layer is neither gzip, zstd nor a plain tar."""

    code = "unsupported-compression"


class TooLarge(ConvertError):
    """The image is larger, or inflates further, than the limits allow."""

    code = "image-too-large"


class BadLayer(ConvertError):
    """The layer's tar stream or its compression is broken."""

    code = "bad-layer"


class BadEntry(ConvertError):
    """One entry of a layer cannot be in an image (`..`, a bare `.wh.`, a lost link target …)."""

    code = "bad-entry"


class ToolMissing(ConvertError):
    """An outside program is not on PATH; the hint names the package that brings it."""

    code = "tool-missing"


class CannotBeRead(ConvertError):
    """The image would be of a compression that its readers do not know."""

    code = "readers-cannot-read"


class SquashfsToolFailed(ConvertError):
    """The squashfs writer ended with an error; its own words are in the message."""

    code = "squashfs-tool-failed"


# ── a store ─────────────────────────────────────────────────────────────────────────────────────


class NotAStore(SifError):
    """The directory is no store, or one of a version that is not known."""

    code = "not-a-store"


class NotInStore(SifError):
    """The store has no image of that name."""

    code = "not-in-store"


class BadName(SifError):
    """No image can be called that."""

    code = "bad-image-name"


class StoreUnreadable(SifError):
    """The store's file system does not let us read, or does not answer."""

    code = "store-unreadable"


class StoreDamaged(SifError):
    """A published file is not what its name or its record says."""

    code = "store-damaged"


class StoreWriteFailed(WriteFailed):
    """The store cannot be written."""

    code = "store-write-failed"


class StoreFull(StoreWriteFailed):
    """The store's file system, or a quota on it, is full."""

    code = "store-full"


class BadBatch(SifError):
    """The list of a batch cannot be read, or its journal belongs to another one."""

    code = "bad-batch"


def printable(name: bytes) -> str:
    """A path for a message: one line, terminal-safe, odd bytes escaped, never endless."""
    text = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in name[:512].decode("utf-8", "backslashreplace")
    )
    return f"'{text}…'" if len(name) > 512 else f"'{text}'"
