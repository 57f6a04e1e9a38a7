"""The kernel's interfaces in the kernel's own words, and nothing of the product.

One thin wrapper for each system call; none keeps state. Everything here raises
``OSError(errno, strerror, what)`` and no other error of its own; a subclass such as
``FileNotFoundError`` comes by itself from the errno.

``mount``          mount(2), umount2(2), pivot_root(2), mounts as file descriptors, mountinfo
``namespaces``     unshare(2), setns(2), id maps
``process``        clone3(2), prctl(2) attributes of a process, resource limits
``pidfd``          signals and waiting that cannot hit the wrong process
``capabilities``   capget(2), capset(2), bounding set, securebits
``cgroup``         both cgroup versions: the layout and the life of a group
``cgroup_limits``  limits and usage of a group
``cgroup_usage``   what all groups below one use
``procfs``         readers of /proc
``seccomp``        filters
``bpf_lsm``        a rule for the kernel's LSM bpf
``id_ranges``      subordinate ids and the maps made of them
``user_ids``       the ids that an ordinary user can have in a user namespace
``programs``       programs of other packages
``settings``       sysctls and limits that many sandboxes need
``child``          a function in a short-lived child, for ``probes``
``features``       what this node can do, found out by doing it; ``features_user`` for a node
                   of an ordinary user, ``features_attributes`` for ``security.*``, ``findings``
                   for how it is told
"""
