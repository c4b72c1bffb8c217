"""The meeting over a store in memory: several ranks as threads, no sockets."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.kit.stopped_clock import StoppedClock
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

from farcall.errors import BadRank, DuplicateName, InitError, MissingPeers, WrongSecret
from farcall.node import Node
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.protocol.member import Member, new_incarnation
from farcall.runtime.io import bounded_call
from farcall.runtime.rendezvous import missing_notice
from farcall.runtime.rendezvous import static as meeting
from farcall.runtime.rendezvous import store as stores
from farcall.runtime.rendezvous.agreement import Abandoned, Formed, Membership, Slot, as_text
from farcall.runtime.rendezvous.dynamic import Meeting
from farcall.runtime.rendezvous.meeting_place import MeetingPlace, find_meeting_place
from farcall.runtime.rendezvous.records import Proofs, Records, secret_of
from farcall.secret import Secret

PLACE = "file:///nowhere/in/particular"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One store in memory that every ``join`` of a test meets at."""
    shared = dist.HashStore()
    monkeypatch.setattr(meeting, "open_store", lambda place, deadline, cancelled: shared)
    monkeypatch.setattr(meeting, "_DEAD_S", 2.0)
    monkeypatch.setattr(meeting, "_BEAT_S", 0.1)
    return shared


def join(
    name: str, rank: int, world_size: int | None, options: RpcBackendOptions, addresses: list[str], host_token: str = ""
) -> Membership:
    """Meet the others as ``name``."""
    place = find_meeting_place(rank, world_size, options.init_method)
    me = Member(name, place.rank, new_incarnation(secrets.randbits(62)), tuple(addresses), host_token)
    return meeting.join(place, me, options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedClock:
    return StoppedClock(monkeypatch)


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Membership]]]:
    """Start a ``join`` on a thread of its own."""
    with ThreadPoolExecutor(32) as pool:

        def start_join(
            name: str, rank: int, world_size: int, timeout_s: float = LONG_S, **more: Any
        ) -> Future[Membership]:
            options = RpcBackendOptions(None, PLACE, start_timeout_s=timeout_s, **more)
            return pool.submit(join, name, rank, world_size, options, [f"tcp://127.0.0.1:{rank + 1}"], "token")

        yield start_join


def settle(futures: list[Future[Membership]]) -> list[Membership | BaseException]:
    return [future.exception(2 * LONG_S) or future.result() for future in futures]


def joined(futures: list[Future[Membership]]) -> list[Membership]:
    return [future.result(2 * LONG_S) for future in futures]


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("is_launched", [False, True])
def test_who_waits_is_told_for_whom_and_once(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_launched: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_launched))
    monkeypatch.setattr(missing_notice, "SPEAK_AFTER_S", 0.0)
    first = start("w0", 0, 3)
    wait_until(lambda: "waits at" in caplog.text)
    joined([first, start("w1", 1, 3), start("w2", 2, 3)])
    told = [record.getMessage() for record in caplog.records if "rank 0 of 3" in record.getMessage()]
    assert len(told) == 1
    assert "for rank 1, rank 2, " in told[0]
    assert ("`farcall run --workers 3 PROGRAM`" in told[0]) is not is_launched
    assert ("What started this one" in told[0]) is is_launched


@pytest.mark.parametrize("size", [1, 2, 16])
def test_everybody_gets_the_same_table(store: Any, start: Any, size: int) -> None:
    memberships = joined([start(f"w{rank}", rank, size) for rank in reversed(range(size))])
    tables = [m.members for m in memberships]
    assert all(table == tables[0] for table in tables)
    assert [(m.name, m.rank, m.addresses, m.host_token) for m in tables[0]] == [
        (f"w{rank}", rank, (f"tcp://127.0.0.1:{rank + 1}",), "token") for rank in range(size)
    ]
    assert len({m.cluster_id for m in memberships}) == 1
    assert len({m.secret.values for m in memberships}) == 1
    assert len(memberships[0].secret.values[0]) == 32
    assert all(m.store is not None for m in memberships), "the file stays while there are members"
    assert sorted(m.rank for m in memberships) == list(range(size))
    assert len({record.incarnation for record in tables[0]}) == size


def test_little_is_left_in_the_store(store: Any, start: Any) -> None:
    first, _ = joined([start("a", 0, 2), start("b", 1, 2)])
    left = {key: store.get(key) for key in ("farcall/0/generation", "farcall/0/0/outcome", "farcall/0/0/table")}
    assert store.num_keys() == len(left)
    assert first.secret.values[0].hex() not in repr(first)


@pytest.mark.parametrize("given", ["known to all of us", None])
def test_no_secret_is_ever_written_to_the_store(store: Any, start: Any, given: str | None) -> None:
    written: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                written.extend(str(argument) for argument in args)
                return getattr(store, name)(*args)

            return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "open_store", lambda *_: Recorder())
        one, two = joined([start(n, r, 2, secret=given) for r, n in enumerate("ab")])
    assert one.secret.values == two.secret.values
    if given is not None:
        assert one.secret.given() == (given.encode(),)
    assert one.cluster_id
    assert written
    assert not any(one.secret.values[0].hex() in text or str(given) in text for text in written)


def test_meeting_again_is_another_generation(store: Any, start: Any) -> None:
    key, clusters = "farcall/0/generation", set()
    for next_generation in (1, 2, 3, 4, 5):
        one, _ = joined([start("a", 0, 2), start("b", 1, 2)])
        assert int(Proofs(one.secret, True, "here").open(key, store.get(key))) == next_generation
        clusters.add(one.cluster_id)
    assert len(clusters) == 5


def test_another_size_and_another_rank_the_next_time(store: Any, start: Any) -> None:
    joined([start("a", 0, 2), start("b", 1, 2)])
    again = joined([start("b", 0, 3), start("c", 1, 3), start("a", 2, 3)])
    assert [m.name for m in again[0].members] == ["b", "c", "a"]


def test_one_runs_ahead_into_the_next_meeting(store: Any, start: Any) -> None:
    def twice(rank: int) -> list[Membership]:
        return [start(f"w{rank}", rank, 3).result(2 * LONG_S) for _ in range(10)]

    with ThreadPoolExecutor(3) as pool:
        results = [future.result(4 * LONG_S) for future in [pool.submit(twice, rank) for rank in range(3)]]
    for meetings in zip(*results, strict=True):
        assert len({m.cluster_id for m in meetings}) == 1


# ---------------------------------------------------------------- disagreement


def test_a_duplicate_name_fails_everybody_and_a_retry_works(store: Any, start: Any) -> None:
    for outcome in settle([start("same", 0, 3), start("other", 1, 3), start("same", 2, 3)]):
        assert isinstance(outcome, DuplicateName)
        assert "'same' is not unique: ranks 0 and 2" in str(outcome)
    assert len(joined([start("x", 0, 3), start("y", 1, 3), start("z", 2, 3)])[0].members) == 3


def test_a_duplicate_name_is_named_even_if_others_are_missing(store: Any, start: Any) -> None:
    start("same", 1, 3, 12.0)
    with pytest.raises(DuplicateName, match="ranks 0 and 1"):
        start("same", 0, 3, 4.0).result(2 * LONG_S)


def test_a_second_process_with_one_rank_is_told_and_does_no_harm(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_DEAD_S", LONG_S)  # on a busy machine the first one may stand still for a while
    first = start("first", 1, 3)
    zero = start("zero", 0, 3)
    wait_until(lambda: store.check(["farcall/0/0/slot/1"]))
    with pytest.raises(BadRank, match=r"rank 1 is taken by another process, 'first'.*'second'"):
        start("second", 1, 3).result(2 * LONG_S)
    assert [m.name for m in joined([start("two", 2, 3), zero, first])[0].members] == ["zero", "first", "two"]


def test_sizes_that_differ_are_told_to_all(store: Any, start: Any) -> None:
    for outcome in settle([start("a", 0, 2), start("b", 1, 3)]):
        assert isinstance(outcome, BadRank)
        assert "world_size=2" in str(outcome)
        assert "world_size=3" in str(outcome)


def test_a_size_that_differs_is_told_where_a_member_waits_for_more(store: Any, start: Any) -> None:
    other = start("b", 1, 2, 6.0)
    wait_until(lambda: store.check(["farcall/0/0/slot/1"]))
    outcomes = settle([start("a", 0, 3, 1.0), other])
    assert isinstance(outcomes[0], BadRank)
    assert "world_size=2" in str(outcomes[0])


def test_a_secret_at_one_only_is_told_to_all(store: Any, start: Any) -> None:
    began = time.monotonic()
    first, second = settle([start("a", 0, 3, 60), start("b", 1, 3, 60, secret="something only known to b")])
    assert time.monotonic() - began < AT_ONCE_S
    assert isinstance(first, WrongSecret)
    assert "rank 1, which calls itself 'b', was given another secret, and this process none" in str(first)
    assert isinstance(second, WrongSecret)
    assert "rank 0, which calls itself 'a', was given no secret" in str(second)
    assert "set the same FARCALL_SECRET" in str(first)


@pytest.mark.parametrize("reason", [WrongSecret, MissingPeers])
def test_rank_0_keeps_the_store_until_the_others_know_why_it_gave_up(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch, reason: type[InitError]
) -> None:
    """Rank 0 may host the store: a slow member would find it gone, and wait for another in vain."""
    written, go_on = threading.Event(), threading.Event()

    class Slow:
        """The store as rank 1 sees it: as soon as its record is in, rank 1 stands still."""

        def __getattr__(self, name: str) -> Any:
            if written.is_set():
                assert go_on.wait(LONG_S)
            return getattr(store, name)

        def compare_set(self, key: str, *values: str) -> bytes:
            result: bytes = store.compare_set(key, *values)
            if key.endswith("/slot/1"):
                written.set()
            return result

    monkeypatch.setattr(meeting, "open_store", lambda place, *_: Slow() if place.rank == 1 else store)
    for bound in ("_FAREWELL_S", "_LATE_S"):
        monkeypatch.setattr(meeting, bound, LONG_S)
    if reason is WrongSecret:
        own, theirs, size, times_s = "something only known to a", "something only known to b", 2, (LONG_S, LONG_S)
    else:
        own, theirs, size, times_s = "known to both of them", "known to both of them", 3, (0.3, 5.0)
    other = start("b", 1, size, times_s[1], secret=theirs)
    assert written.wait(LONG_S)
    first = start("a", 0, size, times_s[0], secret=own)
    wait_until(lambda: store.check(["farcall/0/0/outcome"]))
    with pytest.raises(TimeoutError):
        first.result(1.3)
    go_on.set()
    assert [type(outcome) for outcome in settle([first, other])] == [reason, reason]


def test_without_a_secret_members_of_other_users_or_machines_are_not_met(
    store: Any, start: Any, tmp_path: Path
) -> None:
    elsewhere = ObservingOptions(runtime_directory=str(tmp_path / "another machine's"))
    for outcome in settle([start("a", 0, 2, 60), start("b", 1, 2, 60, observing=elsewhere)]):
        assert isinstance(outcome, WrongSecret)
        assert "no secret, on another machine or by another user, and this process none" in str(outcome)


def test_where_no_key_can_be_kept_private_a_secret_is_asked_for(start: Any, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(InitError, match=r"set the same FARCALL_SECRET"):
        start("a", 0, 1, observing=ObservingOptions(runtime_directory=str(open_to_all))).result(2 * LONG_S)


# ---------------------------------------------------------------- strangers at the store

STRANGER = Proofs(Secret(b"what the stranger has"), True, "here")


def as_strangers(key: str, value: Any) -> str:
    """A record as somebody without the secret would write it."""
    return STRANGER.seal(key, as_text(value))


STRANGERS_ADDRESS = Member("a", 0, 0x4F, ("tcp://stranger:1",))
STRANGERS_SLOT = Slot(STRANGERS_ADDRESS, 2, True, "cluster of the stranger")


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("generation", 7),
        ("0/slot/0", STRANGERS_SLOT),
        ("0/table", (STRANGERS_SLOT, STRANGERS_SLOT)),
        ("0/outcome", Formed((STRANGERS_SLOT, STRANGERS_SLOT))),
        ("0/outcome", Abandoned(STRANGERS_ADDRESS, True, (1,))),
    ],
)
def test_nothing_that_a_stranger_writes_to_the_store_is_believed(store: Any, start: Any, what: str, value: Any) -> None:
    """Rank 1 would dial the stranger, which relays the handshake to rank 0, and then has a connection to both."""
    key = f"farcall/0/{what}"
    store.set(key, as_strangers(key, value))
    outcome = settle([start("b", 1, 2, 60, secret="what the members have")])[0]
    assert isinstance(outcome, WrongSecret)
    assert "stranger:1" not in str(outcome)


def test_a_record_counts_only_under_its_own_key(store: Any, start: Any) -> None:
    """A confirmation by rank 0 is none by rank 1, and what was agreed in one generation is nothing in the next."""
    secret = "what the members have"
    joined([start("a", 0, 2, secret=secret), start("b", 1, 2, secret=secret)])
    store.set("farcall/0/1/outcome", store.get("farcall/0/0/outcome"))
    assert isinstance(settle([start("b", 1, 2, 60, secret=secret)])[0], WrongSecret)


def test_of_two_successors_of_one_member_later_ones_find_both(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them is let in, and that need not be the one that wrote last."""
    joined([start("a", 0, 2), start("b", 1, 2)])
    asked: list[list[str]] = []

    def is_there(found: Meeting, *_: object) -> bool:
        asked.append([member.name for member in found.members])
        return True

    monkeypatch.setattr(meeting, "is_there", is_there)
    settle([start("let in", 1, 2), start("too late", 1, 2)])
    settle([start("next", 0, 2)])
    assert sorted(asked[-1]) == ["b", "let in", "too late"]


# ---------------------------------------------------------------- absence


def test_missing_peers_are_named_in_time_and_a_retry_works(store: Any, start: Any, clock: StoppedClock) -> None:
    both = [start("a", 0, 4), start("c", 2, 4)]
    for name in ("a", "c"):
        clock.wait_until_waits(name)
    clock.turn(LONG_S)
    outcomes = settle(both)
    for outcome in outcomes:
        assert isinstance(outcome, MissingPeers)
        assert outcome.missing == (1, 3)
        assert "missing: rank 1, rank 3" in str(outcome)
    assert len(joined([start(f"w{rank}", rank, 4) for rank in range(4)])[0].members) == 4


def hasty_gives_up(start: Any, clock: StoppedClock) -> tuple[Future[Membership], Future[Membership]]:
    """Of two that wait for a third; the patient one has as much time again."""
    patient, hasty = start("patient", 1, 3, 2 * LONG_S), start("hasty", 0, 3, LONG_S)
    for name in ("patient", "hasty"):
        clock.wait_until_waits(name)
    clock.turn(LONG_S)
    return patient, hasty


def test_who_is_patient_meets_the_others_later(store: Any, start: Any, clock: StoppedClock) -> None:
    """One gives up; the other goes on waiting and meets whoever comes afterwards, also who tries again."""
    patient, hasty = hasty_gives_up(start, clock)
    with pytest.raises(MissingPeers) as caught:
        hasty.result(2 * LONG_S)
    assert caught.value.missing == (2,)
    members = joined([patient, start("hasty", 0, 3), start("late", 2, 3)])[0].members
    assert [m.name for m in members] == ["hasty", "patient", "late"]


def test_who_gave_up_is_named_by_those_who_waited_longer(store: Any, start: Any, clock: StoppedClock) -> None:
    patient, hasty = hasty_gives_up(start, clock)
    with pytest.raises(MissingPeers):
        hasty.result(2 * LONG_S)
    clock.turn(LONG_S)
    with pytest.raises(MissingPeers, match=r"missing: rank 2; rank 0 \(hasty\) came and gave up") as caught:
        patient.result(4 * LONG_S)
    assert caught.value.missing == (2,)


def test_who_would_soon_give_up_anyway_leaves_with_rank_0(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All started together, and one is missing: nobody asks the store that ends with rank 0, which torch would log."""
    rank_0_left = threading.Event()

    class HostedByRank0:
        def __getattr__(self, name: str) -> Any:
            if rank_0_left.is_set():
                raise stores.StoreLost("its server has ended")
            return getattr(store, name)

    monkeypatch.setattr(meeting, "open_store", lambda place, *_: HostedByRank0() if place.rank == 1 else store)
    monkeypatch.setattr(meeting, "_FAREWELL_S", LONG_S)
    monkeypatch.setattr(meeting, "_LATE_S", LONG_S)
    second = start("b", 1, 3, 3.0)
    wait_until(lambda: store.check(["farcall/0/0/slot/1"]))
    with pytest.raises(MissingPeers):
        start("a", 0, 3, 2.8).result(2 * LONG_S)
    rank_0_left.set()
    with pytest.raises(MissingPeers, match=r"missing: rank 2; rank 0 \(a\) came and gave up") as caught:
        second.result(2 * LONG_S)
    assert caught.value.missing == (2,)


def stale_slot(name: str, rank: int, world_size: int) -> str:
    slot = Slot(Member(name, rank, 0xDEAD, ("tcp://dead:1",)), world_size, False, "dead")
    secret = secret_of(RpcBackendOptions(init_method=PLACE))
    return Proofs(secret, False, PLACE).seal(f"farcall/0/0/slot/{rank}", as_text(slot))


def test_a_dead_process_leaves_no_trace_in_the_table(store: Any, start: Any) -> None:
    """All ranks of an earlier job were killed while they waited: their records are still in the store."""
    for rank in range(2):
        store.set(f"farcall/0/0/slot/{rank}", stale_slot(f"dead{rank}", rank, 3))
    members = joined([start(f"w{rank}", rank, 3) for rank in (2, 1, 0)])[0].members
    assert [m.name for m in members] == ["w0", "w1", "w2"]


def test_a_dead_record_never_completes_a_table(store: Any, start: Any) -> None:
    store.set("farcall/0/0/slot/1", stale_slot("dead", 1, 2))
    with pytest.raises(MissingPeers, match="these do not answer") as caught:
        start("alive", 0, 2, 1.5).result(2 * LONG_S)
    assert caught.value.missing == ("dead",)


def test_a_store_that_breaks_is_opened_again(monkeypatch: pytest.MonkeyPatch, store: Any, start: Any) -> None:
    broken = dist.HashStore()
    opened: list[int] = []

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            if len(opened) == 1 and broken.add("calls", 1) > 12:
                raise RuntimeError("Connection was likely closed\nand a long stack")
            return getattr(broken, name)

    def open_store(place: MeetingPlace, *_: object) -> Any:
        if place.rank == 1:
            opened.append(1)
            if len(opened) == 1:
                return Breaking()
        return store

    monkeypatch.setattr(meeting, "open_store", open_store)
    assert len(joined([start("a", 0, 2), start("b", 1, 2)])) == 2
    assert len(opened) == 2


def test_a_store_that_stays_away_is_told_in_time(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    def open_store(*_: object) -> Any:
        raise stores.StoreLost("Connection refused\nstack")

    monkeypatch.setattr(meeting, "open_store", open_store)
    with pytest.raises(MissingPeers, match=r"the store went away \(Connection refused\)") as caught:
        start("b", 1, 2, 2.0).result(2 * LONG_S)
    assert caught.value.missing == (0,)


def test_a_store_that_hangs_is_told_in_time(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    released = threading.Event()

    def open_store(*_: object) -> Any:
        released.wait(2 * LONG_S)
        raise stores.StoreLost("too late")

    monkeypatch.setattr(meeting, "open_store", open_store)
    monkeypatch.setattr(meeting, "_LATE_S", 0.0)
    monkeypatch.setattr(bounded_call, "GRACE_S", 0.2)
    try:
        with pytest.raises(InitError, match="does not answer"):
            start("b", 1, 2, 0.3).result(2 * LONG_S)
    finally:
        released.set()


def test_no_thread_is_left(store: Any, start: Any) -> None:
    joined([start("a", 0, 2), start("b", 1, 2)])
    settle([start("a", 0, 2, 0.1)])
    wait_until(lambda: not any(thread.name == "farcall-rendezvous" for thread in threading.enumerate()))


# ---------------------------------------------------------------- what the store is asked


class Counted:
    """A store that counts the questions, by kind and by the last part of the first key."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.questions: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            key = args[0] if args and isinstance(args[0], str) else args[0][0] if args and args[0] else ""
            self.questions[f"{name} {key.rpartition('/')[2]}"] += 1
            return getattr(self._store, name)(*args)

        return ask


def test_a_table_is_read_once_however_long_others_take_to_confirm_it(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a record of each member, and each of them reads it."""
    monkeypatch.setattr(meeting, "_BEAT_S", LONG_S)
    counted = Counted(store)
    monkeypatch.setattr(meeting, "open_store", lambda *_: counted)
    store.set("farcall/0/0/slot/1", stale_slot("dead", 1, 2))
    assert isinstance(settle([start("alive", 0, 2, 2.0)])[0], MissingPeers)
    assert counted.questions["check outcome"] > 2, "it waited"
    assert counted.questions["get table"] == 1


def test_a_table_in_which_a_slot_changed_hands_is_put_up_and_confirmed_anew(store: Any, start: Any) -> None:
    store.set("farcall/0/0/slot/1", stale_slot("dead", 1, 2))
    first = start("w0", 0, 2, LONG_S)
    wait_until(lambda: store.check(["farcall/0/0/table"]))
    assert [member.name for member in joined([first, start("w1", 1, 2, LONG_S)])[0].members] == ["w0", "w1"]


def test_who_waits_writes_nothing_while_no_rank_is_contested(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a file each member reads all that any other has written."""
    monkeypatch.setattr(meeting, "_BEAT_S", 0.01)
    monkeypatch.setattr(meeting, "_DEAD_S", LONG_S)
    counted = Counted(store)
    monkeypatch.setattr(meeting, "open_store", lambda *_: counted)
    first = start("w0", 0, 2, LONG_S)
    wait_until(lambda: counted.questions["check contests"] > 5)
    assert not counted.questions["add 0"]
    monkeypatch.setattr(meeting, "open_store", lambda *_: store)
    with pytest.raises(BadRank):
        join("w0again", 0, 2, RpcBackendOptions(None, PLACE, start_timeout_s=LONG_S), [])
    assert counted.questions["add 0"]
    joined([first, start("w1", 1, 2, LONG_S)])


def test_in_a_crowd_only_rank_0_looks_at_all_slots(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing_notice, "SPEAK_AFTER_S", 0.0)
    monkeypatch.setattr(meeting, "_CROWD", 2)
    counted = Counted(store)
    monkeypatch.setattr(meeting, "open_store", lambda place, *_: counted if place.rank == 1 else store)
    second = start("w1", 1, 4, LONG_S)
    wait_until(lambda: "rank 1 of 4 waits" in caplog.text)
    first = start("w0", 0, 4, LONG_S)
    wait_until(lambda: "rank 0 of 4 waits" in caplog.text)
    joined([first, second, start("w2", 2, 4, LONG_S), start("w3", 3, 4, LONG_S)])
    told = {record.args[0]: record.getMessage() for record in caplog.records if record.args}  # type: ignore[index]
    assert " for rank 0, " in told[1]
    assert " for rank 2, rank 3, " in told[0] or " for rank 1, rank 2, rank 3, " in told[0]
    asked = {question for question in counted.questions if question.split()[-1] in ("2", "3")}
    assert not asked


def test_members_of_a_crowd_look_at_the_store_as_often_as_a_few_would() -> None:
    def waits(rank: int, size: int) -> tuple[float, float]:
        options = RpcBackendOptions(None, PLACE)
        place = find_meeting_place(rank, size, PLACE)
        one = meeting.StaticRendezvous(place, Member("w", rank, 1, ("tcp://127.0.0.1:1",)), options)
        pauses = one._pauses()
        return max(pauses.next_s() for _ in range(40)), one._beat_s

    pause_s, beat_s = waits(1, 2)
    assert waits(1, 64) == (pause_s, beat_s)
    assert waits(1, 640) == pytest.approx((10 * pause_s, 10 * beat_s))
    assert waits(0, 640) == pytest.approx((pause_s, 10 * beat_s)), "all wait for rank 0"


@pytest.mark.parametrize(("missing", "most"), [((), 1), ((517,), 21), ((0, 1, 2, 1023), 42), (range(1024), 2047)])
def test_who_is_there_takes_few_questions_where_few_are_missing(missing: Collection[int], most: int) -> None:
    keys = [f"slot/{rank}" for rank in range(1024)]
    store = dist.HashStore()
    for rank, key in enumerate(keys):
        if rank not in missing:
            store.set(key, "here")
    counted = Counted(store)
    proofs = Proofs(Secret(b"known to all of us"), True, PLACE)
    assert Records(counted, proofs).there(keys) == [key for rank, key in enumerate(keys) if rank not in missing]
    assert counted.questions.total() <= most


def test_a_record_that_is_deleted_while_it_is_read_is_not_there() -> None:
    """Whoever gives up deletes its own, at the moment at which the others look who is missing."""
    proofs = Proofs(Secret(b"known to all of us"), True, PLACE)

    class Deleting:
        def __init__(self) -> None:
            self.store = dist.HashStore()
            self.store.set_timeout(timedelta(milliseconds=10))
            for key in "ab":
                self.store.set(key, proofs.seal(key, key))

        def __getattr__(self, name: str) -> Any:
            if name in ("get", "multi_get", "compare_set"):
                self.store.delete_key("b")
            return getattr(self.store, name)

    assert Records(Deleting(), proofs).read("b") is None
    assert Records(Deleting(), proofs).read_all(["a", "b"]) is None
    assert Records(Deleting(), proofs).look(["a", "b"]) == {"a": b"a"}


@pytest.mark.parametrize("name", ["", "two words", "x" * 128])
def test_a_bad_name_is_refused_before_anything_happens(name: str) -> None:
    with pytest.raises(ValueError, match="names are"):
        Node(name, rank=0, world_size=1, options=RpcBackendOptions())


def test_a_file_in_a_directory_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(InitError, match="the directory /not/there does not exist"):
        join("a", 0, 1, RpcBackendOptions(init_method="file:///not/there/store"), [])
