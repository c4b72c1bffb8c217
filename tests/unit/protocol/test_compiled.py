"""The compiled part of the protocol: switched off, out of date, and asked for what makes no sense."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.protocol import compiled
from farcall.protocol.frames import (
    HEADER,
    MAGIC,
    REQUEST,
    VERSION,
    Frame,
    Ticket,
    encode_frame,
    encode_small_in_python,
    numbered_in_python,
)

library = compiled.library
needs_library = pytest.mark.skipif(library is None, reason="there is no compiled code here")
WHOLE = encode_small_in_python(REQUEST, 0, 7, b"function", b"notes", b"payload")
WITH_TICKET = b"".join(encode_frame(REQUEST, 0, 7, b"", b"", b"", [Ticket(100, 2, 300)]))


@pytest.mark.parametrize("found", [None, SimpleNamespace(INTERFACE=0)])
def test_what_is_missing_or_out_of_date_is_not_used(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.delenv("FARCALL_SPEEDUPS", raising=False)
    monkeypatch.setitem(sys.modules, "farcall.protocol._frames", found)  # None: its import fails
    assert compiled.load() is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_SPEEDUPS", "0")
    assert compiled.load() is None


@needs_library
def test_whole_frames_are_taken_up_to_the_first_that_is_not() -> None:
    frames: list[Frame] = []
    staging = bytearray(b"??" + numbered_in_python([WHOLE, WITH_TICKET, WHOLE], 2**32 - 1))
    end = len(staging) - 1
    assert library.take_whole(Frame, Ticket, staging, 2, end, frames, 2**40 - 1) == len(staging) - len(WHOLE)
    assert frames == [
        Frame(REQUEST, 0, 7, b"function", b"notes", b"payload"),
        Frame(REQUEST, 0, 7, buffers=[Ticket(100, 2, 300)]),
    ]


@needs_library
def test_a_frame_with_another_number_is_not_taken() -> None:
    frames: list[Frame] = []
    staging = bytearray(numbered_in_python([WHOLE, WHOLE], 5) + numbered_in_python([WHOLE], 6))
    assert library.take_whole(Frame, Ticket, staging, 0, len(staging), frames, 5) == 2 * len(WHOLE)
    assert library.take_whole(Frame, Ticket, staging, 0, len(staging), frames, 4) == 0
    assert len(frames) == 2


@needs_library
@pytest.mark.parametrize("number", [0, 7, 2**32 - 1, 2**70])
def test_numbers_are_written_as_python_writes_them(number: int) -> None:
    frames = [WHOLE, WITH_TICKET, WHOLE]
    assert library.numbered(frames, number) == numbered_in_python(frames, number)
    assert library.numbered(WHOLE, number) == numbered_in_python(WHOLE, number)
    assert library.numbered([], number) == b""


@needs_library
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ([WHOLE],),
        ((WHOLE,), 1),
        ([WHOLE[:39]], 1),
        (WHOLE[:39], 1),
        ([bytearray(WHOLE)], 1),
        ([WHOLE], "1"),
        ([None], 1),
    ],
)
def test_what_is_no_list_of_frames_is_refused(arguments: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        library.numbered(*arguments)


@needs_library
@pytest.mark.parametrize(
    "lengths",
    [(2**64 - 1, 0, 0, 0), (2**64 - 40, 0, 0, 0), (0, 2**32 - 1, 2**32 - 1, 0), (0, 0, 0, 2**32 - 1), (1, 0, 0, 0)],
)
def test_lengths_that_lie_take_nothing(lengths: tuple[int, int, int, int]) -> None:
    frames: list[Frame] = []
    staging = bytearray(HEADER.pack(MAGIC, VERSION, REQUEST, 0, 1, *lengths, 0))
    assert library.take_whole(Frame, Ticket, staging, 0, len(staging), frames, 0) == 0
    assert frames == []


def fail(*_: object) -> Any:
    raise MemoryError("there is no more")


@needs_library
@pytest.mark.parametrize(("make_frame", "make_ticket"), [(fail, Ticket), (Frame, fail)])
def test_an_error_while_a_frame_is_made_comes_through_and_holds_nothing(make_frame: Any, make_ticket: Any) -> None:
    frames: list[Frame] = []
    staging = bytearray(WITH_TICKET)
    before = sys.getrefcount(frames), sys.getrefcount(staging), sys.getrefcount(Ticket), sys.getrefcount(Frame)
    for _ in range(100):
        with pytest.raises(MemoryError, match="no more"):
            library.take_whole(make_frame, make_ticket, staging, 0, len(staging), frames, 0)
    after = sys.getrefcount(frames), sys.getrefcount(staging), sys.getrefcount(Ticket), sys.getrefcount(Frame)
    assert (frames, after) == ([], before)
    staging.clear()  # nobody holds its memory any more


@needs_library
def test_frames_and_their_parts_have_one_owner() -> None:
    def owners(frames: list[Frame]) -> list[int]:
        payload, [ticket] = frames[0].payload, frames[1].buffers
        return [sys.getrefcount(one) for one in (*frames, payload, ticket)]

    frames: list[Frame] = []
    staging = bytearray(numbered_in_python([WHOLE, WITH_TICKET], 0))
    library.take_whole(Frame, Ticket, staging, 0, len(staging), frames, 0)
    by_hand = [Frame(REQUEST, payload=bytes(bytearray(b"payload"))), Frame(REQUEST, buffers=[Ticket(100, 2, 300)])]
    assert owners(frames) == owners(by_hand)


@needs_library
@pytest.mark.parametrize(("start", "end"), [(-1, 5), (6, 5), (0, 11), (0, 2**70), ("a", 5)])
def test_bytes_outside_the_staging_are_not_read(start: Any, end: Any) -> None:
    with pytest.raises((ValueError, OverflowError, TypeError)):
        library.take_whole(Frame, Ticket, bytearray(10), start, end, [], 0)


@needs_library
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (256, 0, 0, b"", b"", b""),
        (-1, 0, 0, b"", b"", b""),
        (1, 2**32, 0, b"", b"", b""),
        (1, 0, 2**64, b"", b"", b""),
        ("1", 0, 0, b"", b"", b""),
        (1, 0, 0, "text", b"", b""),
        (1, 0, 0, b"", None, b""),
        (1, 0, 0, b"", b"", bytearray()),
    ],
)
def test_fields_that_do_not_fit_are_refused(arguments: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        library.encode_small(*arguments)
