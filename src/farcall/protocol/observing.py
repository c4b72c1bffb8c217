"""Questions about a worker's state, and their answers: between members, and from an observer to a member.

An observer is not a member: it has no rank, members do not list it, and these three messages are all that it can send
or receive. It uses the same port and handshake (`handshake.py`), with an observer's key derived from the cluster's
secret, which does not admit it as a member.

    message   from -> to                         says
    Ask       observer -> member, or members     "tell me about ``subject``"; ``everyone``: and ask all others for me
    Roster    member -> observer                 "these are the workers that you will hear of": the first answer
    Told      the asked -> the asker             one worker's answer

An answer's ``data`` is msgpack whose shape depends on the subject; empty ``data`` means "I know of no such subject".
Nothing here is ever unpickled.

Between members these are control messages. An observer's connection carries nothing else; a length of 4 bytes,
big-endian, precedes each message, and a member accepts questions of at most MAX_QUESTION_BYTES.

Invariant: decoding raises no exception but ``ObservingError``, whatever the bytes and the split of the stream.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final, TypeAlias

import msgspec

from farcall.errors import NetworkError
from farcall.protocol.control import ControlMessage

MAX_QUESTION_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 256 << 20
HIDDEN: Final = "only its own user may look at it: give all workers the same FARCALL_OBSERVERS_SECRET"
"""Of a worker that has a table of `farcall.allow`, and a secret for observers of its own."""

_LENGTH: Final = struct.Struct(">I")


class ObservingError(NetworkError):
    """The other end sent something that is neither a question nor an answer."""


class Ask(ControlMessage, frozen=True, tag=72):
    """A question about ``subject``. Its answers repeat the ``number``.

    ``proof``: where members must not look at each other, the one that asks for an observer proves that observer's key.
    """

    number: int
    subject: str
    argument: bytes = b""
    everyone: bool = False
    proof: bytes = b""

    def proved(self, key: bytes, incarnation: int) -> Ask:
        """The question with a proof of ``key``, good for this question to that member alone."""
        asked = msgspec.msgpack.encode((incarnation, self.number, self.subject, self.argument))
        return msgspec.structs.replace(self, proof=hmac.digest(key, b"farcall question" + asked, "sha256"))


class Told(ControlMessage, frozen=True, tag=73):
    """The answer of ``worker``."""

    number: int
    worker: str
    data: bytes


class WorkerState(msgspec.Struct, array_like=True, frozen=True):
    """A member, as the member that was asked sees it."""

    name: str
    rank: int
    gone: str = ""
    """Why no answer will come from it, if it is known to be gone, or `HIDDEN`."""


class Roster(ControlMessage, frozen=True, tag=74):
    """The workers from which the observer will get answers."""

    number: int
    cluster_id: str
    workers: list[WorkerState]


Message: TypeAlias = Ask | Told | Roster

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_framed(message: Message) -> bytes:
    """Encode one message for an observer's connection."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class MessageDecoder:
    """Decodes an observer's connection: bytes in, messages out. Mutable: the buffer of incomplete messages."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def receive(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Take bytes; return the messages that they complete."""
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
