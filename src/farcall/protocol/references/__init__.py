"""The reference protocol: when may an owner forget a value that other members may still refer to?

Owns the answer, sans I/O: messages and program events in, effects out. Must not know values, calls, links
or time. The four invariants: the owner keeps a value while any fork of it is alive, or in transit,
anywhere; when the last fork is gone the value is freed in bounded time; every message may arrive twice or
out of order; a dead user's forks are dropped, and a dead owner's references are lost at once. Transition
tables: ``owner`` and ``user``.

The scheme is reference listing: the owner knows each fork and its holder. Reference counts (weighted or
not) take less memory, but a count cannot be repaired when a member dies with part of it. What each path
costs:

    remote() at the creator     nothing: the request registers the fork, the response confirms it
    owner -> user               nothing: listed when it is sent
    user -> owner               one Accept, lazily; until then the sender's fork lives on
    user -> user                Register, Confirm and (lazily) Accept: the parent outlives its child's journey
    a method call, to_here      nothing: the caller keeps its own fork until the response
    dropping a fork             one Release, lazily; many travel as one message

Order. A holder sends Release only after the Confirm of the fork and the Accept of its children, so a Release cannot
overtake a registration, and no tombstones are needed. A duplicate registration lists a fork again; its Confirm finds no
fork and is answered by another Release. A duplicate payload is recognised by its forks' numbers, which have no gaps
between one sender and one receiver: the receiver remembers one number, and those that came ahead of a gap until it
closes. Withdraw closes the gap of a fork that is never sent.

Death. A dead member may have sent forks that the owner has not heard of, even through other dead members.
So the owner asks everyone: "these are dead; take nothing more from them; what do you hold that I have not
confirmed?" When all have answered, each living descendant of a dead member's fork is listed or will never
arrive, and the owner drops the dead member's forks. A death meanwhile starts the round anew. If a receiver
dies before it accepted a child, the parent registers the child in the receiver's name. One round costs two
messages per member, only at owners of values that the dead member held.

What the runtime must promise: a message or payload between two live members arrives at least once (or the
machine gets ``ForkWithdrawn`` for the payload's forks); a death is final and reported to everyone, and a
restarted process is a new member; every member is known to all before anyone sends it a fork. Only the
numbers of dead members are kept for ever: one integer each.
"""
