"""Inputs that were changed at random, seeded: a failure names its seed, and comes again.

``FARCALL_SOAK=full`` goes on for an hour with each subject, from another seed each time; without it a fixed number of
rounds from a fixed seed, some seconds in all. ``FARCALL_SEED=N`` runs round N alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from time import monotonic

FULL = os.environ.get("FARCALL_SOAK") == "full"
SOAK_S = 3600.0
LONGEST_BYTES = 300_000
INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80" * 8,
    b"\xdd\xff\xff\xff\xff",
    b"\xc1",
)
"""Bytes at which decoders go wrong: bounds of numbers, lengths, markers of msgpack."""


def rounds(count: int) -> Iterator[tuple[int, random.Random]]:
    """Seeds, and a generator of random numbers for each."""
    alone = os.environ.get("FARCALL_SEED")
    if alone is not None and alone.isdecimal():
        yield int(alone), random.Random(int(alone))
        return
    first = random.SystemRandom().randrange(1 << 40) if FULL else 0
    until = monotonic() + SOAK_S
    number = first
    while number < first + count or (FULL and monotonic() < until):
        yield number, random.Random(number)
        number += 1


def mutate(chance: random.Random, data: bytes, corpus: Sequence[bytes] = ()) -> bytes:
    """``data``, changed in one to four places."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(8)
        if kind == 0 and changed:  # one bit
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1 and changed:  # one byte
            changed[at % len(changed)] = chance.randrange(256)
        elif kind == 2:  # a piece is missing
            del changed[at : at + chance.randint(1, 16)]
        elif kind == 3:  # more
            changed[at:at] = chance.randbytes(chance.randint(1, 16))
        elif kind == 4:  # a bound
            value = chance.choice(INTERESTING)
            changed[at : at + len(value)] = value
        elif kind == 5:  # a piece of it again
            changed[at:at] = changed[: chance.randint(1, 64)]
        elif kind == 6:  # the end is missing
            del changed[at:]
        elif corpus:  # the rest of another one
            other = chance.choice(corpus)
            changed[at:] = other[chance.randrange(len(other) + 1) :]
    return bytes(changed[:LONGEST_BYTES])


def pieces(chance: random.Random, data: bytes) -> Iterator[bytes]:
    """``data`` as a network may bring it."""
    while data:
        count = chance.choice((1, 7, 100, len(data)))
        yield data[:count]
        data = data[count:]
