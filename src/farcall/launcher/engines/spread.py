"""The host of each rank, where an engine has to choose: evenly, neighbours in rank together.

Ranks of one batch fill a host before the next; later ones go to the hosts with fewest. A rank keeps its host: a worker
that is started again finds its files, and its place among the GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class Spread:
    """The hosts, and the workers on each."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._host_of: dict[int, str] = {}

    def place(self, ranks: Sequence[int]) -> None:
        """Give each new rank a host."""
        fresh = sorted(rank for rank in ranks if rank not in self._host_of)
        load = Counter(self._host_of.values())
        chosen: list[str] = []
        for _ in fresh:
            chosen.append(min(self._hosts, key=lambda host: load[host]))
            load[chosen[-1]] += 1
        self._host_of.update(zip(fresh, sorted(chosen, key=self._hosts.index), strict=True))

    def host(self, rank: int) -> str:
        return self._host_of[rank]

    def local_rank(self, rank: int) -> int:
        """The worker's number on its host, by which programs choose a GPU."""
        return sum(1 for other, host in self._host_of.items() if other < rank and host == self._host_of[rank])
