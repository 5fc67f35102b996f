"""`dp ipi`: a model as the force engine of i-PI (and of whoever speaks its protocol), by ASE's socket client."""

from __future__ import annotations

import ipaddress
import logging
import socket

from ase import Atoms
from ase.calculators.socketio import SocketClient
from ase.io import read

from allforce.errors import UserError
from allforce.infer.ase import DP

log = logging.getLogger("deepmd.ipi")


def serve_forces(model: str, structure: str, unix: str | None, address: str | None, allow_remote: bool = False) -> None:
    """Connect to a waiting i-PI and compute forces until it says goodbye. structure: a file with the atoms in order."""
    if (unix is None) == (address is None):
        raise UserError("dp ipi: give either --unix NAME or --address HOST:PORT, as i-PI's <ffsocket> has it.")
    host, port = ("localhost", None) if address is None else host_and_port(address, allow_remote)
    try:
        atoms = read(structure, parallel=False)
    except Exception as error:  # ASE's readers fail in any way
        raise UserError(f"{structure}: ASE cannot read it ({error}). Give the structure of i-PI.") from None
    assert isinstance(atoms, Atoms)
    atoms.calc = DP(model, parallel=False)  # several clients of one i-PI are several beads
    try:
        client = SocketClient(host=host, port=port, unixsocket=unix)
    except OSError as error:
        where = f"--unix {unix}" if unix else f"--address {address}"
        raise UserError(f"{where}: nobody listens there ({error.strerror}). Start i-PI first.") from None
    log.info("connected to i-PI with %d atoms", len(atoms))
    client.run(atoms, use_stress=bool(any(atoms.pbc)))
    log.info("i-PI has ended")


def host_and_port(address: str, allow_remote: bool) -> tuple[str, int]:
    """A loopback address, unless another one is allowed: the protocol has no password."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--address {address}: expected HOST:PORT, such as localhost:31415.")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except OSError as error:
        raise UserError(f"--address {address}: the host is not known ({error.strerror}).") from None
    if not allow_remote and not all(ipaddress.ip_address(x).is_loopback for x in found):
        raise UserError(
            f"--address {address} is not on this machine, and i-PI's protocol has no password. Use --unix or "
            "localhost, or say --allow-remote if the network is yours."
        )
    return host, int(port)
