"""What the live page is told, who may see it, and how it looks again and again."""

from __future__ import annotations

import re
import threading
from importlib.resources import files
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.observe.simulated import SimulatedObserver

from farcall.errors import NetworkError
from farcall.observe.answering import WorkerEvents
from farcall.observe.dashboard import digest, looks
from farcall.observe.dashboard.looks import Looks
from farcall.observe.rates import rows
from farcall.observe.snapshot import OutgoingCall, PoolView, ServedCall, WorkerSnapshot
from farcall.observe.web_server import names_loopback
from farcall.runtime.observing.event_log import LoggedEvent

PATIENCE_S = 30.0


# ---------------------------------------------------------------------- who may see it


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "localhost"])
def test_a_loopback_name_is_enough(host: str) -> None:
    assert names_loopback(host)


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "", "127.0.0.1.evil.example", "[::1", "[::1].evil", "a@localhost", "10.0.0.1"]
)
def test_other_names_are_refused(host: str) -> None:
    """A page of the internet may have its own name lead to loopback, and read what it gets."""
    assert not names_loopback(host)


# ---------------------------------------------------------------------- what it is told


def test_what_one_look_says() -> None:
    observer = SimulatedObserver(16)
    before, heard = observer.metrics().answers, observer.metrics()
    found = rows(before, heard.answers)
    workers = digest.workers(found, heard.silent)
    assert [worker["rank"] for worker in workers] == list(range(16))
    assert [worker["state"] for worker in workers[-3:]] == ["running", "unresponsive", "gone"]
    pairs = digest.pairs(before, heard.answers)
    assert {pair[0] for pair in pairs} == set(observer.names[:-2])
    calls = sum(one.latency.count for metrics in heard.answers for one in metrics.called)
    assert sum(pair[3] for pair in pairs) == calls
    sent = digest.channels(before, heard.answers)
    assert [one["channel"] for one in sent] == ["shared memory", "tcp", "unix"]
    point = digest.point(5.0, found, sent)
    assert set(point["workers"]) == set(observer.names[:-2])
    assert point["p50"] <= point["p90"] <= point["p99"]
    assert point["calls"] == pytest.approx(sum(worker.get("calls", 0.0) for worker in workers))
    functions = digest.functions(before, heard.answers, 1.0)
    assert len(functions) == 4
    assert functions[0]["threads"] >= functions[-1]["threads"] > 0
    between = digest.functions_between(heard.answers, observer.names[0], "")
    assert sum(one["calls"] for one in between) == sum(one.latency.count for one in heard.answers[0].called)


def test_a_call_is_joined_from_both_ends() -> None:
    observer = SimulatedObserver(16)
    calls = digest.waiting(observer.snapshots().answers)
    assert [call["for_s"] for call in calls] == sorted((call["for_s"] for call in calls), reverse=True)
    assert {call["state"] for call in calls} == {"running"}
    assert calls[0]["at_caller"]["frames"][0] == "/home/me/train.py:57 in step"
    assert calls[0]["at_callee"]["frames"][0] == "/home/me/train.py:112 in main"


def looked_at(calls: list[OutgoingCall], served: list[ServedCall]) -> list[WorkerSnapshot]:
    pool = PoolView(16, 16, 1, 0, 0)
    return [
        WorkerSnapshot("w0", 0, 1000, "here", "running", pool, calls, [], []),
        WorkerSnapshot("w1", 1, 1001, "here", "running", pool, [], served, []),
    ]


TOKENS = OutgoingCall(1, "w1", "tokens", 0.0, 0.0, 0, " (stream, 7 items)")
LATE_TOKENS = OutgoingCall(2, "w1", "tokens", 4.0, 0.0, 5, " (stream, 3 items)")
TRAIN = OutgoingCall(3, "w1", "train", 90.0, 0.0, 5)


def test_a_stream_whose_items_come_does_not_wait() -> None:
    found = digest.waiting(looked_at([TOKENS, LATE_TOKENS, TRAIN], []))
    assert [call["function"] for call in found] == ["train", "tokens (stream, 3 items)"]


def test_streams_and_long_calls_have_their_place_before_they_end() -> None:
    [one] = [one for one in SimulatedObserver(8).metrics().answers if one.rank == 0]
    now = [replace(one, worker="w0", called=[])]
    served = [ServedCall(call.call_id, "w0", call.function, "running", 1.0, 5) for call in (TOKENS, LATE_TOKENS, TRAIN)]
    snapshots = looked_at([TOKENS, LATE_TOKENS, TRAIN], served)
    [[caller, callee, *rates, under_way]] = digest.pairs([], now, snapshots)
    assert (caller, callee, any(rates), under_way) == ("w0", "w1", False, 3)
    between = digest.functions_between(now, "w0", "w1", snapshots)
    assert [(row["function"], row["calls"], row["under_way"]) for row in between] == [("tokens", 0, 2), ("train", 0, 1)]
    rows = digest.functions([], [replace(one, served=[])], 1.0, snapshots)
    assert [(row["function"], row["total"], row["under_way"]) for row in rows] == [("tokens", 0, 2), ("train", 0, 1)]


def test_functions_stay_when_the_load_stops() -> None:
    now = SimulatedObserver(8).metrics().answers
    busy, idle = digest.functions([], now, 1.0), digest.functions(now, now, 1.0)
    assert [row["function"] for row in idle] == [row["function"] for row in busy]
    assert [row["total"] for row in idle] == [row["total"] for row in busy]
    assert [row["p99"] for row in idle] == [row["p99"] for row in busy]
    assert {row["runs"] for row in idle} == {0.0}


def test_a_death_that_everybody_saw_is_told_once() -> None:
    dead = [WorkerEvents(f"w{rank}", [LoggedEvent(100.0 + rank, "dead", "w9", text="silent")]) for rank in range(5)]
    late = WorkerEvents("w8", [LoggedEvent(50.0, "failed", "w1", "f"), LoggedEvent(500.0, "dead", "w9")])
    found = digest.events([*dead, late])
    assert [(event["kind"], event["at"], event["seen_by"]) for event in found] == [
        ("dead", 500.0, ["w8"]),  # another one of that name
        ("dead", 100.0, ["w0", "w1", "w2", "w3", "w4"]),
        ("failed", 50.0, ["w8"]),
    ]
    many = digest.events([WorkerEvents("w0", [LoggedEvent(float(at), "failed", f"w{at}", "f") for at in range(300)])])
    assert [event["at"] for event in many[:2]] == [299.0, 298.0]
    assert len(many) == digest.MOST_EVENTS


# ---------------------------------------------------------------------- again and again


class Blind(SimulatedObserver):
    def metrics(self) -> Any:
        raise NetworkError("it closed the connection")


def test_a_cluster_that_is_lost_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "RETRY_S", 0.01)
    tries: list[str] = []
    again = threading.Event()

    def connect() -> Any:
        tries.append(watched.state(0)["error"])
        if len(tries) == 1:
            raise NetworkError("nobody there")
        if len(tries) == 4:
            again.set()
        return Blind(8)

    watched = Looks(connect)
    watched.start()
    assert again.wait(PATIENCE_S)
    watched.stop()
    assert tries[:3] == ["it has not been looked at yet", "nobody there", "it closed the connection"]


def test_points_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "EVERY_S", 0.01)
    observer = SimulatedObserver(8)
    enough = threading.Event()
    look = observer.events

    def counted() -> Any:
        if len(watched._points) >= 3:
            enough.set()
        return look()

    monkeypatch.setattr(observer, "events", counted)
    watched = Looks(lambda: observer)  # type: ignore[arg-type, return-value]
    watched.start()
    assert enough.wait(PATIENCE_S)
    watched.stop()
    points = watched.state(0)["points"]
    assert [point["number"] for point in points] == list(range(2, 2 + len(points)))
    assert watched.state(points[1]["number"])["points"] == points[2:]


def test_rates_of_pairs_are_of_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Looks(lambda: SimulatedObserver(8))  # type: ignore[arg-type, return-value]
    seen: list[str] = []
    for at, name in ((0.0, "a"), (3.0, "b"), (9.0, "c"), (12.0, "d"), (30.0, "e"), (31.0, "f")):
        monkeypatch.setattr(looks, "monotonic", lambda at=at: at)
        seen.append("".join(watched._some_time_ago([name])))  # type: ignore[list-item, arg-type]
    assert seen == ["", "a", "a", "a", "d", "d"]


# ---------------------------------------------------------------------- the page


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    """Nor does it make markup of names: those are the user's."""
    for file in (files("farcall.observe.dashboard") / "page").iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)^\s*//.*$|\s//\s.*$", "", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file.name
