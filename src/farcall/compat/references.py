"""What programs expect of references beyond farcall's own: errors that come at the call, and events in a profile.

In the old system a method called by ``rref.remote()`` asks for the type of the value first: a method that does not
exist, or a value that does not come in time, is an error of the call itself. farcall's own `RRef` returns at once, and
the error surfaces with the result; so this costs a question to the owner, once for each reference, and only here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farcall.compat.rpc.constants import UNSET_RPC_TIMEOUT
from farcall.compat.rpc.unserved import find_unserved
from farcall.errors import RpcError
from farcall.rpc.owner_calls import Proxy, call_method_remote
from farcall.rpc.rref import RRef

__all__ = ["replacements"]

_make: Callable[..., None] = RRef.__init__


def replacements() -> dict[str, Callable[..., Any]]:
    """What takes the place of methods of `RRef`."""
    return {
        "__init__": _init,
        "remote": _remote,
        "_get_profiling_future": _get_profiling_future,
        "_set_profiling_future": _set_profiling_future,
        "_deserialize": find_unserved(__name__, "_deserialize"),
    }


def _init(self: RRef[Any], value: Any, type_hint: Any = None) -> None:
    if type_hint is None and isinstance(value, torch.jit.ScriptModule):
        raise RpcError(
            "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint. "
            "Write RRef(module, type_hint=Interface), with a class decorated by torch.jit.interface"
        )
    _make(self, value, type_hint)


def _remote(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """``rref.remote().method(...)`` calls a method of the value at its owner; a reference to its result there."""
    return Proxy(_call_remote, self, timeout)


def _call_remote(rref: RRef[Any], name: str, timeout_s: float, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    kind = rref._get_type(timeout=timeout_s)
    if not issubclass(kind, torch.jit.ScriptModule):  # whose methods are made with the instance
        getattr(kind, name)
    return call_method_remote(rref, name, timeout_s, *args, **kwargs)


def _get_profiling_future(self: RRef[Any]) -> torch.futures.Future[None]:
    """A future that completes when what the creating call did at the owner is known here, if it was profiled."""
    return self._get_future()


def _set_profiling_future(self: RRef[Any], future: Any) -> None:
    """Nothing to do: the creating call itself brings home what was recorded of it."""
