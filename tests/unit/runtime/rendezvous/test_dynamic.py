"""The way into a group whose store, or whose members, come and go meanwhile."""

from __future__ import annotations

import socket
import threading
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

from farcall.errors import BadRank, MissingPeers, WrongSecret
from farcall.options import RpcBackendOptions
from farcall.protocol.connector import Ended, Outcome, Step
from farcall.protocol.hello import Connect, Hello, Listen
from farcall.protocol.member import Member
from farcall.runtime.io import bounded_call
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.dialler import Dialler, Found
from farcall.runtime.rendezvous.contacts import Contacts as ContactList
from farcall.runtime.rendezvous.contacts import Group
from farcall.runtime.rendezvous.dynamic import Meeting, Search, _Newcomer, is_there
from farcall.runtime.rendezvous.meeting_place import MeetingPlace
from farcall.runtime.rendezvous.records import Proofs, Records
from farcall.secret import Secret

ME = Member("me", 1, 0x4F)
MEMBER = Member("member", 0, 0x1F)
PLACE = MeetingPlace("tcp://127.0.0.1:1", "tcp", 1, -1, "127.0.0.1", 1)


class Contacts:
    """A store that dies when it was asked ``answers`` times."""

    def __init__(self, answers: int, *contacts: Member) -> None:
        self.answers = answers
        self.group = Group("cluster", contacts)

    def enter(self, me: Member) -> Group:
        self.answers -= 1
        if self.answers < 0:
            raise RuntimeError("Broken pipe")
        return self.group

    def refresh(self, members: list[Member], is_over: object) -> Group:
        return self.enter(members[0])


class Candidate:
    founded = False

    def found(self, deadline: float) -> None:
        self.founded = True


def joining(contacts: Contacts, outcomes: list[bool | None]) -> tuple[Search, Candidate]:
    """``outcomes``: what is found at the only other contact, again and again; the last one for good."""
    candidate = Candidate()
    meeting = Meeting(PLACE, contacts, None, "cluster", Secret(b"secret"))  # type: ignore[arg-type]
    found: Any = Search(meeting, ME, RpcBackendOptions(init_method=PLACE.url), candidate)  # type: ignore[arg-type]
    found._look = lambda *_: outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
    return found, candidate


def test_who_was_found_before_the_store_died_lets_us_in() -> None:
    found, candidate = joining(Contacts(1, MEMBER, ME), [False, True])
    found.run(monotonic() + 10.0)
    assert not candidate.founded


def test_a_store_that_dies_when_we_are_in_is_not_missed() -> None:
    dead = Member("dead", 2, 0x2F)
    found, _ = joining(Contacts(1, dead, MEMBER, ME), [True])
    found._gone.add(dead.incarnation)
    found.run(monotonic() + 10.0)


def test_nobody_founds_a_group_on_an_old_list() -> None:
    found, candidate = joining(Contacts(1, MEMBER, ME), [False, None])
    with pytest.raises(MissingPeers, match="the store is gone"):
        found.run(monotonic() + LONG_S)
    assert not candidate.founded


def test_who_is_left_alone_without_a_store_gives_up_at_once() -> None:
    """The first member had the store, and left before it let us in."""
    found, _ = joining(Contacts(1, MEMBER, ME), [False, None])
    began = monotonic()
    with pytest.raises(MissingPeers, match="the store is gone"):
        found.run(began + LONG_S)
    assert monotonic() < began + AT_ONCE_S


def test_a_store_that_was_never_heard_is_named() -> None:
    found, _ = joining(Contacts(0), [None])
    with pytest.raises(MissingPeers, match=r"127.0.0.1:1: the store is gone: Broken pipe"):
        found.run(monotonic() + 10.0)


class AskedInVain(Candidate):
    """A candidate that is connected to a member, which goes away instead of letting it in."""

    def ask_if_connected(self, incarnation: int, deadline: float) -> bool:
        return False


def test_nobody_founds_a_group_while_a_member_does_not_answer() -> None:
    """That member is behind us on the list: it was let in before us."""
    candidate = AskedInVain()
    meeting = Meeting(PLACE, Contacts(2, ME, MEMBER), None, "cluster", Secret(b"secret"))  # type: ignore[arg-type]
    found = Search(meeting, ME, RpcBackendOptions(init_method=PLACE.url), candidate)  # type: ignore[arg-type]
    with pytest.raises(MissingPeers, match="member: it has not answered"):
        found.run(monotonic())
    assert not candidate.founded


@pytest.mark.parametrize(
    ("purpose", "admits"), [(Connect(), False), (Connect(), True), (Connect(is_first=True), False)]
)
def test_a_newcomer_keeps_no_connection_of_another(purpose: Connect, admits: bool) -> None:
    """The other one hangs up. Until this node sees that, it might ask in vain, or take it for a member's connection."""
    kept: list[Any] = []
    closed: list[bool] = []
    peers: Any = SimpleNamespace(connected=lambda *connection: kept.append(connection))
    meeting = Meeting(PLACE, None, None, "cluster", Secret(b"secret"))
    newcomer = _Newcomer(meeting, None, None, None, peers)  # type: ignore[arg-type]
    newcomer.admits = admits
    transport: Any = SimpleNamespace(close=lambda: closed.append(True))
    established: Any = SimpleNamespace(peer=Hello(MEMBER, "cluster", purpose))
    newcomer.on_connected(transport, established)
    is_kept = admits or purpose.is_first
    assert kept == [(transport, established, False)] * is_kept
    assert closed == [True] * (not is_kept)


def test_who_was_let_in_late_does_not_found_a_group() -> None:
    """The answer came when this node had given up its sponsor: to found a group now would forget the members."""
    founded: list[bool] = []
    watch = SimpleNamespace(belongs=False, found=lambda: founded.append(True))
    loop: Any = SimpleNamespace(call_soon=lambda function: (setattr(watch, "belongs", True), function()))
    peers: Any = SimpleNamespace(watch=watch)
    meeting = Meeting(PLACE, None, None, "cluster", Secret(b"secret"))
    _Newcomer(meeting, None, None, loop, peers).found(monotonic() + 10.0)  # type: ignore[arg-type]
    assert not founded


@pytest.mark.parametrize("size", [0, 3])
def test_a_dial_that_led_to_no_sponsor_is_forgotten(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """While it is remembered, the dialled newcomer is refused: for good, if this node becomes a member meanwhile."""
    closed: list[bool] = []
    transport: Any = SimpleNamespace(close=lambda: closed.append(True))
    established: Any = SimpleNamespace(peer=Hello(MEMBER, "cluster", Listen(admits=size > 0, size=size)))
    reached = Ended(Step.DONE, ""), Found(Outcome.PROVEN, "", transport, established)
    monkeypatch.setattr(Dialler, "run", lambda _: reached)
    peers: Any = SimpleNamespace(connector=SimpleNamespace(joining=None), stranger=lambda _: None)
    meeting = Meeting(PLACE, Contacts(2, MEMBER, ME), None, "cluster", Secret(b"secret"))  # type: ignore[arg-type]
    newcomer: Any = _Newcomer(meeting, None, None, None, peers)  # type: ignore[arg-type]
    found = Search(meeting, ME, RpcBackendOptions(init_method=PLACE.url), newcomer)
    with pytest.raises(BadRank if size else MissingPeers):
        found.run(monotonic())
    assert closed
    assert peers.connector.joining is None


FAR = Member("far", 0, 0x3F, ("tcp://far.example:1",))
MET_BEFORE = Meeting(PLACE, None, None, "cluster", Secret(b"secret"), (FAR,), 2)


def test_names_that_take_long_hold_up_no_group_that_meets_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> list[Any]:
        asked.set()
        goes_on.wait(LONG_S)
        raise OSError("no name server answers")

    class OverOnceAsked(Gate):
        """The time is over when the look-up has begun."""

        def wait(self, seconds: float = -1) -> bool:
            assert asked.wait(LONG_S)
            return False

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(bounded_call, "Gate", OverOnceAsked)
    try:
        assert not is_there(MET_BEFORE, ME, RpcBackendOptions(init_method=PLACE.url), monotonic() + LONG_S)
    finally:
        goes_on.set()
        wait_until(lambda: all(thread.name != "farcall-rendezvous" for thread in threading.enumerate()))


def test_a_member_of_another_size_is_no_reason_to_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadRank("give every process the same world_size")

    monkeypatch.setattr(Search, "_look", refuse)
    with pytest.raises(BadRank, match="the same world_size"):
        is_there(MET_BEFORE, ME, RpcBackendOptions(init_method=PLACE.url), monotonic() + LONG_S)


def entered(store: Any, secret: bytes, me: Member = ME) -> Group:
    return ContactList(Records(store, Proofs(Secret(secret), True, "here")), "0").enter(me)


def test_only_members_change_the_list_and_its_id_tells_nothing_of_the_secret() -> None:
    store, secret = dist.HashStore(), b"what the members have"
    group = entered(store, secret)
    assert entered(store, secret, MEMBER).contacts == (ME, MEMBER)
    with pytest.raises(WrongSecret, match="set the same FARCALL_SECRET"):
        entered(store, b"what a stranger has")
    assert entered(dist.HashStore(), secret).cluster_id != group.cluster_id
    store.set("farcall/0/members", b"\x00" * 64 + store.get("farcall/0/members")[64:])
    with pytest.raises(WrongSecret):
        entered(store, secret)


class Changing(Secret):
    """A secret as it is read from a file that changes."""

    __slots__ = ("known",)

    def given(self) -> tuple[bytes, ...]:
        return self.known


def test_the_list_is_proved_with_all_secrets_that_its_writer_knows() -> None:
    store, secret = dist.HashStore(), Changing(path="")
    old, new = b"what the members have", b"what they will have"
    secret.known = (old,)
    contacts = ContactList(Records(store, Proofs(secret, True, "here")), "0")
    contacts.enter(ME)
    secret.known = (old, new)
    contacts.refresh([ME])
    with pytest.raises(WrongSecret):
        entered(store, new)
    contacts.refresh([ME], renews_proofs=True)
    for one in (old, new):
        assert entered(store, one).contacts == (ME,)


def test_a_list_that_was_proved_once_is_proved_anew_however_often_the_secret_changed() -> None:
    store, secret = dist.HashStore(), Changing(path="")
    secret.known = (b"what the members had",)
    contacts = ContactList(Records(store, Proofs(secret, True, "here")), "0")
    contacts.enter(ME)
    secret.known = (b"what they have now",)
    assert contacts.refresh([MEMBER]).contacts == (ME, MEMBER)
    assert entered(store, b"what they have now").contacts == (ME, MEMBER)
    entered(store, b"what they have now", Member("other", 2, 0x2F))
    secret.known = (b"what they have later",)
    with pytest.raises(WrongSecret):
        contacts.refresh([MEMBER])
