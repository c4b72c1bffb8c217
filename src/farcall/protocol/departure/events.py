"""The events that the departure machine handles, and the effects that it returns."""

from __future__ import annotations

import msgspec

from farcall.protocol.messages import (
    DepartureAcknowledged,
    DepartureProbe,
    DepartureReleased,
    DepartureReport,
    DepartureStatus,
)

DepartureMessage = DepartureReport | DepartureProbe | DepartureStatus | DepartureReleased | DepartureAcknowledged


class LocalEntered(msgspec.Struct, frozen=True):
    """The user called shutdown here; a ``timeout_s`` of 0 means no bound."""

    timeout_s: float


class LocalIdle(msgspec.Struct, frozen=True):
    """This node waits for no call and serves none; ``activity`` counts all that it ever made or served."""

    activity: int


class LocalBusy(msgspec.Struct, frozen=True):
    """This node waits for, or serves, ``calls_in_flight`` calls; the oldest, in words, since ``oldest_since``."""

    calls_in_flight: int
    oldest: str = ""
    oldest_since: float = 0.0


class PeerGone(msgspec.Struct, frozen=True):
    """``rank`` is dead or has left: its link has ended, and everything that it brought has been handled.

    ``is_silent``: dead since its host fell silent, as all others are to a node that is cut off.
    """

    rank: int
    is_silent: bool = False


class PeerCame(msgspec.Struct, frozen=True):
    """A link to ``rank`` stands: a new process took the place of one that is gone."""

    rank: int
    name: str


class Received(msgspec.Struct, frozen=True):
    """A departure message came from ``rank``."""

    rank: int
    message: DepartureMessage


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to ``rank``; do nothing if the link to it has ended."""

    rank: int
    message: DepartureMessage


class Finished(msgspec.Struct, frozen=True):
    """This node may close its links, once the messages of all its `Send` effects are written."""


class Late(msgspec.Struct, frozen=True):
    """A late member, and why it is late."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.why}"


class LogWaiting(msgspec.Struct, frozen=True):
    """Still waiting: report the late members, and how many more there are, to the user."""

    late: tuple[Late, ...]
    unnamed_count: int


class TimedOut(msgspec.Struct, frozen=True):
    """The timeout of shutdown has passed, or that of a way back; this node stops waiting for the others."""

    late: tuple[Late, ...]
    unnamed_count: int


Event = LocalEntered | LocalIdle | LocalBusy | PeerGone | PeerCame | Received
Effect = Send | Finished | LogWaiting | TimedOut
