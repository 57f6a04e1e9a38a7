"""The network of sandboxes that ask for one: what is allowed, who routes it, who watches it.

::

    sandbox's netns           router's netns                       host's netns
    eth0 100.126.0.8/32 ────► s1 ─┐ prerouting  is it its address?
    eth0 100.126.0.9/32 ────► s2 ─┤ forward     s1, s2 …: allowed? ──► up ──► sbx1a2b… ──► NIC
                                  │ input       port 53 only            masqueraded twice
                                  └ 100.126.0.4:53 ◄── resolver

``policy``    what a create may ask for: entries, parsed; which addresses are open to nobody
``ruleset``   the same as nftables commands
``links``     the veth pair of a sandbox, its addresses, its bandwidth, by netlink
``uplink``    the router's way to the host's network, and what is added to the host for it
``router``    process: owner of the namespace in which all veth pairs end
``resolver``  process: answers DNS, keeps the egress log
``dns``       which names are resolved for whom, and what of an answer is passed on
``egress``    the egress log of one sandbox

Why a namespace of its own: the host's firewall and its sysctls are left as they are, the tables and
connections of sandboxes are no part of the host's, and all of it is gone when the router is. It
belongs to the node's user namespace, so the router is nothing on the host: it has CAP_NET_ADMIN and
CAP_SYS_ADMIN there, over itself and the sandboxes, and nothing else. The resolver, which reads what
sandboxes send, has no capability anywhere, and an id of the host's that no user namespace maps.

What is on the host while there is a network: one link ``sbxHASH`` and one table ``sandboxd_HASH``,
which drops what a sandbox sends to the host itself and masquerades the rest. The host must forward
(``net.ipv4.ip_forward``): that is a decision about all its interfaces and so its operator's, never
made here; without it a network is refused, by name.

IPv6 is off: no address, no route, ``disable_ipv6`` on every link, and AAAA is answered with
nothing.
"""
