"""Graceful shutdown: when a node may leave.

`Leaving` drives the departure machine, for groups of fixed size, whose members leave together: it tells the machine
whether the node is idle, and carries its effects out. `Withdrawing` is for groups whose members come and go: a node
that leaves waits for its own work only. `Work` says what is under way.

Everything here runs on the I/O thread, except `Work`, ``poke``, and ``enter``, in which the thread that shuts down
waits. A shutdown looks again when it is poked: by whatever came to its end on this node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from farcall.protocol import departure
from farcall.protocol.departure import Departure, DepartureMessage
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import Peer

logger: logging.Logger = logging.getLogger("farcall")

POKE_DELAY_S = 0.005
BUSY_S = 1.0
"""How long one that leaves alone waits for a moment in which nobody calls it."""

LocalState = Callable[[], tuple[int, int]]
"""(calls in flight here, activity counter), consistent with each other."""


class Work:
    """What is under way on a node, and keeps it from leaving. From any thread."""

    def __init__(
        self, calls: CallTable, server: Server, executor: Executor, unsettled: Sequence[Callable[[], int]]
    ) -> None:
        """``unsettled`` count what is under way and no call; they may become more later."""
        self._calls = calls
        self._server = server
        self._executor = executor
        self._unsettled = unsettled

    def state(self) -> tuple[int, int]:
        """A `LocalState`: read until no call began in between."""
        while True:
            activity = self._calls.last_id + self._server.last_accepted
            # First and last: a pause ends as a task, which makes a call; a call that fails may end as a pause.
            unsettled = self._count_unsettled()
            # A request that a worker runs is both active and busy; a callback is busy only, a coroutine active only.
            served = max(self._server.awaited, self._executor.waiting + self._executor.busy)
            in_flight = len(self._calls) + served + max(unsettled, self._count_unsettled())
            if activity == self._calls.last_id + self._server.last_accepted:
                return in_flight, activity

    def _count_unsettled(self) -> int:
        return sum(count() for count in self._unsettled)

    def under_way(self) -> list[object]:
        """The calls made here, and those served here, that are not done."""
        return [*self._calls.snapshot(), *self._server.active]


class Leaving:
    """This node's part in the agreement to shut down."""

    def __init__(
        self,
        rank: int,
        names: Mapping[int, str],
        loop: Loop,
        local_state: LocalState,
        send: Callable[[int, DepartureMessage], None],
    ) -> None:
        self._name = names[rank]
        self._machine = Departure(rank, names)
        self._loop = loop
        self._timer = loop.timer(self._look)
        self._local_state = local_state
        self._send = send
        self._late_comers: dict[int, int] = {}  # rank -> the incarnation that came for one that had died
        self._told: tuple[int, int] | None = None
        self._said_serving = False
        self._done = Gate()
        self.entered = False
        self.late: tuple[str, ...] = ()
        """Who was waited for when the time was up, and why; perhaps "... more" last."""
        self.late_names: tuple[str, ...] = ()

    def enter(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until everyone agrees to leave; return who is late if ``timeout_s`` (0: no bound) passes first."""

        def begin() -> None:
            self.entered = True
            self._handle(departure.LocalEntered(timeout_s))

        self._loop.call_soon(begin)
        while not self._done.wait(1.0):
            pass  # in slices: Ctrl-C ends this wait on every platform
        return self.late

    def abort(self) -> None:
        """This node has been expelled: nobody agrees with it on anything."""
        self._done.open()

    def poke(self) -> None:
        """Something ended here: if this node is leaving, look again soon. From any thread.

        Not at once: many workers spend their life in shutdown(), serving calls, and each of these ends here.
        """
        if self.entered:
            soon = monotonic() + POKE_DELAY_S
            if soon < self._timer.due:
                self._timer.at(soon)

    def on_message(self, peer: Peer, message: DepartureMessage) -> None:
        """A departure message came from ``peer``; what one says whose rank another has by now counts no more."""
        if self._has_rank(peer):
            self._handle(departure.Received(peer.info.id, message))

    def on_peer_came(self, peer: Peer) -> None:
        """There is a link to one that has come for another that died."""
        self._late_comers[peer.info.id] = peer.incarnation
        self._handle(departure.PeerCame(peer.info.id, peer.info.name))

    def on_peer_gone(self, peer: Peer) -> None:
        """The link to ``peer`` has ended; perhaps another one has its rank already."""
        if self._has_rank(peer):
            self._handle(departure.PeerGone(peer.info.id))

    def _has_rank(self, peer: Peer) -> bool:
        return self._late_comers.get(peer.info.id, peer.incarnation) == peer.incarnation

    def _look(self, now: float) -> float:
        """Tell the machine what changed here, and what time it is."""
        if self.entered:
            self._tell_local(now)
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= now:
            self._carry_out(self._machine.handle_deadline(now))
            deadline = self._machine.next_deadline()
        return NEVER if deadline is None else deadline

    def _handle(self, event: departure.Event) -> None:
        now = monotonic()
        self._tell_local(now)
        self._carry_out(self._machine.handle(event, now))
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer.at(deadline)

    def _tell_local(self, now: float) -> None:
        state = self._local_state()
        if state == self._told:
            return
        self._told = state
        in_flight, activity = state
        event = departure.LocalBusy(in_flight) if in_flight else departure.LocalIdle(activity)
        self._carry_out(self._machine.handle(event, now))

    def _carry_out(self, effects: list[departure.Effect]) -> None:
        for effect in effects:
            match effect:
                case departure.Send(rank, message):
                    self._send(rank, message)
                case departure.Finished():
                    self._done.open()
                case departure.LogWaiting(late, more):
                    # A worker that only serves calls shutdown() first, and waits there for the others: all is well.
                    if all(one.why != departure.NOT_CALLED for one in late):
                        logger.warning("%s: shutdown waits: %s", self._name, _named(late, more))
                    elif not self._said_serving:
                        self._said_serving = True
                        logger.info("%s serves in shutdown(): %s", self._name, _named(late, more))
                case departure.TimedOut(late, more):
                    self.late_names = tuple(one.name for one in late)
                    self.late = tuple(str(one) for one in late) + ((f"{more} more",) if more else ())
                    self.late = self.late or ("the last acknowledgements",)
                    self._done.open()


class Withdrawing:
    """The way out of a group whose other members stay."""

    def __init__(
        self, name: str, loop: Loop, local_state: LocalState, under_way: Callable[[], Sequence[object]]
    ) -> None:
        """``under_way``: the calls made here, and those served here, that are not done."""
        self._name = name
        self._timer = loop.timer(self._look)
        self._local_state = local_state
        self._under_way = under_way
        self._done = Gate()
        self._aborted = False
        self.entered: bool = False
        self.late_names: tuple[str, ...] = ()

    def enter(self, timeout_s: float, busy_s: float = BUSY_S) -> tuple[str, ...]:
        """Wait until nothing of this node is under way; if ``timeout_s`` (0: no bound) passes first, say what is.

        Others may go on calling until they are told: after ``busy_s`` only what had begun by now is waited for.
        """
        began = monotonic()
        deadline = began + timeout_s if timeout_s else NEVER
        begun = {id(one): one for one in self._under_way()}  # which holds them, so that no id is used again
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
                return (f"{self._name} still has {in_flight} call{'s' * (in_flight > 1)} in flight",)
        return ()

    def poke(self) -> None:
        """Something ended here. From any thread."""
        if self.entered:
            self._timer.at(monotonic() + POKE_DELAY_S)

    def abort(self) -> None:
        """This node has been expelled: there is nothing to wait for."""
        self._aborted = True
        self._done.open()

    def on_message(self, peer: Peer, message: DepartureMessage) -> None:
        """Nobody asks for agreement in such a group."""

    def on_peer_came(self, peer: Peer) -> None:
        """It is not waited for."""

    def on_peer_gone(self, peer: Peer) -> None:
        """Its calls have failed: look again."""
        self.poke()

    def _look(self, now: float) -> float:
        if self.entered and not self._local_state()[0]:
            self._done.open()
        return NEVER


def _named(late: tuple[departure.Late, ...], more: int) -> str:
    text = "; ".join(str(one) for one in late) or "for the last acknowledgements"
    return f"{text}; and {more} more" if more else text
