"""Images of a shared store, as the node finds them: what is stacked, and what is refused."""

import asyncio
import errno
import json
import os

import pytest

from sandboxd.errors import ImageInvalid, ImageNotFound, ImageUnavailable
from sandboxd.images.leases import Leases
from sandboxd.images.store import ImageStore
from sif_tools.sources.open import open_source
from sif_tools.store import files, lookup
from sif_tools.store.keeper import Keeper, make_store
from sif_tools.store.leases import leased
from tests.unit.sif_tools.random_images import ImageMaker, layout_of


@pytest.fixture(scope="module")
def oci(tmp_path_factory):
    one, other = ImageMaker(1), ImageMaker(2)
    for maker in (one, other):
        maker.layer(30)
        maker.layer(10)
    images = {"one": one.layers, "other": other.layers}
    config = {"Env": ["A=1"], "User": "me", "WorkingDir": "/w"}
    return layout_of(tmp_path_factory.mktemp("stacks") / "oci", images, config)


@pytest.fixture
def store(oci, tmp_path):
    layout = make_store(tmp_path / "store")
    keeper = Keeper(layout)
    for tag in ("one", "other"):
        with open_source(f"oci:{oci}:{tag}") as source:
            keeper.keep(source, (1,), f"host:5000/task/{tag}:v1")
    return layout


def check(layout, name):
    return asyncio.run(ImageStore(layout.root).check(name))


def test_a_name_is_a_base_and_what_lies_on_it(store):
    image = check(store, "host:5000/task/one:v1")
    (base,) = image.below
    sifs = lookup.find_image(store, image.name)[1]
    assert [base.digest, image.digest] == [sif.digest for sif in sifs]
    assert image.size_bytes == sum(sif.size_bytes for sif in sifs)
    assert base.name == f"sha256:{base.digest}"
    assert len({base.key, image.key}) == 2
    assert (image.config.env, image.config.user, image.config.workdir) == (("A=1",), "me", "/w")


def test_each_part_can_be_opened_and_is_the_checked_one(store):
    node = ImageStore(store.root)
    image = asyncio.run(node.check("host:5000/task/one:v1"))
    for part in (*image.below, image):
        fd = asyncio.run(node.open(part))
        assert os.readlink(f"/proc/self/fd/{fd}") == part.path
        os.close(fd)


def test_a_part_that_was_replaced_is_named_once_and_then_looked_at_again(store):
    node = ImageStore(store.root)
    image = asyncio.run(node.check("host:5000/task/one:v1"))
    (base,) = image.below
    beside = f"{base.path}.new"
    with open(base.path, "rb") as old, open(beside, "wb") as new:
        new.write(old.read())
    os.replace(beside, base.path)
    with pytest.raises(ImageUnavailable, match="replaced"):
        asyncio.run(node.open(base))
    again = asyncio.run(node.check("host:5000/task/one:v1"))
    fd = asyncio.run(node.open(again.below[0]))
    os.close(fd)
    assert again.below[0].key != base.key


def test_a_name_that_moves_is_the_other_image(store, monkeypatch):
    monkeypatch.setattr("sandboxd.images.store.REVALIDATE_S", -1.0)
    node = ImageStore(store.root)
    first = asyncio.run(node.check("host:5000/task/one:v1"))
    assert asyncio.run(node.check("host:5000/task/one:v1")) is first
    other = lookup.name_record(store, "host:5000/task/other:v1")
    Keeper(store).give_name("host:5000/task/one:v1", other.image, None)
    moved = asyncio.run(node.check("host:5000/task/one:v1"))
    assert moved.key == asyncio.run(node.check("host:5000/task/other:v1")).key != first.key


@pytest.mark.parametrize("name", ["absent", "host:5000/task/one:v2", "x" * 255])
def test_no_such_name(store, name):
    with pytest.raises(ImageNotFound):
        check(store, name)


def test_a_delta_on_another_base_is_refused(store):
    one, other = (
        lookup.name_record(store, f"host:5000/task/{tag}:v1").image for tag in ("one", "other")
    )
    record, alien = (json.loads(store.image(key).read_text()) for key in (one, other))
    record["sifs"][0] = alien["sifs"][0]
    store.image(one).chmod(0o644)
    store.image(one).write_text(json.dumps(record))
    with pytest.raises(ImageInvalid, match="another base"):
        check(store, "host:5000/task/one:v1")


def test_a_file_that_is_gone_is_the_nodes_fault(store):
    lookup.find_image(store, "host:5000/task/one:v1")[1][0].path.unlink()
    with pytest.raises(ImageUnavailable):
        check(store, "host:5000/task/one:v1")


def test_a_broken_record_is_the_nodes_fault(store):
    path = store.name("host:5000/task/one:v1")
    path.chmod(0o644)
    path.write_text("{")
    with pytest.raises(ImageUnavailable):
        check(store, "host:5000/task/one:v1")


def test_the_names_are_listed_without_opening_a_file(store):
    names = [image.name for image in asyncio.run(ImageStore(store.root).known())]
    assert names == ["host:5000/task/one:v1", "host:5000/task/other:v1"]


def test_a_stale_handle_is_looked_up_again(store, monkeypatch):
    real, left = os.open, [2]

    def stale(path, *arguments, **named):
        if str(path).endswith(".sif") and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(files.os, "open", stale)
    assert check(store, "host:5000/task/one:v1").below
    assert left == [0]


def test_what_is_read_is_leased(store):
    async def lease():
        leases = Leases(store.root)
        leases.want("k1", "a" * 64)
        leases.want("k2", "b" * 64)
        leases.unwant("k1")
        await leases.close()
        return leased(store)[0]

    assert asyncio.run(lease()) == {"b" * 64}
