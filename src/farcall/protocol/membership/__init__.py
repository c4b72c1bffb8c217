"""Membership: who belongs to the cluster, who has come, who has gone, who is dead.

Owns the answers, sans I/O: one ``MembershipMachine`` per member, ``handle(event, now) -> effects``. Must not
know sockets, threads, clocks or calls. A member is one incarnation (`protocol/member.py`): nothing said of one ever
applies to another that has its name or rank later.

What a member holds of another incarnation:

    status        event                                                 next          effects
    unknown       Update alive or unresponsive, with its Member         the same      MemberJoined; spread
    unknown       Update dead or left                                   the same      spread: it never becomes a member
    alive         probe failed (two pings, and through others)          unresponsive  MemberUnresponsive; spread
    alive         LinkLost                                              -             probe at once, through others, too
    a member      LinkGivenUp                                           dead          MemberDied; spread; Obituary to it
    a member      Vouch                                                 -             LinkSilent
    alive         LinkRefused                                           unresponsive  as above; and probe at once
    alive         Update unresponsive, version not lower                unresponsive  MemberUnresponsive; spread
    unresponsive  HostSeen                                              -             noted for the verdict
    unresponsive  Update alive, version higher (only it says so)        alive         MemberRecovered; spread
    unresponsive  its time is over                                      -             one last probe
    unresponsive  the last probe failed, its host answers               -             all its time again
    unresponsive  the last probe failed, its host is silent             dead          MemberDied; spread; Obituary to it
    unresponsive  the last probe failed, ``unresponsive_s`` is over     dead          MemberDied; spread; Obituary to it
    unresponsive  refused here, and to all others who were asked        dead          MemberDied; spread; Obituary to it
    a member      Update dead; a later admission has its name or rank   dead          MemberDied; spread
    a member      Update left                                           left          MemberLeft; spread
    dead          Update left                                           left          spread
    dead          any message from it but an Obituary                   -             Obituary to it
    dead          Obituary from it                                      -             the larger side stays, see below
    dead, alone   Obituary, spoken alone, too                           -             the larger side stays
    dead, alone   any other message from it                             -             this member is expelled
    a member      Obituary, spoken alone                                -             Ack: its sender was wrong
    unknown       Obituary                                              -             the larger side stays
    dead, left    anything else                                         -

**Dead is who is gone**: the process (LinkRefused: its host's kernel says that nobody listens), the host (HostSeen: its
kernel answers nothing), or who was said to be (an Update, ``unresponsive_s``). A process that does not answer while its
kernel does is *unresponsive*: busy inside C code, swapped out, stopped by a debugger. It stays a member, however long
that lasts, and refutes with its first message.

And of itself:

    new         founds a cluster, or is of the first hour    member      -
    new         LocalJoin                                    joining     Join, again every probe_timeout_s
    joining     Decision: an offer                           -           Join again, which confirms it
    joining     Decision: why not; or an Obituary            refused     Refused
    joining     JoinAnswer                                   member      Admitted
    member      Update unresponsive about itself                -           version + 1; spread
    member      Update dead about itself, or an Obituary     expelled    Expelled
    member      LocalLeave                                   leaving     Ping with Update left to three
    leaving     two acknowledged, or five rounds are over    departed    Departed

Who speaks: a member's messages count. A stranger's do not, but for Join; it may be a newcomer not heard of yet, so
it is acknowledged, and asked who it is. The dead get an Obituary, and who gets one from a member is expelled.

**Partitions.** While a network is split, either side may come to hold the other for dead. Each member goes on to
try one of its dead every ten probe intervals. When two meet that are dead to each other, they compare what they
take for the cluster: the larger number of members stays, of equal ones the side with the lowest rank. The other
one is expelled, and tells some of its own side whom to ask. A split that ends before a verdict does no
harm; where it ends amid the verdicts, all who were declared dead go, on either side: a verdict is final.

**Coming back.** Who is expelled ends, and its node joins again, with its name and rank, as another incarnation: first
through the one that said so (``Expelled.by``), else through those whom it knew, the lowest rank first, so that many
meet at one. A newcomer is told the records of the dead, too, so that who survives can look for them. A group of fixed
size lets one in for a member that died in the same way, and nobody once a member has left (``Table.is_over``).

    expelled    asks a member, which lets it in      member, another incarnation
    expelled    its name or rank is another's        asks again for a while, then stays out
    expelled    the group is over, or nobody is left stays out
    expelled    no answer                            asks again, until its user shuts it down

**Load.** At rest each member sends one ping and one answer each ``probe_interval_s``, fewer where calls are
busy, and 1/30 as many digests: 2.1 messages a second by default, however large the cluster. While there is news,
up to 15 a second more (3 each fifth of an interval), with 32 updates at most. Each update is sent
1.5 * log2(n) + 2 times by each member. A probe that fails costs 2 pings and 3 questions.

**Bounds**, for up to 32 changes at a time, in a cluster whose members reach each other:

    all know of a join or a leave    (log2(n)/2 + 2) * probe_interval_s                                      news
    all know of a host that is gone  suspicion_s + 4 * probe_timeout_s + (log2(n) + 8) * probe_interval_s + news
    nobody is declared dead whose host answers, nor who answers within suspicion_s of when it fell silent

With the defaults and 1,000 members: 7 s and 37 s (typically 1 s and 14 s). A process that was killed on a host that
lives is refused, not silent: that takes two round trips and the news. A host that vanishes while its member
is unresponsive already takes one more suspicion_s. A part of the bound is luck: nobody
happens to probe the dead one for log2(n) + 8 intervals with probability e^-18 at 1,000 members. Where the
survivors are so few that one hears nobody, it doubts itself first, and takes up to five times as long.

A verdict spoken while nobody at all was heard counts for the one who spoke it, and is not told to others: it may be
deaf, and they would believe it. Should it hear from one of its dead that did not do the same, it was wrong, and has to
go.

A member doubts itself, too, when its own timers come late: then it probes again instead of accusing, is more
patient for a while, and no verdict is ever spoken without a probe begun after the suspicion's time was over.
"""
