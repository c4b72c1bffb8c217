"""Every error that farcall raises on purpose, as one tree.

    RpcError (RuntimeError)
    ├── NotInitialized          no node here yet, or shut down, or this is a forked child
    │   └── Expelled              the other members have declared this node dead
    ├── InitError               this node could not become a member
    │   ├── DuplicateName         two members asked for one name
    │   ├── BadRank               rank or world size make no sense
    │   ├── BadDeviceMap          a device map names a device or worker that is not there
    │   ├── WrongSecret           another worker has another secret, or none
    │   ├── LaunchFailed          workers that this program launched did not start (``.missing``)
    │   └── MissingPeers          not all members arrived in time (``.missing``)
    ├── UnknownWorker           no member has that name, rank or WorkerInfo
    ├── SerializationError      a value could not be turned into bytes, or back
    │   ├── NotPicklable (TypeError too)   a type that pickle does not know
    │   ├── CorruptWeights        bytes of a version of weights are not those that were pushed
    │   ├── FunctionNotFound      the callee has no such function
    │   └── NotAllowed            the callee serves only what its program names, and this is not on that list
    ├── RemoteError             the callee raised something that cannot be rebuilt here
    ├── NetworkError            the call's fate depends on the network (``.delivery``)
    │   ├── Overloaded            too many calls wait at the callee, which did not run this one
    │   ├── PeerDead              the peer's process or link is gone
    │   ├── AnswerLost            the function ran, and its large answer was lost with a connection
    │   ├── ReferenceLost         the owner of a reference's value is gone, or has no such value
    │   └── HandshakeRefused      the peer is no member of this cluster
    ├── RpcTimeout (TimeoutError too)   the answer did not come in time
    ├── PublicationClosed       the publisher of weights has closed its publication: no version follows
    ├── Superseded              another worker has taken over the name that this one published
    ├── ReferenceLeak           references were still held when all members had left
    ├── ShutdownTimeout (TimeoutError too)   a member did not agree to leave in time (``.late``)
    └── Cancelled               the call was cancelled, or the node shut down, before the answer came (``.delivery``)

``RpcError`` derives from ``RuntimeError``, so programs that catch that keep working. ``RemoteTraceback`` is none of
these: it is the ``__cause__`` of an exception that a remote function raised.
This module knows nothing of sockets, tensors or threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

__all__ = [
    "AnswerLost",
    "BadDeviceMap",
    "BadRank",
    "Cancelled",
    "CorruptWeights",
    "Delivery",
    "DuplicateName",
    "Expelled",
    "FunctionNotFound",
    "HandshakeRefused",
    "InitError",
    "LaunchFailed",
    "MissingPeers",
    "NetworkError",
    "NotAllowed",
    "NotInitialized",
    "NotPicklable",
    "Overloaded",
    "PeerDead",
    "PublicationClosed",
    "ReferenceLeak",
    "ReferenceLost",
    "RemoteError",
    "RemoteTraceback",
    "RpcError",
    "RpcTimeout",
    "SerializationError",
    "ShutdownTimeout",
    "Superseded",
    "UnknownWorker",
    "WrongSecret",
]


class RpcError(RuntimeError):
    """Root of all errors that farcall raises."""


class NotInitialized(RpcError):
    """This process has no running node."""


class Expelled(NotInitialized):
    """The other members have declared this node dead, after too long a silence. It joins again, if it can."""


class InitError(RpcError):
    """This node could not become a member of its cluster."""


class DuplicateName(InitError):
    """Two members asked for the same name."""


class BadRank(InitError, ValueError):
    """The rank or the world size makes no sense."""


class BadDeviceMap(InitError, ValueError):
    """A device map names a device or a worker that is not there. Every member gets this error."""


class WrongSecret(InitError):
    """Another worker has another secret, or none, so it cannot prove itself here."""


class MissingPeers(InitError, TimeoutError):
    """Some members did not arrive in time; ``missing`` names them."""

    def __init__(self, message: str, missing: Iterable[str | int] = ()) -> None:
        super().__init__(message)
        self.missing: tuple[str | int, ...] = tuple(missing)


class LaunchFailed(InitError):
    """Workers that this program launched did not start; ``missing`` tells about each, by name."""

    def __init__(self, message: str, missing: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.missing: dict[str, str] = dict(missing or {})


class UnknownWorker(RpcError, ValueError):
    """No member of this cluster has that name or rank."""


class SerializationError(RpcError):
    """A value could not be turned into bytes, or bytes into a value."""


class NotPicklable(SerializationError, TypeError):
    """A value of a type that pickle does not know: a TypeError, too, as pickle's own is."""


class CorruptWeights(SerializationError):
    """Bytes of a version of published weights are not those that were pushed; the message names the tensor."""


class FunctionNotFound(SerializationError, AttributeError):
    """The callee has no function of that name."""


class NotAllowed(SerializationError):
    """The receiver serves and unpickles only the names that its program allows (`farcall.allow`), and not this one."""


class RemoteError(RpcError):
    """The callee raised an exception whose class cannot be rebuilt here.

    ``type_name``, ``message`` and ``remote_traceback`` describe it.
    """

    def __init__(self, text: str, type_name: str = "", message: str = "", remote_traceback: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback


class RemoteTraceback(Exception):
    """The cause of an exception that a remote function raised: its traceback on the other worker."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class Delivery(StrEnum):
    """The fate of a failed call, as far as it is known."""

    NOT_SENT = "not_sent"
    REFUSED = "refused"
    """The callee got the call, and did not run it."""
    UNKNOWN = "unknown"
    EXECUTED = "executed"


class NetworkError(RpcError):
    """The network failed the call, or a callee too busy to take it; not the callee's code."""

    def __init__(self, message: str, delivery: Delivery = Delivery.UNKNOWN) -> None:
        super().__init__(message)
        self.delivery = delivery


class PeerDead(NetworkError, ConnectionError):
    """The peer's process ended, or left, or its link broke.

    ``worker`` is the peer (a `WorkerInfo`), and ``incarnation`` names the start of its process.
    """

    def __init__(
        self, message: str, delivery: Delivery = Delivery.UNKNOWN, worker: object = None, incarnation: str = ""
    ) -> None:
        super().__init__(message, delivery)
        self.worker = worker
        self.incarnation = incarnation


class Overloaded(NetworkError):
    """A worker had more calls waiting than it allows, and did not run this one: it is safe to make it again, later.

    ``worker`` is the callee (a `WorkerInfo`), ``queued`` the number of calls that waited there, and ``limit`` the most
    that may. Raised only where the caller's option ``when_overloaded`` is "fail". With a ``remote_traceback``, it is
    about a call that the remote function made.
    """

    def __init__(
        self,
        message: str,
        delivery: Delivery = Delivery.REFUSED,
        worker: object = None,
        queued: int = 0,
        limit: int = 0,
    ) -> None:
        super().__init__(message, delivery)
        self.worker = worker
        self.queued = queued
        self.limit = limit


class AnswerLost(NetworkError):
    """The callee executed the function, but a connection broke before all of its large answer had arrived."""

    def __init__(self, message: str, delivery: Delivery = Delivery.EXECUTED) -> None:
        super().__init__(message, delivery)


class ReferenceLost(NetworkError):
    """The owner of a reference's value is gone, or never had that value."""


class HandshakeRefused(NetworkError, ConnectionError):
    """A connection was refused before any user data was read."""


class RpcTimeout(RpcError, TimeoutError):
    """The answer did not come within the call's timeout; ``delivery`` says whether the call was sent at all."""

    def __init__(self, message: str = "", delivery: Delivery = Delivery.UNKNOWN) -> None:
        super().__init__(message)
        self.delivery = delivery


class PublicationClosed(RpcError):
    """The publisher of weights has closed its publication: no version follows until another worker publishes them."""


class Superseded(RpcError):
    """Another worker, which the message names, has taken over the name that this one published."""


class ReferenceLeak(RpcError):
    """After a graceful shutdown a worker still held references to values of this node; the text names both."""


class ShutdownTimeout(RpcError, TimeoutError):
    """A graceful shutdown did not end in time; ``late`` names the members it waited for."""

    def __init__(self, message: str, late: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.late: tuple[str, ...] = tuple(late)


class Cancelled(RpcError):
    """The call was cancelled, or the local node shut down, before the answer came; ``delivery`` as far as known."""

    def __init__(self, message: str, delivery: Delivery = Delivery.UNKNOWN) -> None:
        super().__init__(message)
        self.delivery = delivery
