"""The tables of states that the machines look up: complete, and the same as those that are written for readers."""

from __future__ import annotations

import re

from farcall.protocol import membership
from farcall.protocol.departure import events as departure
from farcall.protocol.departure.machine import ACTIONS, DepartureState
from farcall.protocol.membership.machine import TRANSITIONS, State
from farcall.protocol.membership.messages import Status, precedence
from farcall.protocol.membership.table import CHANGES


def rows(text: str | None, heading: str) -> list[list[str]]:
    """The rows of the table below ``heading`` in a docstring, by columns."""
    assert text is not None
    table = text.split(heading, 1)[1].split("\n\n")[1]
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]


def test_a_member_becomes_what_its_table_says() -> None:
    written = {(row[0], row[2]) for row in rows(membership.__doc__, "And of itself:") if row[2] != "-"}
    moves = {(state.value, after.value) for state, row in TRANSITIONS.items() for after in row.values()}
    assert {(before, after) for before, after in moves if before != after} == written


def test_every_state_of_a_member_has_a_row_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {State.NEW, *(after for row in TRANSITIONS.values() for after in row.values())} == set(State)


def test_every_claim_that_can_be_later_has_its_change() -> None:
    """A claim is later if its precedence is higher, for some version that the member itself may have reached."""
    later: set[tuple[Status | None, Status]] = {(None, claim) for claim in Status}
    later |= {(was, claim) for was in Status for claim in Status if precedence(claim, 1) > precedence(was, 0)}
    assert set(CHANGES) == later


def test_what_is_written_of_others_is_what_the_table_does() -> None:
    statuses: dict[str, list[Status | None]] = {status.name.lower(): [status] for status in Status}
    statuses["unknown"] = [None]
    statuses["a member"] = [Status.ALIVE, Status.UNRESPONSIVE]
    for row in rows(membership.__doc__, "What a member holds of another incarnation:")[1:]:
        if row[2] in statuses:
            (after,) = statuses[row[2]]
            assert after is not None
            assert all((was, after) in CHANGES for was in statuses[row[0]]), row


def test_every_state_of_a_departure_has_a_row_and_every_message_a_place_in_one() -> None:
    assert set(ACTIONS) == set(DepartureState)
    handled = {kind for row in ACTIONS.values() for kind in row}
    assert handled >= {departure.LocalEntered, departure.LocalIdle, departure.LocalBusy, departure.PeerGone}
    assert handled >= set(departure.DepartureMessage.__args__)
