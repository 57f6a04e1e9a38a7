"""Bring an image into a store: found there, or built once, however many ask for it at once."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from sif_tools.errors import StoreDamaged, StoreUnreadable, StoreWriteFailed
from sif_tools.merge.tree import Tree
from sif_tools.scratch import scratch_file
from sif_tools.sources.source import Source
from sif_tools.squashfs import SquashfsOptions, find_tool
from sif_tools.store import lookup
from sif_tools.store.build import (
    LocalFile,
    base_sif,
    delta_sif,
    diff_ids,
    extended,
    flat_sif,
    shared_sif,
)
from sif_tools.store.claims import Claims
from sif_tools.store.files import open_published, publish_file, publish_json
from sif_tools.store.layout import FORMAT, MARK, Layout, Suffix, key_of, open_store
from sif_tools.store.plan import Cuts, IsStored
from sif_tools.store.records import (
    BuildRecord,
    ImageRecord,
    Layers,
    NameRecord,
    ObjectRecord,
    Role,
    SifRecord,
)
from sif_tools.store.steps import OnStep, Step, ignore
from sif_tools.store.trees import dump_tree, load_tree

# A tree of 100,000 names takes about 20 MB.
_TREES_KEPT: Final = 6
# Somebody may collect what was just found; after so many times it is no coincidence.
_ATTEMPTS: Final = 5

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KeepOptions:
    """What decides the bytes of what is kept, beside the image itself."""

    squashfs: SquashfsOptions = field(default_factory=SquashfsOptions)
    layers: Layers = Layers.SHARED


@dataclass(frozen=True, slots=True)
class Kept:
    """An image in the store. `written_bytes`: of SIFs that were not there before."""

    key: str
    record: ImageRecord
    written_bytes: int

    @property
    def size_bytes(self) -> int:
        return sum(sif.size_bytes for sif in self.record.sifs)


def make_store(root: str | os.PathLike[str]) -> Layout:
    """The store there; made where there is nothing but perhaps an empty directory."""
    path = Path(root)
    if not (path / MARK).exists():
        try:
            # Two may make it at once: the other's mark may be half way.
            strangers = path.is_dir() and any(MARK not in one for one in os.listdir(path))
        except OSError as error:
            raise StoreUnreadable(f"{path}: {error.strerror}") from error
        if strangers:
            raise StoreWriteFailed(
                f"{path} is neither a store nor empty", hint="give an empty or a new directory"
            )
        publish_json(path / MARK, {"version": FORMAT, "made_by": "sif-tools"})
    layout = open_store(path)
    if not layout.leases.exists():
        # Nodes read as another account than converters write as; a lease can only keep things.
        with suppress(OSError):
            layout.leases.mkdir()
            layout.leases.chmod(0o1777)
    return layout


class Keeper:
    """Keeps images, one after another; remembers the trees of the bases it has met lately."""

    def __init__(
        self,
        layout: Layout,
        options: KeepOptions | None = None,
        *,
        claims: Claims | None = None,
        on_step: OnStep = ignore,
    ) -> None:
        self.layout = layout
        self._options = options or KeepOptions()
        self._claims = claims or Claims(layout.claim)
        self._on_step = on_step
        self._trees: OrderedDict[str, Tree] = OrderedDict()
        squashfs = self._options.squashfs
        # What decides the bytes, and nothing that only decides whether they are made.
        self._squashfs = {
            "compression": str(squashfs.compression),
            "level": squashfs.checked_level(),
            "block_size_bytes": squashfs.block_size_bytes,
        }
        self._written_bytes = 0
        find_tool()

    # --- asking ------------------------------------------------------------------------------

    def image_key(self, source: Source) -> str | None:
        """What an image is found by; None for one that only its conversion can tell apart."""
        if source.manifest_digest is None:
            return None
        layers = self._options.layers if diff_ids(source) else Layers.FLAT
        return self._key(
            "image",
            source.architecture,
            image=source.manifest_digest,
            kind=source.kind,
            how=str(layers),
        )

    def find(self, source: Source) -> Kept | None:
        """The image where it is in the store, and whole."""
        key = self.image_key(source)
        record = None if key is None else lookup.image_record(self.layout, key)
        if key is None or record is None or not lookup.is_complete(self.layout, record):
            return None
        return Kept(key, record, 0)

    def is_stored(self, architecture: str) -> IsStored:
        """For a `Planner`: whether a run of layers is there, for images of that architecture."""
        known: dict[tuple[tuple[str, ...], int], bool] = {}

        def ask(layers: Sequence[str], below: int) -> bool:
            run = (tuple(layers), below)
            if run not in known:
                key = self._run_key(architecture, layers, below)
                known[run] = self._found_build(key) is not None
            return known[run]

        return ask

    # --- keeping -----------------------------------------------------------------------------

    def keep(self, source: Source, cuts: Cuts = (), name: str | None = None) -> Kept:
        """The image in the store, built where it is not, and found by `name` from then on.

        `cuts` are a `Planner`'s; without any, or where layers have no names, it is kept flat.
        Raises SifError.
        """
        self._written_bytes = 0
        for _ in range(_ATTEMPTS):
            kept = self.find(source) or self._keep(source, cuts)
            if name is not None:
                self.give_name(name, kept.key, source.manifest_digest)
            # What lay unused for long may have been collected since it was found.
            if lookup.is_complete(self.layout, kept.record):
                return Kept(kept.key, kept.record, self._written_bytes)
        raise StoreDamaged("the image's files vanish as soon as they are there")

    def keep_run(self, source: Source, cuts: Cuts) -> int:
        """Only the shared run of layers below the last of `cuts`, and what lies below it; returns
        the bytes of SIFs that were not there before."""
        self._written_bytes = 0
        self._runs(source, cuts)
        return self._written_bytes

    def give_name(self, name: str, key: str, manifest_digest: str | None) -> None:
        """Let a name stand for an image; writes nothing where it does."""
        record = NameRecord(name, key, manifest_digest)
        if lookup.name_record(self.layout, name) != record:
            publish_json(self.layout.name(name), record.node(), replace=True)
        self._on_step(Step.NAMED)

    def _keep(self, source: Source, cuts: Cuts) -> Kept:
        key = self.image_key(source)
        if key is None:
            return self._keep_unnamed(source)
        runs = self._runs(source, cuts)
        record = self._once(
            key,
            lambda: self._found_image(key),
            lambda: self._build_image(key, source, runs, cuts),
        )
        return Kept(key, record, 0)

    def _runs(self, source: Source, cuts: Cuts) -> list[BuildRecord]:
        """The records of the shared runs of an image, base first, each built where it is not."""
        layers = diff_ids(source)
        if not layers or self._options.layers is Layers.FLAT:
            return []
        found: list[BuildRecord] = []
        for number, above in enumerate(cuts):
            below = cuts[number - 1] if number else 0
            lower = found[-1] if found else None
            key = self._run_key(source.architecture, layers[:above], below)
            found.append(self._run(key, source, lower, (below, above)))
        return found

    def _run(
        self, key: str, source: Source, lower: BuildRecord | None, cuts: tuple[int, int]
    ) -> BuildRecord:
        return self._once(
            key,
            lambda: self._found_build(key),
            lambda: self._build_run(key, source, lower, cuts),
        )

    def _build_run(
        self, key: str, source: Source, lower: BuildRecord | None, cuts: tuple[int, int]
    ) -> BuildRecord:
        below, above = cuts
        lower_tree = None if lower is None else self._tree(lower.tree)
        tree = extended(lower_tree, source, below, above)
        options = self._options.squashfs
        if lower_tree is None:
            sif = self._publish(base_sif(tree, source, above, options), Role.BASE)
        else:
            sif = self._publish(shared_sif(lower_tree, tree, source, cuts, options), Role.SHARED)
        tree_record = self._publish_tree(tree)
        record = BuildRecord(tuple(diff_ids(source)[:above]), below, sif, tree_record)
        self._publish_record(self.layout.build(key), record, self._found_build(key) is None)
        self._on_step(Step.RECORDED)
        return record

    def _build_image(
        self, key: str, source: Source, runs: Sequence[BuildRecord], cuts: Cuts
    ) -> ImageRecord:
        options = self._options.squashfs
        if runs:
            below = [run.sif for run in runs]
            tree = self._tree(runs[-1].tree)
            digests = [sif.digest for sif in below]
            delta = delta_sif(tree, cuts[-1], source, digests, options)
            sifs = (*below, self._publish(delta, Role.DELTA))
        else:
            sifs = (self._publish(flat_sif(source, options), Role.FLAT),)
        return self._record_image(key, source, sifs)

    def _keep_unnamed(self, source: Source) -> Kept:
        """An image that no manifest names: it is converted, and then found to be there or not."""
        sifs = (self._publish(flat_sif(source, self._options.squashfs), Role.FLAT),)
        key = key_of({"format": FORMAT, "what": "sif", "digest": sifs[0].digest})
        record = self._found_image(key) or self._record_image(key, source, sifs)
        return Kept(key, record, self._written_bytes)

    def _record_image(self, key: str, source: Source, sifs: tuple[SifRecord, ...]) -> ImageRecord:
        record = ImageRecord(
            image=source.manifest_digest,
            architecture=source.architecture,
            layers=Layers.SHARED if len(sifs) > 1 else Layers.FLAT,
            sifs=sifs,
            source_bytes=sum(layer.size_bytes for layer in source.layers),
        )
        self._publish_record(self.layout.image(key), record, self._found_image(key) is None)
        self._on_step(Step.RECORDED)
        # Another's, where a claim of ours was taken for void and over.
        return self._found_image(key) or record

    @staticmethod
    def _publish_record(path: Path, record: BuildRecord | ImageRecord, needed: bool) -> None:
        """Records never change, but for one that names files which are there no more."""
        publish_json(path, record.node(), replace=needed and path.exists())

    # --- once --------------------------------------------------------------------------------

    def _once(self, key: str, find: Callable[[], _T | None], build: Callable[[], _T]) -> _T:
        """What `find` finds, in the end: built by us, or by whoever has the claim."""
        while True:
            found = find()
            if found is not None:
                return found
            claim = self._claims.take(key)
            if claim is None:
                self._claims.wait(key, lambda: find() is not None)
                continue
            try:
                self._on_step(Step.CLAIMED)
                # Published between our look and our claim?
                found = find()
                return build() if found is None else found
            finally:
                claim.release()
                self._on_step(Step.RELEASED)

    def _found_build(self, key: str) -> BuildRecord | None:
        record = lookup.build_record(self.layout, key)
        if record is None:
            return None
        sizes = (
            (self.layout.object(record.sif.digest, Suffix.SIF), record.sif.size_bytes),
            (self.layout.object(record.tree.digest, Suffix.TREE), record.tree.size_bytes),
        )
        try:
            whole = all(os.stat(path).st_size == size for path, size in sizes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnreadable(f"{self.layout.root}: {error.strerror}") from error
        return record if whole else None

    def _found_image(self, key: str) -> ImageRecord | None:
        record = lookup.image_record(self.layout, key)
        return record if record and lookup.is_complete(self.layout, record) else None

    # --- files -------------------------------------------------------------------------------

    def _publish(self, building: AbstractContextManager[LocalFile], role: Role) -> SifRecord:
        with building as file:
            self._on_step(Step.BUILT)
            target = self.layout.object(file.digest, Suffix.SIF)
            if publish_file(file.fd, file.size_bytes, file.digest, target, self._on_step):
                self._written_bytes += file.size_bytes
            return SifRecord(file.digest, file.size_bytes, role)

    def _publish_tree(self, tree: Tree) -> ObjectRecord:
        data = dump_tree(tree)
        digest = hashlib.sha256(data).hexdigest()
        with scratch_file("a list of names") as file:
            file.write(data)
            file.flush()
            target = self.layout.object(digest, Suffix.TREE)
            publish_file(file.fileno(), len(data), digest, target)
        self._remember(digest, tree)
        return ObjectRecord(digest, len(data))

    def _tree(self, record: ObjectRecord) -> Tree:
        tree = self._trees.get(record.digest)
        if tree is not None:
            self._trees.move_to_end(record.digest)
            return tree
        path = self.layout.object(record.digest, Suffix.TREE)
        try:
            with os.fdopen(open_published(path), "rb") as file:
                data = file.read()
        except OSError as error:
            raise StoreUnreadable(f"{path}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != record.digest:
            raise StoreDamaged(f"{path} does not have the digest it is named by")
        tree = load_tree(data)
        self._remember(record.digest, tree)
        return tree

    def _remember(self, digest: str, tree: Tree) -> None:
        self._trees[digest] = tree
        while len(self._trees) > _TREES_KEPT:
            self._trees.popitem(last=False)

    # --- keys --------------------------------------------------------------------------------

    def _run_key(self, architecture: str, layers: Sequence[str], below: int) -> str:
        return self._key("run", architecture, layers=list(layers), below=below)

    def _key(self, what: str, architecture: str, **more: Any) -> str:
        return key_of(
            {
                "format": FORMAT,
                "what": what,
                "architecture": architecture,
                "squashfs": self._squashfs,
            }
            | more
        )
