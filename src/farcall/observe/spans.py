"""Spans and their encoding: intervals of time on a worker's thread, by that worker's own clock.

Owns the shapes and their bytes. A harvest is the record of one run and of the calls that it made, at any depth; it
travels back in the notes of an answer, so it never holds user objects, and nothing of it is unpickled.

Invariant: a span's times are by the clock of the worker that it names; `clocks.align` finds one time for all workers.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

import msgspec

OPERATOR: Final = 0
CALL: Final = 1
RUN: Final = 2

MOST_BYTES = 8 * 1024 * 1024
"""The limit of one harvest; a frame accepts notes of twice that size."""


class Span(msgspec.Struct, array_like=True):
    """An operator, a call or a run, from start to end.

    kind       name                      call                            inside
    OPERATOR   as the profiler names it  of the run it is part of, or 0
    CALL       the stock key             its number                      the call in whose run it was made, or 0
    RUN        the function              the call that it serves, or 0
    """

    kind: int
    worker: int
    thread: int
    name: str
    start_ns: int
    end_ns: int
    call: int = 0
    inside: int = 0
    details: dict[str, Any] = {}


class Bound(msgspec.Struct, array_like=True, frozen=True):
    """The clock of worker ``there`` less that of ``here`` is at least ``low_ns`` and at most ``high_ns``."""

    here: int
    there: int
    low_ns: int
    high_ns: int


class Harvest(msgspec.Struct, array_like=True):
    """The record of some work on any number of workers. Mutable: it grows by `add`."""

    spans: list[Span] = []
    bounds: list[Bound] = []
    names: dict[int, str] = {}
    dropped: int = 0  # operators left out because there were too many

    def add(self, other: Harvest) -> None:
        """Add everything in ``other``."""
        self.spans.extend(other.spans)
        self.bounds.extend(other.bounds)
        self.names.update(other.names)
        self.dropped += other.dropped


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Harvest] = msgspec.msgpack.Decoder(Harvest)


def encode_harvest(harvest: Harvest, most_bytes: int | None = MOST_BYTES) -> bytes:
    """Encode ``harvest``; if it is too large, keep all calls and runs, and as many operators as fit."""
    data = _encode(harvest)
    if most_bytes is None or len(data) <= most_bytes:
        return data
    frame = [span for span in harvest.spans if span.kind != OPERATOR]
    operators = [span for span in harvest.spans if span.kind == OPERATOR]
    room = most_bytes - len(_encode(Harvest(frame, harvest.bounds, harvest.names)))
    kept = sum(used <= room for used in accumulate(len(_encode(span)) for span in operators))
    dropped = harvest.dropped + len(operators) - kept
    return _encode(Harvest(frame + operators[:kept], harvest.bounds, harvest.names, dropped))


def decode_harvest(data: bytes) -> Harvest:
    """Decode a harvest; raise `msgspec.DecodeError` if ``data`` is not one."""
    return _decoder.decode(data)
