"""`ControlMessage`: the base of all control messages, which `messages.py` lists."""

from __future__ import annotations

import msgspec


class ControlMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Immutable, and encoded as [tag, field, field ...]; decoding refuses anything that does not fit exactly."""
