"""What is kept of what happened: all of the counts, and the latest events."""

from __future__ import annotations

from farcall.runtime.observing.event_log import FAILED, MOST_CHARACTERS, MOST_EVENTS, EventLog


def test_repetitions_are_one_event_and_all_of_them_count() -> None:
    chronicle = EventLog()
    chronicle.note("dead", "w1", text="it does not answer")
    for number in range(3 * MOST_EVENTS):
        chronicle.note(FAILED, "w2", "f", f"ValueError: {number}")
    dead, failed = chronicle.latest()
    assert (dead.kind, dead.worker, dead.text, dead.times) == ("dead", "w1", "it does not answer", 1)
    assert (failed.what, failed.text, failed.times) == ("f", f"ValueError: {3 * MOST_EVENTS - 1}", 3 * MOST_EVENTS)
    assert chronicle.count(FAILED) == 3 * MOST_EVENTS
    assert chronicle.count("joined") == 0


def test_the_oldest_go_first_and_no_text_is_endless() -> None:
    chronicle = EventLog()
    for number in range(MOST_EVENTS + 1):
        chronicle.note(FAILED, "w1", f"f{number}", "x" * 10_000)
    events = chronicle.latest()
    assert [event.what for event in events] == [f"f{number}" for number in range(1, MOST_EVENTS + 1)]
    assert {len(event.text) for event in events} == {MOST_CHARACTERS}
