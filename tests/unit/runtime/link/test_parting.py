"""Partings without sockets: a link sleeps only where the other end has all that was written, and wakes if need be."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.memory_transport import memory_pair

from farcall.errors import RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.connector import Bond, Parting
from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import CONTROL, REQUEST, Frame, encode_small
from farcall.protocol.messages import Message, Part, Parted, Stay, decode_message, encode_message
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.link import Link
from farcall.runtime.link.parting import Partings
from farcall.transport.interface import Transport, TransportClosed

LOWER, HIGHER = 1, 2


def request(number: int) -> bytes:
    return encode_small(REQUEST, 0, number, b"", b"", b"")


class End:
    """One end of a pair, with an I/O thread that a test plays."""

    def __init__(self, me: int, transport: Transport) -> None:
        self.far: Any = None
        self.wanted = 0
        self.loop = Loop("test")
        self.link = Link(
            WorkerInfo("other", 1),
            transport,
            self.loop,
            lambda frame: None,
            lambda reason: None,
            1 << 20,
            acknowledge=lambda count, more: None,
            on_wanted=self._on_wanted,
        )
        self.bond = Bond("s", dialled=me == LOWER, now=0.0, jitter=SimpleNamespace(random=lambda: 0.0))
        self.peer: Any = SimpleNamespace(link=self.link, devices=None, known=True, control=self._control)
        self.waits = False
        watch: Any = SimpleNamespace(is_near_all=False, neighbours=frozenset)
        connector: Any = SimpleNamespace(bond_of=lambda peer: self.bond, awake={})
        watcher: Any = SimpleNamespace(awaited=lambda: [self.peer] if self.waits else [])
        self.partings = Partings(me, connector, watch, watcher, loop=self.loop, reconnect_s=10.0)
        self._decoder = FrameDecoder()

    def _on_wanted(self) -> None:
        self.wanted += 1

    def _control(self, message: Message) -> None:
        self.link.outgoing.send(encode_small(CONTROL, 0, 0, b"", b"", encode_message(message)), urgent=True)

    def read(self) -> list[Frame]:
        """What has come, counted, and not handed out."""
        frames: list[Frame] = []
        try:
            while count := self.link.transport.receive_into(self._decoder.writable()):
                frames += self._decoder.received(count)
        except TransportClosed:
            pass
        self.link.session.received += len(frames)
        return frames

    def hear(self, frame: Frame) -> None:
        """Handle a word about parting, as the I/O thread does."""
        if frame.kind == CONTROL:
            match decode_message(frame.payload):
                case Part() as message:
                    self.partings.on_part(self.peer, message)
                case Parted() as message:
                    self.partings.on_parted(self.peer, message)
                case Stay():
                    self.partings.on_stay(self.peer)

    def propose(self) -> None:
        self.partings._propose(self.peer, [self.peer] if self.waits else [])

    @property
    def lacks(self) -> int:
        """How many frames of ours the other end has not got, for all that this one has written."""
        session = self.link.session
        return session.acknowledged + len(session.kept) - self.far.link.session.received


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    left, right = memory_pair()
    lower, higher = End(LOWER, left), End(HIGHER, right)
    lower.far, higher.far = higher, lower
    yield lower, higher
    for end in (lower, higher):
        end.link.close()
        end.loop.stop()


def hear_all(end: End) -> None:
    for frame in end.read():
        end.hear(frame)


def test_both_agree_where_nothing_is_on_its_way(ends: tuple[End, End]) -> None:
    lower, higher = ends
    higher.link.outgoing.send(request(1))
    lower.link.outgoing.send(request(2))
    for end in ends:
        hear_all(end)
    lower.propose()
    hear_all(higher)
    assert higher.bond.parting is Parting.AGREED
    hear_all(lower)
    assert lower.bond.parting is Parting.AGREED
    assert not lower.link.up
    assert [lower.lacks, higher.lacks] == [0, 0]


@pytest.mark.parametrize("proposes", [True, False])
def test_what_another_thread_queues_while_the_last_word_is_written_waits(
    ends: tuple[End, End], proposes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written behind the last word it would be lost: the other end may close the connection before it has come."""
    lower, higher = ends
    speaker = lower if proposes else higher
    send_bytes = type(speaker.link.transport).send_bytes

    def slow(transport: Any, data: bytes) -> int:
        taken = send_bytes(transport, data)
        if transport is speaker.link.transport and not speaker.link.outgoing._outbox and not late:
            late.append(True)
            speaker.link.outgoing._outbox.append(request(7))  # another thread, which does not get the write lock
        return taken

    late: list[bool] = []
    monkeypatch.setattr(type(speaker.link.transport), "send_bytes", slow)
    lower.propose()
    hear_all(higher)
    hear_all(lower)
    assert late
    assert speaker.bond.parting is Parting.AGREED
    assert speaker.lacks == 0
    assert list(speaker.link.outgoing._outbox) == [request(7)]
    speaker.link.outgoing.sleep()
    assert speaker.wanted == 1


def test_who_has_written_what_the_other_end_had_not_got_when_it_proposed_stays(ends: tuple[End, End]) -> None:
    lower, higher = ends
    lower.propose()
    higher.link.outgoing.send(request(1))  # it crosses the proposal
    hear_all(higher)
    assert higher.bond.parting is Parting.NO
    hear_all(lower)
    assert lower.bond.parting is Parting.NO
    lower.link.outgoing.send(request(2))
    assert higher.read()[0].call_id == 2


def test_an_answer_to_an_older_proposal_is_none_to_this_one(ends: tuple[End, End]) -> None:
    """It was written to a connection that broke, and comes again over the next one, ahead of what follows it there."""
    lower, higher = ends
    lower.propose()
    (part,) = higher.read()
    higher.hear(part)
    (parted,) = lower.read()
    for end in ends:  # as if both had been connected again
        end.bond.restore(1, 1.0)
        end.link.outgoing.unpause()
    lower.propose()
    higher.link.outgoing.send(request(1))
    lower.hear(parted)
    assert lower.bond.parting is Parting.NO
    assert lower.link.up
    hear_all(higher)
    hear_all(lower)
    hear_all(higher)
    assert higher.bond.parting is Parting.NO
    lower.link.outgoing.send(request(2))
    assert higher.read()[-1].call_id == 2


def test_who_waits_for_an_answer_stays(ends: tuple[End, End]) -> None:
    lower, higher = ends
    higher.waits = True
    lower.propose()
    hear_all(higher)
    hear_all(lower)
    assert {lower.bond.parting, higher.bond.parting} == {Parting.NO}
    assert lower.link.up


def test_a_proposal_that_the_kernel_does_not_take_whole_goes_and_is_none(ends: tuple[End, End]) -> None:
    """The other end may agree to it all the same, and come back: it must be let in."""
    lower, higher = ends
    lower.link.transport.largest_send = 3  # type: ignore[attr-defined]
    lower.propose()
    assert lower.bond.parting is Parting.NO
    assert lower.bond._has_parted
    hear_all(higher)
    assert higher.bond.parting is Parting.AGREED
    hear_all(lower)
    hear_all(higher)
    assert higher.bond.parting is Parting.NO


def test_who_says_goodbye_parts_no_more(ends: tuple[End, End]) -> None:
    """The I/O thread may be about to propose it, while another thread writes the last word."""
    lower, higher = ends
    lower.link.outgoing.unpause(for_good=True)
    lower.propose()
    assert lower.bond.parting is Parting.NO
    lower.link.outgoing.send(request(1))
    assert [frame.call_id for frame in higher.read()] == [1]


def test_a_full_queue_wakes_a_link_that_nobody_has_woken(ends: tuple[End, End]) -> None:
    """What is held back for more to come wakes nobody; who waits for room behind it would wait for good."""
    lower, _ = ends
    outgoing = lower.link.outgoing
    outgoing.pause()
    outgoing.asleep = True
    data = encode_small(REQUEST, 0, 1, b"", b"", bytes(1 << 19))
    for _ in range(2):
        outgoing.send(data, more=True)
        outgoing.asleep, lower.wanted = True, 0
    with pytest.raises(RpcTimeout):
        outgoing.send(data, deadline=0.0, more=True)
    assert lower.wanted == 1


def test_the_calls_are_looked_at_once_for_all_that_may_part() -> None:
    looks: list[bool] = []
    link = SimpleNamespace(heard_bytes=1, outgoing=SimpleNamespace(bytes_sent=1))
    awake = {number: SimpleNamespace(link=link, known=True) for number in (2, 3, 4)}
    watch: Any = SimpleNamespace(is_near_all=False, neighbours=frozenset)
    connector: Any = SimpleNamespace(bond_of=lambda peer: None, awake=awake)
    watcher: Any = SimpleNamespace(awaited=lambda: looks.append(True) or ())
    loop = Loop("test")
    partings = Partings(1, connector, watch, watcher, loop=loop, reconnect_s=10.0)
    for _ in range(2):
        partings._look(0.0)
    assert len(looks) == 1
    loop.stop()
