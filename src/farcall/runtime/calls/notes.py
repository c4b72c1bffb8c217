"""From what was noted while a message was written to the notes segment of its frame."""

from __future__ import annotations

from collections.abc import Sequence

from farcall.protocol.notes import Notes, ProfileWanted, encode_notes
from farcall.protocol.references import Fork
from farcall.runtime.peers.peer import Peer
from farcall.serialize import RECORDING, Annotated

__all__ = ["notes_of", "request_notes"]


def notes_of(
    buffers: Annotated,
    created: Fork | None = None,
    origin: str = "",
    profile: ProfileWanted | None = None,
    profiled: bytes = b"",
) -> bytes:
    """The notes of a message whose buffers are annotated."""
    return encode_notes(
        Notes(buffers.notes, created, origin, buffers.context_id, buffers.message_id, profile, profiled)
    )


def request_notes(
    peer: Peer,
    buffers: Sequence[memoryview],
    created: Fork | None = None,
    origin: str = "",
    profile: ProfileWanted | None = None,
) -> bytes:
    """The notes of a request to ``peer``. In a distributed autograd context it says so, even if it carries nothing."""
    if isinstance(buffers, Annotated) and (buffers.notes or buffers.recording is not None):
        return notes_of(buffers, created, origin, profile)
    recording = RECORDING.get()
    if recording is None or not recording.admits(peer):
        if created is None and profile is None:
            return b""
        return encode_notes(Notes([], created, origin, profile=profile))
    recording.record_send(peer, [])
    return encode_notes(Notes([], created, origin, recording.id, profile=profile))
