"""The notes of a frame: what its receiver must know of the message without unpickling it."""

from __future__ import annotations

from farcall.protocol.frames import Frame
from farcall.protocol.notes import Notes, ProfileWanted, encode_notes
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.scope import Inherited


def write_notes(
    frame: Frame,
    *,
    created: Fork | None = None,
    origin: str = "",
    profile: ProfileWanted | None = None,
    profiled: bytes = b"",
    inherited: Inherited | None = None,
) -> None:
    """Note in ``frame`` the forks in its payload, its autograd context, and what the arguments say."""
    frame.notes = encode_notes(
        Notes(
            list(frame.forks),
            created,
            origin,
            0 if frame.recording is None else frame.recording.id,
            frame.message_id,
            profile,
            profiled,
            frame.telemetry or {},
            0.0 if inherited is None else inherited.time_left_s,
            {} if inherited is None else dict(inherited.metadata),
            frame.serial,
        )
    )
