"""The choice of serializer: one reducer per class, and a replaceable pickler.

Owns the registries that other parts of farcall and the user may fill: ``REDUCERS`` (class -> how its instances are
pickled in a message), ``REFERENCES``, and the pickler installed by ``use_rpc_pickler``. It does not know what a message
looks like, nor any torch type.

Invariants: an installed pickler writes only *functions and arguments of calls*. The message marks its output, so the
two sides need not install or remove it at the same moment. No pickler is installed beside a table of `farcall.allow`:
it would read what the table refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from farcall.serialize import allowance

if TYPE_CHECKING:
    from farcall.serialize.context import Encoding

Reducer = Callable[[Any, "Encoding"], Any]
"""``reducer(object, encoding) -> reduce tuple``, as ``__reduce_ex__`` returns it, or NotImplemented."""


class RpcPickler(Protocol):
    """What ``use_rpc_pickler`` accepts: a value to bytes plus a list of tensors, and back."""

    def serialize(self, value: Any) -> tuple[bytes, Sequence[Any]]:
        """Return the bytes of ``value`` and the tensors that travel beside them."""

    def deserialize(self, data: bytes, tensors: Sequence[Any]) -> Any:
        """Rebuild the value from what ``serialize`` returned."""


# Looked up for every object that is not a builtin, so it is a plain dict and not a function.
REDUCERS: dict[type[Any], Reducer] = {}


class _Installed:
    """The pickler of the innermost active ``use_rpc_pickler`` block. Mutable, and shared by all threads."""

    pickler: RpcPickler | None = None


INSTALLED = _Installed()


def register_reducer(cls: type[Any], reducer: Reducer) -> None:
    """Pickle instances of exactly ``cls`` with ``reducer``; the last registration counts.

    The reducer may use ``encoding.peer`` (the receiver of the message); the rebuild function that it names may use
    ``current_decoding().peer`` (the sender).
    """
    REDUCERS[cls] = reducer


class _References:
    """The class of references, for which the layer above registers; farcall has one."""

    kind: type[Any] | None = None
    fork: Callable[[Any, Any], tuple[Any, Callable[[], None]] | None]
    """``fork(reference, peer)``: the note that stands for it in a message, and its undo; None: pickle must write it."""


REFERENCES = _References()


def register_references(kind: type[Any], fork: Callable[[Any, Any], tuple[Any, Callable[[], None]] | None]) -> None:
    """Let instances of exactly ``kind`` travel without pickle, as notes of their message (`flat.py`)."""
    REFERENCES.kind, REFERENCES.fork = kind, fork


def installed_pickler() -> RpcPickler | None:
    """Return the pickler installed by an active ``use_rpc_pickler`` block, or None."""
    return INSTALLED.pickler


@contextmanager
def use_rpc_pickler(pickler: RpcPickler) -> Iterator[None]:
    """Let ``pickler`` write the functions and arguments of every call this process makes inside the block.

    It applies to all threads, as in ``torch.distributed.rpc``. The callee reads such a message with the
    pickler installed there, or, if it has none, with ``TablePickler``, which reads anything that plain
    pickle reads (``cloudpickle`` output too).

    Raises:
        RuntimeError: this process has a table (``farcall.allow``), which a pickler of its own would go round.
    """
    if allowance.INSTALLED.allowance is not None:
        raise RuntimeError(
            "no pickler can be installed beside farcall.allow, whose table it would go round: enter the classes that "
            "travel into the table, or leave the table out"
        )
    previous, INSTALLED.pickler = INSTALLED.pickler, pickler
    try:
        yield
    finally:
        INSTALLED.pickler = previous
