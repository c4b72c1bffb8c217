"""Distributed autograd: backward passes over graphs that cross workers.

    with farcall.autograd.context() as context_id:
        loss = farcall.rpc_sync("worker1", forward, args=(inputs,)).sum()
        farcall.autograd.backward(context_id, [loss])
        gradients = farcall.autograd.get_gradients(context_id)

`functions` records what crosses workers, `engine` runs one worker's part of the graph, `passes` joins that part to the
protocol, `context` and `contexts` hold it all by id: none of these knows sockets, they speak to a `Port`. `recorder`
and `port` tie them to a node; `scope` is what programs call.
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
