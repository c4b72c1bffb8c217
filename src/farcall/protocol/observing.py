"""Questions about what a worker does, and their answers; between members, and from an observer to a member.

An observer is not a member: it has no rank, nobody else sees it, and these three messages are all that it can send or
get. It comes through the same door, with a key of its own that is made from the cluster's secret (`handshake.py`), and
that cannot make it a member.

    message   from -> to                         says
    Ask       observer -> member, or members     "tell me about ``subject``"; ``everyone``: and ask all others for me
    Roster    member -> observer                 "these are the workers that you will hear of": the first answer
    Told      the asked -> who asked             one worker's answer

An answer's ``data`` is msgpack that only those who deal with the subject can read; an empty one says "I know of no such
subject". Nothing here is ever unpickled.

Between members these are control messages. An observer's connection carries nothing else, each message behind its
length in 4 bytes, big-endian; a member takes at most MAX_QUESTION_BYTES from it at a time.

Invariant: bytes cause no exception but ``ObservingError``, whatever the split of the stream.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

from farcall.errors import NetworkError

__all__ = [
    "MAX_ANSWER_BYTES",
    "MAX_QUESTION_BYTES",
    "Ask",
    "Message",
    "MessageDecoder",
    "ObservingError",
    "Roster",
    "Told",
    "WorkerState",
    "encode_framed",
]

MAX_QUESTION_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 256 << 20

_LENGTH: Final = struct.Struct(">I")


class ObservingError(NetworkError):
    """The other end sent something that is no question and no answer."""


class _Control(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of the messages: immutable, and encoded as [tag, field, field ...]."""


class Ask(_Control, frozen=True, tag=72):
    """Tell me about ``subject``. ``number`` comes back with the answers."""

    number: int
    subject: str
    argument: bytes = b""
    everyone: bool = False


class Told(_Control, frozen=True, tag=73):
    """What ``worker`` has to say."""

    number: int
    worker: str
    data: bytes


class WorkerState(msgspec.Struct, array_like=True, frozen=True):
    """A member as the asked one sees it."""

    name: str
    rank: int
    gone: str = ""
    """Why nothing will be heard of it, if it is known to be gone."""


class Roster(_Control, frozen=True, tag=74):
    """Who is asked."""

    number: int
    cluster_id: str
    workers: list[WorkerState]


Message: TypeAlias = Ask | Told | Roster

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_framed(message: Message) -> bytes:
    """The bytes of one message on an observer's connection."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class MessageDecoder:
    """Bytes of an observer's connection in, messages out."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def receive(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Take bytes; return the messages that are complete now."""
        buffer = self._buffer
        buffer += data
        found: list[Message] = []
        begin = 0
        while len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if length > self._limit_bytes:
                raise ObservingError(f"a message of {length} bytes was announced; the limit is {self._limit_bytes}")
            end = begin + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                found.append(_decoder.decode(bytes(buffer[begin + _LENGTH.size : end])))
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise ObservingError(f"an unreadable message of {length} bytes: {error}") from error
            begin = end
        del buffer[:begin]
        return found
