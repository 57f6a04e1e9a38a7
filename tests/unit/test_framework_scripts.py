"""The Python parts of scripts/ and the init's build, as far as they run without root or network."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from sandboxd.init import build

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Loads a file of scripts/, which is no package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up by name.
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


STANZA = """Types: deb deb-src
URIs: http://mirror.invalid/debian
Suites: bookworm
 bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def test_sources_of_the_suite_are_taken_in_both_formats(script) -> None:
    image = script("make_task_image")
    assert image.wanted_stanza(STANZA, "bookworm")
    assert not image.wanted_stanza(STANZA, "trixie")
    assert not image.wanted_stanza(STANZA.replace("main", "vendor"), "bookworm")
    assert not image.wanted_stanza(STANZA + "Enabled: no\n", "bookworm")
    assert image.wanted_line("deb http://mirror.invalid/debian bookworm-security main", "bookworm")
    assert image.wanted_line(
        "deb [arch=amd64 signed-by=/k] http://m.invalid bookworm main", "bookworm"
    )
    assert not image.wanted_line("# deb http://mirror.invalid/debian bookworm main", "bookworm")
    assert not image.wanted_line("deb-src http://mirror.invalid/debian bookworm main", "bookworm")
    assert not image.wanted_line("deb cdrom:[Debian]/ bookworm main", "bookworm")
    assert not image.wanted_line("deb http://vendor.invalid cloud-bookworm main", "bookworm")


def test_a_packed_layout_is_what_the_specification_says(script, tmp_path: Path) -> None:
    layer = tmp_path / "layer.tar"
    with tarfile.open(layer, "w") as archive:
        archive.add(__file__, "./file")
    content = layer.read_bytes()
    layout = tmp_path / "layout"
    script("oci_layout").pack(layer, layout, {"Env": ["A=1"]}, {"note": "x"})

    def blob(descriptor: dict[str, object]) -> bytes:
        algorithm, _, name = str(descriptor["digest"]).partition(":")
        data = (layout / "blobs" / algorithm / name).read_bytes()
        assert hashlib.new(algorithm, data).hexdigest() == name
        assert len(data) == descriptor["size"]
        return data

    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads(blob(index["manifests"][0]))
    config = json.loads(blob(manifest["config"]))
    assert blob(manifest["layers"][0]) == content
    diff_id = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert config["rootfs"]["diff_ids"] == [diff_id]
    assert config["config"] == {"Env": ["A=1"]}
    assert index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] == "latest"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (package gcc)")
class TestBuild:
    SOURCE = "int main(int argc, char **argv) { (void)argv; return argc - 1; }\n"

    def test_the_binary_is_static_and_runs(self, tmp_path: Path) -> None:
        source = tmp_path / "x.c"
        source.write_text(self.SOURCE)
        binary = build.build(tmp_path / "out/x", c_files=[source])
        assert subprocess.run([binary, "a", "b"], check=False).returncode == 2
        # A program interpreter (PT_INTERP) is what a static program has not.
        headers = subprocess.run(
            ["readelf", "-lW", binary], capture_output=True, text=True, check=True
        )
        assert "INTERP" not in headers.stdout

    def test_it_is_made_again_only_if_a_source_is_newer(self, tmp_path: Path) -> None:
        source = tmp_path / "x.c"
        source.write_text(self.SOURCE)
        binary = build.build(tmp_path / "x", c_files=[source])
        made = binary.stat().st_ino
        assert build.build(binary, c_files=[source]).stat().st_ino == made
        later = binary.stat().st_mtime + 1
        os.utime(source, (later, later))
        assert build.build(binary, c_files=[source]).stat().st_ino != made

    def test_a_warning_is_an_error_in_the_compilers_words(self, tmp_path: Path) -> None:
        source = tmp_path / "x.c"
        source.write_text("int main(void) { int unused; return 0; }\n")
        with pytest.raises(build.BuildError, match="unused"):
            build.build(tmp_path / "x", c_files=[source])
        assert not (tmp_path / "x").exists()

    def test_the_sanitized_variant_finds_an_overflow(self, tmp_path: Path) -> None:
        source = tmp_path / "x.c"
        source.write_text(
            "int main(int argc, char **argv) {\n"
            "    volatile int n = 0x7fffffff;\n"
            "    (void)argv;\n"
            "    n = n + argc;\n"
            "    return 0;\n"
            "}\n"
        )
        binary = build.build(tmp_path / "x", sanitize=True, c_files=[source])
        done = subprocess.run([binary], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "signed integer overflow" in done.stderr


def test_without_a_compiler_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build.BuildError, match="apt-get install gcc"):
        build.find_compiler()
