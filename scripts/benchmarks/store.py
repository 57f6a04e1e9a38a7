"""Converts task images that share a base into a store, and each for itself.

    apart    sif-tools convert IMAGE DEST.sif, for a sample of the images, as many at once as --jobs
    store    sif-tools convert --batch LIST --store DIR, all images
    again    the same over the finished store
    layers   every distinct layer once through tar2sqfs: what sharing cannot go below

The images are the task image's layer, an environment on it and a task on that, all gzip as
registries serve them. Not for: one image (`bench --convert`).
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quickstart import default_layout
from rich.console import Console
from rich.table import Table

from benchmarks.layers import GZIP_LEVEL, blob, file_digest, read_json
from benchmarks.machine import describe_machine

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS, TASKS, SAMPLE = 10, 200, 10
# An environment: modules copied from the base. A task: a checkout with packed objects.
MODULES, SOURCES, OBJECT_BYTES = 300, 60, 512 << 10
# What must hold: times the bytes of the layers, part of the time apart, milliseconds an image.
MOST_SIZE, MOST_TIME, MOST_AGAIN_MS = 1.15, 0.1, 50.0
SEED = 7


@dataclass
class Figures:
    """Bytes are of all files, records included. `apart_s` is computed from the sample's."""

    images: int
    distinct_layers: int
    sample: int
    layers_bytes: int
    store_bytes: int
    apart_bytes_each: float
    apart_s: float
    store_s: float
    again_ms_each: float
    again_files_changed: int
    report: dict[str, Any]

    @property
    def size(self) -> float:
        return self.store_bytes / self.layers_bytes

    @property
    def time(self) -> float:
        return self.store_s / self.apart_s

    @property
    def holds(self) -> bool:
        return (
            self.size <= MOST_SIZE
            and self.time <= MOST_TIME
            and self.again_ms_each < MOST_AGAIN_MS
            and self.again_files_changed == 0
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench --store", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        figures = measure(options.jobs, options.sample)
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError as error:
        console.print(f"bench: {error}", style="red", markup=False, highlight=False)
        return 1
    if options.json:
        document = {
            **asdict(figures),
            "store_to_layers": round(figures.size, 4),
            "store_to_apart_time": round(figures.time, 4),
            "machine": describe_machine(),
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    console.print(table(figures))
    return 0 if figures.holds else 1


def measure(jobs: int, sample: int) -> Figures:
    base = default_layout()
    subprocess.run([REPOSITORY / "scripts/make-task-image", base], check=True)
    with tempfile.TemporaryDirectory(prefix="sandboxd-bench-") as name:
        scratch = Path(name)
        say(f"making {TASKS} images")
        layout = scratch / "images"
        tags, layers = make_images(base, layout)
        say(f"converting {sample} of them apart")
        step = max(TASKS // sample, 1)
        chosen = tags[::step][:sample]
        started_at = time.perf_counter()
        with ThreadPoolExecutor(jobs) as pool:
            sizes = list(pool.map(lambda tag: convert_apart(layout, tag, scratch), chosen))
        apart_s = (time.perf_counter() - started_at) / len(chosen) * TASKS
        say("converting all into a store")
        listing, store = scratch / "list", scratch / "store"
        listing.write_text("".join(f"oci:{layout}:{tag} task/{tag}\n" for tag in tags))
        store_s = convert_batch(listing, store, jobs, scratch / "journal-1")
        before = files_of(store)
        say("and again")
        again_s = convert_batch(listing, store, jobs, scratch / "journal-2")
        after = files_of(store)
        say("every layer once")
        layers_bytes = sum(layer_alone(layout, layer, scratch) for layer in layers)
        report = json.loads(sif_tools("report", "--json", str(store)))
        sif_tools("verify", str(store))
    return Figures(
        images=TASKS,
        distinct_layers=len(layers),
        sample=len(chosen),
        layers_bytes=layers_bytes,
        store_bytes=sum(size for size, _, _ in before.values()),
        apart_bytes_each=sum(sizes) / len(sizes),
        apart_s=round(apart_s, 3),
        store_s=round(store_s, 3),
        again_ms_each=round(again_s * 1000 / TASKS, 3),
        again_files_changed=sum(before.get(path) != after.get(path) for path in before | after),
        report={key: value for key, value in report.items() if key != "bases"},
    )


def make_images(base: Path, layout: Path) -> tuple[list[str], list[str]]:
    """Tags of the images, and digests of their distinct layers."""
    index = read_json_file(base / "index.json")
    manifest = read_json(base, index["manifests"][0]["digest"])
    config = read_json(base, manifest["config"]["digest"])
    tar = blob(base, manifest["layers"][0]["digest"])
    maker = _Maker(layout, config)
    modules = python_files(tar)
    bottom = maker.layer(tar.open("rb"))
    distinct = [bottom]
    tags = []
    for number in range(ENVIRONMENTS):
        environment = maker.layer(environment_layer(number, modules))
        distinct.append(environment)
        for task in range(number, TASKS, ENVIRONMENTS):
            own = maker.layer(task_layer(task, modules))
            distinct.append(own)
            tags.append(maker.image([bottom, environment, own], f"t{task}"))
    maker.finish()
    return tags, [digest for digest, _ in distinct]


class _Maker:
    """An OCI layout of many images, a blob at a time."""

    def __init__(self, layout: Path, config: dict[str, Any]) -> None:
        self._layout = layout
        self._blobs = layout / "blobs/sha256"
        self._blobs.mkdir(parents=True)
        self._config = config
        self._sizes: dict[str, int] = {}
        self._manifests: list[dict[str, Any]] = []

    def layer(self, tar: io.BufferedIOBase) -> tuple[str, str]:
        """Store a layer; its blob's digest and its diff_id."""
        plain, packed = self._layout / "plain", self._layout / "packed"
        with tar, plain.open("wb") as target:
            shutil.copyfileobj(tar, target, 1 << 20)
        with (
            plain.open("rb") as source,
            packed.open("wb") as target,
            gzip.GzipFile("", "wb", GZIP_LEVEL, target, mtime=0) as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
        digest, diff_id = file_digest(packed), file_digest(plain)
        self._sizes[digest] = packed.stat().st_size
        packed.rename(self._blobs / digest)
        plain.unlink()
        return digest, diff_id

    def image(self, layers: Sequence[tuple[str, str]], tag: str) -> str:
        diff_ids = [f"sha256:{diff_id}" for _, diff_id in layers]
        inner = self._config["config"] | {"Labels": {"task": tag}}
        config = self._config | {
            "config": inner,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        node = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self._json("config.v1+json", config),
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                    "digest": f"sha256:{digest}",
                    "size": self._sizes[digest],
                }
                for digest, _ in layers
            ],
        }
        entry = self._json("manifest.v1+json", node)
        entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
        self._manifests.append(entry)
        return tag

    def _json(self, kind: str, node: dict[str, Any]) -> dict[str, Any]:
        scratch = self._layout / "json"
        scratch.write_text(json.dumps(node, sort_keys=True))
        digest, size = file_digest(scratch), scratch.stat().st_size
        scratch.rename(self._blobs / digest)
        media_type = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}

    def finish(self) -> None:
        (self._layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        node = {"schemaVersion": 2, "manifests": self._manifests}
        (self._layout / "index.json").write_text(json.dumps(node))


def python_files(tar: Path) -> list[tuple[str, bytes]]:
    """The base's Python sources, by name."""
    found: list[tuple[str, bytes]] = []
    with tarfile.open(tar) as archive:
        for one in archive:
            if one.isfile() and one.name.endswith(".py") and len(found) < 10 * MODULES:
                content = archive.extractfile(one)
                assert content is not None
                found.append((one.name.removeprefix("./"), content.read()))
    return found


def environment_layer(number: int, modules: list[tuple[str, bytes]]) -> io.BytesIO:
    """Packages installed: modules of the base under other names, none as it is there."""
    chance = random.Random(SEED * 1000 + number)
    entries = [
        (f"opt/env{number}/site-packages/{name.replace('/', '_')}", b"# %d\n" % number + data)
        for name, data in chance.sample(modules, MODULES)
    ]
    return tar_of(entries)


def task_layer(number: int, modules: list[tuple[str, bytes]]) -> io.BytesIO:
    """A checkout, and what a task changes of what lies below: files replaced and removed."""
    chance = random.Random(SEED * 1_000_000 + number)
    picked = chance.sample(modules, SOURCES + 10)
    entries = [
        (f"work/repo/src/{at}_{name.rpartition('/')[2]}", b"# task %d\n" % number + data)
        for at, (name, data) in enumerate(picked[:SOURCES])
    ]
    entries.append(("work/repo/.git/objects/pack/pack.pack", chance.randbytes(OBJECT_BYTES)))
    entries += [(name, data + b"# changed\n") for name, data in picked[SOURCES : SOURCES + 5]]
    for name, _ in picked[SOURCES + 5 :]:
        parent, _, last = name.rpartition("/")
        entries.append((f"{parent}/.wh.{last}", b""))
    return tar_of(entries)


def tar_of(entries: Sequence[tuple[str, bytes]]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in sorted(dict(entries).items()):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_700_000_000
            archive.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


def convert_apart(layout: Path, tag: str, scratch: Path) -> int:
    target = scratch / f"{tag}.sif"
    sif_tools("convert", f"oci:{layout}:{tag}", str(target))
    size = target.stat().st_size
    target.unlink()
    return size


def convert_batch(listing: Path, store: Path, jobs: int, journal: Path) -> float:
    started_at = time.perf_counter()
    sif_tools(
        "convert",
        *("--batch", str(listing), "--store", str(store), "--jobs", str(jobs)),
        *("--journal", str(journal)),
    )
    return time.perf_counter() - started_at


def layer_alone(layout: Path, digest: str, scratch: Path) -> int:
    """Bytes of a squashfs of nothing but this layer's tar, by the tool alone."""
    target = scratch / "layer.squashfs"
    with gzip.open(layout / "blobs/sha256" / digest) as source:
        subprocess.run(
            ["tar2sqfs", "-q", "-f", "-c", "zstd", "-X", "level=3", target],
            input=source.read(),
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return target.stat().st_size


def sif_tools(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("sif-tools")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stdout


def files_of(store: Path) -> dict[str, tuple[int, int, int]]:
    """Size, inode and time of change of every file."""
    found = {}
    for path in store.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[str(path)] = (status.st_size, status.st_ino, status.st_mtime_ns)
    return found


def read_json_file(path: Path) -> dict[str, Any]:
    node: dict[str, Any] = json.loads(path.read_text())
    return node


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def table(figures: Figures) -> Table:
    result = Table(title=f"{figures.images} images of {figures.distinct_layers} distinct layers")
    for column in ("", "apart", "store", "ratio", "at most"):
        result.add_column(column, justify="right" if column else "left")

    def row(*cells: str, holds: bool) -> None:
        result.add_row(*cells, style=None if holds else "red")

    mib = 1 << 20
    row(
        "MiB, against each layer once",
        f"{figures.layers_bytes / mib:.1f}",
        f"{figures.store_bytes / mib:.1f}",
        f"{figures.size:.3f}",
        f"{MOST_SIZE}",
        holds=figures.size <= MOST_SIZE,
    )
    row(
        f"seconds, apart from {figures.sample}",
        f"{figures.apart_s:.1f}",
        f"{figures.store_s:.1f}",
        f"{figures.time:.3f}",
        f"{MOST_TIME}",
        holds=figures.time <= MOST_TIME,
    )
    row(
        "again, ms an image",
        "",
        f"{figures.again_ms_each:.2f}",
        "",
        f"{MOST_AGAIN_MS:.0f}",
        holds=figures.again_ms_each < MOST_AGAIN_MS,
    )
    row(
        "again, files changed",
        "",
        str(figures.again_files_changed),
        "",
        "0",
        holds=figures.again_files_changed == 0,
    )
    return result
