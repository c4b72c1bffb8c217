"""What a departure machine is told, and what it has done: the words between it and its driver.

The messages that go between members are in `protocol/messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from farcall.protocol.messages import (
    DepartureAcknowledged,
    DepartureProbe,
    DepartureReleased,
    DepartureReport,
    DepartureStatus,
)

DepartureMessage = DepartureReport | DepartureProbe | DepartureStatus | DepartureReleased | DepartureAcknowledged


@dataclass(frozen=True, slots=True)
class LocalEntered:
    """The user called shutdown here; a ``timeout_s`` of 0 means no bound."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class LocalIdle:
    """No call is being waited for or served here; ``activity`` counts all that ever were."""

    activity: int


@dataclass(frozen=True, slots=True)
class LocalBusy:
    """``calls_in_flight`` calls are being waited for or served here."""

    calls_in_flight: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The link to ``rank`` has ended and everything it brought has been handled: dead or left."""

    rank: int


@dataclass(frozen=True, slots=True)
class Received:
    """A departure message came from ``rank``."""

    rank: int
    message: DepartureMessage


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``rank``; if its link has ended, do nothing."""

    rank: int
    message: DepartureMessage


@dataclass(frozen=True, slots=True)
class Finished:
    """This node may close its links, once what it was told to send is written."""


@dataclass(frozen=True, slots=True)
class Late:
    """A member that is waited for, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.why}"


@dataclass(frozen=True, slots=True)
class LogWaiting:
    """Still waiting: tell the user for whom (and for how many more)."""

    late: tuple[Late, ...]
    unnamed_count: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The bound given to shutdown has passed; this node gives up on the others."""

    late: tuple[Late, ...]
    unnamed_count: int


Event = LocalEntered | LocalIdle | LocalBusy | PeerGone | Received
Effect = Send | Finished | LogWaiting | TimedOut
