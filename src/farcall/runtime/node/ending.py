"""The end of a node: by `shutdown`, by a verdict of the others, with its process, or in a forked child.

Owns the order in which the parts of a runtime stop, and whether an expelled node may come back (`rejoin.py`).
`lifecycle.py` decides which thread ends the node: the one that moves it out of its last state.

    a node ends because          on the thread of                then
    `shutdown` is called         the program                     all agree first, if it is graceful
    the process ends             the program, at its exit        closes what is open, waits for nobody
    the others expelled it       I/O, then one of its own        joins again as a new member, where it may
    the same, in `shutdown`      the program                     the same, and serves on until all leave together
    its I/O thread failed        I/O, then one of its own        every call says so
    this is a forked child       the child's only one            lets go of the parent's resources
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from farcall.errors import Cancelled, Expelled, NotInitialized, RpcError, ShutdownTimeout
from farcall.protocol.messages import GoodbyeReason
from farcall.runtime.io import sigint
from farcall.runtime.io.reader import stop_reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.membership.events import wait_for_lost_processes
from farcall.runtime.membership.shutdown import Withdrawing
from farcall.runtime.node import current
from farcall.runtime.rendezvous.dynamic import Meeting
from farcall.runtime.rendezvous.meeting_place import MeetingPlace

if TYPE_CHECKING:
    from farcall.runtime.node.runtime import Runtime

logger: logging.Logger = logging.getLogger("farcall")

ComeBack: TypeAlias = "Callable[[Runtime, Meeting], None]"
"""Makes an expelled node, which has ended, join again by this way; on the thread that ended it."""

STOP_S = 5.0
LEAVE_S = 10.0
LINGER_S = 1.0
"""How long the others may take to read the last messages to them, after a graceful shutdown."""


class Ending:
    """The end of one runtime. Mutable: whether the process ends, whether the program has called `shutdown`."""

    def __init__(self, node: Runtime, place: MeetingPlace, come_back: ComeBack | None) -> None:
        """``come_back``: None where an expelled node stays out."""
        self._node = node
        self._place = place
        self._come_back = come_back
        self._exiting = False
        self._stays_out = threading.Event()  # shutdown was called: an expelled node does not come back
        self._serves_on = False  # in a shutdown without a bound, in a group of fixed size: until all leave together
        self._return: Meeting | None = None  # the way back of a node that is expelled during such a shutdown

    def shutdown(self, graceful: bool, timeout_s: float) -> None:
        """Leave the cluster. Graceful: wait, within ``timeout_s`` if not 0, until all work everywhere is done."""
        node = self._node
        lifecycle, leaving = node.lifecycle, node.leaving
        if not lifecycle.move("leave"):
            self._stays_out.set()
            lifecycle.wait_ended(2 * STOP_S)  # if it was expelled
            if node.successor is not None:
                node.successor.shutdown(graceful, timeout_s)
            return
        stop_reading()
        began = monotonic()
        deadline = began + timeout_s if timeout_s else NEVER
        agreed = False
        late: tuple[str, ...] = ()
        waited_s = 0.0
        try:
            if graceful:
                self._serves_on = node.is_static and not timeout_s
                node.server.on_answered = leaving.poke
                if node.is_static:
                    self._drop_store()  # before all agree: afterwards a new store may open at the same port
                late = leaving.enter(timeout_s)
                waited_s = round(monotonic() - began, 1)
                agreed = not late and lifecycle.verdict is None
                if agreed:
                    node.watch.agreed_to_leave = True
                    for hook in node.hooks.agreed:
                        hook(deadline)
                    if isinstance(leaving, Withdrawing):
                        node.watch.leave(LEAVE_S)
                        leaving.enter(LEAVE_S, LEAVE_S)  # members that did not know yet may have made more calls
                if not node.is_static:
                    # Not while this node lets newcomers in: others, which do not find it on the list, would found a
                    # second group.
                    self._drop_store()
        except BaseException:
            self._return = None
            raise
        finally:
            why = Cancelled(f"{node.info.name} shut down before the answer came")
            # No way back into a shutdown that has a bound, or serves nobody any more.
            way_back = self._return if self._serves_on else None
            self.end(why, linger=agreed, comes_back=way_back is not None)
        if way_back is not None and self._serve_again(way_back):
            return
        if lifecycle.verdict is not None:
            raise lifecycle.verdict
        if late:
            raise ShutdownTimeout(
                f"{node.info.name} left after waiting {waited_s:g} s for: {'; '.join(late)}", leaving.late_names
            )

    def _drop_store(self) -> None:
        if self._node.entry is not None:
            self._node.entry.withdraw()
        self._node.membership.close()

    def _serve_again(self, way_back: Meeting) -> bool:
        """After an expulsion in `shutdown`, while the node served: be a member again, and leave with the others.

        False: the others did not let it in within the time of a start. (A running node tries for longer, since the
        program can still shut it down.)
        """
        assert self._come_back is not None
        bound = threading.Timer(self._node.options.start_deadline_s, self._stays_out.set)
        bound.daemon = True
        bound.start()
        try:
            self._come_back(self._node, way_back)
        finally:
            bound.cancel()
        if self._node.successor is None:
            return False
        self._node.successor.shutdown()
        return True

    def leave_at_exit(self) -> None:
        """The process ends without shutdown: close everything, wait for nobody, let no function run on."""
        self._exiting = True
        if self._node.others() and not hasattr(sys, "last_value"):  # after an error nobody expects a shutdown
            logger.warning(
                "%s ended without shutdown(): call it last, so that workers wait for each other", self._node.info.name
            )
        self.shutdown(graceful=False, timeout_s=0.0)

    # ------------------------------------------------------------------ verdicts

    def on_expelled(self, why: str) -> None:
        """On the I/O thread: the others have declared this node dead, which is final."""
        if self._node.lifecycle.is_over():
            return
        name = self._node.info.name
        then = "joins again by itself, as a new member" if self._may_return else "can do no more; call shutdown()"
        self._give_up(Expelled(f"{name} was declared dead by the other members ({why}): it {then}"))

    def on_io_thread_lost(self, error: BaseException) -> None:
        """On the I/O thread, which ends: without it the node would look alive, and answer nobody."""
        if not self._node.lifecycle.is_over():
            self._give_up(
                NotInitialized(
                    f"{self._node.info.name} ended, since its I/O thread failed ({type(error).__name__}: {error}): has "
                    "a function closed descriptors that are not its own? Call shutdown(), then init_rpc to join again"
                )
            )

    @property
    def _may_return(self) -> bool:
        node = self._node
        stays = node.lifecycle.state == "running" or (self._serves_on and not node.watch.agreed_to_leave)
        return self._come_back is not None and node.options.membership.rejoin and stays

    def _give_up(self, verdict: RpcError) -> None:
        """This node can do no more: every call fails with ``verdict``."""
        node = self._node
        come_back = self._come_back if isinstance(verdict, Expelled) and self._may_return else None
        way_back = None if come_back is None else self._way_back()
        logger.error("%s", verdict)
        node.lifecycle.verdict = verdict
        node.links.myself.ended = verdict
        node.calls.end(verdict)

        def end(verdict: RpcError) -> None:
            self.end(verdict, comes_back=come_back is not None)
            if come_back is not None and way_back is not None:
                come_back(node, way_back)

        if not node.lifecycle.expel(end):
            self._return = way_back
            node.leaving.abort()  # the thread that starts or leaves ends the node

    def _way_back(self) -> Meeting:
        """The way back for this node, through members that it knows; keeps the store, and the list of contacts."""
        entry, membership = self._node.entry, self._node.membership
        return Meeting(
            self._place,
            None if entry is None else entry.contacts,
            membership.store,
            membership.cluster_id,
            membership.secret,
            tuple(self._node.links.peers.who_may_let_us_in()),
            membership.size,
            self._stays_out,
        )

    # ------------------------------------------------------------------ the parts stop

    def end(self, why: RpcError, linger: bool = False, comes_back: bool = False) -> None:
        """Stop all parts; leave no thread, descriptor, file or segment behind.

        ``comes_back``: subscribers to members' events wait for this node's next membership.
        """
        node = self._node
        lifecycle, links, name = node.lifecycle, node.links, node.info.name
        sigint.seal()  # Ctrl-C must not stop this halfway; every wait in here has a bound
        try:
            wanted = lifecycle.state == "leaving" and lifecycle.verdict is None
            lifecycle.end()
            why = lifecycle.verdict or why
            if node.entry is not None:
                node.entry.close()
            node.watch.stop()
            if not comes_back:
                node.member_events.end()
            reason = GoodbyeReason.LEFT if wanted else GoodbyeReason.GAVE_UP
            if self._exiting:
                reason = GoodbyeReason.FORGOT_SHUTDOWN
            agreed = linger and node.membership.size > node.options.membership.full_mesh
            links.say_goodbye(reason, LINGER_S if linger else 0.0, agreed=agreed)
            node.calls.end(why)  # before the links: callers learn the true reason, not "the link is gone"
            links.cut(why)
            node.membership.close()
            # After the links: a call registered later than this sweep finds its peer gone.
            node.calls.end(why)
            for hook in node.hooks.ended:
                hook()
            if self._exiting:
                node.executor.interrupt()
            stuck = node.executor.stop(STOP_S if linger else 1.0)
            if stuck:
                logger.warning("%s ends although functions still run on %d of its threads", name, len(stuck))
            node.server.coroutines.stop(STOP_S)
            node.loop.stop()
            node.observers.close()
            links.close()
            if node.devices is not None:
                node.devices.close()
        finally:
            node.resources.close()
            current.has_ended(node)
            sigint.unseal()

    def close_after_fork(self) -> None:
        """In a forked child: let go of the parent's resources, without telling anybody."""
        self._node.lifecycle.fork()
        membership = self._node.membership
        if membership.store is not None:
            # The store's threads exist in the parent only, and its destructor would wait for them for good.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(membership.store))
            membership.close()


def leave_at_exit() -> None:
    """A program that ends without shutdown must neither hang nor crash: all its nodes leave, and wait for nobody."""
    slot = current.slot
    runtime, slot.runtime = slot.runtime, None
    left = set(current.STARTED) if runtime is None else {runtime, *current.STARTED}
    with ExitStack() as stack:  # each node leaves, whatever another one raises
        stack.callback(wait_for_lost_processes)
        for node in left:
            stack.callback(node.ending.leave_at_exit)


atexit.register(leave_at_exit)
