"""Encrypted connections, altered, cut, swapped, repeated, reflected: only what was sent comes out, in its order.

What somebody on the way between two members can do to them: `test_proxy.py`, `test_relay.py`.
"""

from __future__ import annotations

import os
from random import Random

from tests.fuzz.mutations import FULL, mutate, rounds
from tests.kit.memory_transport import MemoryTransport, memory_pair

from farcall.transport.interface import Transport, TransportError
from farcall.transport.tls import Tls

BODIES = (1, 40, 300, 5000, 40_000)
TLS = Tls(None)


def test_of_an_encrypted_connection_only_what_was_sent_comes_out_in_its_order() -> None:
    """100,000 sessions under FARCALL_SOAK=full, 1,500 else. What is altered may be of the handshake, too."""
    altered = {"the handshake": 0, "later": 0}
    arrived = 0
    for seed, chance in rounds(100_000 if FULL else 1500):
        session = Session(chance)
        session.run()
        for came, sent in ((session.came[1], session.sent[0]), (session.came[0], session.sent[1])):
            assert sent.startswith(came), seed
        arrived += session.came[1] == session.sent[0]
        assert session.is_altered or (session.came[1], session.came[0]) == tuple(session.sent), seed
        altered["the handshake" if session.altered_at < 3 else "later"] += session.is_altered
    assert "FARCALL_SEED" in os.environ or min(*altered.values(), arrived) > 100


class Session:
    """A connection on whose way one thing is altered."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        left, left_way = memory_pair(1 << 20)
        right_way, right = memory_pair(1 << 20)
        self._ends: tuple[Transport, Transport] = (TLS.dialled(left, "host"), TLS.accepted(right))
        self._ways = (left_way, right_way)
        self._bodies = [[chance.randbytes(chance.choice(BODIES)) for _ in range(3)] for _ in self._ends]
        self.sent = [b"".join(bodies) for bodies in self._bodies]
        self.came = [bytearray(), bytearray()]
        self._seen: list[bytes] = []
        self.altered_at: int = chance.choice((0, 1, 2, 3, 4, 5, 6))
        """Which of the pieces that pass."""
        self.is_altered: bool = False

    def run(self) -> None:
        """Until nothing moves any more."""
        try:
            for _ in range(12):
                for end in self._ends:
                    self._speak(self._ends.index(end))
                self._carry(0)
                self._carry(1)
                for number in (0, 1):
                    self._hear(number)
        except TransportError:
            pass  # found out

    def _speak(self, number: int) -> None:
        bodies = self._bodies[number]
        if bodies and (taken := self._ends[number].send((bodies[0],))):
            bodies[0] = bodies[0][taken:]
            if not bodies[0]:
                bodies.pop(0)

    def _hear(self, number: int) -> None:
        view = memoryview(bytearray(1 << 16))
        while count := self._ends[number].receive_into(view):
            self.came[number] += view[:count]

    def _carry(self, number: int) -> None:
        piece = take(self._ways[number])
        if not piece:
            return
        self._seen.append(piece)
        if len(self._seen) - 1 == self.altered_at:
            pieces = self._altered(piece)
            self.is_altered = b"".join(pieces) != piece
        else:
            pieces = [piece]
        for one in pieces:
            self._ways[1 - number].send((one,))

    def _altered(self, piece: bytes) -> list[bytes]:
        chance = self._chance
        match chance.randrange(6):
            case 0:  # cut
                return [piece[: chance.randrange(len(piece))]]
            case 1:  # repeated
                return [piece, piece]
            case 2:  # swapped
                at = chance.randrange(1, len(piece)) if len(piece) > 1 else 0
                return [piece[at:], piece[:at]]
            case 3:  # another one in its place: of the other direction, if it is the first
                return [chance.choice(self._seen)]
            case 4:  # with something added
                return [chance.randbytes(chance.randint(1, 60)), piece]
            case _:
                return [mutate(chance, piece, self._seen)]


def take(way: MemoryTransport) -> bytes:
    view = memoryview(bytearray(1 << 20))
    return bytes(view[: way.receive_into(view) or 0])
