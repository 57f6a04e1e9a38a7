"""``sandboxd slurm``: daemons on the nodes of a Slurm job; see ``sandboxd.slurm``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sandboxd.cli import options
from sandboxd.cli.output import EXIT_FAILED, print_json, print_table, reporting, say
from sandboxd.client import slurm as published
from sandboxd.client.failures import ClientMisused
from sandboxd.client.results import Node
from sandboxd.client.slurm import SlurmNode
from sandboxd.client.sync import Client
from sandboxd.config import load_config
from sandboxd.errors import SandboxdError
from sandboxd.slurm import jobs

PAUSE_S: Final = 0.5
"""Between two looks at files and at Slurm, which tells nobody of anything."""
ASKED_AT_ONCE: Final = 32
SCRIPT: Final = "sandboxd.sbatch"

Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        envvar=published.DIRECTORY,
        help="On storage that all nodes share; a directory for each job in it.",
        show_default=published.DEFAULT_DIRECTORY,
    ),
]
Job = Annotated[str | None, typer.Argument(metavar="JOB", help="By default the one this is in.")]


def build() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Daemons on all nodes of a Slurm job.")
    app.command("launch", context_settings={"allow_interspersed_args": False})(launch)
    app.command("status")(status)
    app.command("stop")(stop)
    app.command("node")(node)
    app.command("sweep")(sweep)
    return app


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...",
            help="Run it in the job once all serve; the job ends with it.",
        ),
    ] = None,
    *,
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="How many.")] = 1,
    time_limit: Annotated[
        str | None, typer.Option("--time", "-t", metavar="TIME", help="As sbatch's.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Any other option of sbatch; may be repeated."),
    ] = None,
    images_dir: Annotated[
        Path | None, typer.Option(help="Where the images lie, on every node.")
    ] = None,
    wait_s: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="For all to serve. 0: do not wait."),
    ] = 600.0,
    directory: Directory = None,
    as_json: options.Json = False,
) -> None:
    """Submit a job with a daemon on every node, and tell where they are once all serve."""
    given = [f"--nodes={nodes}"]
    given += [f"--time={time_limit}"] if time_limit else []
    given += [f"--partition={partition}"] if partition else []
    base = published.base_directory(directory).absolute()
    with reporting():
        os.environ[published.DIRECTORY] = str(base)
        os.environ.setdefault("SANDBOXD_SLURM_PROGRAM", _program())
        if images_dir is not None:
            os.environ["SANDBOXD_IMAGES_DIR"] = str(images_dir.absolute())
        load_config(os.environ.get("SANDBOXD_CONFIG"))  # a mistake is told here and not in the job
        words = [] if not command else options.command_words(command)
        job = jobs.submit(_script(), [*given, *(sbatch or [])], words)
        if wait_s == 0:
            if as_json:
                print_json({"job": job, "nodes": []})
            else:
                typer.echo(job)
            return
        try:
            found = _all_serve(job, base, wait_s)
        except KeyboardInterrupt:
            say(f"job {job} goes on; sandboxd slurm stop {job} ends it")
            raise
        _tell([_Status(job, "RUNNING", _ask(found))], as_json)


def status(job: Job = None, *, directory: Directory = None, as_json: options.Json = False) -> None:
    """Which nodes serve, where, and what they hold; of one job, or of all that have published."""
    with reporting():
        base = published.base_directory(directory)
        here = job or os.environ.get(published.JOB)
        known = [here] if here else _published_jobs(base)
        told = []
        for one in known:
            found = published.nodes(one, base)
            state = _state(one)
            if here and state == _GONE and not found:
                raise jobs.SlurmJobNotFound(f"Slurm has no job {one}, and it has published nothing")
            told.append(_Status(one, state, _ask(found)))
        _tell(told, as_json)


def stop(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id.")],
    *,
    drain_s: Annotated[
        float,
        typer.Option("--drain", metavar="SECONDS", min=0, help="First let sandboxes end so long."),
    ] = 0.0,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="For the job to be gone.")
    ] = 120.0,
    directory: Directory = None,
) -> None:
    """End the job and its daemons, and remove what a lost node has left published."""
    with reporting():
        base = published.base_directory(directory)
        where = published.job_directory(job, base)
        found = published.nodes(job, base)
        state = _state(job)
        if state == _GONE and not where.is_dir():
            raise jobs.SlurmJobNotFound(f"Slurm has no job {job}, and it has published nothing")
        if drain_s > 0:
            _drain(found, drain_s)
        if state not in (_GONE, *jobs.ENDED):
            jobs.cancel(job)
        deadline = time.monotonic() + wait_s
        while (state := _state(job)) not in (_GONE, *jobs.ENDED):
            if time.monotonic() > deadline:
                raise jobs.SlurmError(f"job {job} is still {state} after {wait_s:g} s")
            time.sleep(PAUSE_S)
        # The batch script does so in its last moments; without it (its node is lost) it is ours.
        while where.is_dir() and time.monotonic() < deadline and published.nodes(job, base):
            if not any(one.reachable for one in _ask(published.nodes(job, base))):
                break
            time.sleep(PAUSE_S)
        _remove(where)


def node(
    *,
    listen: Annotated[
        str | None, typer.Option(help="Address; by default the one that Slurm has for the node.")
    ] = None,
    config: options.ConfigFile = None,
    directory: Directory = None,
) -> None:
    """What the batch script runs on each node: a daemon that is published while it serves."""
    with reporting():
        from sandboxd.slurm import step  # noqa: PLC0415 - it needs the daemon's parts

        here = step.place(os.environ, str(directory) if directory else None)
        raise typer.Exit(step.run(here, load_config(config), config, listen))


def sweep() -> None:
    """Remove what daemons of jobs left on this node that were killed with all they had."""
    from sandboxd.slurm import instances  # noqa: PLC0415 - it needs the daemon's parts

    failed = False
    with reporting():
        for path, failures in instances.remove_dead():
            typer.echo(str(path))
            for failure in failures:
                failed = True
                say(failure)
    if failed:
        raise typer.Exit(EXIT_FAILED)


# --- what is known of a job ------------------------------------------------------------------

_GONE: Final = "GONE"


class _Asked:
    """A node as it was published, and what its daemon says of itself now."""

    def __init__(self, told: SlurmNode, answer: Node | SandboxdError) -> None:
        self.told = told
        self.reachable = isinstance(answer, Node)
        self.failure = None if isinstance(answer, Node) else answer
        self.answer = answer if isinstance(answer, Node) else None

    @property
    def state(self) -> str:
        if self.answer is None:
            return self.failure.code if self.failure else "unknown"
        return "draining" if self.answer.admission["drain"]["draining"] else "serving"

    @property
    def sandboxes(self) -> int | None:
        return None if self.answer is None else sum(self.answer.sandboxes.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.told.node,
            "url": self.told.url,
            "state": self.state,
            "sandboxes": self.sandboxes,
            "job_end": self.told.job_end,
            "restart": self.told.restart,
            "error": self.failure,
        }


class _Status:
    def __init__(self, job: str, state: str, nodes: list[_Asked]) -> None:
        self.job = job
        self.state = state
        self.nodes = nodes


def _ask(found: Sequence[SlurmNode]) -> list[_Asked]:
    def one(told: SlurmNode) -> _Asked:
        try:
            with Client(told.url, told.token, retry_s=0) as client:
                return _Asked(told, client.node())
        except SandboxdError as error:
            return _Asked(told, error)

    if not found:
        return []
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(found))) as pool:
        return list(pool.map(one, found))


def _state(job: str) -> str:
    try:
        return jobs.show(job).state
    except jobs.SlurmJobNotFound:
        return _GONE


def _published_jobs(base: Path) -> list[str]:
    try:
        return sorted((one for one in os.listdir(base) if one.isdigit()), key=int)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ClientMisused(f"{base}: {error.strerror}") from error


def _tell(told: Sequence[_Status], as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"job": one.job, "state": one.state, "nodes": [n.to_json() for n in one.nodes]}
                for one in told
            ]
        )
        return
    rows = [list(_rows(one)) for one in told]
    columns = ["JOB", "STATE", "NODE", "URL", "DAEMON", "SANDBOXES"]
    print_table(columns, [row for table in rows for row in table])


def _rows(one: _Status) -> Iterator[list[str]]:
    if not one.nodes:
        yield [one.job, one.state, "-", "-", "-", "-"]
    for asked in one.nodes:
        shown = "-" if asked.sandboxes is None else str(asked.sandboxes)
        yield [one.job, one.state, asked.told.node, asked.told.url, asked.state, shown]


# --- steps of launch and stop ----------------------------------------------------------------


def _all_serve(job: str, base: Path, wait_s: float) -> list[SlurmNode]:
    """Raises SlurmJobEnded, SlurmError."""
    deadline = time.monotonic() + wait_s
    told = ""
    while True:
        known = jobs.show(job)
        if known.ended:
            raise jobs.SlurmJobEnded(
                f"job {job} is {known.state} ({known.exit_code}): {_last_words(known)}",
                hint=f"its output is in {known.output}",
            )
        found = published.nodes(job, base)
        if known.state == "RUNNING" and len(found) >= known.nodes:
            return found
        state = f"{known.state} {known.reason}" if known.state == "PENDING" else known.state
        if state != told:
            say(f"job {job}: {state.lower()}")
            told = state
        if time.monotonic() > deadline:
            raise jobs.SlurmError(
                f"job {job} is {state.lower()} and {len(found)} of {known.nodes} nodes serve",
                hint=f"sandboxd slurm status {job} tells more; sandboxd slurm stop {job} ends it",
            )
        time.sleep(PAUSE_S)


def _last_words(job: jobs.Job) -> str:
    """What the daemons said last, of the job's output where we can read it."""
    try:
        text = Path(job.output).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return job.reason
    lines = [line for line in text.splitlines() if "sandboxd" in line]
    return "; ".join(lines[-3:]) or job.reason


def _drain(found: Sequence[SlurmNode], within_s: float) -> None:
    """Let sandboxes end, and have them deleted when the time is up."""

    def one(told: SlurmNode) -> None:
        try:
            with Client(told.url, told.token, retry_s=0) as client:
                left = client.drain(within_s).sandboxes
                deadline = time.monotonic() + within_s + PAUSE_S
                while left and time.monotonic() < deadline:
                    time.sleep(PAUSE_S)
                    left = sum(client.node().sandboxes.values())
        except SandboxdError as error:
            say(f"{told.node}: {error.code}: {error.message}")

    if found:
        with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(found))) as pool:
            list(pool.map(one, found))


def _remove(where: Path) -> None:
    """A job's directory with what was published in it; nothing else."""
    try:
        for name in os.listdir(where):
            if name.endswith(published.SUFFIX) or f"{published.SUFFIX}." in name:
                (where / name).unlink(missing_ok=True)
        where.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        say(f"{where}: {error.strerror}")


def _program() -> str:
    """This very program, which other nodes have at the same path."""
    beside = Path(sys.executable).with_name("sandboxd")
    return str(beside) if beside.exists() else "sandboxd"


def _script() -> Path:
    package = Path(jobs.__file__).parent
    installed = package / SCRIPT
    return installed if installed.exists() else package.parents[1] / "deploy/slurm" / SCRIPT
