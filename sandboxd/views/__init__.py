"""The proc views: /proc/meminfo and its like, as each sandbox's own limits and use say.

``free``, ``top``, ``nproc``, ``make -j$(nproc)``, pytest-xdist, Node and psutil size themselves by
these files; the kernel's own show the whole host. One process a node serves all of them by FUSE
(pyfuse3); trio stays in here. The launcher (``launcher/views.py``) starts it, tells it of each
sandbox, watches it, and has PID 1 bind a sandbox's files over those of /proc and /sys.

They are a comfort, not a wall. A node without them runs, and says so in ``/v1/node``.

``tree``     names and inode numbers
``figures``  what a sandbox uses, read from its cgroups
``scope``    what a sandbox was given
``content``  the text of each file
``cgroup_files``  the same, of those below /sys/fs/cgroup
``pace``     that one sandbox which reads in a loop does not hold up the others
``server``   FUSE requests, and what the launcher says
"""
