"""Membership: which nodes belong to the cluster, which have joined, left or died.

Owns the decisions, sans I/O: one ``MembershipMachine`` per member, ``handle(event, now) -> effects``. Must not
know sockets, threads, clocks or calls. A member is one incarnation (`protocol/member.py`): no claim about one ever
applies to another that has its name or rank later.

What a member holds of another incarnation:

    status        event                                                 next          effects
    unknown       Update alive or unresponsive, with its Member         the same      MemberJoined; spread
    unknown       Update dead or left                                   the same      spread: it never becomes a member
    alive         probe failed (two pings, and through others)          unresponsive  MemberUnresponsive; spread
    alive         LinkLost                                              -             probe at once, through others, too
    a member      LinkGivenUp                                           dead          MemberDied; spread; Obituary to it
    a member      Vouch                                                 -             LinkSilent
    alive         LinkRefused                                           -             probe at once, through others only
    alive         Update unresponsive, version not lower                unresponsive  MemberUnresponsive; spread
    unresponsive  HostSeen                                              -             noted for the verdict
    unresponsive  Update alive, version higher (only it says so)        alive         MemberRecovered; spread
    unresponsive  its time is over                                      -             one last probe
    unresponsive  the last probe failed, its host answers               -             all its time again
    unresponsive  the last probe failed, its host is silent             dead          MemberDied; spread; Obituary to it
    unresponsive  the last probe failed, ``unresponsive_s`` is over     dead          MemberDied; spread; Obituary to it
    a member      LinkRefused, and this host's kernel is certain        dead          MemberDied; spread
    a member      refused for CONFIRMED_S, to one that was asked, too   dead          MemberDied; spread
    a member      refused for REFUSED_S, and nobody has heard from it   dead          MemberDied; spread
    a member      Update dead; a later admission has its name or rank   dead          MemberDied; spread
    a member      Update left                                           left          MemberLeft; spread
    dead          Update left                                           left          spread
    dead          any message from it but an Obituary                   -             Obituary to it
    dead          Obituary from it                                      -             the larger side stays, see below
    dead, alone   Obituary, spoken alone, too                           -             the larger side stays
    dead, alone   any other message from it                             -             this member is expelled
    a member      Obituary, spoken alone or hinted                      -             Ack: its sender may be wrong
    unknown       Obituary                                              -             the larger side stays
    dead, left    anything else                                         -

**A member is dead** when its process is gone (LinkRefused: at once where this host's kernel says so; between hosts
once the refusals have lasted, since a network may refuse for a moment, too), when its host is gone (HostSeen: the
kernel does not answer), or when it was declared dead (an Update, ``unresponsive_s``). A process that does not answer
while its kernel does is *unresponsive*: busy inside C code, swapped out, stopped by a debugger. It stays a member,
however long that lasts, and refutes with its first message.

And of itself:

    new         founds a cluster, or is of the first hour    member      -
    new         LocalJoin                                    joining     Join, again every probe_timeout_s
    joining     Decision: an offer                           -           Join again, which confirms it
    joining     Decision: why not; or an Obituary            refused     Refused
    joining     JoinAnswer                                   member      Admitted
    member      Update unresponsive about itself                -           version + 1; spread
    member      Update dead about itself, or an Obituary     expelled    Expelled
    member      LocalLeave                                   leaving     Ping with Update left to all neighbours
    leaving     a neighbour leaves, another takes its place  -           the same to that one
    leaving     LinkLost, LinkRefused, or a probe failed     -           it accuses nobody, and awaits none refused
    leaving     all neighbours acknowledged                  departed    Departed; of those who stay, two have to
    leaving     two acknowledged, and two rounds are over    departed    Departed
    leaving     five rounds are over                         departed    Departed

**Senders.** A member's messages count. A stranger's do not, except Join. A stranger may be a newcomer not heard of yet,
so it gets an Ack, and WhoAreYou. The dead get an Obituary, and a member that gets one from a member is expelled.

**Partitions.** While a network is split, each side may declare the other dead. Each member goes on to try one of its
dead every ten probe intervals; in a large group more seldom, so that all together try three in an interval. When two
members meet that are dead to each other, they compare their tables: the larger number of members stays, of equal ones
the side with the lowest rank. The loser is expelled, and names the winner to some members of its own side. A split that
ends before a verdict does no harm. If it ends amid the verdicts, all members declared dead have to go, on either side:
a verdict is final.

**Groups with a table** (`farcall.allow`, ``MembershipOptions.is_guarded``). Members may be hostile to each other
there, so one's word ends nobody (`accusations.py`), and nobody gets a living member's name by saying so, nor a dead
one's for ``name_kept_s``. Who gets an obituary from one member alone holds that one for dead. So such a group heals
less well: after several splits, two members may stay dead to each other while others reach both. In a group of more
than 32 members each dials a dead one itself.

**Coming back.** An expelled incarnation ends, and its node joins again with its name and rank as another incarnation:
first through the member that expelled it (``Expelled.by``), else through members that it knew, the lowest rank first,
so that many meet at one. A newcomer also gets the records of the dead, so that survivors can look for them. A node that
has come back looks for members that only it knew (``LocalJoin.former``): it may have let them in itself. A group of
fixed size replaces a dead member in the same way, and admits nobody once a member has left (``Table.is_over``).

    expelled    asks a member, which lets it in      member, another incarnation
    expelled    its name or rank is another's        asks again for a while, then stays out
    expelled    the group is over, or nobody is left stays out
    expelled    no answer                            asks again, until its user shuts it down

**Neighbours.** A member probes, gossips with, and asks only its neighbours: all others in a group of up to 32 members,
eight in a larger one (`neighbours.py`). It talks to another member only for a reason: a question about that member, a
newcomer, an obituary.

**Load.** At rest each member sends one ping and one answer each ``probe_interval_s`` (a fifth of that in a group of
more than 32), fewer where calls are busy, and a digest every 30 intervals: 2.1 messages a second by default, 0.45 in a
large group, however large. While there is news, up to 15 a second more (3 each fifth of an interval), with 32 updates
at most. Each member sends an update 1.5 * log2(n) + 2 times, or once to each neighbour that has not told it, if that is
more; in a large group the latter. A probe that fails costs 2 pings and 3 questions.

**Many deaths at once**, as of all nodes of one process, cost each survivor a few messages more than one death, and the
group some 30 dials for each of the dead: its eight neighbours dial it, and three others each. A process that is refused
is dead or not within CONFIRMED_S, or REFUSED_S, so no doubt about it is spread before; who was refused is dialled once
more for the verdict, and not told of its death. That one node of a process is gone says nothing about the others: a
node may end by itself, and no member knows which nodes share a process.

**Bounds**, for up to 32 changes at a time, in a cluster whose members reach each other:

    all know of a join or a leave    (log2(n)/2 + 2) * probe_interval_s                                      news
    all know of a host that is gone  suspicion_s + 4 * probe_timeout_s + (log2(n) + 8) * probe_interval_s + news
                                     (of more than 32 members: 5 times both)
    who hears nobody, knows of all   5 * (suspicion_s + 4 * probe_timeout_s) + (log2(n) + 8) * probe_interval_s
                                     (of more than 32 members: 5 times both)
    nobody is declared dead whose host answers, nor who answers within suspicion_s of when it fell silent

With the defaults and 32 members: 4.5 s and 30 s (typically 1 s and 13 s); 1,000 members: 7 s and 117 s (typically 2 s
and 18 s). A process killed on a live host is refused, not silent: its death takes the news, and CONFIRMED_S more if no
member shares its host, or REFUSED_S if no other member is refused. A host that vanishes while its member is already
unresponsive takes one more suspicion_s. A part of the bound is chance: at 1,000 members nobody probes the dead member
for log2(n) + 8 intervals with probability e^-18. A member that hears nobody, as the last of several or one that is cut
off, doubts itself first, and takes up to five times as long: 70 s of three members, 190 s of 1,000.

A verdict reached while a member heard nobody at all holds for all others that were silent as long, counts for that
member only, and is not gossiped: the member may be cut off, and others would believe it. If it later hears from one of
its dead that did not reach the same verdict about it, it was wrong, and has to go.

A member doubts itself, too, when its own timers fire late: it then probes again instead of accusing, and is more
patient for a while. No verdict ever comes without a probe begun after the suspicion's time was over.
"""
