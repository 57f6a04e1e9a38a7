"""The launcher's start: from a root process to one that is nothing on the host.

fd 3: hostd, 4: the listening socket for daemons, 5: the zygote. Order of steps:

  1. the owner's effective id, then a user and a mount namespace: the namespace belongs to that id
     (an ordinary user's launcher is its owner already);
  2. hostd writes the maps; the launcher becomes id 65536 in it, keeping the namespace's
     capabilities (SECBIT_NO_SETUID_FIXUP) and losing all of the host's;
  3. a tmpfs of its own for the image mounts, in the new mount namespace only;
  4. the zygote is told filter, token and capabilities;
  5. the workers, then the socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sandboxd.cpu_list import cpu_list
from sandboxd.host.client import HostClient
from sandboxd.late_imports import CODECS, import_whole
from sandboxd.launcher import mounter, protocol, spooler, undertaker, watchdog
from sandboxd.launcher.census import census
from sandboxd.launcher.cgroups import NodeCgroups
from sandboxd.launcher.cpus import Cpus
from sandboxd.launcher.diffs import Diffs
from sandboxd.launcher.image_server import ServerProgram, open_preload
from sandboxd.launcher.images import Images
from sandboxd.launcher.lanes import Lanes
from sandboxd.launcher.layers import Layers
from sandboxd.launcher.loop import Loop, Task
from sandboxd.launcher.network import Networks
from sandboxd.launcher.pid1 import Zygote
from sandboxd.launcher.primer import Primer
from sandboxd.launcher.roots import Roots
from sandboxd.launcher.sandboxes import Sandboxes
from sandboxd.launcher.server import Server
from sandboxd.launcher.slots import Slots
from sandboxd.launcher.snapshots import Snapshots
from sandboxd.launcher.staging import Staging
from sandboxd.launcher.sweep import Sweep
from sandboxd.launcher.transfers import Transfers, copier_handlers
from sandboxd.launcher.views import Views
from sandboxd.launcher.watchdog import Watchdog
from sandboxd.launcher.worker import Worker
from sandboxd.linux import capabilities as cap
from sandboxd.linux import mount, namespaces, seccomp
from sandboxd.linux.process import set_child_subreaper, set_dumpable, set_parent_death_signal
from sandboxd.log_lines import fold_stderr
from sandboxd.model import KernelCaps
from sandboxd.rootfs import skeleton
from sandboxd.rootfs.overlay import make_writable_layer

SANDBOX_CAPABILITIES: Final = (
    cap.CAP_CHOWN,
    cap.CAP_DAC_OVERRIDE,
    cap.CAP_FSETID,
    cap.CAP_FOWNER,
    cap.CAP_SETGID,
    cap.CAP_SETUID,
    cap.CAP_SETPCAP,
    cap.CAP_SETFCAP,
    cap.CAP_NET_BIND_SERVICE,
    cap.CAP_SYS_CHROOT,
    cap.CAP_KILL,
)
"""What root holds in a sandbox: what package managers and servers need of their own files, users
and processes, and nothing over the kernel."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is read as root."""

    token: seccomp.SyscallToken
    sandbox_filter: bytes
    image_server_filter: bytes
    preload_fd: int


def main() -> None:
    fold_stderr("launcher")
    # What is read must be read by now: the id it becomes may not be able to read our own files.
    import_whole([CODECS])
    token = seccomp.SyscallToken.draw()
    hostd = socket.socket(fileno=3)
    listener = socket.socket(fileno=4)
    zygote_sock = socket.socket(fileno=5)
    for sock in (hostd, listener, zygote_sock):
        sock.set_inheritable(False)
    # hostd decides when the node ends; a Ctrl-C in its terminal is not for the launcher.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders, _ = protocol.receive(hostd)
    assert orders is not None
    marks = orders["cgroups"] is None
    prepared = _Prepared(
        token,
        seccomp.compile_profile(
            seccomp.with_marks(seccomp.SANDBOX_PROFILE) if marks else seccomp.SANDBOX_PROFILE,
            exempt=token,
            also_exempt=seccomp.MARKS if marks else (),
        ),
        seccomp.compile_profile(seccomp.FUSE_SERVER_PROFILE),
        open_preload(),
    )
    try:
        zygote_pidfd = _enter_namespaces(orders, hostd)
    except OSError as error:
        protocol.send(hostd, {"event": "failed", "message": str(error)})
        raise
    _serve(orders, prepared, hostd, listener, (zygote_sock, zygote_pidfd))


def _enter_namespaces(orders: dict[str, Any], hostd: socket.socket) -> int:
    """The zygote's pidfd, once hostd has started that too."""
    node_id = orders["node_id"]
    parent = os.getppid()
    if orders["owner"] is not None:
        os.setresgid(-1, orders["owner"], -1)
        os.setresuid(-1, orders["owner"], -1)
    namespaces.unshare(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS)
    protocol.send(hostd, {"event": "maps"})
    protocol.receive(hostd)
    cap.set_securebits(cap.SECBIT_NO_SETUID_FIXUP)
    namespaces.drop_groups()
    os.setresgid(node_id, node_id, node_id)
    os.setresuid(node_id, node_id, node_id)
    set_parent_death_signal(signal.SIGKILL, parent)
    set_dumpable(False)
    # Orphans of a worker that was killed come here.
    set_child_subreaper(True)
    mount.mount(None, "/", None, mount.MS_REC | mount.MS_PRIVATE)
    mount.mount("images", orders["mount_dir"], "tmpfs", mount.MS_NOSUID, "mode=0755,size=1m")
    protocol.send(hostd, {"event": "namespaces"})
    _, (zygote_pidfd,) = protocol.receive(hostd)
    return zygote_pidfd


def _serve(
    orders: dict[str, Any],
    prepared: _Prepared,
    hostd: socket.socket,
    listener: socket.socket,
    zygote_ends: tuple[socket.socket, int],
) -> None:
    loop = Loop()
    host = HostClient(loop, hostd)
    zygote = Zygote(loop, *zygote_ends)
    groups = _node_cgroups(orders)
    caps = KernelCaps(**orders["kernel_caps"])
    enforcement = {name: str(how) for name, how in groups.enforcement().items()}
    about = {
        **orders["describe"],
        "limits": {
            **enforcement,
            "disk_mb": "enforced",
            "inodes": "enforced",
            "nofile": "enforced",
            "shm_mb": "enforced",
        },
        "kernel_caps": skeleton.caps_in_effect(caps),
        "cpus": cpu_list(os.sched_getaffinity(0)),
        "cgroup": groups.version,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "started_at": time.time(),
    }
    mounts = mounter.handlers(orders["mount_dir"])
    mount_worker = Lanes(loop, "mounter", mounts)
    prober = Lanes(loop, "prober", mounts)
    views = Views(
        loop,
        enabled=orders["proc_views"],
        start_server=host.view_server,
        mount_dir=orders["mount_dir"],
        mounter=mount_worker,
        prober=prober,
        cpus=Cpus(os.sched_getaffinity(0)),
        disk_is_memory=orders["writable_layer"] == "tmpfs",
    )

    def describe() -> dict[str, Any]:
        counts = census(cgroups=groups, images=images, mount_dir=orders["mount_dir"], sweep=sweep)
        features = {
            **about["features"],
            "proc_views": views.state,
            "image_backend": orders["image_backend"],
        }
        return {**about, "features": features, "counts": counts}

    server = Server(loop, listener, describe)
    burial = Worker(loop, "undertaker", undertaker.handlers)
    copier = Worker(loop, "copier", copier_handlers)
    output_worker = Worker(loop, "spooler", body=spooler.main)
    for worker in (mount_worker, prober, burial, copier, output_worker):
        worker.start()
    images = Images(
        loop,
        mounter=mount_worker,
        prober=prober,
        fuse_fd=host.fuse_fd,
        server=ServerProgram(
            orders["squashfuse"],
            prepared.preload_fd,
            orders["fuse_id"],
            prepared.image_server_filter,
        ),
        kernel_mount=host.image if orders["image_backend"] == "kernel" else None,
        on_death=server.image_died,
    )
    staging = _staging(orders, loop, host, mount_worker)
    layers = Layers(burial, staging.detach if staging is not None else None)
    roots = Roots(loop, mounter=mount_worker, undertaker=burial, layers=layers, staging=staging)
    slots = Slots(
        loop,
        zygote=zygote,
        cgroups=groups,
        undertaker=burial,
        drop_root=roots.drop,
        views=views,
        caps=caps,
        ready_min=orders["slots_min"],
        ready_max=orders["slots_max"],
        last_id=orders["sandbox_last_id"] or orders["sandbox_ids"] - 1,
    )
    primer = Primer(
        loop, slots=slots, roots=roots, images=images, primed_max=orders["slots_primed"]
    )
    sandboxes = Sandboxes(
        loop,
        slots=slots,
        images=images,
        roots=roots,
        layers=layers,
        primer=primer,
        views=views,
        networks=Networks(loop, host, orders["network_pool"], orders["hang_s"]),
        host=host,
        on_death=server.sandbox_died,
    )
    snapshots = Snapshots(
        loop,
        sandboxes=sandboxes,
        layers=layers,
        copier=copier,
        images=images,
        images_dir=orders["mount_dir"],
        staging=staging,
    )

    diffs = Diffs(
        loop,
        sandboxes=sandboxes,
        images=images,
        layers=layers,
        images_dir=orders["mount_dir"],
        attached=staging is not None,
    )

    def start() -> Task[None]:
        yield from zygote.initialise(
            unmapped_id=orders["node_id"],
            map_count=orders["sandbox_ids"],
            map_last=orders["sandbox_last_id"],
            no_cgroups=groups.v2 is None,
            token=(prepared.token.low, prepared.token.high),
            caps=cap.mask(SANDBOX_CAPABILITIES),
            program=prepared.sandbox_filter,
        )
        loop.spawn(views.supervise())
        yield views.first
        # One is made before the node says it serves: whatever cannot be set up here fails now.
        slots.add((yield from slots.make(skeleton.SHM_MB)))
        transfers = Transfers(loop, sandboxes=sandboxes, copier=copier)
        server.start(
            sandboxes=sandboxes,
            images=images,
            slots=slots,
            snapshots=snapshots,
            transfers=transfers,
            diffs=diffs,
            spooler=output_worker,
        )
        loop.spawn(slots.keep_house())
        loop.spawn(primer.keep_house())
        if orders["hang_s"]:
            loop.spawn(zygote.watch(orders["hang_s"]))
            for one in (burial, copier, output_worker):
                loop.spawn(one.watch(orders["hang_s"]))
        host.tell_ready()

    if groups.watched:
        looker = Worker(loop, "watchdog", watchdog.handlers)
        looker.start()
        watch = Watchdog(loop, sandboxes.by_id, looker, orders["watchdog_s"])
        loop.spawn(watch.keep_watch())
    started = loop.spawn(start())

    def report() -> None:
        if started.error is not None:
            print(f"launcher: {started.error}", file=sys.stderr)
            protocol.send(hostd, {"event": "failed", "message": str(started.error)})
            loop.stop()

    started.watch(report)
    loop.spawn(images.watch_servers())
    sweep = Sweep(
        loop,
        cgroups=groups,
        slots=slots,
        images=images,
        mounter=mount_worker,
        mount_dir=orders["mount_dir"],
        staging=staging,
        views=views,
    )
    loop.spawn(sweep.keep_house(orders["sweep_s"]))
    loop.run()


def _node_cgroups(orders: dict[str, Any]) -> NodeCgroups:
    told, one_id = orders["cgroups"], orders["sandbox_ids"] == 1
    if told is None:
        return NodeCgroups(None, {}, frozenset(), watched=True, one_id=one_id)
    return NodeCgroups(
        Path(told["v2"]),
        {name: Path(path) for name, path in told["v1"].items()},
        frozenset(told["v2_controllers"]),
        watched=told["watched"],
        one_id=one_id,
    )


def _staging(
    orders: dict[str, Any], loop: Loop, host: HostClient, mount_worker: Lanes
) -> Staging | None:
    """What writable layers are made by and how, where it is not the mounter's tmpfs."""

    def make_tmpfs(size_bytes: int, inodes: int) -> Task[int]:
        yield from ()
        return make_writable_layer(size_bytes, inodes)

    if orders["writable_layer"] == "tmpfs" and orders["overlay_detached"]:
        return None
    make = make_tmpfs if orders["writable_layer"] == "tmpfs" else host.layer
    return Staging(loop, mounter=mount_worker, images_dir=orders["mount_dir"], make=make)


if __name__ == "__main__":
    main()
