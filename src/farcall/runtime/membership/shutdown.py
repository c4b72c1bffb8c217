"""Graceful shutdown: when a node may leave.

`Leaving` drives the departure machine, for groups of fixed size, whose members leave together: it reports to the
machine whether the node is idle, and carries out its effects. `Withdrawing` is for groups whose members come and go: a
leaving node waits for its own work only. `Work` counts the calls and callbacks under way.

Everything here runs on the I/O thread, except `Work`, ``poke``, and ``enter``, in which the thread that shuts down
waits. Every call or callback that ends on this node pokes the shutdown, which then looks again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic, perf_counter

from farcall.protocol.departure import events
from farcall.protocol.departure.events import DepartureMessage
from farcall.protocol.departure.machine import NOT_CALLED, Departure, still_busy
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.observing.counters import name_of
from farcall.runtime.peers.peer import Peer

logger: logging.Logger = logging.getLogger("farcall")

POKE_DELAY_S = 0.005
BUSY_S = 1.0
"""How long a node that leaves alone waits for a moment in which nobody calls it."""

HINT = "; `farcall stacks` shows where"

LocalState = Callable[[], tuple[int, int]]
"""(calls in flight and callbacks running here, activity counter), consistent with each other."""


class Work:
    """The work under way on a node, which keeps it from leaving. From any thread."""

    def __init__(
        self, calls: CallTable, server: Server, executor: Executor, unsettled: Sequence[Callable[[], int]]
    ) -> None:
        """``unsettled`` count the work under way that is no call; the owner may append to them later."""
        self._calls = calls
        self._server = server
        self._executor = executor
        self._unsettled = unsettled

    def state(self) -> tuple[int, int]:
        """A consistent `LocalState`: read again if a call began meanwhile."""
        while True:
            activity = self._calls.last_id + self._server.last_accepted
            # Count these before and after the rest, since work moves both ways: a pause ends as a task, which makes a
            # call; a call that fails may end as a pause. One count could miss it in between.
            unsettled = self._count_unsettled()
            # The larger, not the sum: a request on a worker is both awaited and busy; a callback is only busy, a
            # coroutine only awaited.
            served = max(self._server.awaited, self._executor.waiting + self._executor.busy)
            in_flight = len(self._calls) + served + max(unsettled, self._count_unsettled())
            if activity == self._calls.last_id + self._server.last_accepted:
                return in_flight, activity

    def _count_unsettled(self) -> int:
        return sum(count() for count in self._unsettled)

    def oldest(self) -> tuple[str, float]:
        """The oldest call under way in words, and when it began; an empty string if there is none.

        A served one, if there is one: a call of this node is under way at another member, too, which names it.
        """
        for request in self._server.active:
            began = request.started_at or request.queued_at or perf_counter()
            name = f"{request.function_name}()" if request.function_name else "a call"
            return f"{name} for {request.peer.info.name}", monotonic() - (perf_counter() - began)
        for call in self._calls.snapshot():
            return f"{name_of(call.what)}() on {call.peer.info.name}", call.started_at
        return "", 0.0

    def under_way(self) -> list[object]:
        """The unfinished calls that this node made or serves."""
        return [*self._calls.snapshot(), *self._server.active]


class Leaving:
    """This node's part in the agreement to shut down."""

    def __init__(
        self,
        rank: int,
        names: Mapping[int, str],
        loop: Loop,
        local_state: LocalState,
        oldest: Callable[[], tuple[str, float]],
        *,
        send: Callable[[int, DepartureMessage], None],
        neighbours: Callable[[], Collection[int]],
        fell_silent: Callable[[int], bool],
        return_s: float,
    ) -> None:
        """``oldest``: see `Work`. ``neighbours`` returns the ranks that this node has standing links to.

        ``fell_silent``: is that incarnation dead because its host fell silent? ``return_s``: see `Departure`.
        """
        # Mutable: the machine, the successors of dead members, what the machine last heard, and the result.
        self._name = names[rank]
        self._machine = Departure(rank, names, neighbours, return_s)
        self._loop = loop
        self._timer = loop.timer(self._look)
        self._local_state = local_state
        self._oldest = oldest
        self._send = send
        self._fell_silent = fell_silent
        self._late_comers: dict[int, int] = {}  # rank -> the incarnation that took the place of a dead member
        self._told: tuple[int, int, str] | None = None
        self._said_serving = False
        self._waits = 0
        self._done = Gate()
        self.entered = False
        self.late: tuple[str, ...] = ()
        """The late members at the timeout, and why; perhaps "... more" last."""
        self.late_names: tuple[str, ...] = ()

    def enter(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until everybody agrees to leave; return the late members if ``timeout_s`` (0: no bound) passes first.

        Also if this node was cut off, and found no way back in time: then those whose hosts fell silent.
        """

        def begin() -> None:
            self.entered = True
            self._handle(events.LocalEntered(timeout_s))

        self._loop.call_soon(begin)
        while not self._done.wait(1.0):
            pass  # in slices: Ctrl-C ends this wait on every platform
        return self.late

    def abort(self) -> None:
        """This node has been expelled: no agreement is possible any more."""
        self._done.open()

    def poke(self) -> None:
        """A call or callback ended here: if this node is leaving, look again soon. From any thread.

        Not at once: many workers spend their life in shutdown(), serving calls, and every one of these pokes.
        """
        if self.entered:
            soon = monotonic() + POKE_DELAY_S
            if soon < self._timer.due:
                self._timer.at(soon)

    def on_message(self, peer: Peer, message: DepartureMessage) -> None:
        """A departure message came from ``peer``; it does not count if a successor has its rank by now."""
        if self._has_rank(peer):
            self._handle(events.Received(peer.info.id, message))

    def on_peer_came(self, peer: Peer) -> None:
        """A link stands to ``peer``, which took the place of a dead member."""
        self._late_comers[peer.info.id] = peer.incarnation
        self._handle(events.PeerCame(peer.info.id, peer.info.name))

    def on_peer_gone(self, peer: Peer) -> None:
        """The link to ``peer`` has ended; a successor may already have its rank."""
        if self._has_rank(peer):
            self._handle(events.PeerGone(peer.info.id, self._fell_silent(peer.incarnation)))

    def _has_rank(self, peer: Peer) -> bool:
        return self._late_comers.get(peer.info.id, peer.incarnation) == peer.incarnation

    def _look(self, now: float) -> float:
        """Report local changes and the time to the machine."""
        if self.entered:
            self._tell_local(now)
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= now:
            self._carry_out(self._machine.handle_deadline(now))
            deadline = self._machine.next_deadline()
        return NEVER if deadline is None else deadline

    def _handle(self, event: events.Event) -> None:
        now = monotonic()
        self._tell_local(now)
        self._carry_out(self._machine.handle(event, now))
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer.at(deadline)

    def _tell_local(self, now: float) -> None:
        in_flight, activity = self._local_state()
        oldest, since = self._oldest() if in_flight else ("", 0.0)
        state = in_flight, activity, oldest
        if state == self._told:
            return
        self._told = state
        event = events.LocalBusy(in_flight, oldest, since) if in_flight else events.LocalIdle(activity)
        self._carry_out(self._machine.handle(event, now))

    def _carry_out(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case events.Send(rank, message):
                    self._send(rank, message)
                case events.Finished():
                    self._done.open()
                case events.LogWaiting(late, more):
                    # No warning while some members have not called shutdown(): a worker that only serves calls it at
                    # once, and waits there for the others to finish.
                    if all(one.why != NOT_CALLED for one in late):
                        self._waits += 1
                        if self._waits & (self._waits - 1) == 0:  # after 5 s, 10 s, 20 s and so on
                            logger.warning("%s: shutdown waits: %s%s", self._name, _named(late, more), HINT)
                    elif not self._said_serving:
                        self._said_serving = True
                        logger.info("%s serves in shutdown(): %s", self._name, _named(late, more))
                case events.TimedOut(late, more):
                    self.late_names = tuple(one.name for one in late)
                    self.late = tuple(str(one) for one in late) + ((f"{more} more",) if more else ())
                    self.late = self.late or ("the last acknowledgements",)
                    self._done.open()


class Withdrawing:
    """The leaving of a node from a group whose other members stay."""

    def __init__(
        self,
        name: str,
        loop: Loop,
        local_state: LocalState,
        oldest: Callable[[], tuple[str, float]],
        under_way: Callable[[], Sequence[object]],
    ) -> None:
        """``oldest`` and ``under_way``: see `Work`."""
        self._name = name
        self._timer = loop.timer(self._look)
        self._local_state = local_state
        self._oldest = oldest
        self._under_way = under_way
        self._done = Gate()
        self._aborted = False
        self.entered: bool = False
        self.late_names: tuple[str, ...] = ()

    def enter(self, timeout_s: float, busy_s: float = BUSY_S) -> tuple[str, ...]:
        """Wait until this node has no work under way; if ``timeout_s`` (0: no bound) passes first, say how much it has.

        Others may go on calling until they hear of the leave: after ``busy_s`` wait only for work begun before now.
        """
        began = monotonic()
        deadline = began + timeout_s if timeout_s else NEVER
        begun = {id(one): one for one in self._under_way()}  # holds the objects, so that no id is reused
        self.entered = True
        self._timer.at(0.0)
        while not self._done.wait(min(1.0, max(0.0, deadline - monotonic()))):
            in_flight = self._local_state()[0]
            if not in_flight or self._aborted:
                break
            now = monotonic()
            if now >= began + busy_s and begun.keys().isdisjoint(map(id, self._under_way())):
                break
            if now >= deadline:
                self.late_names = (self._name,)
                oldest, since = self._oldest()
                return (f"{self._name} {still_busy(in_flight, oldest, now - since)}",)
        return ()

    def poke(self) -> None:
        """A call or callback ended here. From any thread."""
        if self.entered:
            self._timer.at(monotonic() + POKE_DELAY_S)

    def abort(self) -> None:
        """This node has been expelled: stop waiting."""
        self._aborted = True
        self._done.open()

    def on_message(self, peer: Peer, message: DepartureMessage) -> None:
        """Ignored: members of such a group leave without agreement."""

    def on_peer_came(self, peer: Peer) -> None:
        """Ignored: a leaving node does not wait for others."""

    def on_peer_gone(self, peer: Peer) -> None:
        """Its calls have failed: look again."""
        self.poke()

    def _look(self, now: float) -> float:
        if self.entered and not self._local_state()[0]:
            self._done.open()
        return NEVER


def _named(late: tuple[events.Late, ...], more: int) -> str:
    text = "; ".join(str(one) for one in late) or "for the last acknowledgements"
    return f"{text}; and {more} more" if more else text
