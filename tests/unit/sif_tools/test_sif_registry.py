"""The registry client against a registry that breaks, delays, redirects and lies."""

from __future__ import annotations

import base64
import gzip
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sif_tools import errors
from sif_tools.limits import Limits
from sif_tools.merge.merger import Merger, Pass
from sif_tools.registry.challenge import parse_challenges
from sif_tools.registry.credentials import Credentials, find_credentials
from sif_tools.registry.patience import Patience
from sif_tools.registry.reference import parse_reference
from sif_tools.sources.open import open_source
from sif_tools.sources.source import SourceOptions
from tests.unit.sif_tools.fake_registry import (
    INDEX,
    FakeRegistry,
    Handler,
    digest_of,
    fake_registry,
)
from tests.unit.sif_tools.image_factories import member, tar_bytes

BIG = tar_bytes([member("big", random.Random(7).randbytes(3_000_000))])
SMALL = tar_bytes([member("small", b"1")])
LAYERS = [(BIG, gzip.compress(BIG, 1)), (SMALL, gzip.compress(SMALL))]
BLOB = LAYERS[0][1]
PATIENCE = Patience(first_delay_s=0.005)
OPTIONS = SourceOptions(plain_http=True, patience=PATIENCE)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRegistry]:
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fake_registry() as one:
        one.image(LAYERS, "1")
        yield one


def auth_file(tmp_path: Path, auths: dict[str, str]) -> Path:
    path = tmp_path / "auth.json"
    nodes = {key: {"auth": base64.b64encode(one.encode()).decode()} for key, one in auths.items()}
    path.write_text(json.dumps({"auths": nodes}))
    return path


def read(registry: FakeRegistry, name: str = "a/b:1", options: SourceOptions = OPTIONS) -> str:
    """Everything a conversion reads; returns the manifest's digest."""
    with open_source(f"docker://{registry.host}/{name}", "amd64", options) as source:
        merger = Merger()
        for layer in source.layers:
            merger.index(layer)
        for layer in source.layers:
            with layer.open(Pass.EMIT) as stream:
                for _ in stream:
                    pass
        assert merger.tree.find(b"small") is not None
        return str(source.manifest_digest)


def test_an_image(registry: FakeRegistry) -> None:
    digest = registry.image(LAYERS, "2")
    assert read(registry, "a/b:2") == digest
    assert read(registry, f"a/b@{digest}") == digest
    assert read(registry, f"a/b:ignored@{digest}") == digest
    # Twice read, once fetched.
    assert len(registry.asked(digest_of(BLOB))) == 3


def test_a_platform_out_of_nested_indexes(registry: FakeRegistry) -> None:
    def listed(digest: str, arch: str) -> dict[str, Any]:
        kind, data = registry.manifests[digest]
        platform = {"os": "linux", "architecture": arch}
        return {"mediaType": kind, "digest": digest, "size": len(data), "platform": platform}

    wanted = registry.image(LAYERS, "x")
    other = registry.image(LAYERS[:1], "y", arch="arm64")
    inner = registry.put_manifest(
        {"schemaVersion": 2, "mediaType": INDEX, "manifests": [listed(wanted, "amd64")]}
    )
    node = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [listed(other, "arm64"), inner]}
    registry.put_manifest(node, "many")
    assert read(registry, "a/b:many") == wanted


def test_a_broken_download_goes_on_where_it_broke(registry: FakeRegistry) -> None:
    broken = iter([1_000_000, 1])

    def fault(handler: Handler) -> bool:
        if digest_of(BLOB) in handler.path and (keep := next(broken, None)) is not None:
            handler.broken(BLOB, keep)
            return True
        return False

    # The second break comes in an answer with status 200 to a request for a range.
    registry.fault = fault
    read(registry)
    ranges = [one.get("Range") for one in registry.asked(digest_of(BLOB))]
    assert ranges == [None, f"bytes=1000000-{len(BLOB) - 1}", f"bytes=1-{len(BLOB) - 1}"]


@pytest.mark.parametrize(
    "content_range", ["", "bytes 0-9/10", "bytes 1000001-{last}/{size}", "bytes 1000000-{last}/7"]
)
def test_a_range_that_was_not_asked_for_is_not_taken(
    registry: FakeRegistry, content_range: str
) -> None:
    asked: list[str | None] = []

    def fault(handler: Handler) -> bool:
        if digest_of(BLOB) not in handler.path:
            return False
        asked.append(handler.headers.get("Range"))
        if len(asked) == 1:
            handler.broken(BLOB, 1_000_000)
            return True
        if asked[-1] is not None:
            text = content_range.format(last=len(BLOB) - 1, size=len(BLOB))
            handler.answer(206, BLOB[1_000_000:], {"Content-Range": text} if text else {})
            return True
        return False

    registry.fault = fault
    read(registry)
    assert asked[0] is None
    assert asked[-1] is None


def test_a_download_that_never_moves_is_given_up(registry: FakeRegistry) -> None:
    def fault(handler: Handler) -> bool:
        if digest_of(BLOB) in handler.path:
            handler.broken(BLOB, 0)
            return True
        return False

    registry.fault = fault
    with pytest.raises(errors.RegistryFailed):
        read(registry)


@pytest.mark.parametrize("damage", ["flip", "cut", "longer"])
def test_damaged_blobs(registry: FakeRegistry, damage: str) -> None:
    data = bytearray(BLOB)
    if damage == "flip":
        data[2_000_000] ^= 1
    elif damage == "cut":
        del data[-1]
    else:
        data += b"1"
    registry.blobs[digest_of(BLOB)] = bytes(data)
    with pytest.raises((errors.DigestMismatch, errors.RegistryFailed)) as caught:
        read(registry)
    assert digest_of(BLOB) in caught.value.message


def test_a_damaged_manifest_and_config(registry: FakeRegistry) -> None:
    kind, data = registry.manifests["1"]
    registry.manifests[digest_of(data)] = (kind, data.replace(b"2", b"3", 1))
    with pytest.raises(errors.DigestMismatch):
        read(registry, f"a/b@{digest_of(data)}")
    config = json.loads(data)["config"]["digest"]
    registry.blobs[config] = registry.blobs[config].replace(b"linux", b"linuX")
    with pytest.raises(errors.DigestMismatch):
        read(registry)


def test_a_wrong_diff_id(registry: FakeRegistry) -> None:
    registry.image([(b"other", BLOB), LAYERS[1]], "bad")
    with pytest.raises(errors.DigestMismatch):
        read(registry, "a/b:bad")


def test_patience(registry: FakeRegistry) -> None:
    answers = iter([(429, "0"), (503, "0"), (500, None), (502, None)])

    def fault(handler: Handler) -> bool:
        if (said := next(answers, None)) is None:
            return False
        handler.answer(said[0], headers={"Retry-After": said[1]} if said[1] else {})
        return True

    registry.fault = fault
    read(registry)


def test_no_endless_patience(registry: FakeRegistry) -> None:
    def fault(handler: Handler) -> bool:
        handler.answer(429, headers={"Retry-After": "100000"})
        return True

    registry.fault = fault
    with pytest.raises(errors.RegistryBusy) as caught:
        read(registry)
    assert "100000 s" in caught.value.message


def test_a_token(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.token_user = ("me", "secret")
    with pytest.raises(errors.RegistryDenied):
        read(registry)
    options = replace(OPTIONS, auth_file=auth_file(tmp_path, {registry.host: "me:secret"}))
    read(registry, options=options)
    assert any("scope=repository%3Aa%2Fb%3Apull" in path for path, _ in registry.requests)
    assert any("service=fake" in path for path, _ in registry.requests)


def test_a_token_that_runs_out_is_replaced(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.token_user = ("me", "secret")

    def fault(handler: Handler) -> bool:
        if digest_of(BLOB) in handler.path and len(registry.tokens) == 1:
            registry.tokens = {"expired", "too"}
        return False

    registry.fault = fault
    options = replace(OPTIONS, auth_file=auth_file(tmp_path, {registry.host: "me:secret"}))
    read(registry, options=options)


def test_basic(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.basic_user = ("me", "secret")
    with pytest.raises(errors.RegistryDenied):
        read(registry)
    wrong = replace(OPTIONS, auth_file=auth_file(tmp_path, {registry.host: "me:wrong"}))
    with pytest.raises(errors.RegistryDenied):
        read(registry, options=wrong)
    auths = {registry.host: "other:user", f"{registry.host}/a/b": "me:secret"}
    right = replace(OPTIONS, auth_file=auth_file(tmp_path, auths))
    read(registry, options=right)


def test_authorization_stays_with_its_host(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.basic_user = ("me", "secret")
    with fake_registry() as storage:
        storage.blobs = registry.blobs

        def fault(handler: Handler) -> bool:
            if "/blobs/" not in handler.path or "Authorization" not in handler.headers:
                return False
            handler.answer(307, headers={"Location": f"http://{storage.host}{handler.path}?s=1"})
            return True

        registry.fault = fault
        options = replace(OPTIONS, auth_file=auth_file(tmp_path, {registry.host: "me:secret"}))
        read(registry, options=options)
        assert len(storage.requests) == 3
        assert not any("Authorization" in headers for _, headers in storage.requests)


def test_endless_redirects(registry: FakeRegistry) -> None:
    def fault(handler: Handler) -> bool:
        handler.answer(302, headers={"Location": handler.path})
        return True

    registry.fault = fault
    with pytest.raises(errors.RegistryFailed) as caught:
        read(registry)
    assert "redirects" in caught.value.message


def test_plain_http_only_when_asked(registry: FakeRegistry) -> None:
    with pytest.raises(errors.RegistryFailed):
        read(registry, options=SourceOptions(patience=PATIENCE))
    assert not registry.requests


def test_a_mirror_is_asked_first_and_need_not_be_whole(registry: FakeRegistry) -> None:
    with fake_registry() as mirror:
        mirror.manifests = registry.manifests
        mirror.blobs = {key: one for key, one in registry.blobs.items() if key != digest_of(BLOB)}
        options = replace(OPTIONS, mirrors={registry.host: [f"{mirror.host}/copy"]})
        read(registry, options=options)
        assert all(path.startswith("/v2/copy/a/b/") for path, _ in mirror.requests)
        assert [path for path, _ in registry.requests] == [f"/v2/a/b/blobs/{digest_of(BLOB)}"]
    registry.requests.clear()
    read(registry, options=options)  # the mirror is gone
    assert len(registry.requests) == 4


def test_a_lying_mirror_harms_nobody(registry: FakeRegistry) -> None:
    with fake_registry() as mirror:
        mirror.manifests = registry.manifests
        mirror.blobs = dict.fromkeys(registry.blobs, b"lies")
        read(registry, options=replace(OPTIONS, mirrors={registry.host: [mirror.host]}))


def test_missing(registry: FakeRegistry) -> None:
    with pytest.raises(errors.ImageNotFound):
        read(registry, "a/b:none")


def test_more_than_the_disk_should_take(registry: FakeRegistry) -> None:
    with pytest.raises(errors.TooLarge):
        read(registry, options=replace(OPTIONS, limits=Limits(download_bytes=1_000_000)))
    assert not registry.asked(digest_of(BLOB))


def test_schema_1_is_refused_by_name(registry: FakeRegistry) -> None:
    kind = "application/vnd.docker.distribution.manifest.v1+prettyjws"
    registry.put_manifest({"schemaVersion": 1, "mediaType": kind, "fsLayers": [1]}, "old")
    with pytest.raises(errors.BadLayout) as caught:
        read(registry, "a/b:old")
    assert "schema 1" in caught.value.message


def test_closing_ends_a_download(registry: FakeRegistry) -> None:
    go_on = threading.Event()

    def fault(handler: Handler) -> bool:
        if digest_of(BLOB) in handler.path:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(BLOB)))
            handler.end_headers()
            handler.wfile.write(BLOB[:1_000_000])
            go_on.wait(20)
            handler.wfile.write(BLOB[1_000_000:2_000_000])
            handler.close_connection = True
            return True
        return False

    registry.fault = fault
    source = open_source(f"docker://{registry.host}/a/b:1", "amd64", OPTIONS)
    closer = threading.Thread(target=source.close)
    closer.start()
    go_on.set()
    closer.join(20)
    assert not closer.is_alive()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian", ("docker.io", "library/debian", "latest", None)),
        ("a/b:1", ("docker.io", "a/b", "1", None)),
        ("docker.io/debian:12", ("docker.io", "library/debian", "12", None)),
        ("localhost/a", ("localhost", "a", "latest", None)),
        ("h.example:5000/a/b_c/d:T.1-x", ("h.example:5000", "a/b_c/d", "T.1-x", None)),
        ("[::1]:5000/a", ("[::1]:5000", "a", "latest", None)),
        (
            f"h.example/a@sha256:{'0' * 64}",
            ("h.example", "a", "latest", f"sha256:{'0' * 64}"),
        ),
    ],
)
def test_references(text: str, expected: tuple[str, str, str, str | None]) -> None:
    found = parse_reference(text)
    assert (found.host, found.repository, found.tag, found.digest) == expected


@pytest.mark.parametrize(
    "text",
    ["", "A", "a/B", "h.example/", "h.example/../a", "a:", "a:b/c", "a@sha256:0", "a@", "a b",
     "h.example/a?x", "h.example:x/a", "a//b", "u:p@h.example/a", "h.example/a#b"],
)  # fmt: skip
def test_references_that_are_none(text: str) -> None:
    with pytest.raises(errors.BadSource):
        parse_reference(text)


def test_challenges() -> None:
    text = (
        'Bearer realm="https://a/,",service=x,scope="repository:a:pull,push", Basic realm="q\\"z"'
    )
    found = parse_challenges([text])
    assert [(one.scheme, one.parameters) for one in found] == [
        ("bearer", {"realm": "https://a/,", "service": "x", "scope": "repository:a:pull,push"}),
        ("basic", {"realm": 'q"z'}),
    ]
    assert parse_challenges(["", ",", '"', "Negotiate"]) == parse_challenges(["Negotiate"])


def test_credentials_by_the_longest_key(tmp_path: Path) -> None:
    auths = {
        "h.example": "host:1",
        "h.example/a": "space:2",
        "h.example/a/b": "repository:3",
        "https://index.docker.io/v1/": "hub:4",
    }
    path = auth_file(tmp_path, auths)

    def user(host: str, repository: str) -> str | None:
        found = find_credentials(host, repository, path)
        return None if found is None else f"{found.user}:{found.password}"

    assert user("h.example", "a/b") == "repository:3"
    assert user("h.example", "a/bc") == "space:2"
    assert user("h.example", "c") == "host:1"
    assert user("docker.io", "library/x") == "hub:4"
    assert user("other.example", "a/b") is None


def test_credentials_in_the_usual_places(tmp_path: Path) -> None:
    (tmp_path / ".docker").mkdir()
    docker = auth_file(tmp_path / ".docker", {"h.example": "docker:1"})
    docker.rename(docker.with_name("config.json"))
    environment = {"HOME": str(tmp_path)}
    assert find_credentials("h.example", "a", None, environment) == Credentials("docker", "1")
    (tmp_path / ".config/containers").mkdir(parents=True)
    auth_file(tmp_path / ".config/containers", {"h.example": "containers:2"})
    assert find_credentials("h.example", "a", None, environment) == Credentials("containers", "2")
    with pytest.raises(errors.BadAuthFile):
        find_credentials("h.example", "a", tmp_path / "none")


def test_a_credential_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-test"
    helper.write_text(
        '#!/bin/sh\nread -r host\n[ "$host" = h.example ] || exit 1\n'
        'echo \'{"Username": "<token>", "Secret": "s"}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"credsStore": "test"}))
    assert find_credentials("h.example", "a", path) == Credentials(identity_token="s")
    assert find_credentials("o.example", "a", path) is None
    path.write_text(json.dumps({"credHelpers": {"h.example": "../evil"}}))
    with pytest.raises(errors.BadAuthFile):
        find_credentials("h.example", "a", path)


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"auths": {"h.example": {"auth": "%"}}}'])
def test_auth_files_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(errors.BadAuthFile):
        find_credentials("h.example", "a", tmp_path / "a")


def test_secrets_are_not_printed() -> None:
    assert "hunter2" not in repr(Credentials("u", "hunter2", "hunter2"))
