"""TLS over a transport: third parties can neither read nor write, and both ends authenticate each other.

TLS 1.3 by Python's ``ssl``, over buffers in memory: bytes in, bytes out, so that it works over any transport and never
waits. (A wrapped socket took 16.7 us of processor time for a small message, buffers 13.2, a plain socket 6.7; large
messages cost the same.) Both ends show a certificate of the same authority or, without certificates, prove a key
derived from the cluster's secret. Farcall's own handshake runs inside, with the digests of both certificates in its
proof (``binding``).

    state      event                                 becomes
    shaking    the handshake's last bytes are here   ready: bytes of the two ends go through
    shaking    a certificate is refused              over: ``TlsFailed``
    any        a record that was changed             over: ``TransportForged``

One thread may send while another receives, but the library allows one at a time, hence the lock. No thread waits while
it holds the lock.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import monotonic
from typing import Any, Final, NamedTuple

from farcall.options import TlsOptions
from farcall.private_files import fingerprint
from farcall.transport.interface import Buffer, Transport, TransportBroken, TransportError, TransportForged
from farcall.transport.layer import Layer

logger: logging.Logger = logging.getLogger("farcall")

MAX_BODY_BYTES: Final = 128 * 1024
_JOINED_BYTES: Final = 16 * 1024
"""The size of a full record: smaller buffers are joined."""


class TlsFailed(TransportBroken):
    """The two ends could not agree, or one could not authenticate itself; the message says why."""


class TlsTransport(Layer):
    """One end of a TLS connection. Mutable: its state, and whether decrypted bytes wait for delivery."""

    __slots__ = (
        "_binds_names",
        "_digest",
        "_incoming",
        "_lock",
        "_object",
        "_outgoing",
        "_ready",
        "_staging",
        "buffered",
    )

    def __init__(
        self, inner: Transport, contexts: _Contexts, *, is_listener: bool, host: str | None, binds_names: bool
    ) -> None:
        """``host``: the host that we dialled and must verify; None if we were dialled, or any host may answer."""
        super().__init__(inner)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        context = contexts.listening if is_listener else contexts.dialling
        self._object: Any = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_listener, server_hostname=host
        )
        self._digest = contexts.digest
        self._binds_names = binds_names
        self._ready = False
        self._staging = memoryview(bytearray(16 * 1024))
        self._lock = threading.Lock()
        self.buffered: bool = False

    # ------------------------------------------------------------------ the other end

    @property
    def binding(self) -> bytes:  # type: ignore[override]
        """The digests of both certificates, the dialer's first: part of the proof in farcall's handshake."""
        theirs = hashlib.sha256(self._object.getpeercert(binary_form=True) or b"").digest()
        return theirs + self._digest if self._object.server_side else self._digest + theirs

    @property
    def peer_names(self) -> frozenset[str] | None:  # type: ignore[override]
        """The names in the peer's certificate, if the options bind worker names to certificates; else None."""
        if not self._binds_names:
            return None
        shown: Any = self._object.getpeercert() or {}
        names = {value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"}
        common = {value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"}
        return frozenset(names | common)

    # ------------------------------------------------------------------ bytes

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        if descriptors:
            raise ValueError(f"a {self.kind} transport cannot carry descriptors")
        with self._lock:
            if not self._ready and not self._shake():
                return 0
            if not self._unsent and not self._make_records(buffers):
                return 0
            return self._push()

    def _make_records(self, buffers: Sequence[Buffer]) -> bool:
        """Encrypt a prefix of ``buffers``. False: they were empty."""
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
        self.pending_bytes = total
        self._unsent = memoryview(self._outgoing.read())
        return total > 0

    def _write(self, parts: list[Buffer]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            while len(data):
                data = memoryview(data)[self._object.write(data) :]
        except ssl.SSLError as error:  # after a failed read, OpenSSL refuses to write as well
            raise self._failed(error) from error

    def receive_into(self, view: memoryview) -> int | None:
        with self._lock:
            if not self._ready and not self._shake():
                return None
            filled = 0
            self.buffered = False
            while filled < len(view):
                try:
                    filled += self._object.read(len(view) - filled, view[filled:])
                except ssl.SSLWantReadError:
                    if filled:
                        return filled
                    count = self._fetch(len(view))
                    if not count:
                        return count
                except ssl.SSLZeroReturnError:
                    return filled
                except ssl.SSLError as error:
                    if filled:
                        self.buffered = True  # deliver the bytes before the error first
                        return filled
                    raise self._failed(error) from error
            self.buffered = bool(self._object.pending() or self._incoming.pending)
            return filled

    def _fetch(self, wanted: int) -> int | None:
        """Receive once from the inner transport; return the result of its `receive_into`."""
        if wanted > len(self._staging) < MAX_BODY_BYTES:
            self._staging = memoryview(bytearray(MAX_BODY_BYTES))
        count = self._inner.receive_into(self._staging)
        if count:
            self._incoming.write(self._staging[:count])
        return count

    @property
    def held_bytes(self) -> int:  # type: ignore[override]
        return self._incoming.pending

    # ------------------------------------------------------------------ the handshake

    def _shake(self) -> bool:
        """Under the lock: advance the handshake as far as the received bytes allow. True: it is complete."""
        while True:
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())
            if self._unsent:
                self._push()
            if self._ready:
                return True
            try:
                self._object.do_handshake()
                self._ready = True
            except ssl.SSLWantReadError:
                if self._outgoing.pending:
                    continue
                count = self._fetch(0)
                if count is None:
                    return False
                if count == 0:
                    raise TlsFailed(
                        f"{self.describe()}: the other end closed the connection: does it use TLS? Its log says why"
                    ) from None
            except ssl.SSLError as error:
                failure = self._failed(error)
                if self._outgoing.pending:
                    try:
                        self._inner.send((self._outgoing.read(),))  # the alert, which tells the peer why
                    except TransportError:
                        pass
                raise failure from error

    def wait_writable(self, timeout_s: float) -> bool:
        deadline = monotonic() + timeout_s
        while True:
            with self._lock:
                if self._ready or self._shake():
                    break
            if not self._inner.wait_readable(max(0.0, deadline - monotonic())):
                return False
        return self._inner.wait_writable(max(0.0, deadline - monotonic()))

    def _failed(self, error: ssl.SSLError) -> TransportBroken:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"its certificate is not valid: {error.verify_message}"
        else:
            why = (error.reason or str(error)).lower().replace("_", " ")
        if self._ready and "alert" not in why:
            return TransportForged(f"{self.describe()}: somebody between the two ends has changed bytes ({why})")
        return TlsFailed(f"{self.describe()}: {why}")

    def describe(self) -> str:
        return f"{self._inner.describe()}, TLS"


class _Contexts(NamedTuple):
    """The contexts for accepting, for dialling and for serving web pages to anybody; the digest of our certificate."""

    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    public: ssl.SSLContext
    digest: bytes


class Tls:
    """The certificates of one node, reloaded when their files change; or a key, if there are none."""

    def __init__(self, options: TlsOptions, keys: Callable[[], Sequence[bytes]]) -> None:
        """Raise ``ValueError`` if the files cannot be used.

        ``keys``: returns the currently valid keys, derived from the cluster's secret; the first is the one to prove.
        """
        self._options = options
        self._keys = keys
        self._lock = threading.Lock()
        self._seen = fingerprint(options.files)
        self._contexts = self._load()

    def dialled(self, transport: Transport, host: str) -> Transport:
        """Put TLS over a connection that we made to ``host``."""
        options = self._options
        name = host if options.check_hosts and not options.from_secret else None
        return TlsTransport(transport, self._current(), is_listener=False, host=name, binds_names=options.bind_names)

    def accepted(self, transport: Transport) -> Transport:
        """Put TLS over a connection that we accepted."""
        return TlsTransport(
            transport, self._current(), is_listener=True, host=None, binds_names=self._options.bind_names
        )

    def serves_web(self) -> bool:
        """Is there a certificate to show to browsers?"""
        return not self._options.from_secret

    def web(self, stream: socket.socket, *, for_members: bool) -> socket.socket:
        """Put TLS over a web server's connection; the handshake runs with the first read.

        ``for_members``: accept only clients with a certificate of this cluster.
        """
        contexts = self._current()
        context = contexts.listening if for_members else contexts.public
        return context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)

    def _current(self) -> _Contexts:
        with self._lock:
            seen = fingerprint(self._options.files)
            if seen != self._seen:
                self._seen = seen  # of unusable files, too: each connection of a stranger would reload them
                try:
                    self._contexts = self._load()
                    logger.info("TLS: read %s again", self._options.certificate)
                except ValueError as error:
                    logger.warning("TLS: cannot use the changed files, so the old ones stay in use: %s", error)
            return self._contexts

    def _load(self) -> _Contexts:
        listening, public = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (listening, public, dialling):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        listening.num_tickets = 0  # TLS sessions are never resumed, and only our own bytes may follow the handshake
        dialling.check_hostname = self._options.check_hosts and not self._options.from_secret
        if self._options.from_secret:
            return self._with_key(_Contexts(listening, dialling, public, hashlib.sha256(b"").digest()))
        ca, certificate, key = self._options.files
        try:
            public.load_cert_chain(certificate, key)
            for context in (listening, dialling):
                context.load_cert_chain(certificate, key)
                context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
            with open(certificate, encoding="ascii") as file:
                text = file.read()
            begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
            first = text[text.index(begin) : text.index(end) + len(end)]
            digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
            return _Contexts(listening, dialling, public, digest)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot use TLS with {ca}, {certificate} and {key}: {error} (`farcall certificates` makes them)"
            ) from error

    def _with_key(self, contexts: _Contexts) -> _Contexts:
        listening, dialling = contexts.listening, contexts.dialling
        serve, dial = (
            getattr(context, f"set_psk_{side}_callback", None)
            for context, side in ((listening, "server"), (dialling, "client"))
        )
        if serve is None or dial is None:
            raise ValueError("TLS from the secret alone needs Python 3.13: give certificates (`farcall certificates`)")
        keys = self._keys
        for context in (listening, dialling):
            context.verify_mode = ssl.CERT_NONE  # without the key, a peer cannot complete the handshake
        serve(lambda identity: next((key for key in keys() if _name_of(key) == identity), b""))
        dial(lambda hint: (_name_of(keys()[0]), keys()[0]))
        return contexts


@lru_cache(maxsize=16)
def tls_of(options: TlsOptions | None, key: bytes) -> Tls | None:
    """The `Tls` of ``options``; cached, since loading certificates takes a while."""
    return None if options is None else Tls(options, lambda: (key,))


def _name_of(key: bytes) -> str:
    """The name of a key, as two may be valid at a time. It reveals no more of the key than the proof beside it."""
    return f"farcall {hashlib.sha256(b'name of a key' + key).hexdigest()[:16]}"
