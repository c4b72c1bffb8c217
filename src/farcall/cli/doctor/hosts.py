"""The doctor's look between hosts: one listens (``--listen``), the other visits it.

A visit uses the parts that members use: a TCP connection and the handshake, in which both prove the shared secret and
tell their versions. Then

    visitor                            listener
    BLOB_BYTES                    ->
                                  <-   the same back: large packets pass, both ways
                                       dials the visitor's own port, as members of lower rank are dialled, and proves
                                  <-   one line: empty, or why that did not work

A visitor without proof gets only the answers of the handshake. Both sides prove what members would prove here: the
secret or, where none is given, their user's key, which doctors of another machine do not have.
"""

from __future__ import annotations

import platform
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from time import monotonic

from farcall import __version__
from farcall.channel.segments import host_token
from farcall.cli.doctor.finding import Finding, note, ok, wrong
from farcall.errors import HandshakeRefused
from farcall.observe.observer import receive_some, send_all
from farcall.options import ENV_ADVERTISE, ENV_ENCRYPTION
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import NONCE_BYTES, Hello, Inspect, RefusalReason, Refused, Side
from farcall.protocol.member import Member, new_incarnation
from farcall.runtime.link.dialler import prove
from farcall.runtime.rendezvous.records import ADD_A_SECRET
from farcall.secret import Secret
from farcall.transport.address import dial, listen
from farcall.transport.interface import (
    DialFailed,
    DialRefused,
    Listener,
    NotEncrypted,
    TlsFailed,
    Transport,
    TransportError,
)
from farcall.transport.tcp import format_tcp, parse_tcp
from farcall.transport.tls import Tls

BLOB_BYTES = 1 << 20
STEP_S = 5.0
VISIT_S = 4 * STEP_S
LOOK_S = 0.1
CLUSTER = "farcall doctor"
MAX_LINE_BYTES = 2048


def _facts(hello: Hello) -> dict[str, str]:
    return hello.purpose.facts if isinstance(hello.purpose, Inspect) else {}


def _hello(back: str = "", unix: str = "") -> Hello:
    told = {
        "farcall": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "host": host_token(),
        "back": back,
        "unix": unix,
    }
    return Hello(Member("doctor", 0, new_incarnation(secrets.randbits(62))), CLUSTER, Inspect(told))


class Host:
    """The listening side: lets visitors in, one after the other, until it is closed."""

    def __init__(self, secret: Secret, port: int = 0, tls: Tls | None = None) -> None:
        self._secret = secret
        self._tls = tls
        self._listeners: list[Listener] = [listen(f"tcp://*:{port}")]
        self.port: int = parse_tcp(self._listeners[0].address)[1]
        self._closing = threading.Event()
        try:
            self._listeners.append(listen("unix:"))
        except TransportError:
            pass  # a finding about this machine says so
        self.unix: str = self._listeners[1].address if len(self._listeners) > 1 else ""

    def serve(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """Let visitors in; ``tell`` is told of each."""
        while not self._closing.is_set():
            try:
                guests = [guest for listener in self._listeners if (guest := listener.accept()) is not None]
            except TransportError as error:
                tell(f"cannot accept connections: {error}")
                guests = []
            for guest in guests:
                try:
                    peer = self._welcome(guest, monotonic() + VISIT_S)
                    tell(f"{guest.describe()}: farcall {_facts(peer).get('farcall')}, proved the secret")
                except (HandshakeRefused, TransportError) as error:
                    tell(f"{guest.describe()}: {error}")
                finally:
                    guest.close()
            if not guests:
                self._closing.wait(LOOK_S)

    def close(self) -> None:
        """Let no more visitors in."""
        self._closing.set()

    def release(self) -> None:
        """Give the ports back; after `serve` has returned."""
        for listener in self._listeners:
            listener.close()

    def _welcome(self, guest: Transport, deadline: float) -> Hello:
        transport, established = _admit(guest, self._tls, self._secret, self.unix, deadline)
        back = _facts(established.peer).get("back", "")
        if back:
            conversation = _Conversation(transport, deadline, established.leftover)
            conversation.send(conversation.take(BLOB_BYTES))
            conversation.send(self._dial_back(back).encode()[:MAX_LINE_BYTES] + b"\n")
        return established.peer

    def _dial_back(self, back: str) -> str:
        """Dial the visitor; empty, or the reason why that fails."""
        try:
            _try_handshake(back, self._secret, self._tls)
        except (HandshakeRefused, TransportError, ValueError) as error:
            return str(error) or type(error).__name__
        return ""


def _admit(
    wire: Transport, tls: Tls | None, secret: Secret, unix: str, deadline: float
) -> tuple[Transport, Established]:
    """The listener's side of the handshake."""
    guest = wire if tls is None or not wire.needs_encryption else tls.accepted(wire)
    first, *others = secret.values
    nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(Side.LISTENER, _hello(unix=unix), first, nonce, also=others, binding=lambda: guest.binding)
    conversation = _Conversation(guest, deadline)
    try:
        while True:
            reply, established = handshake.receive(conversation.some())
            conversation.send(reply)
            if established is not None:
                return guest, established
    except NotEncrypted as error:
        refusal = handshake.unencrypted(error.first_bytes)
        wire.send((refusal.farewell,))
        raise refusal from None
    except Refused as refusal:
        conversation.send(refusal.farewell)
        raise


def _try_handshake(address: str, secret: Secret, tls: Tls | None = None) -> None:
    """Dial ``address`` and prove the secret; raises where that fails."""
    with closing(dial(address, STEP_S, tls)) as transport:
        prove(transport, None, _hello(), secret.values[0], monotonic() + STEP_S)


def visit(host: str, port: int, secret: Secret, advertised: str, tls: Tls | None = None) -> list[Finding]:
    """Visit the doctor that listens at ``host``; ``advertised`` is the address that workers here tell the others."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "check the spelling and this machine's name service, or give an IP address"
        return [wrong(host, f"the name does not resolve: {error}", advice)]
    where = ", ".join(sorted({str(target[0]) for *_, target in found}))
    own = Host(secret, tls=tls)
    serving = threading.Thread(target=own.serve, name="farcall-doctor", daemon=True)
    serving.start()
    try:
        return _visit(host, format_tcp(host, port), where, secret, format_tcp(advertised, own.port), tls)
    finally:
        own.close()
        serving.join()
        own.release()


def _visit(host: str, address: str, where: str, secret: Secret, back: str, tls: Tls | None) -> list[Finding]:
    deadline = monotonic() + VISIT_S
    try:
        transport = dial(address, STEP_S, tls)
    except DialRefused:
        advice = f"run there: farcall doctor --listen {parse_tcp(address)[1]}"
        return [wrong(host, f"{where} answers, but nobody listens on that port", advice)]
    except DialFailed as error:
        advice = "check that the machine is up, that a route leads there, and that no firewall drops connections"
        return [wrong(host, f"{where} cannot be reached: {error}", advice)]
    with closing(transport):
        try:
            established = prove(transport, None, _hello(back), secret.values[0], deadline)
        except Refused as refusal:
            return [_refused(host, refusal)]
        except TlsFailed as error:
            advice = "give both hosts certificates of the same authority that name them (farcall certificates), or none"
            return [wrong(host, f"no TLS: {error}", advice)]
        except TransportError as error:
            return [wrong(host, f"no handshake: {error}", "is it farcall doctor that listens on that port?")]
        findings = [_met(host, where, established.peer), _protection(host, tls)]
        conversation = _Conversation(transport, deadline, established.leftover)
        findings.append(_packets(host, conversation))
        if findings[-1].state == "ok":
            findings.append(_way_back(host, conversation, back))
        findings.append(_same_machine(host, established.peer, secret))
        return findings


def _refused(host: str, refusal: Refused) -> Finding:
    if refusal.reason is RefusalReason.WRONG_SECRET:
        return wrong(host, "it has another secret than this machine, or another user's key", ADD_A_SECRET)
    if refusal.reason is RefusalReason.VERSION_MISMATCH:
        return wrong(host, str(refusal), "install the same version of farcall on all hosts")
    if refusal.reason is RefusalReason.OTHER_HOST:
        return wrong(host, str(refusal), "see Certificates on the page about security")
    if refusal.reason is RefusalReason.ENCRYPTION:
        return wrong(host, str(refusal), f"unset {ENV_ENCRYPTION} on all hosts, or set it on all")
    return wrong(host, str(refusal), "is it farcall doctor that listens on that port?")


def _met(host: str, where: str, peer: Hello) -> Finding:
    mine, theirs = _facts(_hello()), _facts(peer)
    found = f"reached at {where}; both prove the same secret"
    different = [
        f"{what} {theirs.get(what)} there and {mine[what]} here"
        for what in ("farcall", "torch", "python")
        if theirs.get(what) != mine[what]
    ]
    if different:
        return note(
            host, f"{found}; {', '.join(different)}", "install the same versions: pickled values may not fit others"
        )
    return ok(host, f"{found}; same versions")


def _protection(host: str, tls: Tls | None) -> Finding:
    """Can somebody between the two hosts read or change the bytes?"""
    subject = f"{host}: protection"
    if tls is not None:
        return ok(subject, "TLS 1.3: nobody in between can read or change what workers send")
    return note(
        subject,
        f"encryption is off ({ENV_ENCRYPTION}): whoever is in between can read and change what workers send",
        f"on a network that is not yours alone, unset {ENV_ENCRYPTION} on all hosts",
    )


def _packets(host: str, conversation: _Conversation) -> Finding:
    """Large packets may be lost where small ones pass."""
    subject = f"{host}: data"
    blob = b"\x55" * BLOB_BYTES
    begun = monotonic()
    try:
        conversation.send(blob)
        returned = conversation.take(BLOB_BYTES)
    except TransportError as error:
        advice = "small packets pass and large ones do not: compare the MTU of the interfaces on the way (ip link)"
        return wrong(subject, str(error), advice)
    if returned != blob:
        return wrong(
            subject, "the bytes came back changed", "look for a faulty proxy or network card between these hosts"
        )
    return ok(subject, f"1 MiB there and back in {1e3 * (monotonic() - begun):.0f} ms")


def _way_back(host: str, conversation: _Conversation, back: str) -> Finding:
    subject = f"{host}: way back"
    try:
        why_not = conversation.line()
    except TransportError as error:
        return wrong(subject, f"it does not say whether it can reach {back}: {error}", "try again")
    if why_not:
        advice = (
            "workers dial each other on ports that the system chooses: open them in the firewall here, or set "
            f"{ENV_ADVERTISE} to an address of this machine that they reach"
        )
        return wrong(subject, f"workers there cannot reach workers here at {back}: {why_not}", advice)
    return ok(subject, f"workers there reach workers here ({back})")


def _same_machine(host: str, peer: Hello, secret: Secret) -> Finding:
    subject = f"{host}: ways"
    token = host_token()
    if not token or _facts(peer).get("host") != token:
        return ok(subject, "another machine, or another network namespace: workers will use TCP")
    unix = _facts(peer).get("unix", "")
    try:
        if not unix:
            raise DialFailed("it offers none")
        _try_handshake(unix, secret)
    except (HandshakeRefused, TransportError) as error:
        return note(subject, f"the same machine, but no unix socket: {error}", "workers will use TCP")
    return ok(subject, "the same machine: workers will use unix sockets and shared memory")


@dataclass
class _Conversation:
    """Bytes over a transport, up to a deadline."""

    transport: Transport
    deadline: float
    received: bytes = b""

    def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        if not send_all(self.transport, data, self.deadline):
            raise TransportError(f"cannot send {len(data)} bytes in time")

    def some(self) -> bytes:
        """The bytes that come next."""
        data = receive_some(self.transport, self.deadline)
        if not data:
            raise TransportError("no answer in time" if data is None else "the other side closed the connection")
        return data

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        while len(self.received) < size:
            try:
                self.received += self.some()
            except TransportError as error:
                missing = size - len(self.received)
                raise TransportError(f"{missing} of {size} bytes did not arrive: {error}") from error
        taken, self.received = self.received[:size], self.received[size:]
        return taken

    def line(self) -> str:
        """A line, without its end."""
        while b"\n" not in self.received and len(self.received) <= MAX_LINE_BYTES:
            self.received += self.some()
        line, _, self.received = self.received.partition(b"\n")
        return line.decode(errors="replace")
