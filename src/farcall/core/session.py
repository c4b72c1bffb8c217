"""What one link has to send, and what of it the peer may lack: a machine without socket, thread or clock.

    small   frames that nothing has left of, in order
    large   messages with pieces that no slot was free for
    turns   messages in slots, of which chunks leave in turn
    wire    bytes that leave next, in order: numbered, kept, perhaps begun
    kept    what left and was not acknowledged, oldest first

A frame gets its number as it goes to the wire, also when it goes there again. Small frames pass between the chunks of
large messages. The bytes of small frames are kept until the peer has them. The pieces of a large message are its
sender's, who waits until all of it has left and takes them back then; so what of it is lost cannot be sent again: after
a broken connection its sender supplies what goes in its place (`lost`, `resume`). For a letter nothing could stand: its
chunks are kept, as small frames are.

A slot is a large message's until its last byte has left: an earlier end would let another message begin there, which
would be in the way if this one had to go on over another connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from farcall.core.contract import CARRIES, CHUNK, LETTER, REQUEST
from farcall.core.frames import (
    ABANDONED,
    MAX_SLOTS,
    Descriptor,
    Header,
    bare_frame,
    with_flags,
    with_number,
)

_FIRST_CHUNK = 256 * 1024
_LARGEST_CHUNK = 1 << 20
"""Other frames wait for no more than this."""


@dataclass(eq=False, slots=True)
class Large:
    """A message that travels in chunks."""

    head: bytes
    pieces: list[memoryview]
    """Its bytes: the head, then these. Empty when it is done."""
    size: int = field(init=False)
    at: int = 0
    """How many bytes were cut into chunks."""
    unwritten: int = 0
    """Of those, how many have not left."""
    slot: int = -1
    done: bool = False
    """Its sender can take its memory back."""
    failed: bool = False
    """No peer has it whole, or will."""
    is_letter: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_letter = Header.of(self.head).kind == LETTER
        self.pieces = [piece for piece in self.pieces if piece.nbytes]
        self.size = len(self.head) + sum(piece.nbytes for piece in self.pieces)

    def cut(self, size: int) -> list[memoryview]:
        """The next ``size`` bytes."""
        spans, begin, end = [], 0, self.at + size
        for piece in [memoryview(self.head), *self.pieces]:
            span = piece[max(self.at - begin, 0) : max(end - begin, 0)]
            begin += piece.nbytes
            if span:
                spans.append(span)
        self.at = end
        self.unwritten += size
        return spans


@dataclass(eq=False, slots=True)
class _Kept:
    """A frame that the peer may lack: a small one, a letter's chunk, or the chunk of ``large`` from ``offset`` on."""

    frame: bytes = b""
    descriptor: Descriptor | None = None
    large: Large | None = None
    offset: int = 0


@dataclass(eq=False, slots=True)
class _Span:
    """Bytes of the wire."""

    bytes: memoryview
    large: Large | None = None
    """Whose memory they are."""
    descriptor: Descriptor | None = None
    """Leaves with the first byte."""


def _call_of(frame: bytes) -> int:
    """The number of the call that a frame asks for; 0: none."""
    header = Header.of(frame)
    return header.call if header.kind == REQUEST else 0


class Outgoing:
    """One link's. ``next`` and ``wrote`` are for whoever writes: one thread at a time."""

    def __init__(self) -> None:
        self.carries_descriptors = False
        """Does this connection? Where not, a frame leaves without its own; one that is kept can leave with it later."""
        self.size: int = 0
        """Bytes that wait, but for those of large messages."""
        self.rests: bool = False
        """Nothing new goes to the wire: see `put_last`."""
        self.written: int = 0
        """Frames that went to the wire: the number of the next one."""
        self._small: deque[tuple[bytes, Descriptor | None]] = deque()
        self._large: deque[Large] = deque()
        self._turns: deque[Large] = deque()
        self._wire: deque[_Span] = deque()
        self._kept: deque[_Kept] = deque()
        self._slots: list[Large | None] = [None] * MAX_SLOTS
        self._acknowledged = 0
        self._chunk = _FIRST_CHUNK

    def __bool__(self) -> bool:
        return bool(self._wire or self._small or self._large or self._turns)

    # ------------------------------------------------------------------ in

    def post(self, frame: bytes, descriptor: Descriptor | None = None) -> None:
        self.size += len(frame)
        self._small.append((frame, descriptor))

    def post_large(self, large: Large) -> None:
        self._large.append(large)

    def give_up(self, large: Large) -> None:
        """Its sender takes the memory back now. ``large.failed`` tells whether the peer gets it nevertheless."""
        if large.done:
            return
        if large.at == large.size and large.unwritten:  # its end is on the wire: it only needs memory of its own
            self._copy(large)
            self._finish(large)
            return
        if large.slot < 0:
            self._large.remove(large)
        else:
            if large in self._turns:
                self._turns.remove(large)
            self._copy(large)
            self._put(bare_frame(CHUNK, large.slot | ABANDONED))
        self._finish(large, failed=True)

    def _copy(self, large: Large) -> None:
        for span in self._wire:
            if span.large is large:
                span.bytes, span.large = memoryview(bytes(span.bytes)), None
                self.size += span.bytes.nbytes

    def _finish(self, large: Large, failed: bool = False) -> None:
        large.done, large.failed, large.pieces = True, failed, []
        if large.slot >= 0:
            self._slots[large.slot] = None

    def put_last(self, frame: bytes, received: int) -> bool:
        """Send it and nothing else for now, unless something waits, or the peer, with so many frames, lacks one."""
        if self or self.rests or received not in (-1, self.written):
            return False
        self._put(frame)
        self.rests = True
        return True

    # ------------------------------------------------------------------ out

    def next(self, most: int = 64) -> tuple[list[memoryview], Descriptor | None]:
        """What is to be written next, and the descriptor that goes along. Empty: nothing."""
        if not self.rests and (not self._wire or self._wire[-1].large is None):  # else a chunk goes to its end first
            taken = 0
            while self._small and taken < _LARGEST_CHUNK:
                frame, descriptor = self._small.popleft()
                self.size -= len(frame)
                taken += len(frame)
                self._put(frame, descriptor)
            self._put_chunk()
        spans: list[memoryview] = []
        passed = None
        for span in self._wire:
            if len(spans) == most:
                break
            if span.descriptor is not None:
                if spans:
                    break  # it leaves with the first byte of a system call's
                passed = span.descriptor
            spans.append(span.bytes)
        return spans, passed

    def wrote(self, count: int) -> bool:
        """So many bytes of `next` have left. Returns whether a large message is done."""
        done = False
        while count:
            span = self._wire[0]
            span.descriptor = None
            size = min(count, span.bytes.nbytes)
            span.bytes = span.bytes[size:]
            count -= size
            if span.large is None:
                self.size -= size
            else:
                span.large.unwritten -= size
                if not span.large.unwritten and span.large.at == span.large.size:
                    self._finish(span.large)
                    done = True
            if not span.bytes:
                self._wire.popleft()
        return done

    def _number(self, frame: bytes) -> bytes:
        self.written += 1
        return with_number(frame, self.written - 1)

    def _put(self, frame: bytes, descriptor: Descriptor | None = None) -> None:
        frame = self._number(frame)
        self._kept.append(_Kept(frame, descriptor))
        if descriptor is not None and not self.carries_descriptors:
            frame, descriptor = with_flags(frame, Header.of(frame).flags & ~CARRIES), None
        self.size += len(frame)
        self._wire.append(_Span(memoryview(frame), None, descriptor))

    def _put_chunk(self) -> None:
        """Cut the next chunk of the message whose turn it is."""
        for slot, holder in enumerate(self._slots):
            if holder is None and self._large:
                large = self._slots[slot] = self._large.popleft()
                large.slot = slot
                self._turns.append(large)
        if not self._turns:
            return
        large = self._turns.popleft()
        size = min(self._chunk, large.size - large.at)
        self._chunk = min(2 * self._chunk, _LARGEST_CHUNK)
        header = self._number(bare_frame(CHUNK, large.slot, large.at, size))
        offset, spans = large.at, large.cut(size)
        is_letter = large.is_letter
        self._kept.append(_Kept(b"".join((header, *spans))) if is_letter else _Kept(large=large, offset=offset))
        self.size += len(header)
        self._wire.append(_Span(memoryview(header)))
        self._wire.extend(_Span(span, large) for span in spans)
        if large.at < large.size:
            self._turns.append(large)

    # ------------------------------------------------------------------ connections

    def acknowledged(self, count: int) -> None:
        """The peer has so many frames."""
        while self._acknowledged < count and self._kept:
            self._kept.popleft()
            self._acknowledged += 1

    def broke(self) -> None:
        """The connection is gone. What was on the wire is kept, too, and comes again from there."""
        for span in self._wire:
            if span.large is None:
                self.size -= span.bytes.nbytes
            else:
                large = span.large
                large.unwritten -= span.bytes.nbytes
                if large.is_letter and not large.unwritten and large.at == large.size:
                    self._finish(large)
        self._wire.clear()
        self.rests = False
        self._chunk = _FIRST_CHUNK

    def lost(self, received: int) -> list[bytes] | None:
        """The heads of the large messages that a peer with so many frames lacks. None: that count cannot be."""
        if not self._acknowledged <= received <= self.written:
            return None
        lacking = list(self._kept)[received - self._acknowledged :]
        lost = dict.fromkeys(kept.large for kept in lacking)  # each once, in order
        return [large.head for large in lost if large is not None and large.done and not large.failed]

    def resume(self, received: int, replacements: Iterable[bytes | None] = ()) -> list[int]:
        """Another connection: send again what the peer lacks. Returns the calls of messages that were replaced."""
        self.acknowledged(received)
        self.broke()
        lacking, self._kept = self._kept, deque()
        self.written = received
        supply = iter(replacements)
        replaced: list[int] = []
        under_way: deque[Large] = deque()
        seen: set[Large] = set()
        for kept in lacking:
            large = kept.large
            if large is None:
                self._put(kept.frame, kept.descriptor)
            elif large in seen:
                continue
            elif not large.done:  # its memory is still here: it goes on with the first chunk that the peer lacks
                large.at = kept.offset
                under_way.append(large)
            else:
                # The peer may have bytes even of its first chunk. Whoever has the slot now begins again behind this.
                self._put(bare_frame(CHUNK, large.slot | ABANDONED))
                if not large.failed:
                    if call := _call_of(large.head):
                        replaced.append(call)
                    if instead := next(supply, None):
                        self._put(instead)
            if large is not None:
                seen.add(large)
        under_way.extend(large for large in self._turns if large not in seen)
        self._turns = under_way
        return replaced

    def end(self) -> set[int]:
        """The peer is gone. Returns the calls whose requests it cannot have. Keeps nothing."""
        unfinished = [*self._large, *self._turns]
        unsent = [frame for frame, _ in self._small] + [large.head for large in unfinished]
        for large in {*unfinished, *(kept.large for kept in self._kept if kept.large is not None)}:
            if not large.done:
                self._finish(large, failed=True)
        self.broke()
        for queue in self._small, self._large, self._turns, self._kept:
            queue.clear()
        self.size = 0
        return {_call_of(frame) for frame in unsent} - {0}
