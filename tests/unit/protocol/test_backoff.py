"""Pauses that grow."""

from __future__ import annotations

from farcall.protocol.backoff import Backoff


class Halving:
    def uniform(self, a: float, b: float, /) -> float:
        return a


def test_pauses_grow_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.restart()
    assert backoff.next_s() == 1.0


def test_the_first_pause_may_be_none_at_all() -> None:
    backoff = Backoff(1.0, 5.0)
    backoff.restart(0.0)
    assert [backoff.next_s() for _ in range(3)] == [0.0, 1.0, 2.0]


def test_jitter_shortens_a_pause_and_not_the_next() -> None:
    backoff = Backoff(1.0, 5.0, jitter=Halving())
    assert [backoff.next_s() for _ in range(3)] == [0.5, 1.0, 2.0]
