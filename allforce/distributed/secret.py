"""The secret k of a job: how it is proved, and how messages are sealed with it. H is HMAC-SHA256.

Who proves to know it computes H(k, what for, fresh random numbers of both sides), so that nobody hears it and nothing
said before is of use.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from ..errors import UserError
from .comm import Comm

SIZE = 32  # bytes of a random number, and of a proof
LONGEST = 1 << 26  # bytes of a message


def proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def prove(comm: Comm, secret: str) -> None:
    """Every rank r shows, over the connections of `comm` itself, that it knows the secret: H(k, r, numbers of all).

    So nobody has taken a worker's place there.
    """
    numbers = "".join(map(str, comm.gather(secrets.token_hex(SIZE)))).encode()
    wanted = [proof(secret.encode(), b"place %d " % rank, numbers).hex() for rank in range(comm.size)]
    shown = comm.gather(wanted[comm.rank])
    if wrong := [r for r in range(comm.size) if not hmac.compare_digest(str(shown[r]).encode(), wanted[r].encode())]:
        raise UserError(
            f"Rank {comm.rank} of {comm.size} does not share its secret with rank {', '.join(map(str, wrong[:8]))}:"
            " ALLFORCE_SECRET is not the same for all workers, and the launcher should pass it on to each of them"
            " (mpirun of Open MPI: -x ALLFORCE_SECRET), or a stranger has taken a place among them."
        )


class Seals:
    """Messages of one line: the n-th of a direction is `length body H(k', n body)`, with k' = H(k, direction a b).

    Whoever changes, repeats or adds a byte is not understood. A body is a row of fields, each a length and its bytes.
    """

    def __init__(self, secret: bytes, nonces: bytes, worker: bool):
        keys = [proof(secret, way, nonces) for way in (b"to rank 0", b"from rank 0")]
        self.sending_key, self.receiving_key = keys if worker else reversed(keys)
        self.sent = self.received = 0

    def seal(self, fields: Sequence[bytes]) -> bytes:
        body = b"".join(len(f).to_bytes(4, "big") + f for f in fields)
        self.sent += 1
        return len(body).to_bytes(4, "big") + body + proof(self.sending_key, self.sent.to_bytes(8, "big"), body)

    def unseal(self, message: bytes) -> list[bytes]:
        body, seal = message[:-SIZE], message[-SIZE:]
        self.received += 1
        if not hmac.compare_digest(seal, proof(self.receiving_key, self.received.to_bytes(8, "big"), body)):
            raise ConnectionError("a message that the other side has not sealed")
        fields, at = [], 0
        while at < len(body):
            end = at + 4 + int.from_bytes(body[at : at + 4], "big")
            fields.append(body[at + 4 : end])
            at = end
        return fields

    @staticmethod
    def length(head: bytes) -> int:
        """Of what follows the four bytes of `head`."""
        if (count := int.from_bytes(head, "big")) > LONGEST:
            raise ConnectionError(f"a message of {count} bytes")
        return count + SIZE
