"""What a message is called in a rule, and what may be done to it.

Every message has the name of its frame's kind and one or more of its own; a rule that gives any of them means it.

    frame      further names
    request    "call", "create" (of a reference, by `remote`), "fetch" (of its value, by `to_here`)
    response, failure
    letter     "Gradient", and what else is in it: "StartPass", "PassDone", "PassFailed", "AbortPass", "ReleaseContext"
    control    the class of the message, of `protocol/messages.py` or `protocol/references`: "CallCancelled", "Release"

Messages about shared memory have no name: descriptors and leases are counted by both ends, so a lost or repeated one
is no fault that a network can have but a corruption of memory. Only faults of whole connections touch them.

Owns names, and nothing that happens to messages.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Final

import msgspec

from farcall.protocol import gradients, messages
from farcall.protocol.frames import CONTROL, LETTER, REQUEST, Kind
from farcall.protocol.notes import KEEP

__all__ = ["ANSWERS", "CALLS", "KINDS", "check_kinds", "names_of", "offers_segment"]

FETCH: Final = b"pfarcall.rpc.owner_methods\0fetch"
MEMORY: Final = (
    messages.SegmentOffered,
    messages.SegmentAccepted,
    messages.SegmentRefused,
    messages.SegmentRetired,
    messages.BlocksReleased,
)
ANSWERS: Final = frozenset({"response", "failure"})
CALLS: Final = frozenset({"request"}) | ANSWERS
"""What a rule means that gives no kind: messages of the user's calls."""

_FRAMES: Final = {int(kind): kind.name.lower() for kind in Kind}
_REQUESTS: Final = frozenset({"call", "create", "fetch"})
_LETTERS: Final = frozenset(kind.__name__ for kind in typing.get_args(gradients.Message)) | {"Gradient"}
_MEMORY_NAMES: Final = frozenset(kind.__name__ for kind in MEMORY)
_CONTROLS: Final = frozenset(kind.__name__ for kind in typing.get_args(messages.Message)) - _MEMORY_NAMES
KINDS: Final = frozenset(_FRAMES.values()) | _REQUESTS | _LETTERS | _CONTROLS
"""Every name that a rule may give."""

_steering = msgspec.msgpack.Decoder()


def check_kinds(kinds: str | Iterable[str] | None) -> frozenset[str]:
    """The names a rule gives, checked; none mean the messages of calls."""
    if kinds is None:
        return CALLS
    given = frozenset({kinds} if isinstance(kinds, str) else kinds)
    if not given:
        raise ValueError("kind names no message at all: leave it out to mean those of calls")
    if memory := given & _MEMORY_NAMES:
        raise ValueError(
            f"{', '.join(sorted(memory))}: messages about shared memory cannot be lost or repeated without corrupting "
            "memory; cut the connection instead, or give the workers shared_memory=False"
        )
    if unknown := given - KINDS:
        raise ValueError(
            f"there is no message called {', '.join(sorted(unknown))}; there are {', '.join(sorted(KINDS))}"
        )
    return given


def names_of(kind: int, flags: int, function: bytes, payload: bytes | memoryview) -> frozenset[str]:
    """What the message of a frame is called; no name at all: it must be left alone."""
    frame = _FRAMES[kind]
    if kind == REQUEST:
        return frozenset({frame, "create" if flags & KEEP else "fetch" if function == FETCH else "call"})
    if kind == LETTER:
        # A letter with gradients is pickled, and a tool that looks on must not unpickle anything.
        inside = ["Gradient"] if flags else [letter["type"] for letter in _steering.decode(payload)]
        return frozenset({frame, *inside})
    if kind == CONTROL:
        message = messages.decode_message(payload)
        return frozenset() if isinstance(message, MEMORY) else frozenset({frame, type(message).__name__})
    return frozenset({frame})


def offers_segment(payload: bytes | memoryview) -> bool:
    """Does a control message with this payload come with a descriptor?"""
    return isinstance(messages.decode_message(payload), messages.SegmentOffered)
