"""Fault injection for tests: lost, late, repeated and reordered messages; cut, silent and slow connections.

    from farcall.testing.faults import Faults

    faults = Faults(seed=1)
    faults.drop(kind="request", to="ps0", count=2)          # the first two requests of each worker to ps0
    faults.delay(0.05, kind="response", probability=0.1)
    with faults.installed():                                # for all nodes that start here, or for ("ps0", ...)
        farcall.init_rpc(...)
    with faults.cut(to="ps0"):                              # rules can also be made while nodes run
        ...

The effect of each fault, by the kind of message:

=========  ==========================  ==========================  ====================================================
fault      request                     response, failure           control message, letter
=========  ==========================  ==========================  ====================================================
drop       the call times out; the     the call times out; the     nothing sends it again, because a connection loses
           function did not run        function ran                none: its memory stays, and a backward pass or a
                                                                   shutdown that waits for it ends at its timeout
fail       `NetworkError`, "not_sent"  late                        late
delay      late                        late                        late; but a Release behind the Farewell of a
                                                                   shutdown is told as a leak
duplicate  the function runs twice     ignored                     ignored
           (a creation: once)
reorder    as delay                    as delay                    as delay
=========  ==========================  ==========================  ====================================================

A use of a reference may overtake its delayed or reordered creation, or Register, and then fails with
`ReferenceLost`: farcall relies on the order of its connections. The receiver of a lost message still gives up the
memory, references and gradients that came along.

farcall repairs a cut: it reconnects and resumes, unless the workers have ``reconnect_s=0``, or messages of that
connection were repeated or reordered, so that the two ends no longer count the same frames.

A real connection never loses, repeats or reorders messages: it delivers, or it ends. So `cut`, `half_open`,
`throttle` and ``delay(in_order=True)`` are what a network can do; the other faults are for programs that must tolerate
a lost or late message whatever its reason. Messages about shared memory meet only the former faults, since the latter
would corrupt memory. Faults begin after the handshake. Each connection costs a thread and two more hops.
"""

from __future__ import annotations

from farcall.testing.faults.injection import Faults, Injection
from farcall.testing.faults.messages import KINDS
from farcall.testing.faults.rules import Cut, Delay, Drop, Duplicate, Fail, HalfOpen, Reorder, Rule, Selection, Throttle

__all__ = [
    "KINDS",
    "Cut",
    "Delay",
    "Drop",
    "Duplicate",
    "Fail",
    "Faults",
    "HalfOpen",
    "Injection",
    "Reorder",
    "Rule",
    "Selection",
    "Throttle",
]
