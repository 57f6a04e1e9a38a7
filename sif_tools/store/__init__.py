"""A directory on shared scratch in which every image is converted once, and found by name.

::

    STORE/
      store.json                      what this is, and its format's version; made once
      objects/ab/cd/<digest>.sif      SIFs, by the SHA-256 of their bytes: bases, deltas, flat ones
                    <digest>.tree     the names in a base, so that a delta need not read its layers
      builds/ab/cd/<key>.json         which objects came of a run of layers, by what went in
      images/ab/cd/<key>.json         which SIFs an image is, base first, by what went in
      names/ab/cd/<quoted name>.json  which image a name stands for; ab/cd from the name's SHA-256
      claims/<key>.json               who builds what at this moment
      leases/<holder>/<digest>        who reads what, and <holder>/alive, touched while it does
      trash/ab/cd/<digest>.<suffix>   what nobody refers to any more, on its way out

``ab/cd`` are the first four digits of the name: half a million images are seven to a directory, and
none that is listed grows with the store (``claims`` holds what is built now, ``leases`` has a
directory a reader).

**Publishing.** A file is built on local disk; copied to ``.<digest>.<token>.tmp`` in the directory
it will lie in; synced; read back and compared; given its name by ``link``, which never replaces
(a file of that name is the same file: success; any other error may come of a repeated request on
NFS, so the names are compared before it counts); its other name is removed; the directory is
synced. Objects come before the records that name them, an image's record before its name. So
whatever a reader finds by a record is whole, wherever a converter was killed. Published files never
change. Names are the one thing that does: a new record replaces the old by ``rename``.

**Claims** save work; they never make anything correct, nor does any file lock. A claim is a file
made with O_EXCL that says host, boot, pid and start of its maker, who touches it through its open
descriptor every few seconds. It is void when its maker is known to be dead (this host, this boot,
no such process; or this host before it was booted anew), when its time stamp is old by the file
server's own clock (a file touched now tells), or when it has not moved for as long by the
watcher's. A void claim is renamed away, looked at again, and put back if it was not the void one.
Two converters that both think they hold a claim publish the same bytes under the same name.

**Deleting** (``collect``): records and objects that no name leads to, and that have been so for a
grace time, are renamed to ``trash``; there they stay for the grace time, keeping open files open,
and are put back if a record that names them has come meanwhile. What is leased is not touched.

Modules: ``layout`` (paths and keys), ``files`` (publishing, reading), ``claims``, ``records``,
``lookup`` (all that a node needs), ``leases``; ``trees``, ``plan``, ``build``, ``keeper`` (an
image into the store); ``collect``, ``audit``, ``sync_check``, ``report``, ``flatten``.
"""
