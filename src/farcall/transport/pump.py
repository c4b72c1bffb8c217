"""TLS as a pump: bytes in, bytes out. It never waits, and knows no socket, thread or transport.

TLS 1.3 by Python's ``ssl`` over buffers in memory. (A wrapped socket took 16.7 us of processor time for a small
message, buffers 13.2, a plain socket 6.7; large messages cost the same.)

    state      event                                 becomes
    new        first bytes that are not TLS          over: ``NotEncrypted``, which has them
    shaking    the handshake's last bytes are here   ready: bytes of the two ends go through
    shaking    a certificate is refused              over: ``TlsFailed``
    ready      a record that was changed             over: ``TransportForged``
    any        64 KiB from the wire for nothing      over: ``TransportBroken``

One thread at a time.
"""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from typing import Any, Final

from farcall.transport.interface import Buffer, NotEncrypted, TlsFailed, TransportBroken, TransportForged

ALPN: Final = "farcall"
"""What a dialer names in its first record, for listeners that do not encrypt: they tell it so, and nobody else."""
MAX_BODY_BYTES: Final = 128 * 1024
_JOINED_BYTES: Final = 16 * 1024
"""The size of a full record: smaller buffers are joined."""
_RECORDS: Final = (0x16, 0x15)
"""The first byte of a handshake record, and of an alert. Farcall in the clear begins with 0x89 (`hello.py`)."""
_MOST_BARREN_BYTES: Final = 64 * 1024
"""No handshake is as long, and a record brings plain text: others, which change keys, could be sent without end."""
_ADVICE: Final = "give every member certificates of one authority (farcall certificates), or none of them"


class TlsPump:
    """One end of a TLS connection. Mutable: its state, and the bytes on their way in and out."""

    __slots__ = (
        "_digest",
        "_host",
        "_incoming",
        "_object",
        "_outgoing",
        "fed_bytes",
        "has_begun",
        "is_listener",
        "is_ready",
    )

    def __init__(self, context: ssl.SSLContext, digest: bytes, *, is_listener: bool, host: str | None) -> None:
        """``digest``: of the certificate that this end shows. ``host``: what the peer's certificate must name."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.is_listener: bool = is_listener
        self._object: Any = context.wrap_bio(self._incoming, self._outgoing, server_side=is_listener)
        self._digest = digest
        self._host = host
        self.fed_bytes: int = 0
        """Bytes from the wire since the last plain text, or the handshake."""
        self.has_begun: bool = False
        """Has the other end sent anything?"""
        self.is_ready: bool = False

    # ------------------------------------------------------------------ the wire

    def feed(self, data: memoryview) -> None:
        """Take bytes from the wire."""
        if not self.has_begun and data[0] not in _RECORDS:
            raise NotEncrypted(bytes(data))
        self.has_begun = True
        self.fed_bytes += len(data)
        self._incoming.write(data)

    def pull(self) -> bytes:
        """The bytes for the wire, if there are any."""
        return self._outgoing.read()

    # ------------------------------------------------------------------ the handshake

    def shake(self) -> bool:
        """Go on with the handshake as far as the bytes that came allow. True: it is complete."""
        if not self.is_ready:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                self._check_barren()
                return False
            except ssl.SSLError as error:
                raise self._failed(error) from error
            self.fed_bytes = 0
            self.is_ready = True
        return True

    @property
    def wrong_host(self) -> str:
        """Why the peer's certificate is not that of the host that was dialled; empty: it is, or need not be.

        Not left to ``ssl``, which does not tell what the certificate names instead.
        """
        names = self._names()
        if self._host is None or any(_names_host(kind, name, self._host) for kind, name in names):
            return ""
        found = ", ".join(name for _, name in names) or "nothing"
        return (
            f"its certificate names {found}, and not {self._host}, which was dialled: make it again with farcall "
            f"certificates DIR HOST={self._host}, have that member advertise a name that it has (option `advertise`), "
            "or give all members TlsOptions(check_hosts=False)"
        )

    def _names(self) -> list[tuple[str, str]]:
        shown: Any = self._object.getpeercert() or {}
        return [(kind, value.strip()) for kind, value in shown.get("subjectAltName", ())]

    @property
    def binding(self) -> bytes:
        """What both ends know of this channel, and no other channel has: part of the proof in farcall's handshake.

        The digests of both certificates (of nothing where an end showed none), the dialer's first; and the dialer's
        Finished message, which covers all of the handshake under a key of its own.
        """
        theirs = hashlib.sha256(self._object.getpeercert(binary_form=True) or b"").digest()
        finished: bytes | None = self._object.get_channel_binding("tls-unique")
        if not finished:  # OpenSSL always tells; its relatives may not
            raise TlsFailed(f"{ssl.OPENSSL_VERSION} of this Python does not tell channels apart (tls-unique)")
        return (theirs + self._digest if self.is_listener else self._digest + theirs) + finished

    @property
    def peer_names(self) -> frozenset[str]:
        """The names in the peer's certificate."""
        shown: Any = self._object.getpeercert() or {}
        common = {value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"}
        return frozenset({name for kind, name in self._names() if kind == "DNS"} | common)

    # ------------------------------------------------------------------ plain text

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Encrypt a prefix of ``buffers``; how many bytes."""
        total = 0
        small: list[Buffer] = []
        for buffer in buffers:
            room = MAX_BODY_BYTES - total
            if not room:
                break
            part = buffer if len(buffer) <= room else memoryview(buffer)[:room]
            total += len(part)
            if len(part) < _JOINED_BYTES:
                small.append(part)
            else:
                self._write(small)
                small = []
                self._write([part])
        self._write(small)
        return total

    def _write(self, parts: list[Buffer]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            while len(data):
                data = memoryview(data)[self._object.write(data) :]
        except ssl.SSLError as error:  # after a failed read, OpenSSL refuses to write as well
            raise self._failed(error) from error

    def read_into(self, view: memoryview) -> int | None:
        """Decrypt some bytes; 0: the peer ended, None: more must come from the wire first."""
        try:
            count = int(self._object.read(len(view), view))
            self.fed_bytes = 0
            return count
        except ssl.SSLWantReadError:
            self._check_barren()
            return None
        except ssl.SSLZeroReturnError:
            return 0
        except ssl.SSLError as error:
            raise self._failed(error) from error

    def _check_barren(self) -> None:
        if self.fed_bytes > _MOST_BARREN_BYTES:
            raise TransportBroken("the other end sends records without anything in them")

    @property
    def has_plain_text(self) -> bool:
        """Might `read_into` have bytes without more from the wire?"""
        return bool(self._object.pending() or self._incoming.pending)

    def _failed(self, error: ssl.SSLError) -> TransportBroken:
        if isinstance(error, ssl.SSLCertVerificationError):
            return TlsFailed(f"its certificate is not valid: {error.verify_message}: {_ADVICE}")
        why = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in why:
            text = f"the other end refuses TLS with this one ({why})"
        elif self.is_ready:
            return TransportForged(f"somebody between the two ends has changed bytes ({why})")
        else:
            text = f"no TLS with the other end: {why}"
        return TlsFailed(f"{text}: {_ADVICE}" if "certificate" in why or "unknown ca" in why else text)


def _names_host(kind: str, name: str, host: str) -> bool:
    """Does an entry of a certificate name ``host``? A star stands for the first part of a DNS name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        host = host.lower().rstrip(".")
        _, dot, domain = host.partition(".")
        return kind == "DNS" and name.lower() in (host, f"*.{domain}" if dot else host)
    return kind == "IP Address" and ipaddress.ip_address(name) == address
