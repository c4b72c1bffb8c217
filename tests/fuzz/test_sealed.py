"""Records of a sealed connection, altered, dropped, repeated, reordered, injected: only what was sent comes out.

What somebody on the way between two members can do to them: `test_proxy.py`.
"""

from __future__ import annotations

import contextlib

from tests.fuzz.mutations import FULL, mutate, rounds
from tests.kit.memory_transport import memory_pair

from farcall.transport.interface import Transport, TransportError
from farcall.transport.sealed import SealedTransport


def test_of_a_sealed_connection_only_what_was_sent_comes_out_in_its_order() -> None:
    """100,000 alterations under FARCALL_SOAK=full, some thousands else, of records small and large."""
    for seed, chance in rounds(100_000 if FULL else 4000):
        sealing, way = ends(KEYS)
        bodies = [chance.randbytes(chance.choice((1, 40, 300, 5000))) for _ in range(chance.randint(1, 4))]
        records = []
        for body in bodies:
            assert sealing.send((body,)) == len(body)
            records.append(take(way))
        altered = [*records]
        kind, which = chance.randrange(5), chance.randrange(len(records))
        if kind == 0:
            del altered[which]
        elif kind == 1:
            altered.insert(which, altered[which])
        elif kind == 2:
            altered.insert(which, chance.randbytes(chance.randint(1, 60)))
        elif kind == 3:
            chance.shuffle(altered)
        else:
            altered[which] = mutate(chance, altered[which], records)
        # The other end of the same connection, whose keys are the other way round.
        opening, there = ends(KEYS[::-1])
        there.send((b"".join(altered),))
        came = bytearray()
        view = memoryview(bytearray(1 << 16))
        with contextlib.suppress(TransportError):
            while count := opening.receive_into(view):
                came += view[:count]
        assert b"".join(bodies).startswith(came), seed


KEYS = (b"t" * 32, b"b" * 32)


def ends(keys: tuple[bytes, ...]) -> tuple[SealedTransport, Transport]:
    near, far = memory_pair(1 << 17)
    return SealedTransport(near, send_key=keys[0], receive_key=keys[1]), far


def take(way: Transport) -> bytes:
    view = memoryview(bytearray(1 << 16))
    count = way.receive_into(view)
    return bytes(view[: count or 0])
