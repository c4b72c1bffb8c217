"""Names of the old agent's inner parts, which farcall does not have: importing one is fine, using it says what to do.

A program that imports such a name may never use it; so the name exists, and the error comes with the use. It is an
`RpcError`, not an AttributeError, which ``hasattr`` and ``getattr`` with a default would swallow.
"""

from __future__ import annotations

from typing import Any, NoReturn

from farcall.errors import RpcError

__all__ = ["Unserved", "find_unserved"]

_CALL = "use rpc_sync, rpc_async or remote"
_DEVICES = "give device_maps to TensorPipeRpcBackendOptions"
_MODULE = "make a RemoteModule, and ask its get_module_rref() for more"
_OPTIMIZER = "use DistributedOptimizer, which makes and steps each worker's own optimizer"
_SENT = "send it in a call; farcall pickles it by itself"
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
    "_tensorpipe_exchange_and_check_all_device_maps": _DEVICES,
    "_tensorpipe_validate_devices": _DEVICES,
    "_create_device_list": _DEVICES,
    "_create_reverse_mapping": _DEVICES,
    "_get_device_infos": _DEVICES,
    "_set_devices_and_reverse_device_map": _DEVICES,
    "_validate_device_maps": _DEVICES,
    "_init_process_group": "use torch.distributed.init_process_group",
    "_invoke_rpc": _CALL,
    "_run_function": "functions are run by farcall's executor (farcall.runtime.calls.executor)",
    "_handle_exception": "an error raised on the other side is raised by the call itself, with its type",
    "_start_record_function": "use farcall.profile",
    "_local_invoke": _CALL,
    "_local_invoke_async_execution": _CALL,
    "_FunctionalLocalOptimizer": _OPTIMIZER,
    "_LocalOptimizer": _OPTIMIZER,
    "_ScriptLocalOptimizer": _OPTIMIZER,
    "_ScriptLocalOptimizerInterface": _OPTIMIZER,
    "_functional_local_optimizer_step": _OPTIMIZER,
    "_local_optimizer_step": _OPTIMIZER,
    "_new_functional_local_optimizer": _OPTIMIZER,
    "_new_local_optimizer": _OPTIMIZER,
    "_new_script_local_optimizer": _OPTIMIZER,
    "_script_local_optimizer_step": _OPTIMIZER,
    "_wait_for_all": "use torch.futures.wait_all",
    "_NON_SCRIPTABLE_REMOTE_MODULE_MODULE": _MODULE,
    "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING": _SENT,
    "_SerializedRemoteModule": _SENT,
    "_create_module": _MODULE,
    "_create_module_with_interface": _MODULE,
    "_instantiate_template": _MODULE,
    "_param_rrefs": "use RemoteModule.remote_parameters",
    "_raise_not_supported": _MODULE,
    "_recursive_script_module_receiver": _SENT,
    "_recursive_script_module_reducer": _SENT,
    "_remote_module_receiver": _SENT,
    "_remote_module_reducer": _SENT,
    "_deserialize": _SENT,
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
