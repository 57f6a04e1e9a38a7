"""Against Debian's docker-registry on loopback, filled with skopeo."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sif_tools
from sif_tools import errors
from sif_tools.sources.open import open_source
from sif_tools.sources.source import SourceOptions
from tests.unit.sif_tools.image_factories import LayoutMaker, member, tar_bytes

USER, PASSWORD = "someone", "a secret"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(program: str, home: Path, auth: str = "") -> Iterator[str]:
    """A registry with its storage in `home`; gives HOST:PORT."""
    port = free_port()
    config = home / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {home}/storage}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n{auth}"
    )
    process = subprocess.Popen(
        [program, "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    maker = LayoutMaker(tmp_path / "layout")
    lower = tar_bytes([member("etc/"), member("etc/one", b"1" * 100_000), member("etc/gone", b"")])
    upper = tar_bytes([member("etc/two", b"2"), member("etc/.wh.gone", b"")])
    layers = [(one, gzip.compress(one)) for one in (lower, upper)]
    images = []
    for arch in ("arm64", "amd64"):
        platform = {"platform": {"os": "linux", "architecture": arch}}
        images.append(maker.image(layers, arch=arch, config={"Env": [f"A={arch}"]}) | platform)
    maker.add(maker.index(images), "x")
    return maker.finish()


def push(skopeo: str, layout: Path, host: str, *more: str) -> None:
    policy = layout.parent / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    command = [skopeo, "--policy", policy, "copy", "--quiet", "--all", "--dest-tls-verify=false"]
    subprocess.run([*command, *more, f"oci:{layout}:x", f"docker://{host}/a/b:1"], check=True)


def test_the_same_sif_as_from_the_layout(
    tool: Callable[[str], str], home: Path, layout: Path
) -> None:
    tool("tar2sqfs")
    skopeo = tool("skopeo")
    with running(tool("docker-registry"), home) as host:
        push(skopeo, layout, host)
        options = sif_tools.ConvertOptions(
            architecture="amd64", source=SourceOptions(plain_http=True)
        )
        pulled = sif_tools.convert(f"docker://{host}/a/b:1", home / "pulled.sif", options)
        local = sif_tools.convert(f"oci:{layout}:x", home / "local.sif", options)
        digest = pulled.manifest_digest
        inspected = subprocess.run(
            [skopeo, "inspect", "--tls-verify=false", "--raw", f"docker://{host}/a/b@{digest}"],
            capture_output=True,
            check=True,
        )
        assert json.loads(inspected.stdout)["layers"]
        with pytest.raises(errors.NoMatchingPlatform):
            open_source(f"docker://{host}/a/b:1", "s390x", options.source)
    assert pulled.manifest_digest == local.manifest_digest
    assert pulled.path.read_bytes() == local.path.read_bytes()


def test_with_a_password(tool: Callable[[str], str], home: Path, layout: Path) -> None:
    skopeo, htpasswd = tool("skopeo"), tool("htpasswd")
    entry = subprocess.run([htpasswd, "-nbB", USER, PASSWORD], capture_output=True, check=True)
    (home / "htpasswd").write_bytes(entry.stdout)
    auth = f"auth: {{htpasswd: {{realm: test, path: {home}/htpasswd}}}}\n"
    with running(tool("docker-registry"), home, auth) as host:
        login = [skopeo, "login", "--tls-verify=false", "--password-stdin", "--username", USER]
        login += ["--authfile", str(home / "auth.json"), host]
        subprocess.run(login, input=PASSWORD.encode(), stdout=subprocess.DEVNULL, check=True)
        push(skopeo, layout, host, "--authfile", str(home / "auth.json"))
        reference, plain = f"docker://{host}/a/b:1", SourceOptions(plain_http=True)
        with pytest.raises(errors.RegistryDenied):
            open_source(reference, "amd64", plain)
        given = SourceOptions(plain_http=True, auth_file=home / "auth.json")
        with open_source(reference, "amd64", given) as source:
            assert source.config.env == ("A=amd64",)
            assert len(source.layers) == 2
