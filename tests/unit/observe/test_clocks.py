"""Bounds that cannot all be kept, and workers that nobody heard of."""

from __future__ import annotations

from farcall.observe.clocks import align, bounds_of_calls
from farcall.observe.spans import CALL, RUN, Bound, Span


def test_clocks_that_drifted_meet_in_the_middle() -> None:
    assert align(0, [Bound(0, 1, 100, 110), Bound(0, 1, 200, 210)]) == {0: 0, 1: 155}


def test_a_circle_that_cannot_be_closed_ends() -> None:
    impossible = [Bound(0, 1, 10, 10), Bound(1, 2, 10, 10), Bound(0, 2, 100, 100)]
    assert set(align(0, impossible)) == {0, 1, 2}


def test_workers_out_of_reach_have_an_offset_too() -> None:
    offsets = align(0, [Bound(5, 6, 10, 10)])
    assert offsets[6] - offsets[5] == 10
    assert offsets[0] == 0


def test_calls_without_an_answer_and_to_oneself_say_nothing() -> None:
    spans = [
        Span(CALL, 0, 1, "late", 0, 10, 1, 0, {"unanswered": True}),
        Span(RUN, 1, 1, "run", 100, 110, 1),
        Span(CALL, 0, 1, "self", 0, 10, 2),
        Span(RUN, 0, 2, "run", 3, 4, 2),
        Span(RUN, 1, 2, "of somebody unknown", 3, 4, 9),
    ]
    assert bounds_of_calls(spans) == []


def test_all_parts_of_a_run_count() -> None:
    spans = [
        Span(RUN, 1, 1, "run", 1_020, 1_030, 1),
        Span(CALL, 0, 1, "call", 0, 100, 1),
        Span(RUN, 1, 2, "run", 1_040, 1_090, 1),
    ]
    assert bounds_of_calls(spans) == [Bound(0, 1, 1_090 - 100, 1_020 - 0)]
