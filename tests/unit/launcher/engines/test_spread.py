"""Where ranks go."""

from __future__ import annotations

from farcall.launcher.engines.spread import Spread


def hosts_of(spread: Spread, ranks: list[int]) -> list[str]:
    spread.place(ranks)
    return [spread.host(rank) for rank in ranks]


def test_neighbours_share_a_host() -> None:
    spread = Spread(["a", "b"])
    assert hosts_of(spread, [0, 1, 2, 3, 4]) == ["a", "a", "a", "b", "b"]
    assert [spread.local_rank(rank) for rank in range(5)] == [0, 1, 2, 0, 1]


def test_later_ones_go_where_there_are_fewest() -> None:
    spread = Spread(["a", "b"])
    assert hosts_of(spread, [0, 1, 2]) == ["a", "a", "b"]
    assert hosts_of(spread, [3, 4]) == ["a", "b"]
    assert hosts_of(spread, [0, 2]) == ["a", "b"], "one that is started again stays"


def test_more_hosts_than_ranks() -> None:
    assert hosts_of(Spread(["a", "b", "c"]), [0, 1]) == ["a", "b"]
