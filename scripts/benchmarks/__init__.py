"""What sandboxd costs, beside what the kernel takes and what others take, in the same run.

``command``        the one entry: a run of scenarios, or one of the three benches of parts
``scenarios``      one file a subject; each takes samples into ``measurements``
``rig``            what a scenario works with: node, client, yardsticks, size of the run
``measurements``   samples by scenario, measure and subject; medians and p99
``targets``        what must be reached, in one table, and what was
``yardsticks``     floors and peers, as programs that take samples when asked
``floors``         the two C floors and the image's mount (sources in ``floor/``)
``peers``          bwrap, crun, runc, chroot, nitrobox on the same root
``machine``        where the figures come from
``report``         JSON and tables; ``plots``: PNG files
``client``         bench of a part: the asyncio client beside raw aiohttp (--client)
``convert``        the same: one image beside the tools that sif-tools replaces (--convert)
``store``          the same: many images that share layers (--store; ``layers`` makes them)

Samples of ours are followed by those of each yardstick, so that a slower minute of the machine hits
all alike. Figures of ours are taken where a user takes them: in Python, around a call of
``sandboxd.client``, over HTTP. Those of floors and peers are taken in C, around a spawn and a wait.
"""
