"""What a store holds and what sharing saves, from its records alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sif_tools.store import lookup
from sif_tools.store.files import read_json
from sif_tools.store.layout import Area, Layout
from sif_tools.store.records import Role, parse_build, parse_image


@dataclass(slots=True)
class StoreReport:
    """`apart_bytes`: the SIFs of every image on its own, as if none were shared."""

    images: int = 0
    names: int = 0
    kept_bytes: int = 0
    apart_bytes: int = 0
    source_bytes: int = 0
    names_bytes: int = 0
    sifs: dict[str, int] = field(default_factory=dict)
    bytes_by_role: dict[str, int] = field(default_factory=dict)
    images_by_base: dict[str, int] = field(default_factory=dict)
    base_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        return self.apart_bytes - self.kept_bytes

    def node(self) -> dict[str, Any]:
        """The report as JSON has it; bases by how many images they have."""
        return {
            "images": self.images,
            "names": self.names,
            "kept_bytes": self.kept_bytes,
            "apart_bytes": self.apart_bytes,
            "saved_bytes": self.saved_bytes,
            "source_bytes": self.source_bytes,
            "names_bytes": self.names_bytes,
            "sifs": self.sifs,
            "bytes_by_role": self.bytes_by_role,
            "bases": [
                {"digest": digest, "size_bytes": self.base_bytes[digest], "images": count}
                for digest, count in self.images_by_base.items()
            ],
        }


def store_report(layout: Layout) -> StoreReport:
    """Read every record. Raises SifError, OSError."""
    report = StoreReport()
    sizes: dict[str, tuple[str, int]] = {}
    bases: Counter[str] = Counter()
    for path in lookup.files_in(layout, Area.IMAGES):
        node = read_json(path)
        if node is None:
            continue
        image = parse_image(node)
        report.images += 1
        report.source_bytes += image.source_bytes
        for sif in image.sifs:
            report.apart_bytes += sif.size_bytes
            sizes[sif.digest] = (str(sif.role), sif.size_bytes)
        if image.sifs[0].role is Role.BASE:
            base = image.sifs[0]
            bases[base.digest] += 1
            report.base_bytes[base.digest] = base.size_bytes
    trees: dict[str, int] = {}
    for path in lookup.files_in(layout, Area.BUILDS):
        if (node := read_json(path)) is not None:
            tree = parse_build(node).tree
            trees[tree.digest] = tree.size_bytes
    report.names = sum(1 for _ in lookup.names(layout))
    report.names_bytes = sum(trees.values())
    report.kept_bytes = sum(size for _, size in sizes.values())
    report.sifs = dict(Counter(role for role, _ in sizes.values()))
    for role, size in sizes.values():
        report.bytes_by_role[role] = report.bytes_by_role.get(role, 0) + size
    report.images_by_base = dict(bases.most_common())
    return report
