"""The compiled part of the protocol: switched off, out of date, and asked for what makes no sense."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.protocol import compiled

library = compiled.library
needs_library = pytest.mark.skipif(library is None, reason="there is no compiled code here")


@pytest.mark.parametrize("found", [None, SimpleNamespace(INTERFACE=0)])
def test_what_is_missing_or_out_of_date_is_not_used(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.delenv("FARCALL_SPEEDUPS", raising=False)
    monkeypatch.setitem(sys.modules, "farcall.protocol._frames", found)  # None: its import fails
    assert compiled.load() is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_SPEEDUPS", "0")
    assert compiled.load() is None


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
