"""One time for workers whose clocks are apart by anything: no call is answered before it is made."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from farcall.observe.clocks import align, bounds_of_calls
from farcall.observe.spans import CALL, RUN, Bound, Span


def calls_between(rng: random.Random, ahead: list[int], count: int) -> list[Span]:
    """Random calls, each with its run, by the clocks of their workers."""
    spans = []
    for number in range(1, count + 1):
        caller, callee = rng.sample(range(len(ahead)), 2)
        start = rng.randrange(10**9)
        times = [start]
        for _ in range(3):
            times.append(times[-1] + rng.randrange(1, 10**6))
        sent, begun, done, heard = times
        spans.append(Span(CALL, caller, 1, "call", sent + ahead[caller], heard + ahead[caller], number))
        spans.append(Span(RUN, callee, 1, "run", begun + ahead[callee], done + ahead[callee], number))
    return spans


@given(seed=st.integers(0, 2**32), workers=st.integers(2, 6), calls=st.integers(1, 30), questions=st.booleans())
def test_runs_lie_inside_their_calls(seed: int, workers: int, calls: int, questions: bool) -> None:
    rng = random.Random(seed)
    ahead = [rng.randrange(-(10**12), 10**12) for _ in range(workers)]
    spans = calls_between(rng, ahead, calls)
    rng.shuffle(spans)
    bounds = bounds_of_calls(spans)
    if questions:
        for here in range(workers):
            there = rng.randrange(workers)
            difference = ahead[there] - ahead[here]
            bounds.append(Bound(here, there, difference - rng.randrange(10**5), difference + rng.randrange(10**5)))
    offsets = align(0, bounds)
    assert offsets[0] == 0
    made = {span.call: span for span in spans if span.kind == CALL}
    for run in spans:
        if run.kind == RUN:
            call = made[run.call]
            assert call.start_ns - offsets[call.worker] <= run.start_ns - offsets[run.worker]
            assert run.end_ns - offsets[run.worker] <= call.end_ns - offsets[call.worker]


@given(ahead=st.integers(-(10**15), 10**15), early=st.integers(0, 10**4), late=st.integers(0, 10**4))
def test_the_offset_is_near_what_the_questions_say(ahead: int, early: int, late: int) -> None:
    offsets = align(3, [Bound(3, 7, ahead - early, ahead + late), Bound(7, 3, -ahead - 10**6, -ahead + 10**6)])
    assert abs(offsets[7] - ahead) <= max(early, late)
