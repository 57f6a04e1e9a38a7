"""What was tried and how it went, for an operator: one line each, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from sandboxd.linux.child import ChildError


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Probe:
    """One finding. ``remedy`` is what the operator does about it; empty when it is ok."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def probe_to_json(probe: Probe) -> dict[str, str]:
    return asdict(probe)


class Findings:
    """Collects the probes as they are tried."""

    def __init__(self) -> None:
        self.probes: list[Probe] = []

    def add(self, name: str, status: Status, detail: str, remedy: str = "") -> None:
        self.probes.append(Probe(name, status, detail, remedy if status != Status.OK else ""))

    def attempt(
        self,
        name: str,
        action: Callable[[], None],
        detail: str,
        remedy: str,
        otherwise: Status = Status.FAIL,
    ) -> bool:
        """Do it; ``otherwise`` is what it means if it does not work."""
        try:
            action()
        except (OSError, ChildError) as error:
            self.add(name, otherwise, reason_of(error), remedy)
            return False
        self.add(name, Status.OK, detail)
        return True


def reason_of(error: OSError | ChildError) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error)
