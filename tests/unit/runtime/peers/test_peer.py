"""Peers: offers of shared segments, each with its own descriptor."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest

from farcall.channel.segment_map import SegmentMap
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import Cancelled, Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol import messages
from farcall.protocol.chunks import Instead
from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import REQUEST, RESPONSE, Frame, numbered
from farcall.runtime.peers.peer import WORTH_RELEASING_BYTES, RemotePeer
from farcall.serialize.context import IfUnsent

SIZE_BYTES = 4096


class Transport:
    """Descriptors that came with one read."""

    def __init__(self, descriptors: list[int]) -> None:
        self.descriptors = list(descriptors)


class Link:
    broken = None

    def __init__(self, descriptors: list[int]) -> None:
        self.transport = Transport(descriptors)
        self.sent: list[bytes] = []
        self.outgoing = self.incoming = self  # stands in for both halves

    def send(self, data: bytes, **_: object) -> None:
        self.sent.append(data)

    def is_used(self) -> None:
        pass

    def take_descriptor(self) -> int | None:
        return self.transport.descriptors.pop(0) if self.transport.descriptors else None

    @property
    def messages(self) -> list[messages.Message]:
        data = numbered(self.sent, 0)
        decoder = FrameDecoder()
        decoder.writable()[: len(data)] = data
        return [messages.decode_message(frame.payload) for frame in decoder.received(len(data))]


def memory_file() -> int:
    import fcntl

    descriptor = os.memfd_create("farcall-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x0002)
    return descriptor


def peer_with(segments: SegmentMap | None, descriptors: list[int]) -> tuple[RemotePeer, Link]:
    peer = RemotePeer(
        WorkerInfo("other", 1), 0x1F, 1, lambda write: write(), WorkerInfo("me", 0), lambda *_: None, lambda peer: None
    )
    if segments is not None:
        peer.share(SegmentPool(1 << 20), segments)
    link = Link(descriptors)
    peer.link = link  # type: ignore[assignment]
    return peer, link


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files on this system")
def test_offers_that_come_together_keep_their_descriptors() -> None:
    descriptors = [memory_file(), memory_file(), memory_file()]
    segments = SegmentMap(lambda urgent: None)
    peer, link = peer_with(segments, descriptors[:2])
    for number in (1, 2):
        peer.on_segment_offered(messages.SegmentOffered(number, SIZE_BYTES))
    assert link.messages == [messages.SegmentAccepted(1), messages.SegmentAccepted(2)]
    # One that is smaller than announced is closed at once.
    link.transport.descriptors = descriptors[2:]
    peer.on_segment_offered(messages.SegmentOffered(3, SIZE_BYTES * 100))
    assert isinstance(link.messages[-1], messages.SegmentRefused)
    peer.close()
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files on this system")
def test_refused_offer_costs_no_descriptor() -> None:
    descriptor = memory_file()
    peer, link = peer_with(None, [descriptor])
    peer.on_segment_offered(messages.SegmentOffered(1, SIZE_BYTES))
    assert isinstance(link.messages[0], messages.SegmentRefused)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_offer_without_descriptor_is_refused() -> None:
    peer, link = peer_with(SegmentMap(lambda urgent: None), [])
    peer.on_segment_offered(messages.SegmentOffered(1, SIZE_BYTES))
    assert isinstance(link.messages[0], messages.SegmentRefused)
    peer.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files on this system")
def test_any_message_takes_along_what_is_owed_to_its_receiver() -> None:
    segments = SegmentMap(lambda urgent: None)
    peer, link = peer_with(segments, [])
    segments.owe(1, 0, WORTH_RELEASING_BYTES - 1)
    peer.control(messages.Ping(1))
    assert link.messages == [messages.Ping(1)]
    segments.owe(1, 4096, 1)
    peer.control(messages.Ping(2))
    assert link.messages[1:] == [messages.BlocksReleased([(1, 0), (1, 4096)]), messages.Ping(2)]
    peer.close()


class LostDevices:
    """A peer's devices, asked only to take back."""

    is_worth_releasing = False

    def __init__(self) -> None:
        self.taken_back: list[object] = []

    def take_back(self, ticket: object) -> None:
        self.taken_back.append(ticket)


@pytest.mark.parametrize("kind", [REQUEST, RESPONSE])
def test_device_memory_lent_for_a_message_that_a_break_has_lost_is_free_again(kind: int) -> None:
    kept: list[Instead] = []
    peer, link = peer_with(None, [])
    link.on_io_thread = lambda: False  # type: ignore[attr-defined]
    link.send_pieces = lambda pieces, deadline, instead: kept.append(instead)  # type: ignore[attr-defined]
    peer.devices = devices = LostDevices()
    ticket = (0, 7, 512, 100, (), b"event")
    table = pickle.dumps([("cuda:0", [(0, False, 0, ticket), (100, False, 2, b"bytes")])], 5)
    payload = b"any" + table + len(table).to_bytes(4, "little") + b"D"
    peer.send(Frame(kind, 0, 1, payload=payload, buffers=[memoryview(bytes(1 << 20))]))
    assert devices.taken_back == []
    kept[0]()
    assert devices.taken_back == [ticket]


FATES = {
    Delivery.NOT_SENT: "; the call was not sent",
    Delivery.UNKNOWN: "; whether the call ran there is unknown",
}


@pytest.mark.parametrize("delivery", FATES)
def test_a_call_that_finds_the_link_of_a_leaving_peer_closed_is_told_how_it_left(delivery: Delivery) -> None:
    """Its Goodbye came after the call had looked whether the peer leaves."""
    peer, _ = peer_with(None, [])
    peer.leaving, peer.farewell = True, messages.GoodbyeReason.FORGOT_SHUTDOWN.text
    error = peer.lost(delivery)
    assert isinstance(error, PeerDead)
    assert str(error).startswith("other ended without shutdown()")
    assert str(error).endswith(FATES[delivery])
    assert (error.worker, error.delivery) == (peer.info, delivery)


class SlowPeer:
    """A peer whose large requests a worker writes, since an event loop runs on the calling thread."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.withdrawn: list[str] = []
        self.peer, link = peer_with(None, [])
        self.later: list[Callable[[], None]] = []
        self.peer._write_later = self.later.append
        self.while_written: Callable[[], None] = lambda: None
        link.on_io_thread = lambda: True  # type: ignore[attr-defined]
        link.send_pieces = self.write  # type: ignore[attr-defined]
        link.send = lambda data, **_: self.events.append("cancelled")  # type: ignore[method-assign]

    def write(self, *_: object) -> None:
        self.while_written()
        self.events.append("request")

    def send(self) -> None:
        undo = [lambda: self.withdrawn.append("fork"), IfUnsent(lambda: self.withdrawn.append("lent"))]
        self.peer.send(Frame(REQUEST, 0, 7, buffers=[memoryview(bytes(1 << 20))], undo=undo))


def test_a_large_request_that_is_cancelled_before_a_worker_writes_it_is_not_sent() -> None:
    slow = SlowPeer()
    slow.send()
    slow.peer.cancel(7)
    with pytest.raises(Cancelled):
        slow.later[0]()
    assert "request" not in slow.events
    assert slow.withdrawn == ["fork", "lent"]
    assert not slow.peer._unwritten


def test_a_cancellation_follows_the_large_request_that_it_has_overtaken() -> None:
    slow = SlowPeer()
    slow.while_written = lambda: slow.peer.cancel(7)
    slow.send()
    slow.later[0]()
    assert slow.events == ["cancelled", "request", "cancelled"]
    assert slow.withdrawn == []
    assert not slow.peer._unwritten


def test_a_large_request_that_is_wanted_is_written_once() -> None:
    slow = SlowPeer()
    slow.send()
    slow.later[0]()
    assert slow.events == ["request"]
    assert not slow.peer._unwritten
