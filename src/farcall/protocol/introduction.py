"""How a member that dials another says that it is one: what its identity carries.

    capability     value
    host           the token of its host
    admission      its admission number, decimal; only members have one
    address<n>     its addresses, n from 0
    first          "1": it starts, and has had no connection to the listener yet, as far as it knows

The listener may not have heard of it yet (`membership`: a newcomer calls whom it likes as soon as it is let in). All of
this is in the greeting, so the proof covers it.
"""

from __future__ import annotations

import msgspec

from farcall.protocol.handshake import Identity, malformed
from farcall.protocol.member import MAX_ADDRESSES, Member

__all__ = ["HOST", "for_the_first_time", "introduced", "introduction_of", "is_for_the_first_time"]

HOST = "host"
_ADMISSION = "admission"
_FIRST = "first"


def for_the_first_time(me: Identity) -> Identity:
    """``me``, who dials members that it has had no connection to."""
    return msgspec.structs.replace(me, capabilities={**me.capabilities, _FIRST: "1"})


def is_for_the_first_time(peer: Identity) -> bool:
    """Does a dialler know of no connection to us before this one?"""
    return _FIRST in peer.capabilities


def introduced(me: Identity, member: Member) -> Identity:
    """``me``, who was let in as ``member``."""
    addresses = {f"address{number}": address for number, address in enumerate(member.addresses)}
    capabilities = {**me.capabilities, **addresses, HOST: member.host_token, _ADMISSION: str(member.admission)}
    return msgspec.structs.replace(me, capabilities=capabilities)


def introduction_of(peer: Identity) -> Member | None:
    """The member that a proven dialer says it is; None: the dialer is no member yet."""
    capabilities = peer.capabilities
    admission = capabilities.get(_ADMISSION)
    if admission is None:
        return None
    if not admission.isdecimal() or len(admission) > 15:
        raise malformed("an admission number that is none")
    addresses: list[str] = []
    while len(addresses) < MAX_ADDRESSES and (address := capabilities.get(f"address{len(addresses)}")) is not None:
        addresses.append(address)
    return Member(peer.name, peer.rank, peer.incarnation, tuple(addresses), capabilities.get(HOST, ""), int(admission))
