"""How letters between workers' contexts become one frame, and a frame letters again.

    flags  payload
    0      msgpack: what steers a pass, and no gradient; small, and nothing is unpickled
    1      pickle: the former, and gradients; tensor memory travels beside it

Invariant: of one frame, what steers is delivered first, then the gradients; contexts do not depend on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from farcall.autograd.passes import Gradient, Letter
from farcall.protocol import gradients as protocol
from farcall.protocol.frames import Arrived
from farcall.protocol.gradients import PassId
from farcall.protocol.messages import ProtocolError
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode, encode

__all__ = ["GRADIENTS", "decode_letters", "encode_letters"]

GRADIENTS: Final = 1
"""The subject of these letters, in the frame's call id."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[protocol.Message]] = msgspec.msgpack.Decoder(list[protocol.Message])


def encode_letters(letters: Sequence[Letter], peer: Peer) -> tuple[int, bytes, Sequence[memoryview]]:
    """The flags, payload and buffers of a frame."""
    steers = [letter for letter in letters if not isinstance(letter, Gradient)]
    steering = _encoder.encode(steers) if steers else b""
    # As plain tuples: naming a class costs more than all the rest of a small gradient.
    carried = [
        (letter.context_id, tuple(letter.pass_id), letter.message_id, letter.gradients)
        for letter in letters
        if isinstance(letter, Gradient)
    ]
    if not carried:
        return 0, steering, ()
    return 1, *encode((steering, carried), peer)


def decode_letters(frame: Arrived, peer: Peer) -> list[Letter]:
    """The letters in a frame, or ``ProtocolError``."""
    _, flags, _, _, _, payload, buffers = frame
    steering, carried = decode(payload, buffers, peer) if flags else (payload, ())
    try:
        letters: list[Letter] = [] if carried and not steering else [*_decoder.decode(steering)]
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"cannot read letters of {len(steering)} bytes: {error}") from error
    for context_id, pass_id, message_id, gradients in carried:
        letters.append(Gradient(context_id, PassId(*pass_id), message_id, gradients))
    if buffers:
        buffers.clear()  # the reader's frames further up the stack hold the same list
    return letters
