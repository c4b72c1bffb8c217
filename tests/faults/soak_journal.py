"""The journals of a soak: what its processes write down, and what is read out of that in the end.

Each process appends to files of its own, a line at a time, so that nothing of it is lost when it is killed:

    ran-<pid>      <id>                             a request was executed: by the function itself, before anything else
    calls-<pid>    begin <id> <when> <kind> <to> <timeout>    a call was begun; all processes share the clock
                   end <id> <when> <outcome>        and ended: "result", or an error (`Outcome`)
    lives-<pid>    <name> <incarnation> <when>      a node of this process became a member
    deaths-<pid>   <incarnation> <when>             a node of this process was told of a death
    cuts-<pid>     <when>                           a connection of this process was cut

An id names one call and is never used again, so an id that ran twice is a request that was executed twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KINDS = ("ran", "calls", "lives", "deaths", "cuts")
TRUTHFUL = {"PeerDead", "RpcTimeout", "ReferenceLost", "AnswerLost", "NetworkError", "UnknownWorker"}
OF_THE_ENDED = {"Expelled", "NotInitialized", "Cancelled"}
REFERENCE = 7
"""The kind of call that makes a reference and fetches it: two requests, each within the timeout."""


class Journal:
    """The files of this process."""

    def __init__(self, directory: str) -> None:
        self._files = {
            kind: os.open(f"{directory}/{kind}-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY) for kind in KINDS
        }

    def write(self, kind: str, *words: object) -> None:
        os.write(self._files[kind], (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)


class Outcome(NamedTuple):
    """How a call ended."""

    error: str
    """The class; empty for a result."""
    delivery: str
    """What the error says: not_sent, unknown or executed; "there" if it was raised by the function at the callee."""
    incarnation: str
    """Whose death it tells of, if any."""
    text: str

    @classmethod
    def read(cls, text: str) -> Outcome:
        if text == "result":
            return cls("", "", "", "")
        _, error, delivery, incarnation, why = text.split(" ", 4)
        return cls(error, delivery, "" if incarnation == "-" else incarnation, why)


class Call(NamedTuple):
    """One call, as its caller wrote it down."""

    pid: int
    call_id: str
    kind: int
    to: str
    timeout_s: float
    begun_at: float
    ended_at: float | None
    outcome: Outcome

    @property
    def bound_s(self) -> float:
        return self.timeout_s * (2 if self.kind == REFERENCE else 1)


def calls(directory: Path) -> Iterator[Call]:
    """All calls of a soak. Those that never ended come last, for each process."""
    for path in directory.glob("calls-*"):
        pid = int(path.name.partition("-")[2])
        begun: dict[str, list[str]] = {}
        for line in path.read_text().splitlines():
            what, call_id, when, rest = line.split(" ", 3)
            if what == "begin":
                begun[call_id] = [when, *rest.split()]
                continue
            since, kind, to, timeout_s = begun.pop(call_id)
            outcome = Outcome.read(rest)
            yield Call(pid, call_id, int(kind), to, float(timeout_s), float(since), float(when), outcome)
        for call_id, (since, kind, to, timeout_s) in begun.items():
            yield Call(pid, call_id, int(kind), to, float(timeout_s), float(since), None, Outcome("", "", "", ""))


def executed(directory: Path) -> Counter[str]:
    """How often each request was executed."""
    return Counter(line for path in directory.glob("ran-*") for line in path.read_text().splitlines())


def lives(directory: Path) -> dict[str, int]:
    """The process of each incarnation."""
    return {
        line.split()[1]: int(path.name.partition("-")[2])
        for path in directory.glob("lives-*")
        for line in path.read_text().splitlines()
    }


def untruth(call: Call, ran: int, stayed: bool) -> str | None:
    """What is wrong about an outcome, given whether its request was executed and whether its caller was expelled."""
    outcome = call.outcome
    if not outcome.error:
        return None if ran == 1 else "a result of what did not run"
    # A call that a function made there, at a member that leaves, meets the end of that member's node.
    may_be_ended = not stayed or outcome.delivery == "there"
    if outcome.error not in TRUTHFUL and not (may_be_ended and outcome.error in OF_THE_ENDED):
        return "no such error belongs here"
    if outcome.delivery in ("executed", "there") and call.kind != REFERENCE and ran != 1:
        return "said to have run"
    if outcome.delivery == "not_sent" and call.kind != REFERENCE and ran:
        return "said not to have been sent"
    return None
