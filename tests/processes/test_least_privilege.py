"""Groups whose members may call what their programs name, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.kit.ports import held_port

import farcall
from farcall.errors import InitError, NotAllowed, ReferenceLost, SerializationError
from farcall.rpc.owned_values import fetch
from farcall.testing.cluster import finish, start_processes


class Model:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def _train(self) -> None:
        pass


class Secret:
    pass


def double(x: Any) -> Any:
    return [x, x]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def refused(*call: Any) -> str:
    try:
        farcall.rpc_sync(*call)
    except NotAllowed as error:
        return str(error)
    return ""


calls: list[tuple[Any, ...]] = []


def member(rank: int, port: int) -> dict[str, Any]:
    sys.addaudithook(lambda event, args: calls.append(args) if event == "farcall.call" else None)
    farcall.allow(
        functions=[double, scripted, torch.add, "tests.processes.test_least_privilege:what_was_called"], classes=[Model]
    )
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found: dict[str, Any] = {}
    if rank == 0:
        x = torch.ones(3)
        found["doubled"] = farcall.rpc_sync("w1", double, ({1: (x, {2})},))[1][1][0].tolist()
        found["added"] = farcall.rpc_sync("w1", torch.add, (x, x)).tolist()
        found["scripted"] = farcall.rpc_sync("w1", scripted, (x,)).tolist()
        model = farcall.remote("w1", Model, (3.0,))
        kept = [farcall.remote("w1", double, (number,)) for number in range(3)]
        found["numbers"] = [one._fork.ref.local_id for one in kept]
        found["guessed"] = []
        for number in range(min(found["numbers"])):
            if number == 100:
                break
            with pytest.raises(ReferenceLost):
                farcall.rpc_sync("w1", fetch, (0, number))
            found["guessed"].append(number)
        assert [one.to_here() for one in kept] == [[number, number] for number in range(3)]
        found["model"] = model.rpc_sync().run(x).tolist()
        found["sent"] = farcall.rpc_sync("w1", double, (Model(2.0),))[0].scale
        found["error"] = [
            refused("w1", os.getpid),
            refused("w1", double, (Secret(),)),
            refused("w1", Model(1.0).run, (x,)),
        ]
        found["method"] = ""
        try:
            model.rpc_sync()._train()
        except (NotAllowed, AttributeError) as error:
            found["method"] = str(error)
        farcall.barrier()
        found["called"] = farcall.rpc_sync("w1", what_was_called)
    else:
        farcall.barrier()
    farcall.shutdown()
    return found


def what_was_called() -> list[Any]:
    return [[caller, getattr(function, "__qualname__", "")] for caller, function in calls]


def test_only_what_is_named_is_served_and_every_call_is_an_audit_event() -> None:
    found = finish(start_processes(2, member, held_port()))[0]
    assert found["doubled"] == [1.0] * 3
    assert found["added"] == [2.0] * 3
    assert len(found["guessed"]) == 100
    assert all(later - earlier > 1 for earlier, later in pairwise(found["numbers"])), "one in a billion"
    assert found["scripted"] == [2.0] * 3
    assert found["model"] == [3.0] * 3
    assert found["sent"] == 2.0
    assert all("allow" in text for text in found["error"])
    assert found["method"]
    assert ["w0", "double"] in found["called"]
    assert ["w0", "getpid"] not in found["called"]


def data_only(rank: int, port: int) -> dict[str, Any]:
    farcall.allow(functions=[double, torch.add, fail, numbers], trust="data")
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found: dict[str, Any] = {}
    if rank == 0:
        x = torch.arange(6.0).reshape(2, 3)
        found["doubled"] = farcall.rpc_sync("w1", double, ({1: (x.t(), "text")},))[1][1][0].tolist()
        found["large"] = farcall.rpc_sync("w1", torch.add, (torch.ones(100_000), 1)).sum().item()
        found["items"] = list(farcall.worker("w1").stream(numbers, 3))
        with pytest.raises(ValueError, match="because"):
            farcall.rpc_sync("w1", fail, ("because",))
        with pytest.raises(NotAllowed, match="reference"):
            farcall.remote("w1", double, (1,)).to_here()
        with pytest.raises(NotAllowed):
            farcall.rpc_sync("w1", os.getpid)
        with pytest.raises(SerializationError, match="without pickle"):
            farcall.rpc_sync("w1", double, ({1},))
        weight = torch.ones(3, requires_grad=True)
        with farcall.autograd.context() as context_id:
            loss = farcall.rpc_sync("w1", torch.add, (weight, weight.expand(3))).sum()
            farcall.autograd.backward(context_id, [loss])
            found["gradient"] = farcall.autograd.get_gradients(context_id)[weight].tolist()
    farcall.barrier()
    farcall.shutdown()
    return found


def fail(why: str) -> None:
    raise ValueError(why)


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


def test_a_group_without_any_pickle() -> None:
    found = finish(start_processes(2, data_only, held_port()))[0]
    assert found["doubled"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["large"] == 200_000.0
    assert found["items"] == [0, 1, 2]
    assert found["gradient"] == [2.0] * 3


def mixed(rank: int, port: int) -> str:
    if rank == 0:
        farcall.allow(functions=[double])
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    try:
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    except InitError as error:
        return str(error)
    return "in"


def test_who_takes_code_does_not_join_who_does_not() -> None:
    for text in finish(start_processes(2, mixed, held_port())):
        assert "trust in calls" in text
        assert "trust in code" in text
        assert "farcall.allow" in text


def too_late(rank: int, port: int) -> str:
    farcall.init_rpc(
        "w0", rank=0, world_size=1, rpc_backend_options=farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    )
    with pytest.raises(RuntimeError, match="before init_rpc") as caught:
        farcall.allow(functions=[double])
    farcall.shutdown()
    return str(caught.value)


def test_a_running_node_does_not_change_its_mind() -> None:
    assert finish(start_processes(1, too_late, held_port()))[0]
