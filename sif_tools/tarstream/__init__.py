"""Tar as a stream: entries in, entries out, no seeking and no file system.

`tarfile` of the standard library is not used: it decodes names, cannot tell the layer's own
bytes from its guesses, and writing through it costs more than the compression after it.
"""
