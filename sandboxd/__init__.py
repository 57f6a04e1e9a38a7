"""sandboxd: a per-node daemon that gives RL rollout workers disposable Linux sandboxes over HTTP.

The layers, from the outside in; each imports only from those below it
(``scripts/check`` holds this with import-linter):

``cli``        argv to configuration; ``serve``, ``doctor`` and the administration verbs
``slurm``      the daemon on every node of a Slurm job: its start, where it is published, its end
``api``        FastAPI application: schemas, authentication, one file a resource, errors as HTTP
``runtime``    the daemon's subject: the table of sandboxes, exec, files; asyncio lives here
``images``     the node's image store: SIF files checked, what is mounted (only user of sif_tools)
``launcher``   owner of the node namespaces and of every sandbox: slots, cgroups, mounts; its client
``host``       hostd, the few verbs that need the host's root, or do without it for an ordinary
               user; starts and watches the launcher
``views``      the server of /proc/meminfo and its like, a process of its own (pyfuse3, trio)
``network``    policy of a sandbox's network; router and resolver, the processes that keep it
``rootfs``     what a sandbox's root is made of: overlay, writable layer, node skeleton
``init``       the C zygote and PID 1, their protocol header and its Python mirror
``linux``      the kernel's interfaces, nothing of the product: mounts, namespaces, cgroups, seccomp
``config``     one frozen Config: flags over environment over TOML over defaults
``model``      the words everyone shares: SandboxSpec, Limits, ExecRequest, ExecResult …
``errors``     the whole error tree

Four kinds of process run this code: the daemon (``api``, ``runtime``, ``images``; never root once
it serves), hostd (``host``; root), the launcher with its mounter and undertaker (``launcher``; root
of nothing but its own user namespace) and the C processes (``init``; one PID 1 a sandbox). From the
first sandbox with a network on there are two more (``network``): a router, which is root of nothing
but that user namespace's networks, and a resolver, which has no right anywhere.
"""

__version__ = "0.1.0"
