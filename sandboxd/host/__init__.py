"""hostd: the root part of a node. It starts and watches the launcher and the zygote, and does for
them the few things that need the host's root and happen outside the node namespaces:

- writing the id maps of the node's user namespace;
- making the cgroups below which the launcher then does everything itself, as their owner;
- opening ``/dev/fuse`` inside the node's user namespace, once an image.

It reads no byte that comes from a sandbox or an image. Started by an ordinary user it makes do with
what he may (``rootless.py``).
"""
