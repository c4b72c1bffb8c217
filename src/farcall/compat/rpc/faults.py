"""``torch.distributed.rpc._testing``: the options of stock's faulty agent, over `farcall.testing.faults`.

There is no special agent: the ordinary one starts with faults between it and the others. Importing this module
registers the backend ``FAULTY_TENSORPIPE``, as importing torch's does.

A failed send fails a call at once. Stock tries its other messages again, until ``num_fail_sends`` attempts have failed;
here they come late, and once: farcall's connections deliver.

    stock's name                    farcall's message
    PYTHON_CALL, SCRIPT_CALL        a call, outside of an autograd context; script: of an operator or script function
    PYTHON_, SCRIPT_REMOTE_CALL     the call that creates a reference; likewise
    PYTHON_, SCRIPT_RREF_FETCH_CALL to_here: one message for both, since only the owner knows what the value is
    RREF_FORK_REQUEST, RREF_ACK     Register, Confirm
    RREF_CHILD_ACCEPT               Accept
    RREF_USER_DELETE                Release
    CLEANUP_AUTOGRAD_CONTEXT_REQ    ReleaseContext
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from farcall.compat.rpc import backend_registry, constants
from farcall.compat.rpc.agent import TensorPipeAgent
from farcall.compat.rpc.options import _TensorPipeRpcBackendOptionsBase
from farcall.protocol.notes import decode_notes
from farcall.serialize import decode_function
from farcall.serialize.functions import BY_VALUE
from farcall.testing.faults import Delay, Fail, Faults, Rule
from farcall.testing.faults.messages import Message
from farcall.testing.faults.rules import Fault

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]

RETRY_S = 0.05
"""The pause before a failed send is tried again; stock's is a second, but no test depends on that."""


def is_available() -> bool:
    """Can faults be injected? Always."""
    return True


class FaultyTensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Options of an agent that fails and delays messages.

    Args:
        num_worker_threads, rpc_timeout, init_method: as for every agent.
        messages_to_fail: names of messages whose sending fails.
        messages_to_delay: names of messages, and how many seconds later each leaves.
        num_fail_sends: how often the sending of one message fails before it succeeds.
    """

    def __init__(
        self,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail: list[str] = list(messages_to_fail)
        self.messages_to_delay: dict[str, float] = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """farcall's node, with the faults that its options ask for."""

    options_class: ClassVar[type[Any]] = FaultyTensorPipeRpcBackendOptions

    def __init__(
        self, store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any, *rest: Any
    ) -> None:
        with to_faults(rpc_backend_options).installed():
            super().__init__(store, name, rank, world_size, rpc_backend_options, *rest)


# ---------------------------------------------------------------------- the names of messages


def _is_script(message: Message) -> bool:
    """Does it call an operator of torch's, or a script function? Stock has other messages for those."""
    if message.frame.function[:1] in (b"", BY_VALUE):
        return False
    called = decode_function(message.frame.function)
    if isinstance(called, torch.jit.ScriptFunction | torch._ops.OpOverload):
        return True
    find_builtin: Callable[[Any], str | None] = torch.jit._builtins._find_builtin
    return find_builtin(called) is not None


def _in_context(message: Message) -> bool:
    """Is it part of a distributed autograd context? Stock wraps such calls into messages of another name."""
    return bool(message.frame.notes) and decode_notes(message.frame.notes).context_id != 0


class _Meant(NamedTuple):
    kind: str
    where: Callable[[Message], bool] | None = None


MESSAGES = {
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": _Meant("ReleaseContext"),
    "PYTHON_CALL": _Meant("call", lambda message: not _is_script(message) and not _in_context(message)),
    "PYTHON_REMOTE_CALL": _Meant("create", lambda message: not _is_script(message)),
    "PYTHON_RREF_FETCH_CALL": _Meant("fetch"),
    "RREF_ACK": _Meant("Confirm"),
    "RREF_CHILD_ACCEPT": _Meant("Accept"),
    "RREF_FORK_REQUEST": _Meant("Register"),
    "RREF_USER_DELETE": _Meant("Release"),
    "SCRIPT_CALL": _Meant("call", lambda message: _is_script(message) and not _in_context(message)),
    "SCRIPT_REMOTE_CALL": _Meant("create", _is_script),
    "SCRIPT_RREF_FETCH_CALL": _Meant("fetch"),
}
"""Stock's names, and the messages of farcall's that each means."""


def to_faults(options: FaultyTensorPipeRpcBackendOptions) -> Faults:
    """The rules that the options ask for."""
    faults = Faults()
    if options.num_fail_sends > 0:
        for name in options.messages_to_fail:
            _add(faults, name, Fail(options.num_fail_sends, RETRY_S))
    for name, seconds in options.messages_to_delay.items():
        _add(faults, name, Delay(seconds, 0.0, False))
    return faults


def _add(faults: Faults, name: str, fault: Fault) -> None:
    meant = MESSAGES.get(name)
    if meant is None:
        raise ValueError(f"unknown message type {name!r} to fail or delay: choose from {', '.join(MESSAGES)}")
    faults.add(Rule(fault, kind=meant.kind, where=meant.where))


# ---------------------------------------------------------------------- the backend


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int,
    messages_to_fail: Sequence[str],
    messages_to_delay: Mapping[str, float],
    num_fail_sends: int,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail, messages_to_delay, num_fail_sends
    )


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend(
        "FAULTY_TENSORPIPE", _construct_options, partial(backend_registry.start_agent, FaultyTensorPipeAgent)
    )
