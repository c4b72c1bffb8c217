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
from farcall.protocol.frames import LETTER, Frame
from farcall.protocol.gradients import PassId
from farcall.protocol.messages import ProtocolError
from farcall.runtime.peers.peer import Peer
from farcall.serialize import read_value, write_value

__all__ = ["GRADIENTS", "decode_letters", "encode_letters"]

GRADIENTS: Final = 1
"""The subject of these letters, in the frame's call id."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[protocol.Message]] = msgspec.msgpack.Decoder(list[protocol.Message])


def encode_letters(letters: Sequence[Letter], peer: Peer) -> Frame:
    """The frame of ``letters``."""
    steers = [letter for letter in letters if not isinstance(letter, Gradient)]
    steering = _encoder.encode(steers) if steers else b""
    # As plain tuples: naming a class costs more than all the rest of a small gradient.
    carried = [
        (letter.context_id, tuple(letter.pass_id), letter.message_id, letter.gradients)
        for letter in letters
        if isinstance(letter, Gradient)
    ]
    if not carried:
        return Frame(LETTER, 0, GRADIENTS, payload=steering)
    frame = Frame(LETTER, 1, GRADIENTS)
    write_value(frame, (steering, carried), peer)
    return frame


def decode_letters(frame: Frame, peer: Peer) -> list[Letter]:
    """The letters in a frame, or ``ProtocolError``."""
    steering, carried = read_value(frame, peer) if frame.flags else (frame.payload, ())
    try:
        letters: list[Letter] = [] if carried and not steering else [*_decoder.decode(steering)]
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"cannot read letters of {len(steering)} bytes: {error}") from error
    for context_id, pass_id, message_id, gradients in carried:
        letters.append(Gradient(context_id, PassId(*pass_id), message_id, gradients))
    frame.buffers = ()  # the reader, further up the stack, holds the frame
    return letters
