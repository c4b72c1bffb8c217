"""Names of the old agent's inner parts, which farcall does not have: a program may import one; its use says what to do.

Many programs import such a name and never use it, so the name exists, and its use raises: an `RpcError`, not an
AttributeError, which ``hasattr`` and ``getattr`` with a default would swallow.
"""

from __future__ import annotations

from typing import Any, NoReturn

from farcall.errors import RpcError

_NAMES_BY_WAY = {
    "use rpc_sync, rpc_async or remote": """
        _invoke_remote_builtin _invoke_remote_python_udf _invoke_remote_torchscript _invoke_rpc _invoke_rpc_builtin
        _invoke_rpc_python_udf _invoke_rpc_torchscript _local_invoke _local_invoke_async_execution""",
    "use farcall.profile": """
        RemoteProfilerManager _disable_server_process_global_profiler _enable_rpc_profiler
        _enable_server_process_global_profiler _get_should_profile _start_record_function""",
    "give device_maps to TensorPipeRpcBackendOptions": """
        _create_device_list _create_reverse_mapping _get_device_infos _set_devices_and_reverse_device_map
        _tensorpipe_exchange_and_check_all_device_maps _tensorpipe_validate_devices _validate_device_maps""",
    "use DistributedOptimizer, which makes and steps each worker's own optimizer": """
        _FunctionalLocalOptimizer _LocalOptimizer _ScriptLocalOptimizer _ScriptLocalOptimizerInterface
        _functional_local_optimizer_step _local_optimizer_step _new_functional_local_optimizer _new_local_optimizer
        _new_script_local_optimizer _script_local_optimizer_step""",
    "make a RemoteModule, and ask its get_module_rref() for more": """
        _NON_SCRIPTABLE_REMOTE_MODULE_MODULE _create_module _create_module_with_interface _instantiate_template
        _raise_not_supported""",
    "send it in a call; farcall pickles it by itself": """
        _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING _SerializedRemoteModule _deserialize
        _recursive_script_module_receiver _recursive_script_module_reducer _remote_module_receiver
        _remote_module_reducer""",
    "use RemoteModule.remote_parameters": "_param_rrefs",
    "use torch.distributed.init_process_group": "_init_process_group",
    "use torch.futures.wait_all": "_wait_for_all",
    "functions are run by farcall's executor (farcall.runtime.calls.executor)": "_run_function",
    "an error raised on the other side is raised by the call itself, with its type": "_handle_exception",
}
_WAYS = {name: way for way, names in _NAMES_BY_WAY.items() for name in names.split()}


class Unserved:
    """The stand-in for one such name."""

    def __init__(self, name: str, way: str) -> None:
        self.__name__ = name
        self._way = way

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RpcError(f"farcall has no {self.__name__}, a part of the old RPC agent: {self._way}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # Python itself asks any object for these
        self()

    def __repr__(self) -> str:
        return f"<{self.__name__} of torch.distributed.rpc, not served by farcall: {self._way}>"


def find_unserved(module_name: str, name: str) -> Any:
    """For the ``__getattr__`` of a module: the stand-in for ``name``, if torch has such a name there."""
    way = _WAYS.get(name)
    if way is None:
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
    return Unserved(name, way)
