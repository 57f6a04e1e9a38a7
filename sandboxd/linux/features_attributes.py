"""The part of the features that says who refuses ``security.*`` attributes to a sandbox."""

from __future__ import annotations

import os

from sandboxd.linux import bpf_lsm
from sandboxd.linux.child import ChildError
from sandboxd.linux.findings import Findings, Status, reason_of
from sandboxd.linux.id_ranges import IdRange
from sandboxd.linux.probes import attributes, mounts


def find(found: Findings, map_ids: mounts.MapIds | None, ids: IdRange, outsider: int) -> str:
    """``map_ids``: None where there are no user namespaces to try it in. ``ids``: sandboxes', on
    the host. ``outsider``: an id of the namespace that no node's rule is for, so that a node which
    runs already is not taken for the kernel."""
    name = "security attributes"
    if map_ids is None:
        found.add(name, Status.WARN, "not tried", "see user namespaces")
        return "nobody"
    anybody = "this kernel lets anybody set security.*: on tmpfs, memory of the host without bound"
    try:
        if not attributes.anybody_may_set_them(map_ids, outsider):
            found.add(name, Status.OK, "an ordinary user may not set security.*")
            return "kernel"
        rule = bpf_lsm.refuse_security_attributes(ids)
        try:
            if not attributes.anybody_may_set_them(map_ids, 0):
                found.add(name, Status.OK, "security.* refused to sandboxes by the node's own rule")
                return "program"
        finally:
            os.close(rule)
        why = "the node's rule against it does not hold"
    except (OSError, ChildError) as error:
        why = reason_of(error)
    found.add(name, Status.WARN, f"{anybody}; {why}", attributes.remedy())
    return "nobody"
