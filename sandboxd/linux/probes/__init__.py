"""What the kernel lets us do, found out by doing it; ``features`` puts the answers together.

Each probe returns a plain value and raises ``OSError`` (``TimeoutError`` among them) or
``ChildError`` when it did not work. What it makes lives in a child with namespaces of its own and
dies with it; only cgroups are made where everyone sees them, and are removed.

``mounts``    user namespaces, overlay, FUSE and squashfuse, /proc
``processes`` pidfd, seccomp
``cgroups``   placing, killing, and whether a limit holds
"""
