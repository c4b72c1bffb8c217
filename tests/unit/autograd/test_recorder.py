"""Gradient messages to a frame and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farcall.autograd.passes import Gradient, Message
from farcall.autograd.recorder import GRADIENTS, decode_messages, encode_messages
from farcall.protocol.frames import LETTER, Frame
from farcall.protocol.gradients import AbortPass, PassDone, PassFailed, PassId, ReleaseContext, StartPass
from farcall.protocol.messages import ProtocolError

NOBODY: Any = None
PASS = PassId(3, 7)


def there_and_back(messages: list[Message]) -> list[Message]:
    return decode_messages(encode_messages(messages, NOBODY), NOBODY)


def test_what_steers_a_pass() -> None:
    messages: list[Message] = [
        StartPass(5, PASS, (0, 1, 2), True, 4),
        PassDone(5, PASS),
        PassFailed(5, PASS, 2, "broken"),
        AbortPass(5, PASS),
        ReleaseContext(5),
    ]
    assert there_and_back(messages) == messages
    frame = encode_messages(messages, NOBODY)
    assert (frame.flags, frame.buffers) == (0, ())


def test_gradients_come_after_it() -> None:
    large = torch.rand(100, 100)
    sparse = torch.eye(3).to_sparse()
    messages: list[Message] = [
        Gradient(5, PASS, 1, {0: torch.ones(2), 1: None, 3: large, 4: sparse}),
        PassDone(5, PASS),
        Gradient(6, PASS, 2, {}),
    ]
    done, first, second = there_and_back(messages)
    assert done == PassDone(5, PASS)
    assert second == Gradient(6, PASS, 2, {})
    assert isinstance(first, Gradient)
    assert (first.context_id, first.pass_id, first.message_id) == (5, PASS, 1)
    assert list(first.gradients) == [0, 1, 3, 4]
    one, none, two, three = first.gradients.values()
    assert none is None
    assert one is not None
    assert two is not None
    assert three is not None
    assert torch.equal(one, torch.ones(2))
    assert torch.equal(two, large)
    assert torch.equal(three.to_dense(), torch.eye(3))


@pytest.mark.parametrize("payload", [b"", b"\x93", b"\x91\x81\xa4type\xa4Nope"])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read gradient messages"):
        decode_messages(Frame(LETTER, 0, GRADIENTS, payload=payload), NOBODY)
