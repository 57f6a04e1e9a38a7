"""The node's image store: from a name to a checked SIF file, and what of them is mounted.

``store``    names, look-up of ``NAME.sif``, what was checked lately
``stacks``   the same in a store of sif_tools: a base and what is laid over it
``checked``  what is known of an image, and looking at one
``leases``   tells a shared store what this node reads
``mounts``   mounts shared by reference count, single flight, idle eviction, mounting again

Mounting itself is the launcher's; ``mounts`` is handed something that can. Nothing else in sandboxd
uses sif_tools.
"""
