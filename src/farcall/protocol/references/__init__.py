"""The reference protocol: when may an owner forget a value that other members may still refer to?

Owns the answer, sans I/O: messages and program events in, effects out. Must not know values, calls, links
or time. The four invariants: the owner keeps a value while any fork of it is alive, or on its way,
anywhere; when the last one is gone the value is freed in bounded time; every message may arrive twice or
out of order; a dead user's forks are dropped, and a dead owner's references are lost at once. Transition
tables: ``owner`` and ``user``.

The scheme is reference listing: the owner knows each fork and which member holds it. Counting (weighted or
not) takes fewer words, but a count cannot be mended when a member dies with part of it. What each way
costs:

    remote() at the creator     nothing: the request registers the fork, the response confirms it
    owner -> user               nothing: listed when it is sent
    user -> owner               one Accept, lazily; until then the sender's fork lives on
    user -> user                Register, Confirm and (lazily) Accept: the parent outlives its child's journey
    a method call, to_here      nothing: the caller keeps its own fork until the response
    dropping a fork             one Release, lazily; many travel as one message

Order. A Release follows the Confirm of its fork and the Accept of its children, so it cannot overtake a
registration, and no tombstones are needed for that. A registration that comes twice lists a fork twice; its
Confirm finds no fork and is answered by Release again. A payload that comes twice is known by its forks'
numbers, which have no gaps on one way: what is remembered is one number, and those that came ahead of a
gap, until it closes. What is never sent closes its gap by Withdraw.

Death. A dead member may have sent forks that the owner has not heard of, through further dead members even.
So the owner asks everyone: "these are dead; take nothing more from them; what do you hold that I have not
confirmed?" When all have answered, each living descendant of a dead member's fork is listed or will never
arrive, and the dead member's forks are dropped. A death meanwhile starts the round anew. Where a receiver
dies with a child not accepted, the parent lists it in its name. One round costs two messages per member,
only at owners that the dead one held something of.

What the runtime must promise: a message or payload between two live members arrives at least once (or
``ForkWithdrawn`` is told of the payload's forks); a death is final, is told to everyone, and a restarted
process is a new member; a member is known to all before it is sent a fork. Only the numbers of the dead are
kept for ever: an integer each.
"""
