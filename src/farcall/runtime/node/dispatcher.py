"""Routes each message that arrives to its handler: requests, answers, letters and control messages.

Owns the order of the checks on a message: is there room, what do its notes say, which handler gets it. Holds no
protocol: each control message is a row in a table, to which the layers above add their own (`hooks.py`).

What has to be handled in order (`Arrived.handle`) is *placed* by the worker that gets it: in microseconds, without code
of the user's, one frame of a link at a time. Then the worker runs the function, beside others.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, get_args

import msgspec

from farcall.channel.segments import SegmentRefused
from farcall.core.contract import (
    CANCELLED,
    DROPPED,
    ENDED,
    FULL,
    OVERDUE,
    REFUSABLE,
    ROOM,
    STARVED,
    UNKNOWN,
    WANTED,
    Arrived,
    Core,
    CoreError,
    Handle,
)
from farcall.errors import RpcError
from farcall.protocol import messages
from farcall.protocol.departure.events import DepartureMessage
from farcall.protocol.frames import CONTROL, FAILURE, REQUEST, RESPONSE, Frame, Ticket
from farcall.protocol.membership.messages import Message
from farcall.protocol.notes import REFUSED, Notes, Refusal, decode_notes, encode_refusal
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.executor import Task
from farcall.runtime.calls.pending import CallTable, PendingCall
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.membership.events import note_lost_process
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.membership.shutdown import Leaving, Withdrawing
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.observing.counters import BOUNDS_S, FAILED
from farcall.runtime.observing.profiling import PROFILING
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize import decline, discard

logger: logging.Logger = logging.getLogger("farcall")

FLAGS = (1 << 24) - 1 | REFUSABLE
"""The flags of a frame that are not the core's."""
Controls = Mapping[type[Any], Callable[[RemotePeer, Any], None]]

NEWS = get_args(Message)
"""Control messages about membership."""
FOR_STRANGERS = (
    *NEWS,
    messages.BlocksReleased,
    messages.ClockAsked,
    messages.Goodbye,
    messages.QueueFull,
    messages.QueueHasRoom,
    messages.SegmentAccepted,
    messages.SegmentOffered,
    messages.SegmentRefused,
    messages.SegmentRetired,
)
"""Control messages that are also accepted from strangers: peers that are not members here, or not yet."""


class Dispatcher:
    """The router of the messages that arrive at one node. It has no mutable state of its own."""

    def __init__(
        self,
        name: str,
        hooks: Hooks,
        *,
        loop: Loop,
        admission: Admission,
        calls: CallTable,
        server: Server,
        leaving: Leaving | Withdrawing,
        watch: Callable[[], FailureDetector],
        core: Core,
    ) -> None:
        """Adds the node's own rows to ``hooks``."""
        self._name = name
        self._loop = loop
        self._admission = admission
        self._pending = calls.pending
        self._calls = calls
        self._server = server
        self._unanswered = server.unanswered
        self._leaving = leaving
        self._watch = watch
        self._core = core
        self.news: deque[Arrived] = deque()
        """From the core, for the I/O thread."""
        self.peers: Mapping[int, Peer] = {}
        """By the core's numbers of their links; set once, before any of them is connected."""
        self._hooks = hooks
        self._controls = hooks.controls
        self._letters = hooks.letters
        for kind, handle in self._own_controls().items():
            hooks.on_control(kind, handle)

    def _own_controls(self) -> Controls:
        return {
            messages.SegmentAccepted: RemotePeer.on_segment_accepted,
            messages.SegmentRefused: RemotePeer.on_segment_refused,
            messages.SegmentRetired: RemotePeer.on_segment_retired,
            messages.BlocksReleased: RemotePeer.on_blocks_released,
            messages.QueueFull: RemotePeer.on_queue_full,
            messages.QueueHasRoom: RemotePeer.on_queue_has_room,
            messages.CodeWanted: self._on_code_wanted,
            messages.CodeTold: self._on_code,
            messages.Goodbye: self._on_goodbye,
            messages.Ping: lambda peer, message: peer.control(messages.Pong(message.nonce)),
            messages.Pong: lambda peer, message: None,
            messages.ClockAsked: lambda peer, message: peer.control(
                messages.ClockTold(message.sent_ns, PROFILING.clock_ns())
            ),
            messages.ClockTold: lambda peer, message: None,
            **dict.fromkeys(get_args(DepartureMessage), self._on_departure),
            **dict.fromkeys(NEWS, self._on_news),
        }

    # ------------------------------------------------------------------ from the core

    def on_arrived(self, arrived: Arrived) -> None:
        """On a worker: place what came over a link, then run what it asks for."""
        task = self._task_of(arrived)
        if task is not None:
            task.run(False)

    def _task_of(self, arrived: Arrived) -> Task | None:
        """Place what came over a link; returns what a worker is to run."""
        peer = self.peers.get(arrived.link)
        handle = arrived.handle
        task: Task | None = None
        if peer is None:  # its link has ended
            if handle is not None:
                self._place(handle)
            if arrived.descriptor >= 0:
                os.close(arrived.descriptor)
            return None
        try:
            kind = arrived.kind
            if self._is_strangers(peer) and not self._is_for_strangers(arrived):
                assert handle is not None
                self._core.pause_behind(handle)
                handle = None
                if not self._is_strangers(peer):  # `PeerTable` has looked before the line above
                    self._core.unpause(arrived.link)
                return None
            if kind == CONTROL:
                self._on_control(peer, arrived)
                return None
            notes = decode_notes(arrived.notes) if arrived.notes else None
            if notes is not None and self._is_deferred(peer, arrived, notes):
                handle = None
                return None
            frame = self.frame_of(peer, arrived)
            if kind == DROPPED:
                frame.flags = REFUSED
                self._take_notes(peer, frame, notes)
                decline(frame, peer)
                discard(frame.payload, peer)
            elif kind in (RESPONSE, FAILURE):
                self._on_answer(peer, frame, notes)
            else:
                task = self.on_message(peer, frame, notes, arrived.at)
        except Exception as error:
            self._mishandled(peer, error)
        finally:
            if handle is not None:
                self._place(handle)
        return task

    def _place(self, handle: Handle) -> None:
        try:
            self._core.placed(handle)
        except CoreError:
            pass  # it has stopped

    @staticmethod
    def _is_strangers(peer: Peer) -> bool:
        return isinstance(peer, RemotePeer) and not peer.known

    def _is_for_strangers(self, arrived: Arrived) -> bool:
        return arrived.kind == CONTROL and isinstance(messages.decode_message(arrived.payload), FOR_STRANGERS)

    @staticmethod
    def frame_of(peer: Peer, arrived: Arrived) -> Frame:
        """The message that came, with its buffers where they can be read."""
        frame = Frame(
            arrived.kind, arrived.flags & FLAGS, arrived.number, arrived.function, arrived.notes, arrived.payload
        )
        if arrived.buffers:
            frame.buffers = [each if isinstance(each, memoryview) else Ticket(*each) for each in arrived.buffers]
            if isinstance(peer, RemotePeer):
                peer.look_up(frame)
        return frame

    def _is_deferred(self, peer: Peer, arrived: Arrived, notes: Notes) -> bool:
        """Must this message wait for word of a member, or behind an earlier one? Then it comes again."""
        if not (notes.forks or notes.created or notes.serial):
            return False
        handle = arrived.handle
        if handle is None:
            raise ValueError("the message is malformed: it brings references, and is not in order")
        references = self._server.references
        return references.defers(peer, arrived.number, notes, lambda: self._core.defer(handle))

    def receive(self, peer: Peer, arrived: Arrived, call: PendingCall) -> Frame | None:
        """By the thread that waited for it: the answer of a call. None: not yet, wait for it again."""
        handle = arrived.handle
        try:
            notes = decode_notes(arrived.notes) if arrived.notes else None
            if notes is not None and self._is_deferred(peer, arrived, notes):
                handle = None
                return None
            frame = self.frame_of(peer, arrived)
            self._take_notes(peer, frame, notes)
            self.answered(call, frame, notes)
            return frame
        except Exception as error:
            self._mishandled(peer, error)
            raise
        finally:
            if handle is not None:
                self._place(handle)

    def _on_answer(self, peer: Peer, frame: Frame, notes: Notes | None) -> None:
        """On a worker: somebody is to be told of an answer, or nobody has asked for it yet."""
        number = frame.call_id
        call = self._calls.answered(frame)
        self._take_notes(peer, frame, notes)
        if call is None:
            decline(frame, peer)
            discard(frame.payload, peer)
            self._core.cancel(number)
            return
        self.answered(call, frame, notes)
        self._core.settle(number, call.on_answer(frame))

    def answered(self, call: PendingCall, frame: Frame, notes: Notes | None) -> None:
        """Count the answer of ``call``."""
        call.counters[bisect_right(BOUNDS_S, monotonic() - call.started_at)] += 1
        if frame.kind == FAILURE:
            call.counters[FAILED] += 1
        if call.profile is not None:
            # Before `on_answer`: the caller may read the record as soon as it wakes up.
            call.profile.ended(b"" if notes is None else notes.profiled, frame.size_bytes)
        if self._leaving.entered:
            self._leaving.poke()

    def on_news(self) -> None:
        """On the I/O thread: the core has something for it."""
        try:
            self.news.extend(self._core.events())
        except CoreError:
            return  # it has stopped
        while self.news:
            self._on_event(self.news.popleft())

    def _on_event(self, arrived: Arrived) -> None:
        kind = arrived.kind
        if kind == STARVED:
            self._server.on_starved()
            self._place_for_workers()
            return
        if kind == OVERDUE:
            return  # the table of calls has a clock of its own
        if kind == ENDED and arrived.number:
            self._calls.on_ended(arrived.number, arrived.flags)
            return
        if kind == ROOM:
            self._admission.tell_room()
            return
        peer = self.peers.get(arrived.link)
        if peer is None:
            if arrived.descriptor >= 0:
                os.close(arrived.descriptor)
            return
        try:
            if kind == ENDED:
                if isinstance(peer, RemotePeer):
                    why = arrived.function.decode(errors="replace")
                    peer.link.on_ended(why, bool(arrived.flags & UNKNOWN))
            elif kind == WANTED:
                if isinstance(peer, RemotePeer):
                    peer.link.on_wanted()
            elif kind == FULL:
                self._admission.tell_full(peer, arrived.number)
            elif kind == CANCELLED:
                self._server.cancel(peer, arrived.number)
            elif kind == CONTROL:
                self._on_control(peer, arrived)
            elif kind == REQUEST:
                self._refuse(peer, arrived)
        except Exception as error:
            self._mishandled(peer, error)
        if arrived.handle is not None:
            self._place(arrived.handle)

    def _place_for_workers(self) -> None:
        """No worker comes for what has to be placed in order: place it here, and let workers run it later."""
        while waiting := self._core.to_place():
            for arrived in waiting:
                task = self._task_of(arrived)
                if task is not None:
                    self._server.run_later(task)

    def forget_end(self, link: int) -> None:
        """The connection of ``link`` was taken from it: news of its end is no news any more."""
        try:
            self.news.extend(self._core.events())
        except CoreError:
            pass
        kept = [one for one in self.news if not (one.kind == ENDED and not one.number and one.link == link)]
        self.news.clear()
        self.news.extend(kept)

    def _mishandled(self, peer: Peer, error: Exception) -> None:
        """A frame could not be handled: end the link. Do not raise: the reading thread may only be a helping one.

        The sender runs another version, or is hostile, or farcall has a bug. In each case both ends count a message as
        delivered that was lost, so the link cannot go on.
        """
        if isinstance(error, RpcError):
            logger.info("%s: ignored a message from %s: %s", self._name, peer.info.name, error)
            return
        if isinstance(error, (msgspec.DecodeError, ValueError)):  # malformed: our own stack says nothing about that
            logger.error("%s: cannot read a message from %s: %s", self._name, peer.info.name, error)
        elif not isinstance(error, SegmentRefused):
            logger.error("%s: cannot handle a message from %s", self._name, peer.info.name, exc_info=error)
        if isinstance(peer, RemotePeer):
            peer.link.abort(f"cannot handle a message from {peer.info.name}: {type(error).__name__}: {error}")

    def on_message(self, peer: Peer, frame: Frame, notes: Notes | None, at: float) -> Task | None:
        """Hand a request or a letter, which came ``at`` then, to its handler. Returns what the worker is to run."""
        if notes is not None and (notes.time_left_s or notes.metadata):
            frame.scope = (at + notes.time_left_s if notes.time_left_s else NEVER, notes.metadata)
        if not self._take_notes(peer, frame, notes):
            self._core.finished(peer.back, frame.call_id)
            return None
        if frame.kind == REQUEST:
            return self._server.accept(peer, frame)
        handle = self._letters.get(frame.call_id)
        if handle is None:
            logger.error("%s: %s sent a letter of unknown subject %d", self._name, peer.info.name, frame.call_id)
        else:
            handle(peer, frame)
        return None

    def _take_notes(self, peer: Peer, frame: Frame, notes: Notes | None) -> bool:
        """Fill in the fields of ``frame`` from its notes. False: do not handle it."""
        if notes is None:
            return True
        if notes.serial is not None:
            self._server.references.take_turns(peer, frame, notes.serial)
        if (notes.created is not None or notes.forks) and not self._server.references.take_forks(peer, frame, notes):
            return False
        if notes.context_id:
            self._hooks.find_recording(peer, frame, notes)
        frame.profile = notes.profile
        return True

    def on_own_control(self, peer: Any, message: messages.Message) -> None:
        """Handle a control message of this node to itself, on the sending thread; all such handlers allow that."""
        self._controls[type(message)](peer, message)

    def _refuse(self, peer: Peer, arrived: Arrived) -> None:
        """Refuse a request, because too many calls wait here; account for its references, but create none."""
        handle = arrived.handle
        try:
            notes = decode_notes(arrived.notes) if arrived.notes else None
            if notes is not None and self._is_deferred(peer, arrived, notes):
                handle = None
                return
            frame = self.frame_of(peer, arrived)
            frame.flags = REFUSED
            self._take_notes(peer, frame, notes)
            decline(frame, peer)
            discard(frame.payload, peer)
        finally:
            if handle is not None:
                self._place(handle)
        try:
            refusal = encode_refusal(Refusal(len(self._core.queued()), self._admission.limit))
            peer.send(Frame(FAILURE, REFUSED, frame.call_id, payload=refusal))
        except RpcError as error:
            logger.info("%s: cannot tell %s that its call was refused: %s", self._name, peer.info.name, error)

    def _on_control(self, peer: Peer, arrived: Arrived) -> None:
        if not isinstance(peer, RemotePeer):
            return
        descriptor = arrived.descriptor
        try:
            message = messages.decode_message(arrived.payload)
        except messages.ProtocolError as error:
            if descriptor >= 0:
                os.close(descriptor)
            peer.link.abort(str(error))
            return
        if type(message) is messages.SegmentOffered:
            peer.on_segment_offered(message, descriptor if descriptor >= 0 else None)
            return
        handle = self._controls[type(message)]
        if not peer.known and not isinstance(message, FOR_STRANGERS):
            peer.early.append((handle, message))
            return
        peer.descriptor = descriptor  # one such message of a peer at a time
        handle(peer, message)
        if (left := peer.take_descriptor()) is not None:
            os.close(left)

    def _on_code_wanted(self, peer: RemotePeer, message: messages.CodeWanted) -> None:
        from farcall.serialize.units import content_of  # the call that named the code has loaded it

        peer.control(messages.CodeTold(message.digest, content_of(message.digest)))

    def _on_code(self, peer: RemotePeer, message: messages.CodeTold) -> None:
        if self._server.code is not None:
            self._server.code.on_told(peer, message)

    def _on_goodbye(self, peer: RemotePeer, message: messages.Goodbye) -> None:
        if message.agreed:
            # The group has agreed to end: as good as the release by our parent, and earlier in a large group.
            self._leaving.on_message(peer, messages.DepartureReleased())
        if message.reason is not messages.GoodbyeReason.LEFT:
            note_lost_process(peer)
        peer.leaving, peer.farewell = True, message.reason.text
        if peer.known:
            is_wanted = message.reason is messages.GoodbyeReason.LEFT
            self._watch().on_goodbye(peer.incarnation, "" if is_wanted else message.reason.text)

    def _on_departure(self, peer: RemotePeer, message: DepartureMessage) -> None:
        self._leaving.on_message(peer, message)

    def _on_news(self, peer: RemotePeer, message: Message) -> None:
        watch = self._watch()
        if peer.known or not watch.is_guarded or not watch.is_member(peer.incarnation):
            watch.on_message(peer.incarnation, message)
        # else another connection is that member's: whoever knows the secret can say that this one is, too
