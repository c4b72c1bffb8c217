"""The writing half of a link over connections where anything fails at any step: whatever was sent comes once, or not.

Frames, large messages and offers of memory, in any order; the transport raises any error before or after it has taken
bytes, waits are interrupted or out of time, connections break at any byte and come back with or without descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farcall.errors import Delivery, PeerDead, RpcError
from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import CHUNK, REQUEST, encode_frame, encode_small
from farcall.protocol.session import Session
from farcall.runtime.io.loop import Loop
from farcall.runtime.link import send, send_queue
from farcall.runtime.link.resend import LostOffer
from farcall.runtime.link.send import COPIED_BYTES, Outgoing
from farcall.transport.interface import Absent, Buffer, Transport, TransportBroken

CAPACITY_BYTES = 100_000
LARGE_BYTES = 600_000
APOLOGY = 1

Failure = tuple[int, type[BaseException], bool]
"""How many operations go well before, what is raised then, and whether bytes are taken first."""


class Wire(Absent):
    """A connection whose kernel holds CAPACITY_BYTES; its errors are those of the world."""

    def __init__(self, world: World, carries_descriptors: bool) -> None:
        super().__init__("wire")
        self.carries_descriptors = carries_descriptors
        self._world = world
        self.bytes = bytearray()

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        assert not descriptors or self.carries_descriptors
        failure = self._world.next_failure()
        # A system call that raises has taken no descriptor; only Ctrl-C comes behind one.
        if failure is None or (failure[2] and not (descriptors and issubclass(failure[1], Exception))):
            data = b"".join(buffers)[: CAPACITY_BYTES - len(self.bytes)]
            self.bytes += data
        if failure is not None:
            raise failure[1]("injected")
        return len(data)

    def wait_writable(self, timeout_s: float) -> bool:
        failure = self._world.next_failure()
        if failure is not None:
            raise failure[1]("injected")
        self._world.clock += timeout_s
        self._world.read(CAPACITY_BYTES)
        return True


class World:
    """A sender, its connection, and a receiver that acknowledges when the plan says so."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.failure: Failure | None = None
        self.broken = True
        self.session = Session()
        self.decoder = FrameDecoder()
        self.wire = Wire(self, True)
        self.outgoing = Outgoing(
            "peer",
            self.wire,
            Loop("never started"),
            1 << 20,
            on_error=self._on_error,
            dead=lambda delivery: PeerDead("gone", delivery),
            session=self.session,
            on_wanted=lambda: None,
        )
        self.number = 0
        self.arrived: list[int] = []
        self.lost: list[int] = []
        self.must_come: set[int] = set()
        self.may_come: set[int] = set()
        self.reconnect(True)

    def _on_error(self, error: Exception, transport: Transport) -> None:
        assert isinstance(error, TransportBroken)
        self.broken = True
        self.clock += 1000.0  # nobody makes a connection in time

    def next_failure(self) -> Failure | None:
        if self.failure is None:
            return None
        after, error, taken = self.failure
        self.failure = (after - 1, error, taken) if after else None
        return None if after else (0, error, taken)

    def reconnect(self, carries_descriptors: bool) -> None:
        self.outgoing.detach()
        self.decoder.restart()
        self.session.broke()
        self.session.resume()
        self.outgoing.resumed(self.decoder.count)
        self.broken = False
        self.wire = Wire(self, carries_descriptors)
        try:
            self.outgoing.attach(self.wire)
        except KeyboardInterrupt:
            pass

    def read(self, limit: int) -> None:
        data = bytes(self.wire.bytes[:limit])
        del self.wire.bytes[:limit]
        while data:
            view = self.decoder.writable()
            chunk = data[: len(view)]
            view[: len(chunk)] = chunk
            data = data[len(chunk) :]
            for frame in self.decoder.received(len(chunk)):
                assert frame.kind != CHUNK
                self.arrived.append(frame.call_id)

    def send(self, what: str, size: int) -> None:
        self.number += 1
        number, deadline = self.number, self.clock + (0.0 if self.broken else 1.0)
        small = encode_small(REQUEST, 0, number, b"", b"", bytes(size))
        try:
            if what == "offer":
                if self.outgoing.send_with_descriptor(small, 0, deadline, LostOffer(lambda: self.lost.append(number))):
                    self.must_come.add(number)
            elif what == "large":
                apology = encode_small(REQUEST, APOLOGY, number, b"", b"", b"")
                memory = memoryview(bytes(LARGE_BYTES if size > COPIED_BYTES else COPIED_BYTES * 3))
                pieces = encode_frame(REQUEST, 0, number, b"", b"", b"", [memory])
                self.outgoing.send_pieces(pieces, deadline, lambda: (apology,))
                self.must_come.add(number)
            else:
                self.outgoing.send(small, deadline)
                self.must_come.add(number)
        except RpcError as error:
            if error.delivery is not Delivery.NOT_SENT:
                self.may_come.add(number)
        except KeyboardInterrupt as error:
            if getattr(error, "delivery", None) is not Delivery.NOT_SENT:
                self.may_come.add(number)
        except (ValueError, MemoryError) as error:
            assert what != "small", "these errors are no sender's business"
            # Out of a wait, where the handler of a signal (SIGALRM) may raise anything: its program gets to see it.
            if what == "large" and getattr(error, "delivery", None) is not Delivery.NOT_SENT:
                self.may_come.add(number)

    def finish(self) -> None:
        self.failure = None
        for _ in range(1000):
            if self.broken:
                self.reconnect(True)
            self.outgoing.write()
            self.outgoing.flush()
            self.read(CAPACITY_BYTES)
            if self.decoder.count == self.session.written and not self.outgoing._outbox:
                return
        raise AssertionError("it never ends")


sizes = st.sampled_from([0, 10, COPIED_BYTES - 40, COPIED_BYTES + 1, 50_000])
errors = st.sampled_from([TransportBroken, ValueError, MemoryError, KeyboardInterrupt])
failures = st.one_of(st.none(), st.tuples(st.integers(0, 3), errors, st.booleans()))
steps = st.one_of(
    st.tuples(st.just("small"), sizes, failures),
    st.tuples(st.just("offer"), st.just(10), failures),
    st.tuples(st.just("large"), sizes, failures),
    st.tuples(st.just("read"), st.one_of(st.integers(1, 200), st.just(CAPACITY_BYTES)), st.none()),
    st.tuples(st.just("acknowledge"), st.just(0), st.none()),
    st.tuples(st.just("break"), st.booleans(), failures),
)
Plan = list[tuple[str, int, Failure | None]]


@given(st.lists(steps, max_size=40))
@example([("small", 10, None), ("offer", 10, (0, ValueError, False)), ("small", 10, None), ("break", 1, None)])
@example([("offer", 10, (1, KeyboardInterrupt, True)), ("small", 0, None), ("break", 0, None), ("offer", 10, None)])
@example([("small", 10, None), ("large", 50_000, (2, TransportBroken, True)), ("small", 10, None)])
@example([("large", COPIED_BYTES + 1, (2, ValueError, False)), ("small", 10, None), ("break", 1, None)])
@example([("large", 10, (0, KeyboardInterrupt, True)), ("read", CAPACITY_BYTES, None), ("small", 10, None)])
def test_what_was_sent_comes_once_whatever_fails_where(plan: Plan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World()
        for module in (send, send_queue):
            patch.setattr(module, "monotonic", lambda: world.clock)
        for what, detail, world.failure in plan:
            if what == "read":
                world.read(detail)
            elif what == "acknowledge":
                world.session.on_acknowledged(world.decoder.count)
            elif what == "break":
                world.reconnect(bool(detail))
            else:
                world.send(what, detail)
        world.finish()
    came = world.arrived + world.lost
    assert len(set(came)) == len(came)
    assert world.must_come <= set(came) <= world.must_come | world.may_come
    assert world.arrived == sorted(world.arrived)
