"""`dp ipi`: a model as the force engine of i-PI (and of whoever speaks its protocol), by ASE's socket client."""

from __future__ import annotations

import ipaddress
import logging
import socket

import numpy as np
from ase import Atoms, units
from ase.calculators.socketio import IPIProtocol, SocketClient, SocketClosed
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
    atoms.calc.types_of(atoms)  # a wrong element is told before i-PI waits for forces
    if not atoms.pbc.any():
        log.warning("%s: has no cell, so forces are those of a structure that is not periodic", structure)
    where = f"--unix {unix}" if unix else f"--address {address}"
    try:
        client = SocketClient(host=host, port=port, unixsocket=unix)
    except OSError as error:
        raise UserError(f"{where}: nobody listens there ({error.strerror}). Start i-PI first.") from None
    client.protocol = Conversation(client.protocol.socket, len(atoms), structure, where)
    log.info("connected to i-PI with %d atoms", len(atoms))
    client.run(atoms, use_stress=bool(any(atoms.pbc)))
    log.info("i-PI has ended")


class Conversation(IPIProtocol):
    """ASE's side of i-PI's protocol, which tells what i-PI would not say, and what does not fit the structure."""

    def __init__(self, sock: socket.socket, natoms: int, structure: str, where: str):
        super().__init__(sock)
        self.natoms, self.structure, self.where = natoms, structure, where
        self.forces_wait = False  # positions have come, their forces were not yet asked for

    def recvmsg(self) -> str:
        found = self._recvall(12).rstrip()
        if found not in (b"STATUS", b"EXIT", b"GETFORCE" if self.forces_wait else b"POSDATA"):
            raise UserError(f"{self.where}: i-PI is not what listens there: it sent {found!r}.")
        self.forces_wait = found == b"POSDATA" or (self.forces_wait and found != b"GETFORCE")
        return found.decode("ascii")

    def recvposdata(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cell (Å), its inverse and positions (n, 3), after a look at n."""
        cell, inverse, natoms = self.recv((3, 3), np.float64).T, self.recv((3, 3), np.float64).T, self.recv(1, np.int32)
        if natoms[0] != self.natoms:
            raise UserError(
                f"{self.structure}: has {self.natoms} atoms, but i-PI sends {natoms[0]}. Give the structure that i-PI "
                "has, with its atoms in the same order."
            )
        return cell * units.Bohr, inverse / units.Bohr, self.recv((self.natoms, 3), np.float64) * units.Bohr

    def recv(self, shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
        raw = self._recvall(int(np.dtype(dtype).itemsize * np.prod(shape)))
        numbers: np.ndarray = np.frombuffer(raw, dtype).reshape(shape)
        if not np.isfinite(numbers).all():
            raise UserError(f"{self.where}: i-PI sent numbers that are not finite: its simulation has gone astray.")
        return numbers

    def _recvall(self, nbytes: int) -> bytes:
        try:
            return super()._recvall(nbytes)
        except SocketClosed:
            raise
        except OSError as error:
            raise self.lost(error) from None

    def sendmsg(self, msg: str) -> None:
        self.send(np.frombuffer(msg.encode("ascii").ljust(12), np.byte), np.byte)

    def send(self, a: np.ndarray, dtype: type) -> None:
        try:
            super().send(a, dtype)
        except OSError as error:
            raise self.lost(error) from None

    def lost(self, error: OSError) -> UserError:
        return UserError(f"{self.where}: the connection to i-PI was lost ({error.strerror}). See i-PI's own output.")


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
