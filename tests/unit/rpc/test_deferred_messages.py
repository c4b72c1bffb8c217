"""Messages wait for word of the owners of their references, and behind each other where they call one object."""

from __future__ import annotations

from typing import Any

from farcall.ids import ForkId, RefId
from farcall.protocol.frames import REQUEST, RESPONSE, Frame
from farcall.protocol.notes import KEEP, REFUSED, Notes, encode_notes
from farcall.protocol.references.messages import Fork
from farcall.rpc.deferred_messages import UNKNOWN_OWNER_S, DeferredMessages
from farcall.runtime.io.timers import NEVER

ME, KNOWN, STRANGER = 0, 1, 2
ACTOR = RefId(ME, 7)


def message(owner: int | None = None, serial: RefId | None = None) -> Frame:
    forks = [] if owner is None else [Fork(RefId(owner, 1), ForkId(owner, 2), owner, ME, KNOWN)]
    frame = Frame(REQUEST, notes=encode_notes(Notes(forks, serial=serial)))
    frame.serial = serial
    return frame


def frames(deferred: DeferredMessages, known: set[int], now: float) -> list[Frame]:
    return [one.frame for one in deferred.take_ready(known, now)[0]]


def test_a_message_waits_for_its_owner_or_for_its_time() -> None:
    peer: Any = object()
    deferred = DeferredMessages()
    heard, unheard = message(KNOWN), message(STRANGER)
    assert not deferred
    assert deferred.add(peer, heard, 10.0) == 10.0 + UNKNOWN_OWNER_S
    deferred.add(peer, unheard, 11.0)
    assert deferred.next_deadline(11.0) == 10.0 + UNKNOWN_OWNER_S
    assert frames(deferred, set(), 11.0) == []
    assert frames(deferred, {KNOWN}, 11.0) == [heard]
    ready, owners = deferred.take_ready({KNOWN}, 11.0 + UNKNOWN_OWNER_S)
    assert ([one.frame for one in ready], owners) == ([unheard], {STRANGER})
    assert not deferred
    assert deferred.next_deadline(20.0) == NEVER


def test_calls_of_one_object_keep_their_order_also_while_they_are_read() -> None:
    peer: Any = object()
    deferred = DeferredMessages()
    first, second, third = message(STRANGER, ACTOR), message(serial=ACTOR), message(serial=ACTOR)
    deferred.add(peer, first, 0.0)
    assert deferred.is_behind(peer, second)
    deferred.add(peer, second, 1.0)
    [on_its_way, next_one] = deferred.take_ready({STRANGER}, 1.0)[0]
    assert (on_its_way.frame, next_one.frame) == (first, second)
    assert not deferred.is_behind(peer, first)
    assert deferred.is_behind(peer, third)
    deferred.add(peer, third, 2.0)
    assert frames(deferred, {STRANGER}, 2.0 + UNKNOWN_OWNER_S) == []
    assert deferred.next_deadline(2.0 + UNKNOWN_OWNER_S) == NEVER  # not "at once", again and again
    deferred.read(on_its_way)
    deferred.read(next_one)
    assert frames(deferred, {STRANGER}, 3.0) == [third]


def test_other_objects_and_other_callers_do_not_wait() -> None:
    one: Any = object()
    another: Any = object()
    deferred = DeferredMessages()
    deferred.add(one, message(STRANGER, ACTOR), 0.0)
    assert not deferred.is_behind(another, message(serial=ACTOR))
    assert not deferred.is_behind(one, message(serial=RefId(ME, 8)))
    free = message(KNOWN)
    deferred.add(one, free, 0.0)
    assert frames(deferred, {KNOWN}, 1.0) == [free]


def test_a_call_that_is_cancelled_while_it_waits_will_not_run() -> None:
    caller: Any = object()
    another: Any = object()
    deferred = DeferredMessages()
    cancelled, wanted, answer, creating = (message(STRANGER) for _ in range(4))
    cancelled.call_id, wanted.call_id, answer.call_id, creating.call_id = 1, 2, 1, 3
    answer.kind, creating.flags = RESPONSE, KEEP
    others = message(STRANGER)
    others.call_id = 1
    for sender, frame in (
        (caller, cancelled),
        (caller, wanted),
        (caller, answer),
        (caller, creating),
        (another, others),
    ):
        deferred.add(sender, frame, 0.0)
    deferred.cancel(caller, 1)
    assert [frame.flags for frame in (cancelled, wanted, answer, others)] == [REFUSED, 0, 0, 0]
    assert frames(deferred, {STRANGER}, 1.0) == [cancelled, wanted, answer, creating, others]  # references count


def test_no_call_of_a_peer_that_is_gone_will_run() -> None:
    caller: Any = object()
    another: Any = object()
    deferred = DeferredMessages()
    first, creating, others = message(STRANGER), message(STRANGER), message(STRANGER)
    creating.flags = KEEP
    deferred.add(caller, first, 0.0)
    deferred.add(caller, creating, 0.0)
    deferred.add(another, others, 0.0)
    deferred.cancel(caller, None)
    assert [frame.flags for frame in (first, creating, others)] == [REFUSED, KEEP, 0]
