"""Frames of a member that has lost its mind: they end its link at most, and nobody else's call notices."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import msgspec
import pytest
import torch
from tests.fuzz.mutations import mutate, pieces, rounds
from tests.kit.team import team

import farcall
from farcall.core.contract import Arrived
from farcall.core.frames import Decoder, WireError
from farcall.errors import NotAllowed
from farcall.protocol import messages
from farcall.protocol.frames import CONTROL, REQUEST, Frame, encode_small
from farcall.protocol.notes import decode_notes
from farcall.rpc.references import NodeReferences
from farcall.runtime.node import runtime_of
from farcall.runtime.node.dispatcher import FLAGS, Dispatcher
from farcall.runtime.peers.peer import RemotePeer
from farcall.serialize import restrict
from farcall.serialize.allowance import Allowance


def echo(value: Any) -> Any:
    return value


def work(node: farcall.Node, to: str) -> None:
    """A little of everything that travels."""
    x = torch.ones(200, requires_grad=True)
    node.rpc_sync(to, echo, (1,))
    node.rpc_sync(to, torch.add, (x, x))
    rref = node.remote(to, echo, (x.detach(),))
    node.rpc_sync(to, echo, (rref,))
    with pytest.raises(ZeroDivisionError):
        node.rpc_sync(to, divmod, (1, 0))


@contextmanager
def recorded(node: Any) -> Iterator[list[tuple[Any, Frame]]]:
    """The frames that come to ``node`` meanwhile, copied before anybody reads them."""
    dispatcher, seen = node._runtime.dispatcher, []
    frame_of, on_control = dispatcher.frame_of, dispatcher._on_control

    def note(peer: RemotePeer, arrived: Arrived) -> None:
        fields = arrived.flags & FLAGS, arrived.number, arrived.function, arrived.notes, bytes(arrived.payload)
        seen.append((peer, Frame(arrived.kind, *fields)))

    def noted_frame(peer: RemotePeer, arrived: Arrived) -> Frame:
        note(peer, arrived)
        return frame_of(peer, arrived)

    def noted_control(peer: RemotePeer, arrived: Arrived) -> None:
        note(peer, arrived)
        on_control(peer, arrived)

    dispatcher.frame_of, dispatcher._on_control = noted_frame, noted_control
    try:
        yield seen
    finally:
        del dispatcher.frame_of, dispatcher._on_control


def deliver(dispatcher: Dispatcher, peer: RemotePeer, frame: Frame) -> None:
    """As a worker gets it from the core."""
    fields = frame.function, frame.notes, frame.payload, ()
    dispatcher.on_arrived(Arrived(frame.kind, frame.flags, peer.way, frame.call_id, *fields, None, -1, monotonic()))


def copy_of(frame: Frame, **changes: Any) -> Frame:
    fields = {
        "kind": frame.kind,
        "flags": frame.flags,
        "call_id": frame.call_id,
        "function": bytes(frame.function),
        "notes": bytes(frame.notes),
        "payload": bytes(frame.payload),
        **changes,
    }
    return Frame(**fields)


def altered(chance: random.Random, frame: Frame, corpus: list[Frame]) -> Frame:
    """A frame that its decoder lets through, with one part changed. Not the pickle of a call: members may send any."""
    part = chance.randrange(4)
    if frame.kind == CONTROL:
        others = [other.payload for other in corpus if other.kind == CONTROL]
        return copy_of(frame, payload=mutate(chance, frame.payload, others))
    if part == 0:
        return copy_of(frame, call_id=chance.choice((0, 1, frame.call_id + 1, 2**63)))
    if part == 1:
        return copy_of(frame, flags=frame.flags ^ (1 << chance.randrange(8)))
    if part == 2 and frame.kind == REQUEST:
        return copy_of(frame, function=mutate(chance, frame.function)[:60_000])
    return copy_of(frame, notes=mutate(chance, frame.notes, [other.notes for other in corpus if other.notes]))


def test_frames_that_cannot_be_handled_end_their_link_and_raise_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the thread that reads: it may be one of the user's, which only waits for its own answer."""
    caplog.set_level(logging.ERROR, "farcall")
    with team([None, None], 2) as nodes:
        with recorded(nodes[0]) as seen:
            work(nodes[0], "w1")
            work(nodes[1], "w0")
        corpus = [frame for _, frame in seen]
        (peer,) = {peer for peer, _ in seen}
        aborted: list[str] = []
        monkeypatch.setattr(type(peer.link), "abort", lambda self, reason: aborted.append(reason))
        dispatcher = nodes[0]._runtime.dispatcher
        harmless = [frame for frame in corpus if frame.kind != CONTROL]
        for seed, chance in rounds(2000):
            frame = altered(chance, chance.choice(harmless), corpus)
            try:
                deliver(dispatcher, peer, frame)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {frame!r}") from error
        assert aborted, "some of them are nonsense"
        assert not [record for record in caplog.records if record.exc_info]
        monkeypatch.undo()
        assert nodes[0].rpc_sync("w1", echo, (1,)) == 1
        for node in nodes:  # what was said in others' names is no base for a graceful end
            node.shutdown(graceful=False)


def test_with_data_alone_nobody_leaves_values_here(caplog: pytest.LogCaptureFixture) -> None:
    """A request may ask to keep its result, however plain: it stayed as long as its caller, who could not fetch it."""
    caplog.set_level(logging.INFO, "farcall")
    with team([None, None], 2) as nodes:
        with recorded(nodes[0]) as seen:
            rref = nodes[1].remote("w0", echo, (1,))
            assert rref.to_here() == 1
            nodes[1].rpc_sync("w0", echo, (rref,))
        kept = [(peer, frame) for peer, frame in seen if frame.kind == REQUEST and frame.notes]
        counts = runtime_of(nodes[0]).part(NodeReferences).counts()
        restrict(Allowance(["operator:add"], [], "data"))
        try:
            for peer, frame in kept:
                deliver(nodes[0]._runtime.dispatcher, peer, copy_of(frame, call_id=frame.call_id + 1000))
            assert runtime_of(nodes[0]).part(NodeReferences).counts() == counts
            assert caplog.text.count("a reference to a value is not allowed here") == len(kept) >= 2
            with pytest.raises(NotAllowed, match="a reference to a value"):
                nodes[1].remote("w0", echo, (1,))
        finally:
            restrict(None)
        for node in nodes:
            node.shutdown(graceful=False)


CONTROLS = [
    messages.encode_message(message)
    for message in (messages.Ping(1), messages.QueueFull(7, 3), messages.Part(3), messages.ClockAsked(5))
]


def test_control_messages_of_no_sense_abort_their_link_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with team([None, None], 2) as nodes:
        (peer,) = nodes[0]._runtime.others()
        aborted: list[str] = []
        handled: list[Any] = []
        monkeypatch.setattr(type(peer.link), "abort", lambda self, reason: aborted.append(reason))
        dispatcher = nodes[0]._runtime.dispatcher
        # Those that are still messages would have their effect: only that they are recognised is tried here.
        dispatcher._controls = dict.fromkeys(dispatcher._controls, lambda peer, message: handled.append(message))
        for seed, chance in rounds(3000):
            payload = mutate(chance, chance.choice(CONTROLS), CONTROLS)
            try:
                deliver(dispatcher, peer, Frame(CONTROL, payload=payload))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {payload!r}") from error
        assert aborted
        for node in nodes:
            node.shutdown(graceful=False)


def recorded_from_w1() -> list[Frame]:
    with team([None, None], 2) as nodes, recorded(nodes[0]) as seen:
        work(nodes[1], "w0")
    return [frame for _, frame in seen]


def test_the_decoder_of_frames_raises_wire_errors_only() -> None:
    wire = [
        encode_small(frame.kind, frame.flags, frame.call_id, frame.function, frame.notes, bytes(frame.payload))
        for frame in recorded_from_w1()
    ]
    for seed, chance in rounds(5000):
        decoder = Decoder()
        data = mutate(chance, b"".join(chance.sample(wire, min(3, len(wire)))), wire)
        try:
            for piece in pieces(chance, data):
                list(decoder.feed(piece))
        except WireError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_notes_raise_decode_errors_only() -> None:
    corpus = [bytes(frame.notes) for frame in recorded_from_w1() if frame.notes]
    for seed, chance in rounds(5000):
        try:
            decode_notes(mutate(chance, chance.choice(corpus), corpus))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
