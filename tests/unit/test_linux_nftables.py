"""Where the kernel has no netfilter."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from sandboxd.linux import nftables
from sandboxd.network import uplink


def test_a_kernel_without_netfilter_has_no_tables_and_ends_nobody(monkeypatch):
    """libnftables calls exit(3) where it gets no netlink socket."""
    real = socket.socket

    def refusing(family=socket.AF_INET, kind=socket.SOCK_STREAM, proto=0, **rest):
        if (family, proto) == (socket.AF_NETLINK, 12):
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        return real(family, kind, proto, **rest)

    monkeypatch.setattr(socket, "socket", refusing)
    assert uplink.has_table("0123abcd") is False
    with pytest.raises(FileNotFoundError):
        nftables.Nftables()
