"""Addresses of this host: a socket of ours listens on the loopback, or on the interface that leads to the others."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import psutil

from ..errors import UserError

LOOPBACK = "127.0.0.1"
ANYWHERE = "192.0.2.1"  # an address of nobody (RFC 5737): the route to it is the default route


def source_address(target: str) -> str:
    """The local address of the route to `target`, "" when there is none; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except (OSError, UnicodeError):
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def outward_address(targets: Iterable[str]) -> str:
    """The address of the interface that leads to the first of `targets` that is not this host, else to anywhere."""
    for target in (*targets, ANYWHERE):
        address = source_address(target)
        if address and not is_loopback(address):
            return address
    raise UserError(
        f"{socket.gethostname()} has no network interface that leads to the other hosts of this job: its name and"
        " theirs lead to the loopback, and there is no default route. Set MASTER_ADDR to an address of rank 0."
    )


def interface_of(address: str) -> str:
    """The name of the interface that has an address, "" when none has."""
    for name, nics in psutil.net_if_addrs().items():
        if any(nic.address.partition("%")[0] == address for nic in nics):
            return name
    return ""


def exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = line.recv(count - len(data))
        if not piece:
            raise ConnectionError("the other side closed the line")
        data += piece
    return bytes(data)
