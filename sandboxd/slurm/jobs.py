"""Slurm's own programs: what is asked of them, and what their answers mean."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandboxd.errors import FeatureMissing, NodeError, RequestError

TIMEOUT_S: Final = 60.0
"""MessageTimeout of slurm.conf is 10 s, and a busy slurmctld has Slurm's programs try again."""
_KEY: Final = re.compile(r"(?:^| )([A-Z][A-Za-z_:/]*)=")

ENDED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""squeue(1), JOB STATE CODES: what a job does not leave again (but by a requeue)."""


class SlurmError(NodeError):
    """Slurm refused, or does not answer; the message is its own."""

    code = "slurm-error"
    retryable = False


class SlurmJobNotFound(RequestError):
    """Slurm knows no job of this id, or none any more."""

    code = "slurm-job-not-found"


class SlurmJobEnded(NodeError):
    """The job ended before its daemons served; the message holds what they said."""

    code = "slurm-job-ended"
    retryable = False


@dataclass(frozen=True, slots=True)
class Job:
    """What Slurm knows of a job."""

    id: str
    state: str
    reason: str
    nodes: int
    end: str
    output: str
    exit_code: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def submit(script: Path, options: Sequence[str], command: Sequence[str]) -> str:
    """Queue a job; its id. ``options`` are sbatch's."""
    # The job is to know nothing of one that this process may be in, such as when that ends.
    env = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith("SLURM")}
    answer = _run(["sbatch", "--parsable", *options, str(script), *command], env)
    return answer.strip().partition(";")[0]


def show(job: str) -> Job:
    """Raises SlurmJobNotFound, SlurmError."""
    try:
        text = _run(["scontrol", "show", "job", "--oneliner", job])
    except SlurmError as error:
        if "Invalid job id" in error.message:
            raise SlurmJobNotFound(f"Slurm has no job {job} (any more)") from None
        raise
    fields = parse(text.splitlines()[0] if text else "")
    if "JobState" not in fields:
        raise SlurmJobNotFound(f"Slurm has no job {job} (any more)")
    return Job(
        job,
        fields["JobState"],
        fields.get("Reason", ""),
        int(fields.get("NumNodes", "0").partition("-")[0]),
        fields.get("EndTime", ""),
        fields.get("StdOut", ""),
        fields.get("ExitCode", ""),
    )


def cancel(job: str) -> None:
    """SIGTERM for all that is in it, and SIGKILL after KillWait."""
    _run(["scancel", job])


def node_address(node: str) -> str:
    """Where Slurm reaches a node: NodeAddr, a name or an address."""
    fields = parse(_run(["scontrol", "show", "node", "--oneliner", node]))
    return fields.get("NodeAddr") or node


def parse(line: str) -> dict[str, str]:
    """scontrol's ``Key=value Key=value``; a value may have spaces and equals signs in it."""
    found = list(_KEY.finditer(line))
    ends = [one.start() for one in found[1:]] + [len(line)]
    return {one[1]: line[one.end() : end].strip() for one, end in zip(found, ends, strict=True)}


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Its stdout. Raises FeatureMissing, SlurmError."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_S,
            env=dict(env or os.environ),
        )
    except FileNotFoundError:
        raise FeatureMissing(
            f"there is no {command[0]}", hint="run it where Slurm's programs are (slurm-client)"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} does not answer in {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
