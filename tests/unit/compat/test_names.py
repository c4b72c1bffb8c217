"""Options, backends, worker infos and the names that cannot be served: what programs see before a cluster exists."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from farcall.compat import rpc
from farcall.compat.rpc import backend_registry, internal, options
from farcall.errors import RpcError
from farcall.ids import WorkerInfo as FarcallWorkerInfo


def test_options_are_those_of_torch() -> None:
    made = rpc.TensorPipeRpcBackendOptions(num_worker_threads=3, rpc_timeout=7, init_method="tcp://127.0.0.1:1")
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (3, 7.0, "tcp://127.0.0.1:1")
    assert isinstance(made, rpc.RpcBackendOptions)
    made.rpc_timeout = 9
    made.init_method = "env://"
    chosen = options.to_farcall(made, made.init_method)
    assert (chosen.num_worker_threads, chosen.rpc_timeout, chosen.init_method) == (3, 9.0, "env://")


def test_options_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=timedelta(seconds=1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(init_method=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must be positive"):
        rpc.TensorPipeRpcBackendOptions(num_worker_threads=0)
    with pytest.raises(RuntimeError, match="must not be negative"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=-1)


def test_device_maps() -> None:
    made = rpc.TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    made.set_device_map("b", {"cuda:1": "cuda:0"})
    cuda = [torch.device("cuda", index) for index in range(2)]
    assert made.device_maps == {"b": {cuda[0]: cuda[1], cuda[1]: cuda[0]}}
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        made.set_device_map("b", {"cuda:0": "cuda:0"})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        made.set_device_map("c", {"cuda:0": "cuda:0", "cuda:1": "cuda:0"})
    made.set_devices(["cuda:0", "cuda:1"])
    assert made.devices == cuda
    with pytest.raises(ValueError, match="expect a list of CUDA devices, but got device type cpu"):
        made.set_devices(["cpu"])


def test_old_transports_and_channels_are_told_once() -> None:
    made = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    with pytest.warns(UserWarning, match="of the old agent") as told:
        assert options.to_farcall(made, "env://").transports == ("tcp",)
    assert [warning.filename for warning in told] == [__file__] * 2
    assert "this worker therefore uses TCP only" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options.to_farcall(made, "env://").transports == ("tcp",)
        assert options.to_farcall(rpc.TensorPipeRpcBackendOptions(), "env://").transports is None


def test_backends_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    assert backend_registry.backend_registered("TENSORPIPE")
    before = rpc.BackendType.TENSORPIPE
    names = {kind.name for kind in rpc.BackendType}  # whoever loaded the faulty agent registered that, too
    made = backend_registry.register_backend("OWN", lambda timeout, url: (timeout, url), lambda **kwargs: kwargs)
    assert repr(made) == "BackendType.OWN"
    assert {kind.name for kind in backend_registry.BackendType} == {*names, "OWN"}
    assert backend_registry.construct_rpc_backend_options(made, 3, "env://") == (3, "env://")
    assert backend_registry.init_backend(made, name="a") == {"name": "a"}
    assert rpc.BackendType is backend_registry.BackendType
    assert backend_registry.is_member(before)
    assert not backend_registry.is_member("TENSORPIPE")
    with pytest.raises(RuntimeError, match=r"^RPC backend OWN: already registered$"):
        backend_registry.register_backend("OWN", dict, dict)


def test_the_agent_of_another_backend_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    said: list[str] = []

    class Agent(rpc.RpcAgent):  # type: ignore[name-defined,misc]
        def get_worker_info(self, worker: object = None) -> FarcallWorkerInfo:
            return FarcallWorkerInfo("a", 0)

        def get_worker_infos(self) -> list[FarcallWorkerInfo]:
            return [self.get_worker_info()]

        def join(self, shutdown: bool = False, timeout: float = 0) -> None:
            said.append(f"join {shutdown} {timeout}")

        def shutdown(self) -> None:
            said.append("shutdown")

    made = backend_registry.register_backend("OWN", rpc.RpcBackendOptions, lambda **_: Agent())
    for graceful, expected in ((True, ["join True 7", "shutdown"]), (False, ["shutdown"])):
        said.clear()
        options = rpc.RpcBackendOptions(init_method=f"file://{tempfile.mktemp()}")
        rpc.init_rpc("a", backend=made, rank=0, world_size=1, rpc_backend_options=options)
        rpc.shutdown(graceful, timeout=7)
        assert said == expected
        assert not rpc._is_current_rpc_agent_set()


def test_a_name_that_cannot_be(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    with pytest.raises(RuntimeError, match="Worker name must match"):
        rpc.init_rpc("a*", rank=0, world_size=1, rpc_backend_options=options)
    assert not rpc._is_current_rpc_agent_set()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": "TENSORPIPE"}, TypeError, "Argument backend must be a member of BackendType"),
        ({"rpc_backend_options": {}}, TypeError, "must be an instance of RpcBackendOptions"),
        ({"rpc_backend_options": rpc.RpcBackendOptions()}, TypeError, "Could not infer backend for options"),
        (
            {"backend": rpc.BackendType["TENSORPIPE"], "rpc_backend_options": rpc.RpcBackendOptions()},
            TypeError,
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`",
        ),
    ],
)
def test_arguments_that_init_rpc_refuses(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rpc.init_rpc("a", rank=0, world_size=1, **arguments)
    assert not rpc._is_current_rpc_agent_set()


def test_without_a_cluster() -> None:
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.rpc_sync("a", torch.add)
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.shutdown()
    for asking in (rpc._get_current_rpc_agent, lambda: rpc.RRef(1)):
        with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize the RPC framework"):
            asking()


def test_worker_infos() -> None:
    made = rpc.WorkerInfo("a", 1)
    assert made == FarcallWorkerInfo("a", 1)
    assert isinstance(FarcallWorkerInfo("a", 1), rpc.WorkerInfo)
    assert not isinstance(("a", 1), rpc.WorkerInfo)
    assert pickle.loads(pickle.dumps(made)) == made
    for name, text in (("abc*", "must match"), ("", "must be non-empty"), ("a" * 128, "must be shorter than 128")):
        with pytest.raises(RuntimeError, match=f"Worker name {text}"):
            rpc.WorkerInfo(name, 0)


def test_what_cannot_be_served_says_what_to_do_when_it_is_used() -> None:
    from farcall.compat.rpc import _invoke_rpc_python_udf  # type: ignore[attr-defined]

    with pytest.raises(RpcError, match="use rpc_sync, rpc_async or remote"):
        _invoke_rpc_python_udf("a", b"", [], 0, False)
    with pytest.raises(RpcError, match=r"farcall\.profile"):
        rpc.RemoteProfilerManager.set_current_profiling_key("a")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rpc.nonsense  # type: ignore[attr-defined] # noqa: B018


def test_reducers_of_programs_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kit.values import decode, encode

    from farcall.serialize.policy import REDUCERS

    monkeypatch.setattr(internal, "REDUCERS", REDUCERS)
    internal._internal_rpc_pickler._register_reducer(Odd, lambda value: (Odd, (value.number + 1,)))
    internal._internal_rpc_pickler._register_reducer(Odd, lambda value: (Odd, (0,)))  # the first one counts
    try:
        payload, buffers = encode(Odd(1))
        assert decode(payload, buffers).number == 2
        data, tensors = internal.serialize([Odd(1), torch.ones(2)])
        assert len(tensors) == 1
        found, tensor = internal.deserialize(data, tensors)
        assert found.number == 2
        assert tensor is tensors[0]
    finally:
        del REDUCERS[Odd]


class Odd:
    def __init__(self, number: int) -> None:
        self.number = number
