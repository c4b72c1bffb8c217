"""Agreement to shut down: when all work everywhere is done, and until then, which members are late and why.

Each node runs one machine (`machine.py`), events in, effects out (`events.py`). Members report to a *parent*, parents
to theirs; the *root*, the smallest rank not known to be gone, releases everybody along the same tree. `machine.ACTIONS`
says what each state makes of each event; `Departure._settle` decides which messages go out after each event.

**The tree.** A member's parent is its neighbour of the lowest rank, if that is lower than its own: so reports travel
over standing links, and where all are neighbours, the tree is a star. The one member in nine without such a neighbour
reports to rank ``(rank - 1) // FALLBACK_FANOUT``, to the next rank of that series, or to the smallest rank, whichever
is alive. Every step leads to a lower rank, so there is no cycle, whatever each member knows of the dead. A member's
children are the members that report to it; nobody assigns them. A member counts as entered at the root as soon as it
has reported anywhere.

**A look.** A probed member probes its own children, and answers when all of them have answered. The root releases after
two looks in a row have shown every member shutting down, idle, and unchanged. The ``activity`` of a report changes
whenever a member below made or served a call, came or went; equal values mean that nothing happened between the two
looks. A caller stays busy until its answer arrives. So when the second look began, no member was busy and no call was
in flight; and an idle cluster starts no call by itself. A member that is not ready says so at once, and reports again
when it is: no look waits for work.

**The dead.** The root's probes name the dead it knows of, and a member that holds one of them for alive is not ready.
A link ends only after everything that the dead node sent over it was read, so a member that knows of the death has
seen its last requests. A death that a member still has not noticed after a long grace counts as a lost link only. A
member that the root holds for gone, but that another member's report includes, is alive: it and the root have merely
lost their link. Two roots do no harm: each releases only members that it has looked at in full. Messages may come
twice or out of order.

**Cut off.** To a member that is cut off, the hosts of all others fall silent. With nobody left to wait for, it would
leave at once, as if all were done, while the others go on. So a member is not ready if the hosts of half the members or
more fell silent: it waits ``return_s`` for a way back, or for the others to come back, and then gives up. Which side of
a split is cut off is not known, so with two equal sides both wait.

The driver feeds ``LocalIdle`` or ``LocalBusy`` whenever that changed, *before* it hands in a message, and reads the
counter under the same lock: a stale "idle" is the one thing that could release a busy cluster. An abandoned call should
count as in flight until its answer arrives or its link ends: its request may still be on the way, and only the caller
knows of it.
"""
