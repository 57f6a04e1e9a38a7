"""The store: names, plans, reuse, collecting, auditing, flattening."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sif_tools
from sif_tools.batch.jobs import Job, Journal, read_list
from sif_tools.errors import BadBatch, BadName, NotInStore, StoreWriteFailed
from sif_tools.merge.tree import Tree
from sif_tools.sources.open import open_source
from sif_tools.squashfs import SquashfsOptions
from sif_tools.store import lookup
from sif_tools.store.audit import audit
from sif_tools.store.build import extended
from sif_tools.store.collect import collect
from sif_tools.store.flatten import flatten
from sif_tools.store.keeper import Keeper, KeepOptions, make_store
from sif_tools.store.layout import Layout, quoted, unquoted
from sif_tools.store.leases import LeaseHolder, leased
from sif_tools.store.plan import Chain, Planner
from sif_tools.store.records import Layers
from sif_tools.store.report import store_report
from sif_tools.store.sync_check import sync_check
from sif_tools.store.trees import dump_tree, load_tree
from tests.unit.sif_tools.image_factories import member, tar_bytes
from tests.unit.sif_tools.random_images import ImageMaker, layout_of
from tests.unit.sif_tools.store_readers import assert_readers_see_whole_files, files

DAY_S = 86400.0


@pytest.fixture(scope="module")
def oci(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = ImageMaker(11)
    maker.layer(60)
    maker.layer(20)
    images = {}
    for number in range(3):
        one = maker.copy(number)
        one.layer(10)
        images[f"t{number}"] = one.layers
    return layout_of(tmp_path_factory.mktemp("store") / "oci", images, {"Env": ["A=1"]})


@pytest.fixture
def store(tmp_path: Path) -> Layout:
    return make_store(tmp_path / "store")


def keep(store: Layout, oci: Path, tag: str, cuts: tuple[int, ...] = (1, 2)) -> str:
    with open_source(f"oci:{oci}:{tag}") as source:
        return Keeper(store).keep(source, cuts, tag).key


def age(store: Layout, seconds: float) -> None:
    """Let all that is there have been there for long."""
    then = time.time() - seconds
    for path in store.root.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


# ── names ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["a", "host:5000/team/image:tag", "x@sha256:" + "0" * 64, "..", "./a", "ä b\udcff%2F"]
)
def test_a_name_is_one_file_name_and_back(name: str) -> None:
    text = quoted(name)
    assert "/" not in text
    assert not text.startswith(".")
    assert unquoted(text + ".json") == name or "\udcff" in name


@pytest.mark.parametrize("name", ["", "a" * 241, "/" * 90])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(BadName):
        quoted(name)


def test_an_image_is_found_by_its_name(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    record, sifs = lookup.find_image(store, "t0")
    assert [sif.role for sif in record.sifs] == ["base", "shared", "delta"]
    assert all(sif.path.stat().st_mode & 0o777 == 0o444 for sif in sifs)
    with pytest.raises(NotInStore):
        lookup.find_image(store, "t1")


def test_a_name_moves_to_another_image(store: Layout, oci: Path) -> None:
    first = keep(store, oci, "t0")
    other = keep(store, oci, "t1")
    Keeper(store).give_name("t0", other, None)
    assert first != other
    assert lookup.find_image(store, "t0")[0] == lookup.image_record(store, other)


def test_a_directory_of_something_else_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(StoreWriteFailed):
        make_store(tmp_path)


# ── keeping ─────────────────────────────────────────────────────────────────────────────────────


def test_images_share_what_lies_below(store: Layout, oci: Path) -> None:
    for tag in ("t0", "t1", "t2"):
        keep(store, oci, tag)
    stacks = [lookup.find_image(store, tag)[0].sifs for tag in ("t0", "t1", "t2")]
    assert len({stack[:2] for stack in stacks}) == 1
    assert len({stack[2] for stack in stacks}) == 3
    report = store_report(store)
    assert (report.images, list(report.images_by_base.values())) == (3, [3])
    whole = sum(path.stat().st_size for path in (store.root / "objects").rglob("*.sif"))
    assert report.kept_bytes == whole
    assert report.saved_bytes == 2 * sum(sif.size_bytes for sif in stacks[0][:2])


def test_the_second_time_nothing_is_written(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    before = files(store.root)
    keep(store, oci, "t0")
    assert files(store.root) == before


def test_equal_layers_over_different_bases_are_one_file(store: Layout, tmp_path: Path) -> None:
    one, other = ImageMaker(1), ImageMaker(2)
    one.layer(30)
    other.layer(30)
    # As `COPY --link` makes them: the directories on the way are in the layer, too.
    layer = tar_bytes([member("opt/", mode=0o750), member("opt/tool", os.urandom(5000))])
    oci = layout_of(tmp_path / "oci", {"a": [*one.layers, layer], "b": [*other.layers, layer]})
    for tag in ("a", "b"):
        keep(store, oci, tag, (1, 2))
    stacks = [lookup.find_image(store, tag)[0].sifs for tag in ("a", "b")]
    assert stacks[0][0] != stacks[1][0]
    assert stacks[0][1] == stacks[1][1]


def test_flat_images_are_what_convert_makes(store: Layout, oci: Path, tmp_path: Path) -> None:
    with open_source(f"oci:{oci}:t0") as source:
        kept = Keeper(store, KeepOptions(layers=Layers.FLAT)).keep(source, (1,), "flat")
    (sif,) = lookup.stored_sifs(store, kept.record)
    sif_tools.convert(f"oci:{oci}:t0", tmp_path / "apart.sif")
    assert sif.path.read_bytes() == (tmp_path / "apart.sif").read_bytes()


def test_a_root_file_system_is_kept_by_what_it_is(store: Layout, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_text("x")
    keys = []
    for _ in range(2):
        with open_source(f"rootfs:{tmp_path / 'root'}") as source:
            keys.append(Keeper(store).keep(source, (), "root").key)
    assert keys[0] == keys[1]
    (tmp_path / "root" / "file").write_text("y")
    with open_source(f"rootfs:{tmp_path / 'root'}") as source:
        assert Keeper(store).keep(source, (), "root").key != keys[0]


def test_a_tree_survives_its_file(oci: Path) -> None:
    with open_source(f"oci:{oci}:t0") as source:
        tree = extended(None, source, 0, 2)
        again = load_tree(dump_tree(tree))
        assert listing(again) == listing(tree)
        assert dump_tree(again) == dump_tree(tree)
        whole = extended(None, source, 0, 3)
        assert listing(extended(again, source, 2, 3)) == listing(whole)


def listing(tree: Tree) -> list[object]:
    return [
        (path, sorted((n, c) for n, c in node.children.items() if isinstance(c, int)), node.layer)
        for path, node in tree.directories()
    ]


# ── planning ────────────────────────────────────────────────────────────────────────────────────


def chain(layers: str, *sizes: int) -> Chain:
    return Chain(tuple(layers), sizes or (10,) * len(layers))


def test_a_base_an_environment_and_tasks() -> None:
    chains = [chain(f"be{chr(0x100 + n)}") for n in range(5)]
    chains += [chain(f"bf{chr(0x200 + n)}") for n in range(5)]
    planner = Planner(chains)
    assert {planner.cuts(one) for one in chains} == {(1, 2)}


def test_several_layers_that_always_come_together_are_one_base() -> None:
    chains = [chain(f"abc{chr(0x100 + n)}") for n in range(5)]
    planner = Planner(chains)
    assert {planner.cuts(one) for one in chains} == {(3,)}


def test_equal_layers_on_other_bases_are_a_shared_part() -> None:
    chains = [chain(f"{chr(0x100 + n)}st{chr(0x200 + n)}", 1, 50, 50, 1) for n in range(6)]
    planner = Planner(chains)
    assert {planner.cuts(one) for one in chains} == {(1, 3)}


def test_a_lone_image_has_its_lowest_layer_as_base_and_uses_what_is_there() -> None:
    one = chain("abcd")
    assert Planner([one]).cuts(one) == (1,)


# ── collecting ──────────────────────────────────────────────────────────────────────────────────


def test_what_has_no_name_goes_to_the_trash_and_then_for_good(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    keep(store, oci, "t1")
    (_, _, gone), (_, _, stays) = (lookup.find_image(store, tag)[1] for tag in ("t0", "t1"))
    assert collect(store, drop_names=["t0"]).trashed == []  # too young
    age(store, 8 * DAY_S)
    first = collect(store)
    assert first.trashed_bytes == gone.size_bytes
    assert not gone.path.exists()
    assert stays.path.exists()
    assert collect(store).removed == []
    age(store, 8 * DAY_S)
    assert collect(store).removed_bytes == gone.size_bytes
    assert audit(store).problems == []
    assert lookup.is_complete(store, lookup.find_image(store, "t1")[0])


def test_what_is_leased_stays(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    *_, delta = lookup.find_image(store, "t0")[1]
    holder = LeaseHolder(store)
    holder.take(delta.digest)
    age(store, 8 * DAY_S)
    holder.touch()
    done = collect(store, drop_names=["t0"])
    assert delta.path.exists()
    assert done.leased == 1
    holder.close()
    assert leased(store) == (set(), [])
    collect(store)
    assert not delta.path.exists()


def test_a_dead_holders_leases_end(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    *_, delta = lookup.find_image(store, "t0")[1]
    LeaseHolder(store).take(delta.digest)
    age(store, 8 * DAY_S)
    collect(store, drop_names=["t0"])
    assert not delta.path.exists()
    assert list(store.leases.iterdir()) == []


def test_what_is_named_again_comes_back_from_the_trash(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    record, sifs = lookup.find_image(store, "t0")
    key = lookup.name_record(store, "t0").image  # type: ignore[union-attr]
    age(store, 8 * DAY_S)
    saved = store.image(key).read_bytes()
    collect(store, drop_names=["t0"])
    # A converter that had found the image before publishes its record and name after.
    store.image(key).write_bytes(saved)
    Keeper(store).give_name("t0", key, None)
    age(store, 8 * DAY_S)
    done = collect(store)
    assert set(done.restored) >= {sif.digest for sif in sifs}
    assert lookup.is_complete(store, record)
    assert_readers_see_whole_files(store.root)


def test_collecting_nothing_in_a_dry_run(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    age(store, 8 * DAY_S)
    before = files(store.root)
    assert collect(store, dry_run=True, drop_names=["t0"]).trashed == []
    assert files(store.root) == before


def test_an_image_whose_files_were_collected_is_made_again(store: Layout, oci: Path) -> None:
    key = keep(store, oci, "t0")
    for sif in lookup.find_image(store, "t0")[1]:
        sif.path.unlink()
    assert keep(store, oci, "t0") == key
    assert_readers_see_whole_files(store.root)
    assert audit(store).problems == []


# ── auditing ────────────────────────────────────────────────────────────────────────────────────


def test_an_audit_names_each_damage(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0")
    assert audit(store).problems == []
    base, _, delta = (sif.path for sif in lookup.find_image(store, "t0")[1])
    base.chmod(0o644)
    with base.open("r+b") as file:
        file.seek(base.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    delta.unlink()
    found = {(one.path.partition("/")[0], one.code) for one in audit(store).problems}
    assert found == {("objects", "digest-mismatch"), ("images", "store-damaged")}


def test_this_file_system_can_hold_a_store(tmp_path: Path) -> None:
    checks = sync_check(tmp_path)
    assert [one.name for one in checks if one.needed and not one.holds] == []
    assert list(tmp_path.iterdir()) == []


# ── flattening ──────────────────────────────────────────────────────────────────────────────────


def test_a_flattened_image_is_the_flat_one(
    store: Layout, oci: Path, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    keep(store, oci, "t2")
    flatten([sif.path for sif in lookup.find_image(store, "t2")[1]], tmp_path / "flat.sif")
    sif_tools.convert(f"oci:{oci}:t2", tmp_path / "apart.sif")

    def shown(sif: Path) -> list[str]:
        part = sif_tools.mountable_partition(sif_tools.read_sif(sif), sif)
        command = [tool("unsquashfs"), "-o", str(part.offset_bytes), "-lln", str(sif)]
        lines = subprocess.run(command, check=True, capture_output=True).stdout.splitlines()
        return sorted(line.decode("utf-8", "replace") for line in lines)

    assert shown(tmp_path / "flat.sif") == shown(tmp_path / "apart.sif")
    first, other = (sif_tools.read_sif(tmp_path / f"{name}.sif") for name in ("flat", "apart"))
    assert [one.name for one in first.descriptors] == [one.name for one in other.descriptors]


# ── batches ─────────────────────────────────────────────────────────────────────────────────────


def test_a_list(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("# tasks\n\noci:a:1 one\ndocker://h:5/n:t\noci:a:1 one\n")
    assert read_list(path) == [Job("oci:a:1", "one"), Job("docker://h:5/n:t", "h:5/n:t")]
    path.write_text("oci:a one\noci:b one\n")
    with pytest.raises(BadBatch, match="line 2"):
        read_list(path)


def test_a_journal_that_a_crash_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.add(Job("a", "a"), state="done", image="k")
        journal.add(Job("b", "b"), state="failed", code="x", message="y")
    with path.open("ab") as file:
        file.write(b'{"source": "c", "na')
    with Journal(path) as journal:
        assert list(journal.done) == [Job("a", "a")]
        journal.add(Job("c", "c"), state="done", image="k")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["source"] for line in lines] == ["a", "b", "c"]


def test_options_that_change_the_bytes_change_the_key(store: Layout, oci: Path) -> None:
    with open_source(f"oci:{oci}:t0") as source:
        keys = {
            Keeper(store, KeepOptions(SquashfsOptions(level=level))).image_key(source)
            for level in (None, 3, 4)
        }
    assert len(keys) == 2


def test_a_later_image_lies_on_what_is_there(store: Layout, oci: Path) -> None:
    keep(store, oci, "t0", (2,))
    keeper = Keeper(store)
    with open_source(f"oci:{oci}:t1") as source:
        layers = tuple(layer.diff_id for layer in source.layers)  # type: ignore[attr-defined]
        one = Chain(layers, tuple(layer.size_bytes for layer in source.layers))
        assert Planner([one]).cuts(one) == (1,)
        assert Planner([one], keeper.is_stored("arm64")).cuts(one) == (1,)
        assert Planner([one], keeper.is_stored(source.architecture)).cuts(one) == (2,)


def test_whoever_may_read_may_lease(store: Layout) -> None:
    assert store.leases.stat().st_mode & 0o7777 == 0o1777
