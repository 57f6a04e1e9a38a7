"""Who may set ``security.*`` attributes on a file."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxd.linux import capabilities, child, mount
from sandboxd.linux.probes.mounts import NODE, SCRATCH, TIMEOUT_S, MapIds

LSMS = Path("/sys/kernel/security/lsm")


def anybody_may_set_them(map_ids: MapIds, uid: int) -> bool:
    """Without a capability, on a tmpfs, as one of the mapped ids. A kernel that is as it should be
    asks for CAP_SYS_ADMIN (xattr(7))."""

    def work() -> bool:
        mount.mount("tmpfs", SCRATCH, "tmpfs", mount.MS_NOSUID | mount.MS_NODEV, "size=1m")
        file = SCRATCH / "file"
        file.touch()
        file.chmod(0o666)
        os.setresuid(uid, uid, uid)
        capabilities.capset(0, 0, 0)
        try:
            os.setxattr(file, "security.sandboxd", b"1")
        except OSError:  # EPERM; EOPNOTSUPP of a tmpfs without attributes
            return False
        return True

    return bool(child.run(work, TIMEOUT_S, NODE, map_ids))


def remedy() -> str:
    """The boot parameter that leaves out the LSM whose empty hook lets them."""
    try:
        active = LSMS.read_text(encoding="ascii").strip().split(",")
    except OSError:
        return f"boot with lsm= and what {LSMS} says, without bpf; or use a newer kernel"
    rest = ",".join(name for name in active if name not in ("bpf", "capability"))
    return f"boot with lsm={rest}, which leaves out bpf; or use a newer kernel"
