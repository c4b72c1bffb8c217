"""A callee's queue and its callers, in any order of events: nobody is held for good, nobody is refused for nothing."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from tests.kit.clock import Clock

from farcall.runtime.calls.admission import Admission, Fullness

CALLERS = 3
EVENTS = st.one_of(
    st.tuples(st.just("call"), st.integers(0, CALLERS - 1), st.booleans()),
    st.tuples(st.just("run"), st.integers(1, 4), st.none()),
    st.tuples(st.just("look"), st.none(), st.none()),
    st.tuples(st.just("read"), st.integers(0, CALLERS - 1), st.none()),
)


class Caller:
    """A caller behind a link: what it is told arrives, in order, when it reads."""

    def __init__(self) -> None:
        self.on_the_way: deque[Fullness | None] = deque()
        self.full: Fullness | None = None
        self.told = False

    def tell_full(self, queued: int, limit: int) -> None:
        assert queued >= limit
        assert not self.told, "told twice"
        self.told = True
        self.on_the_way.append(Fullness(queued, limit))

    def tell_room(self) -> None:
        assert self.told, "told of room without having been told to wait"
        self.told = False
        self.on_the_way.append(None)

    def read(self) -> None:
        while self.on_the_way:
            full = self.on_the_way.popleft()
            if full is None and self.full is not None:
                self.full.end()
            self.full = full


@given(st.integers(1, 6), st.lists(EVENTS, max_size=60))
def test_any_order_of_events(limit: int, events: list[tuple[str, int | None, bool | None]]) -> None:
    queued = 0
    clock = Clock()
    admission = Admission(limit, lambda: queued, clock.timer)
    callers = [Caller() for _ in range(CALLERS)]
    held: list[Fullness] = []
    for kind, number, refusable in events:
        if kind == "call" and number is not None:
            caller = callers[number]
            if not refusable and caller.full is not None:
                held.append(caller.full)  # it waits, and sends nothing
                continue
            full = queued >= limit
            refused = admission.refuses(caller, bool(refusable))
            assert refused == (full and refusable)
            if full and not refusable:
                assert caller.told
                assert clock.named, "nobody would look whether there is room"
            queued += not refused
        elif kind == "run" and number is not None:
            queued = max(0, queued - number)
        elif kind == "look":
            due = admission.look_for_room(0.0)
            assert (due < 1.0) == any(caller.told for caller in callers)
            assert queued > limit // 2 or not any(caller.told for caller in callers)
        elif kind == "read" and number is not None:
            callers[number].read()
    queued = 0
    admission.look_for_room(0.0)
    for caller in callers:
        caller.read()
        assert caller.full is None
    assert all(full.wait(0.0) for full in held)
