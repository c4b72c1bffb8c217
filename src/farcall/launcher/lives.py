"""The states of a worker, and the events of its process, its membership and its user that change them. Sans-I/O.

    state         event       next state
    starting      joined      preparing
    starting      failed      backing off, or dead: the first process of a worker is not tried again
    preparing     prepared    running: its files were sent, and the user's ``on_start`` returned
    preparing     failed      backing off, or dead
    running       failed      backing off, or dead
    running       finished    ended: its process ended with exit code 0
    backing off   due         starting: another process, one life later, with the same name and rank
    dead          removed     ended: nobody asks for it any more
    any of these  removed     ended
    ended         any         the same

"Backing off" where restarts are left, "dead" where none is. The table is `NEXT`, which runs. The supervisor drops news
of earlier lives. Knows no clock (it is told the time), no engine, no member.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    STARTING = "starting"
    PREPARING = "preparing"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    DEAD = "dead"
    ENDED = "ended"


class Event(StrEnum):
    JOINED = "joined"
    PREPARED = "prepared"
    FAILED = "failed"
    FINISHED = "finished"
    DUE = "due"
    REMOVED = "removed"


FINAL: frozenset[State] = frozenset({State.DEAD, State.ENDED})

NEXT: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.JOINED): State.PREPARING,
    (State.STARTING, Event.FAILED): State.BACKING_OFF,
    (State.PREPARING, Event.PREPARED): State.RUNNING,
    (State.PREPARING, Event.FAILED): State.BACKING_OFF,
    (State.RUNNING, Event.FAILED): State.BACKING_OFF,
    (State.RUNNING, Event.FINISHED): State.ENDED,
    (State.BACKING_OFF, Event.DUE): State.STARTING,
    **{(state, Event.REMOVED): State.ENDED for state in State if state is not State.ENDED},
}


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a worker that failed is started again, and after which pause."""

    most: int = 0
    first_pause_s: float = 0.0
    longest_pause_s: float = 30.0

    def pause_s(self, restarts: int) -> float:
        """Before the restart after ``restarts`` others: each pause is twice as long as the one before."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(restarts, 60))


class Life:
    """The states of one worker, one life after the other."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self.has_run: bool = False
        """Did it run, in any of its lives?"""
        self.number: int = 0
        """The present life: how often the worker was started again."""
        self.state: State = State.STARTING
        self.due_at: float | None = None
        """The time of the next start, while it is backing off."""
        self.why: str = ""
        """The reason of the last failure, for people."""

    @property
    def is_over(self) -> bool:
        return self.state in FINAL

    def handle(self, event: Event, now: float, why: str = "") -> bool:
        """Change the state by ``event``; False: this state has no such row."""
        following = NEXT.get((self.state, event))
        if following is None:
            return False
        if event is Event.FAILED:
            self.why = why
            if not self.has_run or self.number >= self._restarts.most:
                following = State.DEAD
            else:
                self.due_at = now + self._restarts.pause_s(self.number)
        elif event is Event.DUE:
            self.number += 1
        if following is not State.BACKING_OFF:
            self.due_at = None
        self.has_run |= following is State.RUNNING
        self.state = following
        return True
