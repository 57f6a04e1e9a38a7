"""Builds a Debian task image with mmdebstrap and packs it as an OCI layout.

For: the quickstart, tests and the bench. Packages come from the package sources this machine itself
is set up with, so that a mirror or a proxy is respected and none is named here. Not for: arbitrary
images; `sif-tools convert` reads those from registries and archives.

The result is cached: a layout made by the same recipe is left as it is. It is built beside its
place and renamed, so it is complete or absent.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from oci_layout import pack

PACKAGES = (
    "ca-certificates",
    "git",
    "patch",
    "procps",
    "python-is-python3",
    "python3",
    "python3-pytest",
)
RECIPE_ANNOTATION = "sandboxd.recipe"
CONFIG = {
    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"],
    "WorkingDir": "/work",
    "Cmd": ["/bin/bash"],
}
# Documentation is a third of such an image and of no use in it; licences stay.
DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/doc/*/copyright",
    # The empty directories stay: Java's packages put links there and fail without.
    "path-include=/usr/share/man/man[1-9]",
)
CUSTOMIZE = (
    'mkdir -p "$1/work"',
    # What mmdebstrap was told about proxies concerns this machine and not the image.
    'rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1/etc/resolv.conf" "$1/etc/hostname"',
)


class ImageError(Exception):
    """The image could not be built; the message says what to do."""


def say(text: str) -> None:
    print(f"image: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make-task-image", description=__doc__.splitlines()[0])
    parser.add_argument("layout", type=Path, help="directory of the OCI layout to make")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="default: %(default)s")
    parser.add_argument("--suite", default=host_suite(), help="default: this machine's")
    parser.add_argument("--force", action="store_true", help="also if it is there already")
    options = parser.parse_args()
    try:
        build(options.layout, options.suite, options.packages.split(","), options.force)
    except ImageError as error:
        print(f"make-task-image: error: {error}", file=sys.stderr)
        return 1
    return 0


def build(layout: Path, suite: str, packages: list[str], force: bool = False) -> None:
    recipe = recipe_digest(suite, packages)
    if not force and is_current(layout, recipe):
        say(f"{layout} is up to date")
        return
    if layout.exists() and not (layout / "oci-layout").exists():
        raise ImageError(f"{layout} exists and is no OCI layout; name another directory")
    program = shutil.which("mmdebstrap")
    if program is None:
        raise ImageError("mmdebstrap is missing; run scripts/install --with quickstart")
    started = time.monotonic()
    layout.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".image-", dir=layout.parent) as scratch_name:
        scratch = Path(scratch_name)
        # mmdebstrap's helpers and apt's sandbox user read the sources below it.
        scratch.chmod(0o755)
        tar = scratch / "layer.tar"
        say(f"Debian {suite} with {', '.join(packages)}")
        bootstrap(program, suite, packages, package_sources(suite, scratch), tar)
        add_empty_dev(tar)
        say(f"packing {tar.stat().st_size >> 20} MiB as an OCI layout")
        made = scratch / "layout"
        pack(tar, made, CONFIG, {RECIPE_ANNOTATION: recipe})
        if layout.exists():
            layout.rename(scratch / "replaced")
        made.rename(layout)
    say(f"{layout} made in {time.monotonic() - started:.0f} s")


def host_suite() -> str:
    text = Path("/etc/os-release").read_text()
    found = re.search(r"^VERSION_CODENAME=\"?([a-z]+)", text, re.MULTILINE)
    return found[1] if found else "bookworm"


def recipe_digest(suite: str, packages: list[str]) -> str:
    text = Path(__file__).read_text() + suite + " ".join(sorted(packages))
    return hashlib.sha256(text.encode()).hexdigest()


def is_current(layout: Path, recipe: str) -> bool:
    try:
        return recipe in (layout / "index.json").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return False


def package_sources(suite: str, scratch: Path) -> list[str]:
    """Files with this machine's sources of `suite`, without those of other suites and vendors.

    A vendor's repository is told by having no component `main`. Both formats of sources.list(5).
    """
    apt = Path("/etc/apt")
    stanzas: list[str] = []
    lines: list[str] = []
    for file in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if file.suffix == ".sources":
            stanzas += [
                s for s in re.split(r"\n\s*\n", file.read_text()) if wanted_stanza(s, suite)
            ]
        elif file.suffix == ".list" and file.is_file():
            lines += [line for line in file.read_text().splitlines() if wanted_line(line, suite)]
    found = []
    for name, parts, separator in (("a.sources", stanzas, "\n\n"), ("b.list", lines, "\n")):
        if parts:
            (scratch / name).write_text(separator.join(part.strip() for part in parts) + "\n")
            found.append(str(scratch / name))
    if not found:
        raise ImageError(
            f"this machine's package sources (/etc/apt) have no Debian {suite}; "
            "add one or choose another with --suite"
        )
    return found


def wanted_stanza(stanza: str, suite: str) -> bool:
    fields = {
        key.lower(): value.split()
        for key, value in re.findall(
            r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE
        )
    }
    return (
        "deb" in fields.get("types", [])
        and "main" in fields.get("components", [])
        and any(of_suite(name, suite) for name in fields.get("suites", []))
        and fields.get("enabled", ["yes"]) != ["no"]
    )


def wanted_line(line: str, suite: str) -> bool:
    words = re.sub(r"\[[^]]*\]", "", line.partition("#")[0]).split()
    return (
        len(words) > 3
        and words[0] == "deb"
        and not words[1].startswith("cdrom:")
        and of_suite(words[2], suite)
        and "main" in words[3:]
    )


def of_suite(name: str, suite: str) -> bool:
    return name in (suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates")


def bootstrap(
    program: str, suite: str, packages: list[str], sources: list[str], output: Path
) -> None:
    """Run mmdebstrap; its progress lines are shown, and all of its words if it fails."""
    command = [program, "--variant=minbase", "--format=tar", "--skip=output/dev"]
    command += [f"--include={','.join(packages)}"]
    command += [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
    command += [f"--aptopt={option}" for option in proxy_options()]
    command += [f"--customize-hook={hook}" for hook in CUSTOMIZE]
    command += [suite, str(output), *sources]
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if line.startswith("I: ") and not re.search(r"hook|tempdir|mode:|architecture", line):
                say(f"  {line[3:].strip()}")
    if process.returncode != 0:
        raise ImageError("mmdebstrap failed:\n" + "\n".join(said[-40:]))


def add_empty_dev(tar: Path) -> None:
    """An image has no device nodes of its own, but needs the place where its runtime puts them."""
    entry = tarfile.TarInfo("./dev")
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    with tarfile.open(tar, "a") as archive:
        archive.addfile(entry)


def proxy_options() -> list[str]:
    """This machine's apt proxies, which mmdebstrap would not look up by itself."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    return [
        line.removesuffix(";")
        for line in dump.stdout.splitlines()
        if re.match(r"Acquire::https?::Proxy[^ ]* \"..*\";", line)
    ]


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
