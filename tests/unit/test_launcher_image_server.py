"""What goes into an image's server beside the image."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sandboxd.launcher import image_server


@pytest.mark.parametrize(
    ("attributes", "told"),
    [(True, {}), (False, {"SANDBOXD_NO_XATTRS": "1"})],
)
def test_it_is_told_whether_an_image_has_extended_attributes(
    tmp_path: Path, attributes: bool, told: dict[str, str]
) -> None:
    content = tmp_path / "content"
    content.mkdir()
    (content / "file").write_text("content")
    if attributes:
        try:
            os.setxattr(content / "file", "user.kept", b"value")
        except OSError as error:
            pytest.skip(f"no attributes here: {error}")
    made = tmp_path / "made"
    subprocess.run(["mksquashfs", content, made, "-quiet", "-no-progress"], check=True)
    image = tmp_path / "image"
    image.write_bytes(bytes(8192) + made.read_bytes())
    with image.open("rb") as file:
        assert image_server.told_of(file.fileno(), 8192) == told


def test_without_the_library_it_is_said_and_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = image_server.open_preload()
    assert os.readlink(f"/proc/self/fd/{there}") == str(image_server.PRELOAD)
    os.close(there)
    monkeypatch.setattr(image_server, "PRELOAD", tmp_path / "none.so")
    assert image_server.open_preload() == -1
    assert "build-init" in capsys.readouterr().err
