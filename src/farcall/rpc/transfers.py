"""The transfer engine of one node, and the end of whatever others may still read or write through it.

Owns when memory may be taken back: an engine copies without asking the owner, and may go on after its caller has gone.

    what                       is kept                          until
    exported memory            with the last reference to it    then, or `REST_S` after the last loss of a member
    memory that was opened     with its `RemoteTensor`          then
    a transfer whose caller    with its local memory and the    the engine says that it is over
    stopped waiting            reference to the owner's

A reader keeps its reference while a transfer runs, even when it leaves, so the owner's memory stays; memory that a
lost reader, or one that has left, may still read rests. Destructors only queue what they end; worker threads do the
rest. When the node ends, so does the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic

import torch

from farcall.channel.device_memory import REST_S
from farcall.channel.transfer_engine import (
    Exported,
    OpenedMemory,
    Ranges,
    Transfer,
    TransferEngine,
    make_engine,
)
from farcall.destructors import destructor
from farcall.errors import RpcError, RpcTimeout
from farcall.protocol.backoff import Backoff
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer
from farcall.serialize.allowance import INSTALLED

logger: logging.Logger = logging.getLogger("farcall")

WORTH_BYTES = 1 << 20
"""Smaller parts go faster by a call."""
LEAST_RANGE_BYTES = 4096
"""Parts that lie in smaller pieces are gathered by their owner, and sent at once."""
_FIRST_LOOK_S, _LAST_LOOK_S = 20e-6, 1e-3
"""The first and the longest pause between two looks at a transfer."""
_TEND_S = 0.1
"""The pause between two looks at what cannot be ended yet."""


def ranges_of(region: Sequence[tuple[int, int, int]], shape: Sequence[int], item_bytes: int) -> Ranges | None:
    """The bytes of a part of a contiguous tensor, in the order of its elements; None: a call does that better."""
    chosen = [*region, *((0, extent, 1) for extent in shape[len(region) :])]
    dimension, size = len(shape), item_bytes
    while dimension and chosen[dimension - 1] == (0, shape[dimension - 1], 1):
        dimension -= 1
        size *= shape[dimension]
    first, stride = 0, size
    if dimension and chosen[dimension - 1][2] == 1:  # neighbours: one range for all of them
        dimension -= 1
        start, stop, _ = chosen[dimension]
        first, size, stride = start * size, (stop - start) * size, shape[dimension] * size
    if size < LEAST_RANGE_BYTES:
        return None
    offsets = [first]
    for outer in reversed(range(dimension)):
        offsets = [index * stride + offset for index in range(*chosen[outer]) for offset in offsets]
        stride *= shape[outer]
    return [(offset, size) for offset in offsets] if size * len(offsets) >= WORTH_BYTES else None


class ExportedTensor:
    """Memory of a shared tensor that readers open by its description. When it dies, the memory is given back."""

    __slots__ = ("_exported", "_tensor", "_transfers", "description")

    def __init__(self, transfers: Transfers, exported: Exported, tensor: torch.Tensor) -> None:
        self._transfers = transfers
        self._exported = exported
        self._tensor = tensor
        self.description: bytes = exported.description

    @destructor
    def __del__(self) -> None:
        self._transfers.let_go(self._exported, self._tensor)


class OpenedTensor:
    """The memory of another worker's shared tensor. When it dies, the memory is closed."""

    __slots__ = ("_transfers", "memory")

    def __init__(self, transfers: Transfers, memory: OpenedMemory) -> None:
        self._transfers = transfers
        self.memory: OpenedMemory = memory

    @destructor
    def __del__(self) -> None:
        self._transfers.close_soon(self.memory)


class Transfers:
    """The transfers of one node, ``node.part(Transfers)``, made when the node starts if it has an engine.

    Mutable: the engine, None once the node has ended; when a member was last lost; and the ends that are due, which any
    thread appends to, and destructors too.
    """

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._lost_at = -NEVER
        self._due: deque[tuple[Callable[[float], bool], Callable[[], object]]] = deque()
        self._engine: TransferEngine | None = None
        self.name: str | None = node.options.memory.transfer_engine
        """The name of the engine; None: there is none."""
        if self.name is None:
            return
        if INSTALLED.allowance is not None:
            raise RpcError(
                "with a transfer engine others can write any memory that this node exports, read-only tensors too: "
                "it does not go together with farcall.allow"
            )
        self._engine = make_engine(self.name)
        self._timer = node.timer(self._on_timer)
        node.hooks.peer_gone.append(self._on_gone)
        node.hooks.ended.append(self._on_ended)

    def export(self, tensor: torch.Tensor) -> ExportedTensor | None:
        """Let other workers read and write ``tensor`` through the engine; None: they call this node for it."""
        engine = self._engine
        if engine is None or tensor.device.type != "cpu" or tensor.nbytes < WORTH_BYTES:
            return None
        try:
            return ExportedTensor(self, engine.export(tensor), tensor)
        except Exception as error:
            logger.warning(
                "%s: %d bytes are shared without the engine %s: %s", *self._about(tensor.nbytes), repr(error)
            )
            return None

    def open(self, description: bytes) -> OpenedTensor | None:
        """Open a tensor that another worker has exported; None: call its owner."""
        engine = self._engine
        if engine is None:
            return None
        try:
            return OpenedTensor(self, engine.open(description))
        except Exception as error:
            logger.warning(
                "%s: a description of %d bytes is not opened by %s: %s", *self._about(len(description)), repr(error)
            )
            return None

    def copy(
        self,
        opened: OpenedTensor,
        local: torch.Tensor,
        ranges: Ranges,
        *,
        write: bool,
        deadline: float,
        keeps: object,
        check: Callable[[], None],
    ) -> bool:
        """Copy between ``local`` and the tensor, as `OpenedMemory.begin` says. False: it failed, call the owner.

        ``check`` raises when the owner is gone. If that, the deadline or Ctrl-C ends the wait, the transfer may go on:
        ``keeps``, the reference to the tensor, and ``local`` live until it is over.
        """
        try:
            transfer = opened.memory.begin(local, ranges, write=write)
        except Exception as error:
            logger.warning(
                "%s: a transfer of %d bytes by %s did not begin: %s", *self._about(local.nbytes), repr(error)
            )
            return False
        pauses = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        try:
            while True:
                try:
                    if transfer.query():
                        return True
                except Exception as error:
                    logger.warning(
                        "%s: a transfer of %d bytes by %s failed: %s", *self._about(local.nbytes), repr(error)
                    )
                    return False
                check()
                if monotonic() >= deadline:
                    raise RpcTimeout(f"a transfer of {local.nbytes} bytes by {self.name} is not done in time")
                time.sleep(pauses.next_s())
        except BaseException:
            self._end_soon(lambda now: _is_over(transfer), partial(_drop, (transfer, opened, local, keeps)))
            raise

    def let_go(self, exported: Exported, tensor: torch.Tensor) -> None:
        """Nobody refers to exported memory any more. From destructors, too."""

        def give_back() -> None:
            exported.close()
            _drop(tensor)

        self._end_soon(lambda now: now >= self._lost_at + REST_S, give_back)

    def close_soon(self, memory: OpenedMemory) -> None:
        """Nobody here uses opened memory any more. From destructors, too."""
        self._end_soon(lambda now: True, memory.close)

    # ------------------------------------------------------------------ inside

    def _about(self, size_bytes: int) -> tuple[str, int, str | None]:
        # Errors are logged as text: a record that is kept would hold their frames, and the memory in those.
        return self._node.info.name, size_bytes, self.name

    def _end_soon(self, is_over: Callable[[float], bool], end: Callable[[], object]) -> None:
        if self._engine is not None:
            self._keep(is_over, end)
            self._timer.at(monotonic())

    def _keep(self, is_over: Callable[[float], bool], end: Callable[[], object]) -> None:
        self._due.append((is_over, end))
        if self._engine is None:  # the node ended meanwhile, and has cleared the list perhaps before this came
            self._due.clear()

    def _on_timer(self, now: float) -> float:
        self._node.executor.submit(FunctionTask(self._tend))  # a library may take long to unpin memory
        return NEVER

    def _tend(self) -> None:
        """End what is over; the rest waits. Two threads may do so at once: each entry is taken by one."""
        for _ in range(len(self._due)):
            try:
                is_over, end = self._due.popleft()
            except IndexError:
                break
            if not is_over(monotonic()):
                self._keep(is_over, end)
                continue
            try:
                end()
            except Exception as error:
                logger.warning(
                    "%s: memory of the engine %s stays in use: %s", self._node.info.name, self.name, repr(error)
                )
        if self._due and self._engine is not None:
            self._timer.at(monotonic() + _TEND_S)

    def _on_gone(self, peer: Peer) -> None:
        self._lost_at = monotonic()

    def _on_ended(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            with suppress(Exception):
                engine.close()
        self._due.clear()


def _is_over(transfer: Transfer) -> bool:
    try:
        return transfer.query()
    except Exception:
        return True


def _drop(kept: object) -> None:
    """The last use of ``kept``: it lives until here."""
