"""The functions of ``farcall.autograd``: contexts, backward passes and gradients, at the current node.

Each is a few lines over the node's contexts. The names with an underscore are those of ``torch.distributed.autograd``,
by which programs look inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from farcall.autograd.context import Context
from farcall.autograd.contexts import Contexts
from farcall.autograd.recorder import Recorder
from farcall.destructors import whole
from farcall.runtime.node import HasRuntime, current_runtime
from farcall.serialize import RECORDING


def _contexts() -> Contexts:
    return current_runtime().part(Recorder).contexts


class context:
    """``with context() as context_id:`` records the calls made inside, by this thread and by the functions it calls.

    Tensors that need a gradient and cross workers inside the block are tied together at both ends. At the end of the
    block this worker forgets the context and its gradients; the other workers that know it follow soon. Contexts of one
    thread do not nest; those of different threads and coroutines are independent.
    """

    def __init__(self, node: HasRuntime | None = None) -> None:
        self._node = node
        self._context: Context | None = None

    @whole  # else Ctrl-C could leave the thread in a context for ever, and contexts do not nest
    def __enter__(self) -> int:
        self._outside = RECORDING.get()
        node = self._node
        runtime = current_runtime() if node is None else node._runtime
        self._contexts = runtime.part(Recorder).contexts
        self._context = self._contexts.new_context()
        return self._context.id

    @whole
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._context is not None
        RECORDING.set(self._outside)
        self._contexts.release_everywhere(self._context.id)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Run a backward pass from ``roots`` over all workers; the gradients are in the context when this returns.

    Each worker's context holds the gradients of that worker's parameters, see `get_gradients`; no ``.grad`` changes.
    Several passes in one context add up. Results of calls need not lead to a root.

    Args:
        context_id: the context in which the roots were computed.
        roots: a list of scalar tensors of this worker that need a gradient.
        retain_graph: keep the graph for another pass.

    Raises:
        RpcError: a backward function failed on some worker, a worker died, or the pass took longer than the timeout
            of this worker's calls (the option ``rpc_timeout``). The pass has no effect then.
    """
    try:
        current_runtime().part(Recorder).backward(context_id, roots, retain_graph)
    except RuntimeError as error:
        from farcall.foreign_errors import is_changed_in_place  # most programs never need it

        if is_changed_in_place(error):
            error.add_note(
                "A step of an optimizer has changed weights that this pass needed: do several trainers use one model? "
                "Then wrap it where it lives: farcall.nn.Shared(model)"
            )
        raise


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that this worker has in a context, by tensor."""
    return current_runtime().part(Recorder).get_gradients(context_id)


def _new_context() -> Context:
    """Open a context and put this thread into it; `_release_context` ends it."""
    return _contexts().new_context()


def _release_context(context_id: int) -> None:
    """Forget a context on every worker that knows it."""
    contexts = _contexts()
    contexts.retrieve(context_id)
    contexts.release_everywhere(context_id)


def _current_context() -> Context:
    """Return the context that this thread is in."""
    return _contexts().current()


def _retrieve_context(context_id: int) -> Context:
    """Return the context with that id; raise if this worker does not know it."""
    return _contexts().retrieve(context_id)


def _is_valid_context(context_id: int) -> bool:
    """Does this worker know a context with that id?"""
    return _contexts().is_valid(context_id)


def _get_max_id() -> int:
    """Return the largest id that a context or message of this worker may get."""
    return _contexts().max_id()


def _get_debug_info() -> dict[str, str]:
    """Count the contexts and the running backward passes of this worker."""
    return _contexts().debug_info()


def _init(worker_id: int) -> Any:
    """Do nothing: every node has its contexts."""
