"""Distributed autograd: backward passes over graphs that cross workers.

    with farcall.autograd.context() as context_id:
        loss = farcall.rpc_sync("worker1", forward, args=(inputs,)).sum()
        farcall.autograd.backward(context_id, [loss])
        gradients = farcall.autograd.get_gradients(context_id)

`functions` ties tensors that cross workers into graphs, `engine` runs one worker's part of a graph (`nodes`: a single
node, `replicas`: DistributedDataParallel), `passes` joins that part to the protocol, `contexts` is the table of
contexts. None of these knows sockets: they send through a `Port`, which the `recorder` of a node implements. `scope`
has the functions for programs.
"""

from farcall.autograd.scope import (
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    context,
    get_gradients,
)

__all__ = [
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "get_gradients",
]
