"""``sandboxd support-bundle``: all that somebody else needs to see what is wrong with a node.

Each part is gathered by itself: a node that is broken gives what it can, and ``manifest.json`` says
what it could not and why. Nothing of workloads is gathered but ids, names and figures; everything
passes the redaction.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sandboxd import __version__
from sandboxd.cli import config_show, doctor, options
from sandboxd.cli.output import as_json, reporting, say
from sandboxd.cli.redaction import redactor
from sandboxd.client.failures import AnswerTimeout
from sandboxd.client.sync import Client
from sandboxd.config import Config, load_config
from sandboxd.errors import ConfigError, RequestError, SandboxdError

EVENTS_MAX: Final = 5000
JOURNAL_LINES: Final = 2000
PART_BYTES_MAX: Final = 16 << 20
_OURS: Final = re.compile(rb"sandboxd|squashfuse_ll|\binit\0zygote")
_SYSTEM: Final = ("fuse", "overlay", "cgroup", "squashfs")
Part = Callable[[], str]


class BundleExists(RequestError):
    """There is a file of that name, which is not overwritten."""

    code = "bundle-exists"


def support_bundle(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="By default named by node and time."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Try what the node can do, as doctor does.")
    ] = True,
    url: options.Url = None,
    token_file: options.TokenFile = None,
    config: options.ConfigFile = None,
) -> None:
    """Write what is known of this node into one .tar.gz to send to whoever helps, without secrets.

    Run as root for the most; without a running daemon it holds what there is.
    """
    with reporting():
        try:
            settings = load_config(config)
        except ConfigError as error:
            say(f"{error.message}: with the defaults")
            settings = Config(origins={})
        node = re.sub(r"[^A-Za-z0-9.-]", "_", settings.node_name or platform.node())
        name = f"sandboxd-support-{node}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        path = output or Path(f"{name}.tar.gz")
        parts = dict(_of_the_machine(settings))
        if probe:
            parts["doctor.json"] = lambda: as_json(doctor.report(*doctor.look(config)))
        redact = redactor(_secrets(settings, token_file))
        try:
            with options.daemon(url, token_file, config) as daemon:
                texts, failed = _gather({**parts, **dict(_of_the_daemon(daemon))})
        except SandboxdError as error:  # no token that can be read
            texts, failed = _gather(parts)
            failed["daemon"] = f"{error.code}: {error.message}"
        texts["manifest.json"] = as_json({**_manifest(), "failed": failed})
        _write(path, name, {part: redact(text) for part, text in texts.items()})
    for part, why in failed.items():
        say(f"without {part}: {redact(why)}")
    typer.echo(str(path))


def _gather(parts: dict[str, Part]) -> tuple[dict[str, str], dict[str, str]]:
    """Texts by name, and why there is none. A daemon that does not answer is not waited for with
    every part."""
    texts: dict[str, str] = {}
    failed: dict[str, str] = {}
    silent: AnswerTimeout | None = None
    for name, part in parts.items():
        try:
            if silent is not None:
                raise silent  # noqa: TRY301 - as if it were asked
            texts[name] = part()[:PART_BYTES_MAX]
        except AnswerTimeout as error:
            silent = error
            failed[name] = f"{error.code}: {error.message}"
        except SandboxdError as error:
            failed[name] = f"{error.code}: {error.message}"
        except Exception as error:  # noqa: BLE001 - the other parts are all the more needed
            failed[name] = f"{type(error).__name__}: {error}"
    return texts, failed


def _manifest() -> dict[str, Any]:
    requires = metadata.requires("sandboxd") or []
    names = {re.split(r"[^A-Za-z0-9._-]", one)[0] for one in requires if "extra ==" not in one}
    return {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sandboxd": __version__,
        "python": platform.python_version(),
        "kernel": " ".join((platform.system(), platform.release(), platform.machine())),
        "uid": os.geteuid(),
        "packages": {name: _version(name) for name in sorted(names)},
        "variables": sorted(
            name for name in os.environ if name.startswith(("SANDBOXD_", "SLURM_"))
        ),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _of_the_daemon(daemon: Client) -> Iterator[tuple[str, Part]]:
    yield "node.json", lambda: as_json(daemon.node().raw)
    yield "metrics.txt", daemon.metrics
    yield "history.json", lambda: as_json(daemon.history())
    yield "events.ndjson", lambda: _events(daemon)
    yield "sandboxes.json", lambda: as_json([_sandbox(one) for one in daemon.list()])
    yield "runs.json", lambda: as_json(list(daemon.runs()))
    yield "images.json", lambda: as_json(daemon.images())


def _events(daemon: Client) -> str:
    rows = [dataclasses.asdict(one) | {"at": one.at.isoformat()} for one in daemon.events()]
    return "".join(json.dumps(row) + "\n" for row in rows[-EVENTS_MAX:])


def _sandbox(info: Any) -> dict[str, Any]:
    """Without what a run may have put a secret into; a label's name is no value."""
    row = {one.name: getattr(info, one.name) for one in dataclasses.fields(info)}
    row["labels"] = sorted(row.get("labels") or {})
    row.pop("env", None)
    return row


def _of_the_machine(settings: Config) -> Iterator[tuple[str, Part]]:
    yield "config.json", lambda: as_json(config_show.with_origins(settings))
    yield "mounts.txt", lambda: _mounts(settings)
    yield "cgroups.json", lambda: as_json(_cgroups(settings))
    yield "processes.json", lambda: as_json(list(_processes()))
    for name in ("meminfo", "loadavg", "pressure/memory", "pressure/io", "pressure/cpu"):
        path = Path("/proc", name)
        if path.exists():
            yield f"proc/{name.replace('/', '-')}.txt", path.read_text
    if shutil.which("journalctl"):
        yield "journal.txt", _journal


def _mounts(settings: Config) -> str:
    """What is ours of this mount namespace, and of the file systems that a node needs."""
    ours = (settings.state_dir, settings.runtime_dir, settings.images_dir)
    lines = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if any(one and one in before for one in ours) or after.startswith(_SYSTEM):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _cgroups(settings: Config) -> dict[str, Any]:
    # Here and not above: no other verb needs the kernel layer.
    from sandboxd.host.command import cgroup_name  # noqa: PLC0415
    from sandboxd.linux import cgroup, cgroup_usage  # noqa: PLC0415

    layout = cgroup.layout()
    return {
        "node": cgroup_name(settings),
        "own": {name or "v2": str(path) for name, path in layout.own.items()},
        "groups": [
            dataclasses.asdict(one)
            for one in cgroup_usage.usage_below(layout, settings.cgroup_root)
        ],
    }


def _processes() -> Iterator[dict[str, Any]]:
    """The node's own, by their command lines, which hold no secret; not those of workloads."""
    from sandboxd.linux import procfs  # noqa: PLC0415

    for pid in procfs.pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not _OURS.search(command):
                continue
            status = procfs.status(pid)
        except OSError:
            continue
        words = command.rstrip(b"\0").split(b"\0")
        yield {
            "pid": pid,
            "command": [word.decode(errors="replace") for word in words[:6]],
            **{key: status.get(key) for key in ("State", "PPid", "Uid", "VmRSS", "Threads")},
        }


def _journal() -> str:
    units = ("-u", "sandboxd", "-u", "sandboxd-node")
    done = subprocess.run(
        ["journalctl", "--no-pager", "-o", "short-iso", "-n", str(JOURNAL_LINES), *units],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=20,
        check=False,
    )
    return done.stdout + done.stderr


def _write(path: Path, name: str, texts: dict[str, str]) -> None:
    """A file of its owner's alone, whole or not at all."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BundleExists(f"{path} is there already", hint="give another --output") from None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from error
    try:
        with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for part, text in sorted(texts.items()):
                data = text.encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{name}/{part}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
    except BaseException:
        path.unlink()
        raise


def _secrets(settings: Config, token_file: Path | None) -> list[str]:
    """The token, wherever it may be from."""
    found = [os.environ.get("SANDBOXD_TOKEN", "")]
    for path in (token_file, settings.token_file):
        try:
            found += [Path(path).read_text(encoding="ascii").strip()] if path else []
        except (OSError, UnicodeDecodeError):
            continue
    return found
