"""Routes each message that arrives to its handler: requests, answers, letters and control messages.

Owns the order of the checks on a message: is there room, what do its notes say, which handler gets it. Holds no
protocol: each control message is a row in a table, to which the layers above add their own (`hooks.py`).

Frames arrive on the thread that reads the link, which must not block: the I/O thread, or a helping reader, which waits
for an answer. Control messages are handled on the I/O thread, except those in ``in_order``, whose handlers have their
own locks. Every call passes here: plain attributes, no layer in between.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, get_args

import msgspec

from farcall.channel.segments import SegmentRefused
from farcall.errors import RpcError
from farcall.protocol import messages
from farcall.protocol.departure.events import DepartureMessage
from farcall.protocol.frames import CONTROL, FAILURE, LETTER, REQUEST, Frame
from farcall.protocol.membership.messages import Message
from farcall.protocol.notes import REFUSABLE, REFUSED, Notes, Refusal, decode_notes, encode_refusal
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.membership.shutdown import Leaving, Withdrawing
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.observing.counters import BOUNDS_S, FAILED
from farcall.runtime.observing.profiling import PROFILING
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize import decline, discard

logger: logging.Logger = logging.getLogger("farcall")

Controls = Mapping[type[Any], Callable[[RemotePeer, Any], None]]

HANDLED_ANYWHERE = (
    messages.BlocksReleased,
    messages.ClockAsked,
    messages.FramesReceived,
    messages.QueueFull,
    messages.QueueHasRoom,
    messages.SegmentAccepted,
    messages.SegmentOffered,
)
"""Control messages that a helping reader handles itself: their handlers touch only objects with their own locks."""
NEWS = get_args(Message)
"""Control messages about membership."""
FOR_STRANGERS = (*NEWS, *HANDLED_ANYWHERE, messages.Goodbye, messages.SegmentRefused, messages.SegmentRetired)
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
        hold: Callable[[RemotePeer, Frame], None],
    ) -> None:
        """``hold`` keeps the messages of peers that are not members yet. Adds the node's own rows to ``hooks``."""
        self._name = name
        self._loop = loop
        self._admission = admission
        self._max_queued = admission.limit
        self._pending = calls.pending
        self._answered = calls.answered
        self._server = server
        self._unanswered = server.unanswered
        self._leaving = leaving
        self._watch = watch
        self._hold = hold
        self._hooks = hooks
        self._controls = hooks.controls
        self._in_order = hooks.in_order
        self._letters = hooks.letters
        for kind, handle in self._own_controls().items():
            hooks.on_control(kind, handle, in_order=kind in HANDLED_ANYWHERE)

    def _own_controls(self) -> Controls:
        return {
            messages.SegmentOffered: RemotePeer.on_segment_offered,
            messages.SegmentAccepted: RemotePeer.on_segment_accepted,
            messages.SegmentRefused: RemotePeer.on_segment_refused,
            messages.SegmentRetired: RemotePeer.on_segment_retired,
            messages.BlocksReleased: RemotePeer.on_blocks_released,
            messages.QueueFull: RemotePeer.on_queue_full,
            messages.QueueHasRoom: RemotePeer.on_queue_has_room,
            messages.CallCancelled: lambda peer, message: self._server.cancel(peer, message.call_id),
            messages.CodeWanted: self._on_code_wanted,
            messages.CodeTold: self._on_code,
            messages.Goodbye: self._on_goodbye,
            messages.Ping: lambda peer, message: peer.control(messages.Pong(message.nonce)),
            messages.Pong: lambda peer, message: None,
            messages.FramesReceived: lambda peer, message: peer.link.session.on_acknowledged(message.count),
            messages.ClockAsked: lambda peer, message: peer.control(
                messages.ClockTold(message.sent_ns, PROFILING.clock_ns())
            ),
            messages.ClockTold: lambda peer, message: None,
            **dict.fromkeys(get_args(DepartureMessage), self._on_departure),
            **dict.fromkeys(NEWS, self._on_news),
        }

    def on_frame(self, peer: RemotePeer, frame: Frame) -> None:
        """Route one frame. On the thread that reads the link: it must not block."""
        try:
            if frame.kind == CONTROL:
                self._on_control(peer, frame)
                return
            if not peer.known:
                self._hold(peer, frame)
                return
            if frame.buffers:
                peer.look_up(frame)
            self.on_message(peer, frame)
        except Exception as error:
            self._mishandled(peer, error)

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

    def on_message(self, peer: Peer, frame: Frame) -> None:
        """Hand a request, an answer or a letter to its handler."""
        kind = frame.kind
        if (
            kind == REQUEST
            and len(self._unanswered) >= self._max_queued
            and self._admission.refuses(peer, bool(frame.flags & REFUSABLE))
        ):
            self.refuse(peer, frame)
            return
        profiled = b""
        if frame.notes:
            notes = decode_notes(frame.notes)
            profiled = notes.profiled
            if not self._take_notes(peer, frame, notes):
                return
        if kind == REQUEST:
            self._server.accept(peer, frame)
            return
        if kind == LETTER:
            handle = self._letters.get(frame.call_id)
            if handle is None:
                logger.error("%s: %s sent a letter of unknown subject %d", self._name, peer.info.name, frame.call_id)
            else:
                handle(peer, frame)
            return
        # A call is answered by its callee alone: ids are easy to guess. `answered` ends the span of a traced one.
        call = self._pending.get(frame.call_id)
        if call is None or call.peer is not peer or self._answered(frame) is None:
            # The answer is late: the call has ended.
            decline(frame, peer)
            discard(frame.payload, peer)
            return
        call.counters[bisect_right(BOUNDS_S, monotonic() - call.started_at)] += 1
        if kind == FAILURE:
            call.counters[FAILED] += 1
        if call.profile is not None:
            # Before `on_answer`: the caller may read the record as soon as it wakes up.
            call.profile.ended(profiled, frame.size_bytes)
        call.on_answer(frame)
        if self._leaving.entered:
            self._leaving.poke()

    def _take_notes(self, peer: Peer, frame: Frame, notes: Notes) -> bool:
        """Fill in the fields of ``frame`` from its notes. False: do not handle the frame, or not yet."""
        if (notes.time_left_s or notes.metadata) and frame.scope is None:
            # Before anything can defer the frame, and not again afterwards: its caller's time runs meanwhile.
            frame.scope = (monotonic() + notes.time_left_s if notes.time_left_s else NEVER, notes.metadata)
        if notes.serial is not None and not self._server.references.take_turns(peer, frame, notes.serial):
            return False
        if (notes.created is not None or notes.forks) and not self._server.references.take_forks(peer, frame, notes):
            return False
        if notes.context_id:
            self._hooks.find_recording(peer, frame, notes)
        frame.profile = notes.profile
        return True

    def on_own_control(self, peer: Any, message: messages.Message) -> None:
        """Handle a control message of this node to itself, on the sending thread; all such handlers allow that."""
        handle = self._controls[type(message)]
        if type(message) is messages.CallCancelled:
            # Queued, not called here: nested calls that are cancelled with this one may go to this node, too, and the
            # cancellations would recurse.
            self._loop.call_soon(lambda: self._handle_later(handle, peer, message))
        else:
            handle(peer, message)

    def refuse(self, peer: Peer, frame: Frame) -> None:
        """Refuse a request, because too many calls wait here; account for its references, but create none."""
        if frame.notes:
            frame.flags = REFUSED
            if not self._take_notes(peer, frame, decode_notes(frame.notes)):
                return  # the references deferred it: see `redeliver`
            decline(frame, peer)
        discard(frame.payload, peer)
        try:
            refusal = encode_refusal(Refusal(self._admission.queued, self._admission.limit))
            peer.send(Frame(FAILURE, REFUSED, frame.call_id, payload=refusal))
        except RpcError as error:
            logger.info("%s: cannot tell %s that its call was refused: %s", self._name, peer.info.name, error)

    def redeliver(self, peer: Peer, frame: Frame) -> None:
        """On the I/O thread: handle a message that the references of this node have deferred."""
        try:
            if frame.kind == REQUEST and frame.flags & REFUSED:
                self.refuse(peer, frame)
            else:
                self.on_message(peer, frame)
        except Exception as error:
            self._mishandled(peer, error)

    def _on_control(self, peer: RemotePeer, frame: Frame) -> None:
        try:
            message = messages.decode_message(frame.payload)
        except messages.ProtocolError as error:
            peer.link.abort(str(error))
            return
        handle = self._controls[type(message)]
        if not peer.known and not isinstance(message, FOR_STRANGERS):
            self._hold(peer, frame)
            return
        if type(message) in self._in_order or self._loop.on_thread():
            handle(peer, message)
        else:
            self._loop.call_soon(lambda: self._handle_later(handle, peer, message))

    def _handle_later(self, handle: Callable[[RemotePeer, Any], None], peer: RemotePeer, message: Any) -> None:
        try:
            handle(peer, message)
        except Exception as error:
            self._mishandled(peer, error)

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
