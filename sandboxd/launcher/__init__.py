"""The launcher: owner of the node namespaces, the table of sandboxes and the mounted images.

A process of its own, single-threaded, without asyncio and without threads, so that it may fork; it
is uid 65536 of a user namespace that no sandbox can name, and nothing on the host. ``client.py`` is
what the daemon uses; ``protocol.py`` is the contract between them; the rest runs in the launcher.
"""
