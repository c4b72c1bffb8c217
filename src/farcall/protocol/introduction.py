"""How a member that dials another says that it is one: what its identity carries.

    capability     value
    host           the token of its host
    admission      its admission number, decimal; only members have one
    address<n>     its addresses, n from 0

The listener may not have heard of it yet (`membership`: a newcomer calls whom it likes as soon as it is let in). All of
this is in the greeting, so the proof covers it.
"""

from __future__ import annotations

import msgspec

from farcall.protocol.handshake import Identity, malformed
from farcall.protocol.membership.messages import MAX_ADDRESSES, Record

__all__ = ["HOST", "introduced", "introduction_of"]

HOST = "host"
_ADMISSION = "admission"


def introduced(me: Identity, record: Record) -> Identity:
    """``me``, who was let in as ``record`` says."""
    addresses = {f"address{number}": address for number, address in enumerate(record.addresses)}
    capabilities = {**me.capabilities, **addresses, HOST: record.host_token, _ADMISSION: str(record.admission)}
    return msgspec.structs.replace(me, capabilities=capabilities)


def introduction_of(peer: Identity, life: int) -> Record | None:
    """The member that a proven dialer, whose life is ``life``, says it is; None: it does not say so."""
    capabilities = peer.capabilities
    admission = capabilities.get(_ADMISSION)
    if admission is None:
        return None
    if not admission.isdecimal() or len(admission) > 15:
        raise malformed("an admission number that is none")
    addresses: list[str] = []
    while len(addresses) < MAX_ADDRESSES and (address := capabilities.get(f"address{len(addresses)}")) is not None:
        addresses.append(address)
    return Record(life, peer.name, peer.rank, tuple(addresses), capabilities.get(HOST, ""), int(admission))
