"""The node's image store: from a name to a checked SIF file, and what of them is mounted.

``store``    names, look-up, checks (the only user of sif_tools)
``mounts``   mounts shared by reference count, single flight, idle eviction, mounting again

Mounting itself is the launcher's; ``mounts`` is handed something that can.
"""
