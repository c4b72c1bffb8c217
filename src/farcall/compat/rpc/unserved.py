"""Names of the old agent's inner parts, which farcall does not have: importing one is fine, using it says what to do.

A program that imports such a name may never use it; so the name exists, and the error comes with the use. It is an
`RpcError`, not an AttributeError, which ``hasattr`` and ``getattr`` with a default would swallow.
"""

from __future__ import annotations

from typing import Any, NoReturn

from farcall.errors import RpcError

__all__ = ["Unserved", "find_unserved"]

_CALL = "use rpc_sync, rpc_async or remote"
_WAYS = {
    "_invoke_rpc_builtin": _CALL,
    "_invoke_rpc_python_udf": _CALL,
    "_invoke_rpc_torchscript": _CALL,
    "_invoke_remote_builtin": _CALL,
    "_invoke_remote_python_udf": _CALL,
    "_invoke_remote_torchscript": _CALL,
    "_enable_server_process_global_profiler": "use farcall.profile",
    "_disable_server_process_global_profiler": "use farcall.profile",
    "RemoteProfilerManager": "use farcall.profile",
    "_enable_rpc_profiler": "use farcall.profile",
    "_get_should_profile": "use farcall.profile",
    "_tensorpipe_exchange_and_check_all_device_maps": "members exchange their device maps when they meet",
    "_invoke_rpc": _CALL,
    "_run_function": "functions are run by farcall's executor (farcall.runtime.executor)",
    "_handle_exception": "an error raised on the other side is raised by the call itself, with its type",
    "_start_record_function": "use farcall.profile",
}


class Unserved:
    """Stands for something farcall does not have."""

    def __init__(self, name: str, way: str) -> None:
        self.__name__ = name
        self._way = way

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RpcError(f"{self.__name__} is a part of the old RPC agent that farcall does not have: {self._way}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # asked by Python itself, about any object
        self()

    def __repr__(self) -> str:
        return f"<{self.__name__} of torch.distributed.rpc, not served by farcall: {self._way}>"


def find_unserved(module_name: str, name: str) -> Any:
    """For the ``__getattr__`` of a module: the stand-in for ``name``, if torch has such a name there."""
    way = _WAYS.get(name)
    if way is None:
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
    return Unserved(name, way)
