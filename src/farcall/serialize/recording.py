"""Messages whose tensors a distributed autograd context records: how writing and reading tell the context.

Owns the variable that says which context the running code is in, and what a message needs to know of one. It does not
know graphs, passes or peers: a recorder implements `Recording`.

Invariant: each message that was given a number is, at its receiver, either received or declined, exactly once.
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
        """Its number in the cluster."""

    def admits(self, peer: Any) -> bool:
        """Whether messages to ``peer`` are recorded now."""

    def record_send(self, peer: Any, tensors: list[torch.Tensor]) -> int:
        """The number of a message that leaves with these tensors; 0 if no gradient can come back for it."""

    def withdraw_send(self, message_id: int) -> None:
        """That message was not sent after all."""

    def record_receive(self, peer: Any, message_id: int, tensors: list[torch.Tensor]) -> None:
        """A message arrived with these tensors."""

    def decline_receive(self, peer: Any, message_id: int) -> None:
        """A message arrived, and nobody will use it."""

    def enter(self) -> Recording | None:
        """Put the running code into this context; where it was before."""


class _Present:
    """Which context the running code is in. Inside it is a context variable: a coroutine keeps its own.

    ``get`` and ``set`` are those of the variable itself, since every recorded call uses them.
    """

    __slots__ = ("_set", "get", "set")

    def __init__(self) -> None:
        variable: ContextVar[Recording | None] = ContextVar("farcall_autograd_context", default=None)
        self.get: Callable[[], Recording | None] = variable.get
        self._set = variable.set
        self.set: Callable[[Recording | None], object] = variable.set

    def watch(self, on_set: Callable[[Recording | None], object] | None) -> None:
        """Tell ``on_set`` of each change from now on: TorchScript takes the context along to threads of its own."""
        if on_set is None:
            self.set = self._set
            return

        def set_and_tell(recording: Recording | None) -> None:
            self._set(recording)
            on_set(recording)

        self.set = set_and_tell


RECORDING: Final = _Present()
