"""``sandboxd doctor``: try what this node can do, and say what to do about the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from sandboxd.cli import options
from sandboxd.cli.output import print_json
from sandboxd.config import Config, load_config
from sandboxd.errors import ConfigError
from sandboxd.host.network import NetworkSettings, refusal
from sandboxd.host.rootless import NO_NETWORK
from sandboxd.linux import cgroup_usage, features
from sandboxd.linux.features import Features
from sandboxd.linux.findings import Probe, Status, probe_to_json
from sandboxd.network import uplink

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(config: options.ConfigFile = None, as_json: options.Json = False) -> None:
    """Try what this node can do. Exit status 1 if something it needs does not work."""
    found, probes = look(config)
    told = report(found, probes)
    if as_json:
        print_json(told)
    else:
        _print(probes)
    raise typer.Exit(0 if told["ok"] else 1)


def report(found: Features, probes: list[Probe]) -> dict[str, object]:
    """As JSON has it."""
    return {
        "ok": all(probe.status != Status.FAIL for probe in probes),
        "features": found.to_json(),
        "probes": [probe_to_json(probe) for probe in probes],
    }


def look(config: Path | None) -> tuple[Features, list[Probe]]:
    """Try everything."""
    settings, complaint = _settings(config)
    found, probes = features.probe(
        settings.user,
        sandboxes=settings.max_sandboxes,
        squashfuse=Path(settings.squashfuse) if settings.squashfuse else None,
        writable_layer=settings.writable_layer,
        image_backend=settings.image_backend,
        layers_dir=settings.state_dir if os.path.isdir(settings.state_dir) else "/var/tmp",
    )
    own = [_views(settings), _network(settings), _usage(found, settings)]
    return found, [complaint, *probes, *own]


def _settings(config: Path | None) -> tuple[Config, Probe]:
    """A configuration that is wrong is a finding; the node is looked at with the defaults."""
    try:
        settings = load_config(config)
    except ConfigError as error:
        remedy = error.hint or "correct it, or unset it"
        return Config(), Probe("configuration", Status.FAIL, error.message, remedy)
    # Of a file once, whatever its lines.
    origins = sorted({re.sub(r":\d+$", "", origin) for origin in settings.origins.values()})
    return settings, Probe("configuration", Status.OK, ", ".join(origins) or "defaults")


def _views(settings: Config) -> Probe:
    """By a process of its own: nobody but the view server is to load what it needs."""
    name = "proc views"
    if not settings.proc_views:
        return Probe(name, Status.OK, "off: sandboxes see the host's /proc/meminfo and the like")
    done = subprocess.run(
        [sys.executable, "-c", "import pyfuse3; print(pyfuse3.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return Probe(name, Status.OK, f"pyfuse3 {done.stdout.strip()}")
    why = done.stderr.strip().rpartition("\n")[2]
    return Probe(
        name,
        Status.WARN,
        f"sandboxes see the host's /proc/meminfo and the like: {why}",
        "apt-get install libfuse3-dev pkg-config gcc python3-dev, then pip install pyfuse3 where "
        "sandboxd is; or proc_views = false",
    )


def _network(settings: Config) -> Probe:
    """Whether a sandbox can have more than a loopback here. Looks only."""
    name = "network"
    if os.geteuid() != 0:
        return Probe(name, Status.OK, f"none but loopback: {NO_NETWORK}")
    if why := refusal(NetworkSettings(settings.network_pool)):
        remedy = "sysctl -w net.ipv4.ip_forward=1" if "ip_forward" in why else ""
        if not settings.network_pool:
            return Probe(name, Status.OK, f"none but loopback: {why}")
        return Probe(name, Status.WARN, f"none but loopback: {why}", remedy)
    dropping = ""
    with suppress(OSError):  # only root may look
        dropping = uplink.forward_policy()
    if dropping:
        return Probe(
            name,
            Status.WARN,
            f"the table {dropping} drops what it forwards unless a rule of its own says otherwise",
            "let it accept what comes from and goes to the links sbx* (Docker: chain DOCKER-USER)",
        )
    return Probe(name, Status.OK, f"allow-lists, IPv4, addresses of {settings.network_pool}")


def _usage(found: Features, settings: Config) -> Probe:
    """What the sandboxes of a running daemon use; without one, groups that were left behind."""
    groups = [
        group
        for group in cgroup_usage.usage_below(found.cgroup, settings.cgroup_root)
        if group.processes
    ]
    mebibytes = sum(group.memory_bytes for group in groups) >> 20
    count = f"{len(groups)} cgroup{'' if len(groups) == 1 else 's'} with processes"
    return Probe("in use", Status.OK, f"{count}, {mebibytes} MiB")


def _print(probes: list[Probe]) -> None:
    console = Console(highlight=False)
    width = max(len(probe.name) for probe in probes)
    for probe in probes:
        line = Text.assemble(
            (f"{probe.status:<5}", _STYLES[probe.status]),
            f"{probe.name:<{width}}  {probe.detail}",
        )
        console.print(line, soft_wrap=True)
        if probe.remedy:
            console.print(Text(f"{'':<{width + 5}}  -> {probe.remedy}"), soft_wrap=True)
    counts = {status: sum(probe.status == status for probe in probes) for status in Status}
    console.print(
        f"\n{counts[Status.OK]} ok, {counts[Status.WARN]} warn, {counts[Status.FAIL]} fail"
    )
