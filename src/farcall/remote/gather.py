"""All-gather and barrier over calls, with one leader per group.

Each member calls `_contribute` on the leader (the smallest name); that function answers, to everyone, when all
contributions are there. So a gather costs each member one call, and its result travels in the answer.

A gather is named by its group and its number in that group, counted by each member for itself: two gathers of a group
cannot be confused, and different groups go on independently. The leader bounds each gather: when the time of the first
contribution is up, all who wait get an error that names who did not come.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import monotonic
from typing import Any, TypeVar

import torch

from farcall.errors import RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.remote.call import UNSET_TIMEOUT, call_sync
from farcall.remote.functions import async_execution
from farcall.runtime.loop import NEVER
from farcall.runtime.node import Node, node_of_thread

T = TypeVar("T")
Group = tuple[str, ...]

GRACE_S = 5.0
"""How much longer a member waits than the leader, whose error says more than a plain timeout."""


class _Gather:
    """One gather at its leader."""

    __slots__ = ("contributions", "deadline", "future", "group")

    def __init__(self, group: Group, deadline: float) -> None:
        self.group = group
        self.deadline = deadline
        self.contributions: dict[str, Any] = {}
        self.future: torch.futures.Future[dict[str, Any]] = torch.futures.Future()


class _Gathers:
    """The gathers of one node: those it leads, and how many of each group it has begun. A ticker of the loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._led: dict[tuple[Group, int], _Gather] = {}
        self._begun: dict[Group, int] = {}
        node.add_ticker(self)
        node.on_peer_gone(self.on_peer_gone)

    def next_number(self, group: Group) -> int:
        with self._lock:
            number = self._begun.get(group, 0)
            self._begun[group] = number + 1
            return number

    def contribute(
        self, group: Group, number: int, name: str, value: Any, timeout_s: float
    ) -> torch.futures.Future[dict[str, Any]]:
        deadline = monotonic() + timeout_s if timeout_s else NEVER
        with self._lock:
            gather = self._led.get((group, number))
            if gather is None:
                gather = self._led[group, number] = _Gather(group, deadline)
            if name in gather.contributions:
                raise RpcError(f"{name} reported to the same gather twice")
            gather.contributions[name] = value
            complete = len(gather.contributions) == len(group)
            if complete:
                del self._led[group, number]
        if complete:
            gather.future.set_result({name: gather.contributions[name] for name in group})
        elif deadline != NEVER:
            self._node.attend_by(deadline)
        return gather.future

    def tick(self, now: float) -> float:
        """Fail what is overdue; on a worker thread, since it runs what waits for the future."""
        nearest = NEVER
        with self._lock:
            for key, gather in list(self._led.items()):
                if gather.deadline <= now:
                    del self._led[key]
                    self._node.executor.submit(_Unfinished(gather, "timed out"))
                else:
                    nearest = min(nearest, gather.deadline)
        return nearest

    def on_peer_gone(self, worker: WorkerInfo) -> None:
        """Who is gone does not contribute any more: do not let the others wait for it."""
        with self._lock:
            for key, gather in list(self._led.items()):
                if worker.name in gather.group and worker.name not in gather.contributions:
                    del self._led[key]
                    self._node.executor.submit(_Unfinished(gather, f"lost {worker.name}"))


class _Unfinished:
    """Tells those who came to a gather who did not."""

    quick = False

    def __init__(self, gather: _Gather, why: str) -> None:
        self._gather = gather
        self._why = why

    def run(self, more: bool) -> None:
        group, contributions = self._gather.group, self._gather.contributions
        missing = ", ".join(name for name in group if name not in contributions)
        error = RpcTimeout(f"{self._why} in a gather of {len(group)} workers; missing: {missing}")
        self._gather.future.set_exception(error)  # type: ignore[arg-type]

    def drop(self) -> None:
        self.run(False)


@async_execution
def _contribute(
    group: Group, number: int, name: str, value: Any, timeout_s: float
) -> torch.futures.Future[dict[str, Any]]:
    """On the leader: take one contribution; the future completes when all are there."""
    node = node_of_thread()
    assert node is not None
    return node.part(_Gathers).contribute(group, number, name, value, timeout_s)


def gather(node: Node, value: T, names: Iterable[str] | None, timeout_s: float) -> dict[str, T]:
    """Give ``value`` and get everyone's, by name. Raises if this node is not among ``names``."""
    members = {info.name for info in node.workers()}
    group: Group = tuple(sorted(members if names is None else set(names)))
    if node.info.name not in group:
        raise RpcError(f"{node.info.name} is not one of the workers of this gather: {', '.join(group)}")
    unknown = set(group) - members
    if unknown:
        raise RpcError(f"these are no workers of this cluster: {', '.join(sorted(unknown))}")
    timeout_s = node.timeout_s if timeout_s == UNSET_TIMEOUT else timeout_s
    number = node.part(_Gathers).next_number(group)
    waiting_s = timeout_s + GRACE_S if timeout_s else 0.0
    result: dict[str, T] = call_sync(
        node, group[0], _contribute, (group, number, node.info.name, value, timeout_s), None, waiting_s
    )
    return result
