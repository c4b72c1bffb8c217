"""How long tests wait, in one place.

A test says "at once" of something that would otherwise come only when a timeout of ``LONG_S`` has run out. Half of that
tells the two apart on a machine that is busy with something else, too; a bound in absolute seconds would not.
"""

from __future__ import annotations

from farcall.options import MembershipOptions

LONG_S = 30.0
"""A timeout that must not decide anything."""

AT_ONCE_S = LONG_S / 2
"""Less than this: it was not the timeout."""

PATIENT = MembershipOptions(suspicion_s=10 * LONG_S, reconnect_s=10 * LONG_S)
"""Options of a node that gives nobody up for silence: a death must show in another way, or the test ends first."""
