"""A trace of a running cluster that is asked for from outside: ``farcall trace``.

Owns the two questions about it. "Begin" has a worker record all that it does (`cluster.Recordings`), "end" fetches it.
The member that the observer is connected to measures how far the other clocks are apart, and the trace is by its clock.

    worker is      hears            then
    idle           begin            recording, for ``for_s`` and GRACE_S at most
    recording      end              idle; a thread of its own writes the answer, since it may be long
    recording      its time is up   idle: the observer is gone, and what was recorded is dropped
    idle           end              answers that it has nothing: it joined meanwhile

Everything at the workers runs on the I/O thread, but for that writing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import msgspec

from farcall.observe.answering import Answering
from farcall.observe.clocks import Clocks
from farcall.observe.cluster import Recordings
from farcall.observe.observer import Observer
from farcall.observe.spans import CALL, OPERATOR, Harvest, encode_harvest
from farcall.protocol.observing import WorkerState
from farcall.runtime.io.loop import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer

__all__ = ["MOST_S", "Trace", "Tracing", "record"]

BEGIN = "trace: begin"
END = "trace: end"
MOST_S = 600.0
GRACE_S = 30.0
FETCH_S = 25.0
"""How long the answers may take; a member forgets a question that it passed on after 30 s."""
MOST_BYTES = 48 << 20
"""Of one worker; beyond that operators are counted only."""
_OUTSIDE = -1
"""In the place of the worker that asked."""


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """What is wanted."""

    name: str
    options: int
    for_s: float


_read_begin = msgspec.msgpack.Decoder(Begin)
_read_name = msgspec.msgpack.Decoder(str)


class Tracing:
    """A node's answers; ``node.part(Tracing)``. Also a ticker of its loop."""

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._ends: dict[str, float] = {}
        subjects = node.part(Answering).subjects
        subjects[BEGIN] = self._begin
        subjects[END] = self._end
        node.add_ticker(self)

    def _begin(self, peer: Peer | None, argument: bytes) -> bytes:
        wanted = _read_begin.decode(argument)
        node = self._node
        if peer is None:
            for other in node.others():
                node.part(Clocks).ask(other)
        node.part(Recordings).start(wanted.name, _OUTSIDE, wanted.options)
        self._ends[wanted.name] = monotonic() + min(wanted.for_s, MOST_S) + GRACE_S
        node.attend_by(self._ends[wanted.name])
        return msgspec.msgpack.encode((node.info.name, node.info.id))

    def _end(self, peer: Peer | None, argument: bytes) -> Callable[[], bytes]:
        name = _read_name.decode(argument)
        self._ends.pop(name, None)
        harvest = self._node.part(Recordings).stop(name)
        return lambda: encode_harvest(harvest, MOST_BYTES)

    def tick(self, now: float) -> float:
        """Drop what nobody fetched."""
        for name, end in list(self._ends.items()):
            if end <= now:
                del self._ends[name]
                self._node.part(Recordings).stop(name)
        return min(self._ends.values(), default=NEVER)


@dataclass(frozen=True)
class Trace:
    """What was recorded."""

    harvest: Harvest
    origin: int
    """The rank of the worker whose clock counts."""
    missing: list[WorkerState]
    """Workers that did not say what they did."""

    @property
    def calls(self) -> int:
        """How many calls are in it."""
        return sum(span.kind == CALL for span in self.harvest.spans)

    @property
    def operators(self) -> int:
        """How many operators are in it."""
        return sum(span.kind == OPERATOR for span in self.harvest.spans)


def record(observer: Observer, seconds: float, options: int) -> Trace:
    """Have all workers record for a while. Ctrl-C ends it early: what there is by then is the trace."""
    name = secrets.token_hex(8)
    begun = observer.ask(BEGIN, tuple[str, int], argument=msgspec.msgpack.encode(Begin(name, options, seconds)))
    ranks = dict(begun.answers)
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    heard = observer.ask(END, Harvest, FETCH_S, msgspec.msgpack.encode(name))
    harvest = Harvest([], [], {})
    for one in heard.answers:
        harvest.add(one)
    missing = [worker for worker in heard.silent if not worker.gone or worker.name in ranks]
    return Trace(harvest, ranks.get(observer.member, 0), missing)
