"""``torch.distributed.rpc.rref_proxy``: methods of a reference's value, called in one of three ways."""

from __future__ import annotations

from typing import Any

from farcall.compat.rpc import api
from farcall.compat.rpc.constants import UNSET_RPC_TIMEOUT
from farcall.compat.rpc.unserved import find_unserved
from farcall.rpc import method_calls
from farcall.rpc.rref import RRef

__all__: list[str] = []


class RRefProxy(method_calls.Proxy):
    """The methods of ``rref``'s value, called by ``rpc_api``: one of rpc_sync, rpc_async and remote."""

    __slots__ = ()

    def __init__(self, rref: RRef[Any], rpc_api: Any, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        ways = {
            api.rpc_sync: method_calls.call_method,
            api.rpc_async: method_calls.call_method_async,
            api.remote: method_calls.call_method_remote,
        }
        super().__init__(ways[rpc_api], rref, timeout)


def _invoke_rpc(rref: RRef[Any], rpc_api: Any, func_name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    return getattr(RRefProxy(rref, rpc_api, timeout), func_name)(*args, **kwargs)


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
