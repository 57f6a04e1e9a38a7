"""One frozen Config: flags over environment (``SANDBOXD_*``) over a TOML file over defaults.

Every setting is a field of ``Config``; its name is its TOML key, its environment variable
(``SANDBOXD_`` and the name in capitals) and, with dashes, its flag. The limits are tables of their
own: ``[default_limits]`` and ``[max_limits]`` in TOML, ``SANDBOXD_MAX_LIMITS_MEMORY_MB`` outside.
An unknown key and an impossible value are errors that name file, line and key.
"""

from __future__ import annotations

import math
import os
import pwd
import resource
import secrets
import socket
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from sandboxd.config_lines import key_lines
from sandboxd.cpu_list import parse_cpu_list
from sandboxd.errors import ConfigError
from sandboxd.model import CPU_WEIGHT_MAX, IO_LIMITS, KernelCaps, Limits, parse_mount_roots
from sandboxd.network.policy import parse_pool, parse_upstreams

ENV_PREFIX: Final = "SANDBOXD_"
WRITABLE_LAYERS: Final = ("auto", "tmpfs", "ext4")
IMAGE_BACKENDS: Final = ("fuse", "kernel")
LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
NODES: Final = ("auto", "own", "unit")
TOKEN_BYTES: Final = 32
CAP_MAX: Final = (1 << 31) - 1
PTYS_MAX: Final = 1 << 20
"""``NR_UNIX98_PTY_MAX`` of the kernel."""
_TABLES: Final[dict[str, type[Limits] | type[KernelCaps]]] = {
    "default_limits": Limits,
    "max_limits": Limits,
    "kernel_caps": KernelCaps,
}
HANG_MIN_S: Final = 1.0
"""Less would take a busy node's parts for hung."""
_MAY_BE_ZERO: Final = frozenset(
    {
        "image_idle_s",
        "image_copies_mb",
        "image_read_ahead_mb",
        "slots_primed",
        "run_max_sandboxes",
        "run_max_creates_per_s",
        "drain_before_end_s",
        "hang_s",
    }
)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a node. Sizes and times carry their unit in the name."""

    listen: str = "127.0.0.1:8642"
    """Address and port of the API; an IPv6 address in brackets."""
    state_dir: str = "/var/lib/sandboxd"
    """What outlives the daemon. Of an ordinary user's: ``~/.local/state/sandboxd`` (or below
    XDG_STATE_HOME), if not set."""
    runtime_dir: str = "/run/sandboxd"
    """Sockets, gone at reboot. Of an ordinary user's: ``sandboxd`` in XDG_RUNTIME_DIR, else
    ``/tmp/sandboxd-UID``, if not set."""
    images_dir: str = ""
    """Where ``NAME.sif`` lie; ``images`` in ``state_dir`` if empty."""
    token_file: str = ""
    """The bearer token's file; ``token`` in ``state_dir`` if empty."""
    user: str = "sandboxd"
    """The unprivileged account that the API runs as, and whose subordinate ids sandboxes use."""
    node: str = "auto"
    """Whose the node's root part is: ``own`` of this daemon, ending with it; ``unit``, started
    apart by ``sandboxd node``; ``auto``: a unit's where one runs, else its own."""
    node_name: str = ""
    """How answers name this node; the host's name if empty."""
    cgroup_root: str = "sandboxd"
    """Name of the cgroup under which all of this daemon's lie."""
    seccomp_profiles_dir: str = ""
    """Where ``NAME.json`` lie, OCI seccomp profiles that a sandbox may ask for by name; none if
    empty."""
    mount_roots: str = ""
    """Directories of the host below which a sandbox may have ``mounts``, comma-separated; none if
    empty. ``PATH:rw`` also for writing. A sandbox's root may read all that is mounted into it,
    whatever the modes, where the file system takes idmapped mounts; with ``PATH:unmapped`` only
    what others may read. Nothing there is to be a secret, nor a socket or fifo of the host."""
    squashfuse: str = ""
    """Path of ``squashfuse_ll``; looked for if empty."""
    image_backend: str = "fuse"
    """Who serves images: ``fuse``, a squashfuse each, without any right; ``kernel``, the kernel
    itself, faster and with more to lose: only those of a store, whose files have the digest that
    the store has them by, are root's and on a disk of this machine. Others are refused then."""
    image_copies_mb: int = 0
    """Of this node's disk, for copies of the images of a store that are asked for again and again;
    0 for none. Worth having where the store is a network's. Not with the kernel as back end."""
    image_copies_dir: str = ""
    """Where they lie; ``image-copies`` in ``state_dir`` if empty. Nothing else is to lie there."""
    image_read_ahead_mb: int = 0
    """An image's file of at most so much is read into memory once it is mounted; 0 for none."""
    writable_layer: str = "auto"
    """What sandboxes write to: ``tmpfs``, in memory; ``ext4``, on loop devices whose files take
    their space in ``state_dir``; ``auto``: tmpfs where this kernel can (Linux 6.6), else ext4."""
    proc_views: bool = True
    """Whether a sandbox sees its own limits in /proc/meminfo and the like, and runs on as many CPUs
    as it has; else the host's. Needs pyfuse3."""
    log_level: str = "info"
    log_format: str = "text"
    """``text``, for people; ``json``: one object a line, with the ids of sandbox, run, node and
    Slurm job, from the node's root part too."""
    max_sandboxes: int = 512
    memory_reserve_mb: int = 512
    """Of the node's memory, not for sandboxes. Nothing is taken on while less than that is free."""
    memory_overcommit: float = 16.0
    """How much more memory (disk included) may be promised than there is: few use what they may."""
    cpu_overcommit: float = 256.0
    """The same of CPUs, of which too few only make everything slower …"""
    pids_overcommit: float = 8.0
    """… and of processes."""
    pressure_memory_percent: float = 20.0
    """Of the last 10 s in which all waited for memory (PSI), while little is left: above it nothing
    is taken on. 100: never. So too …"""
    pressure_io_percent: float = 80.0
    """… for I/O …"""
    pressure_cpu_percent: float = 100.0
    """… and for CPUs, there of the time in which any process waited."""
    run_max_sandboxes: int = 0
    """Of one run at once, unless it is set up otherwise; 0: as many as the node has."""
    run_max_creates_per_s: float = 0.0
    """The same, of creates a second; 0: any number."""
    run_ended_s: float = 300.0
    """How long a run that was ended is refused."""
    max_connections: int = 16_384
    """Open at once; one more is told to come back (503)."""
    drain_before_end_s: float = 60.0
    """In a Slurm job: before its end nothing more is taken on for so long, and in the last quarter
    of it everything is deleted. 0: never."""
    oom_score_adjust: int = -900
    """Of the daemon's own processes: the kernel ends sandboxes first."""
    watchdog_s: float = 0.2
    """Where no cgroup holds memory and processes: how often those of the sandboxes are looked at,
    if that takes no more than a tenth of a CPU."""
    sweep_s: float = 60.0
    """How often the node looks for what it has lost track of."""
    hang_s: float = 30.0
    """A part of the node that does not answer for so long is killed, and the node starts anew, with
    none of its sandboxes: nothing would ever come of it. 0: never."""
    slots_min: int = 4
    """Sandboxes made ahead of need, at least …"""
    slots_max: int = 64
    """… and at most, when many are asked for."""
    slots_primed: int = 8
    """Of those, so many at most are given ahead of need what was asked for last: an image and
    limits. 0 for none."""
    default_ttl_s: float = 3600.0
    max_ttl_s: float = 86_400.0
    image_idle_s: float = 600.0
    """How long an image stays mounted after its last sandbox has gone."""
    default_timeout_s: float = 60.0
    """Of an exec that names none."""
    max_timeout_s: float = 7200.0
    default_output_bytes: int = 10 * 1024 * 1024
    """Kept per stream of an exec that names no cap."""
    max_output_bytes: int = 64 * 1024 * 1024
    stop_grace_s: float = 5.0
    """What is under way when the daemon is told to stop, and the node is a unit's, has so long to
    end."""
    stream_heartbeat_s: float = 10.0
    """A stream that is silent for so long says that it lives."""
    stream_resume_s: float = 10.0
    """How long a stream that was cut off can be resumed before its command is killed."""
    stream_detached_s: float = 600.0
    """How long the end of a detached command is kept for whoever comes back."""
    stream_unsent_bytes: int = 1024 * 1024
    """Of one stream that no client has taken yet; then the command waits."""
    stream_replay_bytes: int = 8 * 1024 * 1024
    """Of one stream, kept after it was sent. What the kernel buffers for a connection may be lost
    with it, so it should be more than that."""
    stream_total_bytes: int = 256 * 1024 * 1024
    """Of all streams; above it each keeps little of what was sent."""
    max_processes: int = 64
    """Background processes of one sandbox, ended ones that were not removed included."""
    process_spool_bytes: int = 8 * 1024 * 1024
    """Kept of each stream of a background process: the newest. Memory of the node, as used."""
    max_port_connections: int = 64
    """Through the daemon to programs in one sandbox, HTTP requests that run included."""
    max_node_port_connections: int = 1024
    """The same over all sandboxes."""
    port_connect_s: float = 10.0
    """For a program in a sandbox to take a connection."""
    port_answer_s: float = 120.0
    """Silence in an HTTP exchange with a program in a sandbox, after which it is ended."""
    port_idle_s: float = 3600.0
    """The same of a tunnel or a WebSocket."""
    port_message_bytes: int = 16 * 1024 * 1024
    """Of one WebSocket message, either way; it is held in memory."""
    max_body_bytes: int = 96 * 1024 * 1024
    """Of a JSON request; a file's content is streamed and not bounded by it. Takes a stdin of
    64 MiB in base64."""
    max_file_bytes: int = 16 * 1024 * 1024 * 1024
    network_pool: str = "100.126.0.0/16"
    """Private addresses for sandboxes that have a network, a /16 to a /22; they are seen nowhere
    outside the node. None has one if it is empty."""
    network_bandwidth_mbit: int = 1000
    """Of each sandbox in each direction: what it has, and the most that may be asked for."""
    allow_full_network: bool = False
    """Whether a sandbox may have all of the network instead of a list."""
    dns_upstreams: str = ""
    """Servers that sandboxes' allowed names are asked of, comma-separated, each with a port where
    it is not 53; those of the host's resolv.conf if empty."""
    default_limits: Limits = field(default_factory=Limits)
    """Of a sandbox that names none."""
    max_limits: Limits = field(
        default_factory=lambda: Limits(
            cpus=256.0,
            memory_mb=1_048_576,
            disk_mb=1_048_576,
            inodes=16_777_216,
            pids=32_768,
            nofile=1_048_576,
            shm_mb=65_536,
            cpu_weight=CPU_WEIGHT_MAX,
        )
    )
    kernel_caps: KernelCaps = field(default_factory=KernelCaps)
    """Of every sandbox; those that are there, or made ahead, keep what they have."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each setting that is no default comes from."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of ``listen``."""
        return parse_listen(self.listen)

    @property
    def launcher_socket(self) -> str:
        return os.path.join(self.runtime_dir, "launcher.sock")


@dataclass(frozen=True, slots=True)
class _Setting:
    key: str
    value: object
    origin: str


def load_config(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration. ``overrides`` are the flags, by setting name; None counts as not given.

    Raises ConfigError naming file, line and key.
    """
    settings = [
        *(_from_file(Path(path)) if path is not None else ()),
        *_from_env(os.environ if env is None else env),
        *(
            _Setting(key, value, "flag --" + key.replace("_", "-"))
            for key, value in (overrides or {}).items()
            if value is not None
        ),
    ]
    types = _types()
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for setting in settings:
        wanted = types.get(setting.key)
        if wanted is None:
            raise ConfigError(f"{setting.origin}: unknown key {setting.key!r}", key=setting.key)
        values[setting.key] = _coerce(setting, wanted)
        origins[setting.key] = setting.origin
    config = replace(_build(values), origins=origins)
    _check(config)
    return config


def _types() -> dict[str, type]:
    kinds = {"str": str, "int": int, "float": float, "bool": bool}
    types = {f.name: kinds[str(f.type)] for f in fields(Config) if str(f.type) in kinds}
    for table, kind in _TABLES.items():
        types |= {f"{table}.{f.name}": kinds[str(f.type)] for f in fields(kind)}
    return types


def _from_file(path: Path) -> Iterator[_Setting]:
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="is --config right?") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    lines = key_lines(text)

    def origin(key: str, table: str = "") -> str:
        line = lines.get(key) or lines.get(table)
        return f"{path}:{line}" if line else str(path)

    for key, value in data.items():
        if key in _TABLES and isinstance(value, dict):
            for name, one in value.items():
                yield _Setting(f"{key}.{name}", one, origin(f"{key}.{name}", key))
        else:
            yield _Setting(key, value, origin(key))


def _from_env(env: Mapping[str, str]) -> Iterator[_Setting]:
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        key = variable.removeprefix(ENV_PREFIX).lower()
        for table in _TABLES:
            if key.startswith(table + "_"):
                key = f"{table}.{key.removeprefix(table + '_')}"
        if key in ("config", "token", "url", "slurm_dir", "slurm_program") or key.startswith(
            "tests_"
        ):
            # The configuration file's own path, what the client and the batch script of a Slurm
            # job read, and the test suite's.
            continue
        yield _Setting(key, value, f"environment {variable}")


def _coerce(setting: _Setting, wanted: type) -> object:
    value = setting.value
    wrong = ConfigError(
        f"{setting.origin}: {setting.key} must be {_WORDS[wanted]}, not {value!r}",
        key=setting.key,
    )
    if wanted is str:
        if not isinstance(value, str) or "\0" in value:
            raise wrong
        return value
    if wanted is bool:
        flag = {"true": True, "false": False}.get(str(value).lower())
        if flag is None or not isinstance(value, bool | str):
            raise wrong
        return flag
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong
    try:
        number = wanted(value)
    except ValueError:
        raise wrong from None
    if isinstance(value, float) and wanted is int:
        raise wrong
    if not math.isfinite(number):
        raise wrong
    return number


_WORDS: Final[dict[type, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _build(values: dict[str, object]) -> Config:
    plain: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    base = Config()
    if is_rootless(str(plain.get("user", base.user))):
        plain = _user_directories() | plain
    nofile = _users_nofile(str(plain.get("user", base.user)))
    for table in _TABLES:
        own: dict[str, Any] = {
            key.removeprefix(table + "."): value
            for key, value in values.items()
            if key.startswith(table + ".")
        }
        default = getattr(base, table)
        if nofile is not None and isinstance(default, Limits):
            default = replace(default, nofile=min(default.nofile, nofile))
        plain[table] = replace(default, **own)
    config = Config(**plain)
    # Who asks for nothing has what is most, where that is a bound and the default none.
    bounds = {
        name: getattr(config.max_limits, name)
        for name in (*IO_LIMITS, "cpuset")
        if not getattr(config.default_limits, name)
    }
    return replace(
        config,
        default_limits=replace(config.default_limits, **bounds),
        images_dir=config.images_dir or os.path.join(config.state_dir, "images"),
        image_copies_dir=config.image_copies_dir or os.path.join(config.state_dir, "image-copies"),
        token_file=config.token_file or os.path.join(config.state_dir, "token"),
        node_name=config.node_name or socket.gethostname(),
    )


def is_rootless(account: str) -> bool:
    """Whether this process is an ordinary user's: neither root nor the service's ``account``."""
    if os.geteuid() == 0:
        return False
    try:
        return pwd.getpwnam(account).pw_uid != os.geteuid()
    except KeyError:
        return True


def _user_directories() -> dict[str, object]:
    """Where an ordinary user's daemon keeps its files; XDG Base Directory Specification."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    state = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", "")
    if not os.path.isabs(state):
        state = f"{home}/.local/state" if os.path.isabs(home) else f"/tmp/sandboxd-{uid}"
    return {
        "state_dir": os.path.join(state, "sandboxd"),
        "runtime_dir": f"{runtime}/sandboxd" if os.path.isabs(runtime) else f"/tmp/sandboxd-{uid}",
    }


def _users_nofile(account: str) -> int | None:
    """An ordinary user cannot give sandboxes more open files than he has; half of them are for the
    node's own parts, which hold some of each. None where nothing bounds them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard // 2 if is_rootless(account) and hard != resource.RLIM_INFINITY else None


def _check(config: Config) -> None:
    def refuse(key: str, why: str, other: str = "") -> ConfigError:
        # Of two that contradict each other, the one that somebody wrote.
        origin = config.origins.get(key) or config.origins.get(other, "defaults")
        return ConfigError(f"{origin}: {key} {why}", key=key)

    nofile = _users_nofile(config.user)
    if nofile is not None and config.max_limits.nofile > nofile:
        raise refuse(
            "max_limits.nofile", f"is more than {nofile}, half of this user's RLIMIT_NOFILE"
        )
    try:
        parse_listen(config.listen)
    except ValueError as error:
        raise refuse("listen", str(error)) from None
    for key in ("state_dir", "runtime_dir", "images_dir", "token_file", "image_copies_dir"):
        if not os.path.isabs(getattr(config, key)):
            raise refuse(key, f"must be an absolute path, not {getattr(config, key)!r}")
    if config.log_level not in LOG_LEVELS:
        raise refuse("log_level", f"must be one of {', '.join(LOG_LEVELS)}")
    if config.log_format not in LOG_FORMATS:
        raise refuse("log_format", f"must be one of {', '.join(LOG_FORMATS)}")
    if config.node not in NODES:
        raise refuse("node", f"must be one of {', '.join(NODES)}")
    if config.writable_layer not in WRITABLE_LAYERS:
        raise refuse("writable_layer", f"must be one of {', '.join(WRITABLE_LAYERS)}")
    if config.image_backend not in IMAGE_BACKENDS:
        raise refuse("image_backend", f"must be one of {', '.join(IMAGE_BACKENDS)}")
    if config.image_backend == "kernel" and config.image_copies_mb:
        # They are the API's account's own files, which the kernel is not given.
        raise refuse("image_copies_mb", 'must be 0 with image_backend = "kernel"', "image_backend")
    if not config.cgroup_root or "/" in config.cgroup_root or config.cgroup_root.startswith("."):
        raise refuse("cgroup_root", "must be the name of one directory")
    for one in fields(Config):
        value = getattr(config, one.name)
        zero_is_fine = one.name in _MAY_BE_ZERO or isinstance(value, bool)
        if one.name == "oom_score_adjust":
            if not -1000 <= value <= 1000:
                raise refuse(one.name, f"must be in -1000 to 1000, not {value}")
        elif isinstance(value, int | float) and (value < 0 or (value == 0 and not zero_is_fine)):
            raise refuse(one.name, f"must be more than 0, not {value:g}")
    if 0 < config.hang_s < HANG_MIN_S:
        raise refuse("hang_s", f"must be 0 or at least {HANG_MIN_S:g}, not {config.hang_s:g}")
    try:
        if config.network_pool:
            parse_pool(config.network_pool)
    except ValueError as error:
        raise refuse("network_pool", str(error)) from None
    try:
        parse_mount_roots(config.mount_roots)
    except ValueError as error:
        raise refuse("mount_roots", str(error)) from None
    try:
        parse_upstreams(config.dns_upstreams)
    except ValueError as error:
        raise refuse("dns_upstreams", str(error)) from None
    for name in ("ttl_s", "timeout_s"):
        if getattr(config, f"default_{name}") > getattr(config, f"max_{name}"):
            raise refuse(f"default_{name}", f"is more than max_{name}", f"max_{name}")
    if config.slots_min > config.slots_max:
        raise refuse("slots_min", "is more than slots_max", "slots_max")
    if config.default_output_bytes > config.max_output_bytes:
        raise refuse("default_output_bytes", "is more than max_output_bytes", "max_output_bytes")
    if config.kernel_caps.ptys > PTYS_MAX:
        raise refuse("kernel_caps.ptys", f"must be at most {PTYS_MAX}")
    for one in fields(KernelCaps):
        if not 0 <= getattr(config.kernel_caps, one.name) <= CAP_MAX:
            raise refuse(f"kernel_caps.{one.name}", f"must be in 0 to {CAP_MAX}")
    # The maximum first: a default may come from it.
    for table in ("max_limits", "default_limits"):
        if why := _wrong_list(getattr(config, table).cpuset):
            raise refuse(f"{table}.cpuset", why)
    outside = set(_cpus(config.default_limits)) - set(_cpus(config.max_limits))
    if config.max_limits.cpuset and outside:
        raise refuse("default_limits.cpuset", "is not in max_limits.cpuset", "max_limits.cpuset")
    for one in fields(Limits):
        least, most = getattr(config.default_limits, one.name), getattr(config.max_limits, one.name)
        if one.name == "cpuset":
            continue
        if one.name in IO_LIMITS:
            for table, value in (("max_limits", most), ("default_limits", least)):
                if value < 0 or 0 < value < IO_LIMITS[one.name]:
                    why = f"must be 0 or at least {IO_LIMITS[one.name]}, not {value}"
                    raise refuse(f"{table}.{one.name}", why)
            if most and least > most:
                why = f"must be in 0 to {most}, not {least}"
                raise refuse(f"default_limits.{one.name}", why, f"max_limits.{one.name}")
            continue
        if one.name == "cpu_weight" and most > CPU_WEIGHT_MAX:
            raise refuse("max_limits.cpu_weight", f"must be at most {CPU_WEIGHT_MAX}, not {most}")
        if most <= 0:
            raise refuse(f"max_limits.{one.name}", f"must be more than 0, not {most:g}")
        if not 0 < least <= most:
            raise refuse(
                f"default_limits.{one.name}",
                f"must be in 0 to {most:g}, not {least:g}",
                f"max_limits.{one.name}",
            )


def _wrong_list(text: str) -> str:
    """What is wrong with a list of CPUs; "" if nothing, or if there is none."""
    try:
        if text:
            parse_cpu_list(text)
    except ValueError as error:
        return str(error)
    return ""


def _cpus(limits: Limits) -> tuple[int, ...]:
    return parse_cpu_list(limits.cpuset) if limits.cpuset else ()


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port. Raises ValueError that says what is wrong."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise ValueError(f"must look like 127.0.0.1:8642, not {listen!r}")
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"has no port of 0 to 65535: {listen!r}")
    return host, int(port)


def ensure_token(path: str | os.PathLike[str], uid: int = -1, gid: int = -1) -> str:
    """The bearer token in ``path``, made (0600, given to ``uid`` and ``gid``) if there is none.

    Raises ConfigError for a file that others may read, or that holds no usable token.
    """
    name = os.fspath(path)
    try:
        _make_token(name, uid, gid)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{name}: the token cannot be written: {error.strerror}") from error
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{name}: the token cannot be read: {error.strerror}") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"{name}: the token's file must be readable by its owner only",
                hint=f"chmod 600 {name}, or remove it and a new one is made",
            )
        token = file.read(4096).decode("ascii", "replace").strip()
    if len(token) < 16 or not all(33 <= ord(char) < 127 for char in token):
        raise ConfigError(f"{name}: the token must be 16 or more printable ASCII characters")
    return token


def _make_token(name: str, uid: int, gid: int) -> None:
    """Write beside and link: a crash leaves no half token. FileExistsError if there is one."""
    temporary = f"{name}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
            os.fchown(fd, uid, gid)
        os.link(temporary, name)
    finally:
        os.unlink(temporary)
