"""The way back of a node that the others declared dead although it lives: it joins again, as a new member.

Runs on the thread that ended the old membership (`ending.py`). Carries over only the program's own choices: its
subscriptions to members' events, the timeout of its calls. References and contexts are lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from farcall.errors import Expelled, InitError, MissingPeers
from farcall.protocol.backoff import Backoff
from farcall.protocol.member import incarnation_text
from farcall.runtime.membership.events import MemberEvent
from farcall.runtime.node.current import slot
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.node.runtime import Runtime
from farcall.runtime.rendezvous.dynamic import GroupIsOver, Meeting

logger: logging.Logger = logging.getLogger("farcall")

FIRST_RETURN_S, LONGEST_RETURN_S = 0.05, 5.0
"""The pauses of an expelled node between its attempts to join again."""


def join_again(
    expelled: Runtime, way_back: Meeting, start: Callable[[Lifecycle], Runtime], hold: Callable[[Runtime], None]
) -> None:
    """``start`` a successor of ``expelled``, and have the program ``hold`` it; unless ``shutdown`` is called."""
    name = expelled.info.name
    pauses = Backoff(FIRST_RETURN_S, LONGEST_RETURN_S)
    until = monotonic() + expelled.options.start_deadline_s
    assert way_back.cancelled is not None
    while way_back.members and not way_back.cancelled.wait(pauses.next_s()):
        lifecycle = Lifecycle(name)
        lifecycle.move("start")
        try:
            successor = start(lifecycle)
        except (MissingPeers, Expelled) as error:
            logger.info("%s could not join again yet: %s", name, error)
            continue
        except Exception as error:
            # The member that decides may not know yet that this node's former membership has ended.
            if isinstance(error, InitError) and not isinstance(error, GroupIsOver) and monotonic() < until:
                continue
            logger.error("%s cannot join again: %s", name, error)
            break
        _succeed(expelled, successor, hold)
        if way_back.cancelled.is_set():
            # By a shutdown that may have looked for a successor already; it looks only once.
            successor.shutdown(graceful=False)
        return
    expelled.member_events.end()


def _succeed(expelled: Runtime, successor: Runtime, hold: Callable[[Runtime], None]) -> None:
    successor.server.on_failure = expelled.server.on_failure
    successor.timeout_s = expelled.timeout_s  # perhaps changed since the start
    successor.member_events.take_over(expelled.member_events)
    hold(successor)
    expelled.successor = successor
    slot.succeed(expelled, successor)
    info, why = successor.info, str(expelled.why_ended)
    logger.warning("%s is back as a new member; the values it held are lost", info.name)
    successor.event_log.note("rejoined", info.name, text=why)
    successor.member_events.tell(MemberEvent("rejoined", info, incarnation_text(successor.me.incarnation), why))
