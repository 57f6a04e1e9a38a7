"""A real Slurm on this host: slurmctld and several slurmd, each a "node", all on loopback.

For: the tier slurm. Not for: what sandboxd makes of it. The programs are Debian's; they run in the
foreground as children of the tests, with every file in one temporary directory, and nothing is
authenticated (``auth/none``): whoever reaches the ports is believed, which is why they are on
loopback. No service of the packages has a part in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.framework import host_state, times

PROGRAMS: Final = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
PACKAGES: Final = "slurmctld slurmd slurm-client"
START_S: Final = times.scaled(40.0)
STOP_S: Final = times.scaled(20.0)
PAUSE_S: Final = 0.1  # Slurm tells nobody of a change of state

CONFIGURATION: Final = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
SlurmdParameters=config_overrides
StateSaveLocation={home}/state
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmctldDebug=verbose
SlurmdSpoolDir={home}/spool.%n
SlurmdPidFile={home}/slurmd.%n.pid
SlurmdLogFile={home}/slurmd.%n.log
SlurmdDebug=verbose
KillWait={kill_wait_s}
SlurmdTimeout={slurmd_timeout_s}
SlurmctldTimeout=30
BatchStartTimeout=30
ReturnToService=2
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmFailed(Exception):
    """Slurm did not do what it was told; the message holds what it said."""


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(absent)} (packages {PACKAGES})" if absent else None


@dataclass
class Slurm:
    """A running cluster. ``environment`` leads every program of Slurm, and sandboxd, to it."""

    home: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]
    controller: subprocess.Popen[bytes]
    slurmds: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    def run(
        self, command: Sequence[str], *, user: int | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            cwd=self.home,
            timeout=times.scaled(100),
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        if check and done.returncode != 0:
            raise SlurmFailed(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by key."""
        shown = self.run(["scontrol", "show", "job", "--oneliner", job_id]).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_state(self, job_id: str, *states: str, within_s: float = 60.0) -> dict[str, str]:
        deadline = time.monotonic() + times.scaled(within_s)
        while True:
            shown = self.job(job_id)
            if shown["JobState"] in states:
                return shown
            if time.monotonic() > deadline:
                raise SlurmFailed(f"job {job_id} is {shown['JobState']}, not {'/'.join(states)}")
            time.sleep(PAUSE_S)

    def wait_nodes(self, state: str, names: Sequence[str] | None = None) -> None:
        """Until each is in ``state`` (``idle``, ``down`` …) and nothing else."""
        wanted = set(self.nodes if names is None else names)
        deadline = time.monotonic() + START_S
        while True:
            shown = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"], check=False)
            pairs = [line.split() for line in shown.stdout.splitlines()]
            found = {pair[0] for pair in pairs if len(pair) == 2 and pair[1] == state}
            if wanted <= found:
                return
            if time.monotonic() > deadline:
                raise SlurmFailed(
                    f"nodes are not {state}: {shown.stdout}{shown.stderr}\n{self.log_tail()}"
                )
            time.sleep(PAUSE_S)

    def start_slurmd(self, node: str) -> None:
        command = [*self.before, "slurmd", "-D", "-N", node]
        self.slurmds[node] = _start(command, self.environment, self.home)

    def kill_slurmd(self, node: str) -> None:
        """As a crash does: its steps go on without it."""
        process = self.slurmds.pop(node)
        process.kill()
        process.wait()

    def log_tail(self, lines: int = 25) -> str:
        texts = []
        for log in sorted(self.home.glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            texts.append("\n".join([f"== {log.name}", *tail]))
        return "\n".join(texts)


@contextlib.contextmanager
def running_slurm(
    count: int, *, kill_wait_s: int = 15, before: Sequence[str] = ()
) -> Iterator[Slurm]:
    """A cluster of ``count`` nodes; after the block nothing of it is left. ``before``: words that
    put a node into surroundings of its own, in the same process."""
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix=f"{host_state.OWN_PREFIX}slurm-"))
        stack.callback(shutil.rmtree, home)
        home.chmod(0o755)
        ports = [_free_port() for _ in range(count + 1)]
        names = tuple(f"node{number + 1}" for number in range(count))
        nodes = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={port} CPUs=4 RealMemory=512 State=UNKNOWN"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        (home / "state").mkdir()
        configuration = home / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                controller_port=ports[0],
                home=home,
                kill_wait_s=kill_wait_s,
                slurmd_timeout_s=10,
                nodes="\n".join(nodes),
            )
        )
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "SBATCH", "SQUEUE", "SRUN", "SANDBOXD_"))
        }
        environment["SLURM_CONF"] = str(configuration)
        controller = _start(["slurmctld", "-D", "-c"], environment, home)
        cluster = Slurm(home, names, environment, controller, before=tuple(before))
        stack.callback(_stop, cluster)
        for name in names:
            cluster.start_slurmd(name)
        try:
            cluster.wait_nodes("idle")
        except SlurmFailed:
            print(cluster.log_tail())
            raise
        yield cluster


def _start(
    command: Sequence[str], environment: Mapping[str, str], home: Path
) -> subprocess.Popen[bytes]:
    with (home / f"{Path(command[0]).name}.stderr").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home
        )


def _stop(cluster: Slurm) -> None:
    """Jobs first, or their steps would outlive the daemons that could end them."""
    with contextlib.suppress(SlurmFailed, subprocess.TimeoutExpired):
        jobs = cluster.run(["squeue", "--noheader", "--format=%A"]).stdout.split()
        if jobs:
            cluster.run(["scancel", *jobs])
            deadline = time.monotonic() + STOP_S
            while cluster.run(["squeue", "--noheader"]).stdout and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
    for process in (*cluster.slurmds.values(), cluster.controller):
        process.send_signal(signal.SIGTERM)
    for process in (*cluster.slurmds.values(), cluster.controller):
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
