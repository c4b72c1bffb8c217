"""Agreement to shut down: when all work everywhere is done, and until then, who is late and why.

Each node runs one machine. It reports to a coordinator: the smallest rank it still has a link to. The
coordinator releases everybody after two looks at the cluster in a row have shown every member shutting down,
idle, and with the same activity counter. A caller stays busy until its answer came, so at a moment between
the two looks nobody was busy and no call was under way; and nothing can start from nothing.

    state      event                                        next       effects
    working    LocalEntered                                 waiting    report to the coordinator
    waiting    becomes idle, and told somebody otherwise    -          report to those
    waiting    PeerGone                                     -          report to the (perhaps new) coordinator
    waiting    status tick                                  -          ask who is late; LogWaiting
    waiting    deadline                                     timed out  TimedOut
    waiting    all members ready, no round under way        -          probe everybody: a round
    waiting    all answered the round, same counters        releasing  release everybody
    waiting    all answered the round, other counters       -          another round
    waiting    DepartureReleased                            finished   acknowledge; Finished
    releasing  everybody acknowledged or is gone, or grace  finished   Finished
    working, waiting        DepartureProbe                  -          report
    releasing, finished     DepartureProbe, DepartureReport -          release the sender
    releasing, finished     DepartureReleased               -          acknowledge

*Ready* is: shutting down, idle, and aware of every death the coordinator knows of. The last matters because
a link's end comes after all that the dead node sent over it: who knows of the death has seen its last
requests. Two that merely lost their link to each other must not block the rest, so whoever is reported to
coordinates, even with a smaller rank alive (two coordinators do no harm: each releases only what is truly
done), and a death that others still have not noticed after a long grace is held to be only a lost link.
Messages may come twice or out of order. No clock, socket or thread in here.

The driver feeds ``LocalIdle`` or ``LocalBusy`` whenever that changed, *before* it hands in a message, and
reads the counter under the same lock: a stale "idle" is the one thing that could release a busy cluster. A
call its caller gave up on should count as in flight until its answer or its link's end: its request may still
be on the way, where only the caller knows of it.
"""

from farcall.protocol.departure.events import (
    DepartureMessage,
    Effect,
    Event,
    Finished,
    Late,
    LocalBusy,
    LocalEntered,
    LocalIdle,
    LogWaiting,
    PeerGone,
    Received,
    Send,
    TimedOut,
)
from farcall.protocol.departure.machine import (
    ACKNOWLEDGE_GRACE_S,
    LOST_LINK_GRACE_S,
    MAX_LATE_NAMED,
    NOT_CALLED,
    STATUS_INTERVAL_S,
    Departure,
    DepartureState,
)

__all__ = [
    "ACKNOWLEDGE_GRACE_S",
    "LOST_LINK_GRACE_S",
    "MAX_LATE_NAMED",
    "NOT_CALLED",
    "STATUS_INTERVAL_S",
    "Departure",
    "DepartureMessage",
    "DepartureState",
    "Effect",
    "Event",
    "Finished",
    "Late",
    "LocalBusy",
    "LocalEntered",
    "LocalIdle",
    "LogWaiting",
    "PeerGone",
    "Received",
    "Send",
    "TimedOut",
]
