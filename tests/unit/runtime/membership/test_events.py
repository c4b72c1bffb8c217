"""Who hears of members that come and go, from when on, and until when."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from farcall.ids import WorkerInfo
from farcall.runtime.membership.events import MemberEvent, MemberEvents


class AtOnce:
    """An executor that runs what it is given."""

    def submit(self, task: Any) -> None:
        task.run(False)


def event(kind: str) -> MemberEvent:
    return MemberEvent(kind, WorkerInfo("w1", 1), "1f")


@pytest.fixture
def changes() -> MemberEvents:
    return MemberEvents(AtOnce())  # type: ignore[arg-type]


def test_callbacks_hear_in_order_and_until_they_end_it(changes: MemberEvents) -> None:
    heard: list[str] = []
    end = changes.subscribe(lambda event: heard.append(event.kind))
    changes.tell(event("joined"))
    changes.tell(event("unresponsive"))
    end()
    end()
    changes.tell(event("dead"))
    assert heard == ["joined", "unresponsive"]


def test_a_callback_that_fails_keeps_nothing_from_the_others(changes: MemberEvents) -> None:
    heard: list[str] = []

    def fail(event: MemberEvent) -> None:
        raise ValueError("for the test")

    changes.subscribe(fail)
    changes.subscribe(lambda event: heard.append(event.kind))
    changes.tell(event("joined"))
    assert heard == ["joined"]


def test_an_iterator_has_what_happened_since_it_was_made(changes: MemberEvents) -> None:
    async def listen() -> list[str]:
        events = changes.iterate()
        changes.tell(event("joined"))  # before anybody looks
        heard = [(await anext(events)).kind]
        changes.tell(event("dead"))
        changes.end()
        return heard + [event.kind async for event in events]

    assert asyncio.run(listen()) == ["joined", "dead"]


def test_an_iterator_wakes_up_and_ends_with_the_node(changes: MemberEvents) -> None:
    async def listen() -> list[str]:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, changes.tell, event("joined"))
        loop.call_later(0.02, changes.end)
        return [event.kind async for event in changes.iterate()]

    assert asyncio.run(listen()) == ["joined"]
    assert asyncio.run(listen()) == []


def test_an_iterator_that_nobody_looks_at_is_forgotten(changes: MemberEvents) -> None:
    changes.iterate()
    gc.collect()
    assert changes._callbacks == []
