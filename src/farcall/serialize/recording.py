"""The interface between messages and the distributed autograd context that records their tensors.

Owns the variable that holds the context of the running code, and the protocol `Recording` that a context implements. It
does not know graphs, passes or peers.

Invariant: the receiver of a numbered message records it as either received or declined, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch


class Recording(Protocol):
    """A distributed autograd context."""

    @property
    def id(self) -> int:
        """The context's id, unique in the cluster."""

    def admits(self, peer: Any) -> bool:
        """Are messages to ``peer`` recorded now?"""

    def record_send(self, peer: Any, tensors: list[torch.Tensor]) -> int:
        """Number a message that leaves with these tensors; 0 if no gradient can come back for it."""

    def withdraw_send(self, message_id: int) -> None:
        """Forget a message that was not sent after all."""

    def record_receive(self, peer: Any, message_id: int, tensors: list[torch.Tensor]) -> None:
        """Record a message that arrived with these tensors."""

    def decline_receive(self, peer: Any, message_id: int) -> None:
        """Record a message that arrived and that nobody will use."""

    def enter(self) -> Recording | None:
        """Put the running code into this context; return its previous context."""


class _Present:
    """The context of the running code, in a context variable: each coroutine keeps its own.

    ``get`` and ``set`` are the variable's own methods, since every recorded call uses them.
    """

    __slots__ = ("_set", "get", "set")

    def __init__(self) -> None:
        variable: ContextVar[Recording | None] = ContextVar("farcall_autograd_context", default=None)
        self.get: Callable[[], Recording | None] = variable.get
        self._set = variable.set
        self.set: Callable[[Recording | None], object] = variable.set

    def watch(self, on_set: Callable[[Recording | None], object] | None) -> None:
        """Call ``on_set`` at each change from now on: TorchScript carries the context to threads of its own."""
        if on_set is None:
            self.set = self._set
            return

        def set_and_tell(recording: Recording | None) -> None:
            self._set(recording)
            on_set(recording)

        self.set = set_and_tell


RECORDING: Final = _Present()
