"""The observer: a view into a running cluster from outside, for commands.

    with Observer.find() as observer:
        for snapshot in observer.snapshots().answers: ...

An observer connects to one member, proves that it knows the observer's key, and asks; the member forwards its question
to the others. An observer is not a member: it has no rank, members do not list it, it cannot call functions, and
nothing is unpickled at either end. Workers that do not answer in time are named, and do not delay the rest.

Runs on the calling thread and starts none.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Generic, TypeVar

import msgspec

from farcall.errors import InitError, NetworkError
from farcall.observe.answering import EVENTS, METRICS, SNAPSHOT, WorkerEvents
from farcall.observe.metrics import Metrics
from farcall.observe.presence import Presence, find_nodes
from farcall.observe.snapshot import WorkerSnapshot
from farcall.options import RpcBackendOptions
from farcall.private_files import runtime_directory
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, Observe, observer_key
from farcall.protocol.member import Member, new_incarnation
from farcall.protocol.observing import (
    MAX_ANSWER_BYTES,
    Ask,
    MessageDecoder,
    Roster,
    Told,
    WorkerState,
    encode_framed,
)
from farcall.runtime.link.dialler import prove
from farcall.transport.address import dial
from farcall.transport.interface import DialFailed, Transport, TransportError
from farcall.transport.tls import tls_for

DIAL_S = 3.0
ANSWER_S = 2.0
_READ_BYTES = 64 * 1024
_MOST_NAMED = 4
_UNITS = (("days", 86_400), ("h", 3600), ("min", 60))

_MAKING = threading.Lock()
"""Of decoders: msgspec looks into a type at its first use, and two threads that do so at once crash."""

A = TypeVar("A")


class NothingToObserve(InitError):
    """No cluster was found, or several; the text names the remedy."""


@dataclass(frozen=True)
class Answers(Generic[A]):
    """The answers to a question, and the workers that gave none."""

    cluster_id: str
    answers: list[A]
    """The answers, ordered by the rank of their workers."""
    silent: list[WorkerState]
    """Workers that did not answer: those with ``gone`` set are known to be gone, the others were too slow."""


def _choice(members: Sequence[Presence]) -> str:
    """One line about a cluster: enough to choose it among others, which may have workers of the same names."""
    first = next((one for one in members if one.program), members[0])
    age_s = max(0.0, time() - min(one.started_at for one in members))
    age = next((f"{age_s / unit_s:.0f} {unit}" for unit, unit_s in _UNITS if age_s >= 2 * unit_s), f"{age_s:.0f} s")
    about = [one for one in (first.cluster_name, first.program, f"process {first.process_id}", f"for {age}") if one]
    names = ", ".join(one.name for one in members[:_MOST_NAMED])
    more = f" and {len(members) - _MOST_NAMED} more" if len(members) > _MOST_NAMED else ""
    return f"  {first.cluster_id}  {', '.join(about)}: {names}{more}"


class Observer:
    """A connection to one member of a cluster, to ask about all of it. A context manager."""

    def __init__(self, transport: Transport, established: Established) -> None:
        self._transport = transport
        self.member: str = established.peer.member.name
        """The member that this observer is connected to."""
        self._decoder = MessageDecoder(MAX_ANSWER_BYTES)
        self._numbers = itertools.count(1)
        self._arrived = self._decoder.receive(established.leftover)

    @classmethod
    def find(cls, cluster: str = "", options: RpcBackendOptions | None = None) -> Observer:
        """Connect to a cluster of this user on this host; ``cluster``: a prefix of its id, its name or a worker's."""
        options = options or RpcBackendOptions()
        directory = runtime_directory(options.observing.runtime_directory)
        try:
            nodes = find_nodes(directory)
        except OSError as error:
            raise NothingToObserve(f"cannot look for workers on this host: {error}") from error
        wanted = [
            one
            for one in nodes
            if any(text.startswith(cluster) for text in (one.cluster_id, one.cluster_name, one.name))
        ]
        clusters = {one.cluster_id: one for one in wanted}
        if not wanted:
            more = f" that matches {cluster!r}" if cluster else ""
            raise NothingToObserve(
                f"no running worker of yours{more} was found on this host (in {directory}); for one on another host "
                "use --connect HOST:PORT and FARCALL_SECRET"
            )
        if len(clusters) > 1:
            lines = [_choice([one for one in wanted if one.cluster_id == cluster_id]) for cluster_id in clusters]
            raise NothingToObserve(
                "several clusters run here: choose one with --cluster and the beginning of its id, or of a worker's "
                "name\n" + "\n".join(lines)
            )
        failures = []
        for one in wanted:
            try:
                its = options.replace(encryption="on") if one.encrypts else options.replace(encryption="off", tls=None)
                return cls.connect_any(one.addresses, one.observer_key(), one.cluster_id, one.name, its)
            except (TransportError, NetworkError, ValueError) as error:
                failures.append(f"{one.name} (process {one.process_id}): {error}")
        raise NothingToObserve("cannot reach any worker of the cluster: " + "; ".join(failures))

    @classmethod
    def connect_any(
        cls, addresses: Iterable[str], key: bytes, cluster_id: str, member: str, options: RpcBackendOptions
    ) -> Observer:
        """Connect to ``member`` on this host, at the first of its addresses that works; unix sockets come first."""
        failure: TransportError | None = None
        for address in sorted(addresses, key=lambda address: not address.startswith("unix:")):
            try:
                return cls.connect(address, key, cluster_id, member, options)
            except TransportError as error:
                failure = error
        raise failure or DialFailed(f"{member} has no address")

    @classmethod
    def connect_with_secret(cls, address: str, options: RpcBackendOptions | None = None) -> Observer:
        """Connect to the member at ``address`` (``host:port`` or a farcall address) with the cluster's secret."""
        options = options or RpcBackendOptions()
        secret = options.observing.given_secret() or options.given_secret()
        if secret is None:
            raise NothingToObserve(
                "set FARCALL_OBSERVERS_SECRET, or FARCALL_SECRET where workers lack that, to observe from elsewhere"
            )
        known = address.partition(":")[0] in ("tcp", "unix")
        return cls.connect(address if known else f"tcp://{address}", observer_key(secret.values[0]), options=options)

    @classmethod
    def connect(
        cls,
        address: str,
        key: bytes,
        cluster_id: str = "",
        member: str | None = None,
        options: RpcBackendOptions | None = None,
    ) -> Observer:
        """Connect to the member at ``address`` with the observer's key."""
        deadline = monotonic() + DIAL_S
        transport = dial(address, DIAL_S, tls_for(options or RpcBackendOptions()))
        try:
            me = Hello(Member("observer", 0, new_incarnation(secrets.randbits(62))), cluster_id, Observe())
            return cls(transport, prove(transport, member, me, key, deadline))
        except BaseException:
            transport.close()
            raise

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._transport.close()

    def interrupt(self) -> None:
        """Make a question in progress fail at once. From any thread."""
        self._transport.interrupt()

    # ------------------------------------------------------------------ questions

    def snapshots(self, timeout_s: float = ANSWER_S) -> Answers[WorkerSnapshot]:
        """The calls and threads of every worker, now."""
        return self.ask(SNAPSHOT, WorkerSnapshot, timeout_s)

    def metrics(self, timeout_s: float = ANSWER_S) -> Answers[Metrics]:
        """The metrics of every worker."""
        return self.ask(METRICS, Metrics, timeout_s)

    def events(self, timeout_s: float = ANSWER_S) -> Answers[WorkerEvents]:
        """The latest events of every worker: errors, deaths, broken connections."""
        return self.ask(EVENTS, WorkerEvents, timeout_s)

    def ask(self, subject: str, kind: type[A], timeout_s: float = ANSWER_S, argument: bytes = b"") -> Answers[A]:
        """Ask all workers about ``subject``; return the answers that come within ``timeout_s``."""
        deadline = monotonic() + timeout_s
        number = next(self._numbers)
        if not send_all(self._transport, encode_framed(Ask(number, subject, argument, everyone=True)), deadline):
            raise DialFailed(f"{self.member} does not read questions: its process may be stopped")
        roster: Roster | None = None
        with _MAKING:
            decoder = msgspec.msgpack.Decoder(kind)
        answers: dict[str, A] = {}
        refused: set[str] = set()
        while roster is None or any(
            not worker.gone and worker.name not in answers and worker.name not in refused for worker in roster.workers
        ):
            message = self._next(deadline)
            if message is None:
                break
            if isinstance(message, Roster) and message.number == number:
                roster = message
            elif isinstance(message, Told) and message.number == number:
                if message.data:
                    answers[message.worker] = decoder.decode(message.data)
                else:
                    refused.add(message.worker)
        if roster is None:
            raise NetworkError(f"{self.member} does not answer: its process may be stopped")
        workers = sorted(roster.workers, key=lambda worker: worker.rank)
        return Answers(
            roster.cluster_id,
            [answers[worker.name] for worker in workers if worker.name in answers],
            [worker for worker in workers if worker.name not in answers],
        )

    def _next(self, deadline: float) -> Ask | Told | Roster | None:
        """The next message, or None at ``deadline``."""
        while not self._arrived:
            data = receive_some(self._transport, deadline)
            if data is None:
                return None
            if not data:
                raise NetworkError(f"{self.member} closed the connection")
            self._arrived.extend(self._decoder.receive(data))
        return self._arrived.pop(0)


def send_all(transport: Transport, data: bytes, deadline: float) -> bool:
    """Send all of ``data`` on the calling thread; False: the transport did not take it before ``deadline``."""
    left = memoryview(data)
    while left:
        taken = transport.send((left,))
        left = left[taken:]
        if not taken and not transport.wait_writable(max(0.0, deadline - monotonic())):
            return False
    return True


def receive_some(transport: Transport, deadline: float) -> bytes | None:
    """Read the next bytes on the calling thread; empty at the end, None if none came before ``deadline``."""
    buffer = bytearray(_READ_BYTES)
    while (remaining_s := deadline - monotonic()) > 0:
        if transport.wait_readable(remaining_s):
            count = transport.receive_into(memoryview(buffer))
            if count is not None:
                return bytes(buffer[:count])
    return None
