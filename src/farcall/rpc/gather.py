"""All-gather and barrier over calls, with one leader per group.

Each member calls `_contribute` on the leader (the smallest name). The leader answers all of these calls when the last
contribution arrives. So a gather costs each member one call, and the result travels in the answer.

A gather is identified by its group and a number, which each member counts for itself. So two gathers of a group cannot
be confused, and groups do not disturb each other. A group consists of incarnations: when a member restarts under its
name, the group is a new one, and its count begins at 0. The leader bounds each gather: when the timeout of the first
contribution expires, or when a member dies before it has contributed, every waiting member gets an error that names
the missing members. The leader keeps the last errors, so that a late member gets the same error at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import torch

from farcall.errors import Delivery, PeerDead, RpcError, RpcTimeout
from farcall.rpc.call import call_sync
from farcall.rpc.functions import async_execution
from farcall.rpc.handles import Target, handle_of
from farcall.rpc.outcome import copied
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.scope import current_call
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, runtime_of_thread
from farcall.runtime.peers.peer import Peer

T = TypeVar("T")
Group = tuple[tuple[str, int], ...]
"""The names and incarnations of the members, sorted by name."""

GRACE_S = 5.0
"""How much longer a member waits than the leader: the leader's error names the missing members, a timeout does not."""
KEPT_FAILURES = 64
MOST_BEGUN = 1024
"""How many gathers that one member has begun may be under way at a leader: it names them as it likes."""


class _Gather:
    """One gather, at its leader."""

    __slots__ = ("begun_by", "contributions", "deadline", "future", "group")

    def __init__(self, group: Group, begun_by: str, deadline: float) -> None:
        self.group = group
        self.begun_by = begun_by
        self.deadline = deadline
        self.contributions: dict[str, Any] = {}
        self.future: torch.futures.Future[dict[str, Any]] = torch.futures.Future()

    def __str__(self) -> str:
        missing = ", ".join(name for name, _ in self.group if name not in self.contributions)
        return f"a gather of {len(self.group)} workers; missing: {missing}"


class _Gathers:
    """The gathers that one node leads, and the number of its next gather in each group.

    Mutable, under the lock: the gathers under way, the numbers, and the last errors.
    """

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._led: dict[tuple[Group, int], _Gather] = {}
        self._begun: dict[Group, int] = {}
        self._failed: dict[tuple[Group, int], RpcError] = {}
        self._timer = node.timer(self._fail_overdue)
        node.hooks.peer_gone.append(self.on_peer_gone)

    def next_number(self, group: Group) -> int:
        with self._lock:
            number = self._begun.get(group, 0)
            self._begun[group] = number + 1
            return number

    def contribute(
        self, group: Group, number: int, name: str, value: Any, timeout_s: float
    ) -> torch.futures.Future[dict[str, Any]]:
        deadline = monotonic() + timeout_s if timeout_s else NEVER
        me = self._node.me
        if group[0] != (me.info.name, me.incarnation):
            raise PeerDead(f"{me.info.name} has restarted since {name} met it", Delivery.NOT_SENT)
        if name not in (member for member, _ in group):
            raise RpcError(f"{name} is not one of the workers of this gather")
        with self._lock:
            failure = self._failed.get((group, number))
            if failure is not None:
                raise copied(failure)  # else the kept error would hold the stack frames, and values, of late members
            gather = self._led.get((group, number))
            if gather is None:
                if sum(one.begun_by == name for one in self._led.values()) >= MOST_BEGUN:
                    raise RpcError(f"{name} has begun {MOST_BEGUN} gathers, and others report to none of them")
                gather = self._led[group, number] = _Gather(group, name, deadline)
            if name in gather.contributions:
                raise RpcError(f"{name} reported to the same gather twice")
            gather.contributions[name] = value
            complete = len(gather.contributions) == len(group)
            if complete:
                del self._led[group, number]
        if complete:
            gather.future.set_result({name: gather.contributions[name] for name, _ in group})
        else:
            if deadline != NEVER:
                self._timer.at(deadline)
            # Only after the gather is in ``_led``: `on_peer_gone` catches later losses, this loop the earlier ones.
            for member, incarnation in group:
                if member not in gather.contributions and self._node.is_gone(member, incarnation):
                    self._on_member_lost(member, incarnation)
        return gather.future

    def _fail_overdue(self, now: float) -> float:
        nearest = NEVER
        with self._lock:
            for key, gather in self._led.copy().items():
                if gather.deadline <= now:
                    self._fail(key, RpcTimeout(f"timed out in {gather}"))
                else:
                    nearest = min(nearest, gather.deadline)
        return nearest

    def on_peer_gone(self, peer: Peer) -> None:
        """Fail the gathers that wait for a contribution of ``peer``."""
        self._on_member_lost(peer.info.name, peer.incarnation)

    def _on_member_lost(self, name: str, incarnation: int) -> None:
        with self._lock:
            for key, gather in self._led.copy().items():
                if (name, incarnation) in gather.group and name not in gather.contributions:
                    self._fail(key, PeerDead(f"lost {name} in {gather}", Delivery.UNKNOWN))

    def _fail(self, key: tuple[Group, int], error: RpcError) -> None:
        """End a gather; the caller holds the lock. A worker completes the future, whose callbacks answer the calls."""
        gather = self._led.pop(key)
        while len(self._failed) >= KEPT_FAILURES:
            del self._failed[next(iter(self._failed))]
        self._failed[key] = copied(error)
        # If the node ends first, the executor drops this task: the calls of all waiting members fail with the node.
        self._node.executor.submit(FunctionTask(partial(gather.future.set_exception, error)))  # type: ignore[arg-type]


@async_execution
def _contribute(
    group: Group, number: int, name: str, value: Any, timeout_s: float
) -> torch.futures.Future[dict[str, Any]]:
    """On the leader: take one contribution; the future completes with the last one."""
    node, caller = runtime_of_thread(), current_call().caller
    assert node is not None
    if caller is not None and caller.name != name:
        raise RpcError(f"{caller.name} cannot report to a gather as {name}")
    return node.part(_Gathers).contribute(group, number, name, value, timeout_s)


def gather(node: Runtime, value: T, chosen_workers: Iterable[Target] | None, timeout_s: float | None) -> dict[str, T]:
    """Contribute ``value`` and return the values of all who were chosen. Raises if this node is not one of them."""
    members = {info.name for info in node.workers()}
    chosen = members if chosen_workers is None else {handle_of(node, one).name for one in chosen_workers}
    if node.info.name not in chosen:
        raise RpcError(f"{node.info.name} is not one of the workers of this gather: {', '.join(sorted(chosen))}")
    unknown = chosen - members
    if unknown:
        raise RpcError(f"not workers of this cluster: {', '.join(sorted(unknown))}")
    group: Group = tuple((name, node.peer(name).incarnation) for name in sorted(chosen))
    limit_s = node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    number = node.part(_Gathers).next_number(group)
    waiting_s = limit_s + GRACE_S if limit_s else timeout_s  # as it was given: torch's 0, or a default of no limit
    contribution = (group, number, node.info.name, value, limit_s)
    # The leader must not refuse this call: the other members would wait, and the number cannot be used again.
    result: dict[str, T] = call_sync(node, group[0][0], _contribute, contribution, None, waiting_s, refusable=False)
    return result
