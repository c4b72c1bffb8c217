"""Encrypted connections between hosts: TLS 1.3 over a transport, and whom it is made with.

    options                     the two ends show each other                      who is at the other end
    none (the default)          a certificate of the listener's process,   whoever proves the cluster's secret
                                made in memory, which nobody verifies
    ``TlsOptions``              certificates of one authority              the same, from a host of that authority
    ``encryption="off"``        nothing: no TLS, plain bytes               the same, and whoever is on the way

farcall's own handshake (`protocol/handshake.py`) runs inside. Its proofs cover this very channel (`TlsPump.binding`):
somebody who ends TLS towards both members relays a proof that neither accepts, whatever certificates he has. As the
proofs say who is there, the dialer needs no certificate by default. (Python's ``ssl`` cannot ask for one that it is not
to verify.) The keys of a channel are made for it and forgotten with it: the secret, learnt later, opens no recording.

One thread may send while another receives, but the library allows one at a time, hence the lock. No thread waits while
it holds the lock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple

from farcall.options import RpcBackendOptions, TlsOptions
from farcall.private_files import fingerprint
from farcall.transport.interface import AcceptPostponed, Buffer, TlsFailed, Transport, TransportBroken, TransportError
from farcall.transport.pump import ALPN, MAX_BODY_BYTES, TlsPump

logger: logging.Logger = logging.getLogger("farcall")


class TlsTransport(Transport):
    """One end of an encrypted connection over an inner transport.

    A record is made once. While it is partly sent, its bytes are *pending*: `send` has returned 0, and its caller must
    offer the same bytes again.
    Mutable: the pump, the unsent rest of records and their pending bytes, and whether plain text waits for delivery.
    """

    __slots__ = (
        "_inner",
        "_is_ended",
        "_lock",
        "_names",
        "_pump",
        "_staging",
        "_unsent",
        "buffered",
        "kind",
        "peer_host",
        "pending_bytes",
    )

    def __init__(self, inner: Transport, pump: TlsPump, *, names: bool) -> None:
        """``names``: the peer's certificate must have the name of its worker."""
        self._inner = inner
        self._pump = pump
        self._names = names
        self._lock = threading.Lock()
        self._staging = memoryview(bytearray(16 * 1024))
        self._unsent = memoryview(b"")
        self._is_ended = False  # before the handshake was complete
        self.kind: str = inner.kind
        self.peer_host: str = inner.peer_host
        self.pending_bytes: int = 0
        self.buffered: bool = False

    @property
    def binding(self) -> bytes:  # type: ignore[override]
        return self._pump.binding

    @property
    def peer_names(self) -> frozenset[str] | None:  # type: ignore[override]
        return self._pump.peer_names if self._names else None

    @property
    def wrong_host(self) -> str:  # type: ignore[override]
        return self._pump.wrong_host

    # ------------------------------------------------------------------ bytes

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        if descriptors:
            raise ValueError(f"a {self.kind} transport cannot carry descriptors")
        with self._lock:
            if not self._require():
                return 0
            if not self._unsent:
                self.pending_bytes = self._pump.write(buffers)
                if not self.pending_bytes:
                    return 0
                self._unsent = memoryview(self._pump.pull())
            return self._push()

    def _push(self) -> int:
        """Send the rest of the records; once all of it has left, their plain text counts as taken."""
        if self._unsent:
            self._unsent = self._unsent[self._inner.send((self._unsent,)) :]
            if self._unsent:
                return 0
        gone, self.pending_bytes = self.pending_bytes, 0
        return gone

    def receive_into(self, view: memoryview) -> int | None:
        with self._lock:
            if not self._require():
                return 0 if self._is_ended else None
            filled, has_more, self.buffered = 0, self.buffered, False
            while filled < len(view):
                # Asked first: that a read would come in vain costs ``ssl`` more time than to decrypt a small record.
                if not (has_more or self._pump.has_plain_text):
                    if filled:
                        return filled
                    came = self._fetch(len(view))
                    if not came:
                        return came
                has_more = False
                try:
                    count = self._pump.read_into(view[filled:])
                except TransportError:
                    if not filled:
                        raise
                    self.buffered = True  # deliver the bytes before the error first
                    return filled
                if count == 0:
                    return filled
                filled += count or 0
            self.buffered = self._pump.has_plain_text
            return filled

    def _fetch(self, wanted: int) -> int | None:
        """Receive once from the inner transport; return the result of its `receive_into`."""
        if wanted > len(self._staging) < MAX_BODY_BYTES:
            self._staging = memoryview(bytearray(MAX_BODY_BYTES))
        count = self._inner.receive_into(self._staging)
        if count:
            self._pump.feed(self._staging[:count])
        return count

    @property
    def held_bytes(self) -> int:  # type: ignore[override]
        return self._pump.fed_bytes

    # ------------------------------------------------------------------ the handshake

    def _shake(self) -> bool:
        """Under the lock: advance the handshake as far as the received bytes allow. True: it is complete."""
        while True:
            try:
                is_ready = self._pump.shake()
            except TlsFailed:
                try:
                    self._inner.send((self._pump.pull(),))  # the alert, which tells the peer why
                except TransportError:
                    pass
                raise
            if not self._unsent:
                self._unsent = memoryview(self._pump.pull())
            self._push()
            if is_ready:
                return True
            count = self._fetch(0)
            if not count:
                self._is_ended = count == 0
                return False

    def _require(self) -> bool:
        """Under the lock: may plain text go through? Raises ``TransportBroken`` where it never will."""
        if self._pump.is_ready or self._shake():
            return True
        if self._is_ended and not self._was_knocked_at():
            guess = "" if self._pump.is_listener else " (is it an older farcall?)"
            raise TransportBroken(f"the other end closed the connection where TLS was due; its log says why{guess}")
        return False

    def _was_knocked_at(self) -> bool:
        """Did the dialer end without a byte, to see whether this node listens?"""
        return self._pump.is_listener and not self._pump.has_begun

    def wait_readable(self, timeout_s: float) -> bool:
        # Call the inner transport even with buffered bytes: it raises if this side has closed the connection.
        return self._inner.wait_readable(0.0 if self.buffered else timeout_s) or self.buffered

    @property
    def look(self) -> Callable[[], object]:
        # Bytes are buffered only by the thread that receives, which does not while it looks.
        return super().look if self.buffered else self._inner.look

    def wait_writable(self, timeout_s: float) -> bool:
        deadline = monotonic() + timeout_s
        while True:
            with self._lock:
                if self._require() or self._is_ended:
                    break
            if not self._inner.wait_readable(max(0.0, deadline - monotonic())):
                return False
        return self._inner.wait_writable(max(0.0, deadline - monotonic()))

    def connection(self, first_bytes: bytes) -> tuple[Any, bytes]:
        with self._lock:
            pump = _CorePump(self._pump, os.dup(self._inner.fileno() or 0), bytes(self._unsent))
            self._unsent = memoryview(b"")
            return pump, first_bytes + pump.plain()

    # ------------------------------------------------------------------ as the inner transport

    def silent_s(self) -> float:
        return self._inner.silent_s()

    def fileno(self) -> int | None:
        return self._inner.fileno()

    def watch(self, on_readable: Callable[[], None] | None, on_writable: Callable[[], None] | None) -> None:
        self._inner.watch(on_readable, on_writable)

    def end_sending(self) -> None:
        self._inner.end_sending()

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()

    @property
    def closed(self) -> bool:
        return self._inner.closed

    def describe(self) -> str:
        return f"{self._inner.describe()}, TLS"


class _CorePump:
    """A channel whose handshake is over, as the core reads and writes it (`core.contract.Pump`)."""

    def __init__(self, pump: TlsPump, descriptor: int, unsent: bytes) -> None:
        self._pump = pump
        self._descriptor = descriptor
        self._unsent = unsent
        self._lock = threading.Lock()  # one thread may write while another reads; OpenSSL takes one at a time
        self._buffer = memoryview(bytearray(64 * 1024))

    def fileno(self) -> int:
        return self._descriptor

    def open(self, data: bytes) -> bytes:
        with self._lock:
            self._pump.feed(memoryview(data))
            return self.plain()

    def plain(self) -> bytes:
        """All plain text that is there."""
        parts = []
        while self._pump.has_plain_text:
            count = self._pump.read_into(self._buffer)
            if count == 0:
                raise TransportBroken("the peer ended the encryption")
            if not count:
                break
            parts.append(bytes(self._buffer[:count]))
        return b"".join(parts)

    def seal(self, data: Sequence[memoryview]) -> bytes:
        with self._lock:
            first, self._unsent = self._unsent, b""
            left = sum(map(len, data))
            parts = [first]
            views = list(data)
            while left:
                count = self._pump.write(views)
                left -= count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
                parts.append(self._pump.pull())
            return b"".join(parts)


# ---------------------------------------------------------------------- certificates


class _Contexts(NamedTuple):
    """The contexts for accepting, for dialling and for serving web pages to anybody; the digests of what they show."""

    listening: ssl.SSLContext
    dialling: ssl.SSLContext
    public: ssl.SSLContext
    listening_digest: bytes
    dialling_digest: bytes


class Tls:
    """What one process encrypts with: certificates, read again when their files change; or one of its own."""

    def __init__(self, options: TlsOptions | None) -> None:
        """Raise ``ValueError`` if the files cannot be used. None: without certificates of the user's."""
        self._options = options
        self._lock = threading.Lock()
        self._files = options.files if options is not None else ()
        self._seen = fingerprint(self._files)
        self._contexts = _load(options) if options is not None else None

    def dialled(self, transport: Transport, host: str) -> Transport:
        """Put TLS over a connection that we made to ``host``."""
        options, contexts = self._options, self._current()
        host_to_check = host if options is not None and options.check_hosts else None
        pump = TlsPump(contexts.dialling, contexts.dialling_digest, is_listener=False, host=host_to_check)
        return TlsTransport(transport, pump, names=options is not None and options.bind_names)

    def accepted(self, transport: Transport) -> Transport:
        """Put TLS over a connection that we accepted."""
        options, contexts = self._options, self._current()
        pump = TlsPump(contexts.listening, contexts.listening_digest, is_listener=True, host=None)
        return TlsTransport(transport, pump, names=options is not None and options.bind_names)

    def serves_web(self) -> bool:
        """Is there a certificate to show to browsers?"""
        return self._options is not None

    def web(self, stream: socket.socket, *, for_members: bool) -> socket.socket:
        """Put TLS over a web server's connection; the handshake runs with the first read.

        ``for_members``: accept only clients with a certificate of this cluster.
        """
        contexts = self._current()
        context = contexts.listening if for_members else contexts.public
        return context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)

    def _current(self) -> _Contexts:
        if self._contexts is None or self._options is None:
            try:
                return _ephemeral(os.getpid())
            except OSError as error:
                raise AcceptPostponed(f"cannot make a certificate now: {error}") from error
        with self._lock:
            seen = fingerprint(self._files)
            if seen != self._seen:
                self._seen = seen  # of unusable files, too: each connection of a stranger would reload them
                try:
                    self._contexts = _load(self._options)
                    logger.info("TLS: read %s again", self._options.certificate)
                except ValueError as error:
                    logger.warning("TLS: cannot use the changed files, so the old ones stay in use: %s", error)
            return self._contexts


def tls_for(options: RpcBackendOptions) -> Tls | None:
    """What connections over a network are encrypted with; None: they are not."""
    return _tls_of(options.tls, os.getpid()) if options.encrypts else None


@lru_cache(maxsize=16)
def _tls_of(options: TlsOptions | None, process: int) -> Tls:
    """One object for all parts of a node: reading certificates takes a while. A forked child may find a lock taken."""
    return Tls(options)


@lru_cache(maxsize=1)
def _ephemeral(process: int) -> _Contexts:
    """Those of this process, whose number tells it from the one that it was forked from."""
    from farcall.transport.certificate import self_signed  # loads cryptography: only where hosts are connected

    listening, dialling, public = _contexts()
    dialling.verify_mode = ssl.CERT_NONE
    key, certificate, digest = self_signed()
    with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
        listening.load_cert_chain(certificate_file, key_file)
    return _Contexts(listening, dialling, public, digest, hashlib.sha256(b"").digest())


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A name that ``content`` can be read from, once: ``ssl`` takes nothing but files. It reaches no disk."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as file:
            file.write(content)  # a kilobyte: a pipe holds more
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    listening, public = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (listening, public, dialling):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3  # whatever openssl.cnf says
    listening.num_tickets = 0  # TLS sessions are never resumed, and only our own bytes may follow the handshake
    dialling.check_hostname = False  # the pump does
    dialling.set_alpn_protocols([ALPN])
    return listening, dialling, public


def _load(options: TlsOptions) -> _Contexts:
    listening, dialling, public = _contexts()
    ca, certificate, key = options.files
    try:
        public.load_cert_chain(certificate, key, _no_password)
        for context in (listening, dialling):
            context.load_cert_chain(certificate, key, _no_password)
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
        with open(certificate, encoding="latin-1") as file:  # remarks of any kind may surround what is read
            text = file.read()
        begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
        first = text[text.index(begin) : text.index(end) + len(end)]
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
        return _Contexts(listening, dialling, public, digest, digest)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot use TLS with {ca}, {certificate} and {key}: {error} (`farcall certificates` makes them)"
        ) from error


def _no_password() -> str:
    # OpenSSL would ask on the terminal, wherever the program runs, and each time that the files have changed.
    raise ValueError("the key needs a password: give it a file without one, that only its user may read")
