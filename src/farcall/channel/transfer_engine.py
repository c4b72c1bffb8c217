"""The contract of transfer engines: libraries that copy between the memory of two hosts without work of the owner.

    owner     engine.export(tensor)       -> Exported: a description for others; memory that they may read and write
    reader    engine.open(description)    -> OpenedMemory
              opened.begin(...)           -> Transfer, which is polled

One engine serves a node, made by `make_engine` from the name in the options: ``"nixl"`` (`nixl_engine.py`), or
``"module:function"`` of a program, which is called without arguments. Both ends of a transfer name the same engine;
where they do not, bytes go by calls. Engines know neither nodes nor peers nor deadlines: `rpc/transfers.py` does.

Any method may raise any exception, since the libraries behind them do: the caller then goes by calls. Any thread may
call, several at a time. None of the calls waits for another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, TypeAlias

import torch

from farcall.errors import RpcError

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Parts of exported memory: the first byte and the number of bytes of each."""


class Transfer(Protocol):
    """A copy that is under way. It may read and write both memories until ``query`` has said that it is over."""

    def query(self) -> bool:
        """Is it done? Raises if it has failed, and is over."""


class Exported(Protocol):
    """Memory of this process that others may open, until it is closed."""

    @property
    def description(self) -> bytes:
        """What ``open`` needs elsewhere."""

    def close(self) -> None:
        """Nobody uses it any more."""


class OpenedMemory(Protocol):
    """Exported memory of another process."""

    def begin(self, local: torch.Tensor, ranges: Ranges, *, write: bool) -> Transfer:
        """Begin to copy ``ranges`` into ``local``, one behind the other; with ``write``, the other way round.

        ``local`` is contiguous, in host memory, and as large as all ranges together.
        """

    def close(self) -> None:
        """No transfer will begin any more."""


class TransferEngine(Protocol):
    """The engine of one node."""

    def export(self, tensor: torch.Tensor) -> Exported:
        """Let others open the memory of a contiguous tensor in host memory. The caller keeps the tensor."""

    def open(self, description: bytes) -> OpenedMemory:
        """Open memory that another engine of this kind has exported."""

    def close(self) -> None:
        """The node ends: free everything, abandon transfers. Whatever is called afterwards may raise."""


def make_engine(name: str) -> TransferEngine:
    """The engine of that name for one more node."""
    module, _, function = name.partition(":")
    if not function:
        if name != "nixl":
            raise RpcError(f"there is no transfer engine {name!r}: name 'nixl', or a function, as 'module:function'")
        module, function = "farcall.channel.nixl_engine", "NixlEngine"
    made: TransferEngine = getattr(import_module(module), function)()
    return made
