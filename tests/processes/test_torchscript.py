"""TorchScript: called, calling, and with references; in programs written for torch.distributed.rpc."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch

import farcall
from farcall.errors import RpcError
from farcall.testing.cluster import run_cluster
from farcall.torchscript.extension import build, why_not

MISSING = why_not()
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("_extension")]
TIMEOUT_S = 250.0
PROGRAM = """
    import json, os, sys, time
    from typing import Dict, List, Tuple

    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch import Tensor
    from torch.distributed.rpc import RRef, rpc_async
    from torch.futures import Future

    @torch.jit.script
    def add(x: Tensor, y: int = 2) -> Tensor:
        return x + y

    @torch.jit.script
    def numbers() -> List[int]:
        return [1]

    @torch.jit.script
    def give(to: str) -> RRef[Tensor]:
        return rpc.remote(to, add, (torch.ones(1),))

    @torch.jit.script
    def give_two(to: str) -> List[RRef[Tensor]]:
        return [give(to), give(to)]

    @torch.jit.script
    def ask(to: str, owner: str) -> Tensor:
        return rpc.rpc_sync(to, give, (owner,)).to_here()

    @torch.jit.script
    def ask_on_other_threads(to: str, owner: str) -> Tensor:
        first = torch.jit._fork(ask, to, owner)
        second = torch.jit._fork(ask, to, owner)
        return torch.jit._wait(first) + torch.jit._wait(second)

    @torch.jit.script
    def ask_for_two(to: str, owner: str) -> Tensor:
        future = rpc_async(to, give_two, (owner,))
        total = torch.zeros(1)
        for rref in future.wait():
            total += rref.to_here()
        return total

    @torch.jit.script
    class Box:
        def __init__(self, rref: RRef[Tensor]):
            self.rref = rref

    @torch.jit.script
    def give_in_a_box(to: str) -> Box:
        return Box(give(to))

    @torch.jit.script
    def give_in_boxes(to: str) -> List[Box]:
        return [give_in_a_box(to)]

    @torch.jit.script
    def ask_for_boxes(to: str, owner: str) -> Tensor:
        first = rpc_async(to, give_in_a_box, (owner,)).wait()
        second = rpc.remote(to, give_in_a_box, (owner,)).to_here()  # on a thread of TorchScript's, after the wait
        third = rpc.rpc_sync(to, give_in_boxes, (owner,))[0]
        return first.rref.to_here() + second.rref.to_here() + third.rref.to_here()

    @torch.jit.script
    def append(rref: RRef[List[int]], value: int) -> int:
        held = rref.local_value()
        held.append(value)
        return len(held)

    @torch.jit.script
    def fetch_both(tensor: RRef[Tensor], numbers: RRef[List[int]]) -> Tensor:
        return tensor.to_here() + len(numbers.to_here())

    @torch.jit.script
    def look_at_both(tensor: RRef[Tensor], numbers: RRef[List[int]]) -> Tensor:
        return tensor.local_value() + len(numbers.local_value())

    @torch.jit.script
    def about(rref: RRef[Tensor]) -> Tuple[bool, str, bool]:
        return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()

    @torch.jit.script
    def call_its_owner(rref: RRef[Tensor]) -> Tensor:
        return rpc.rpc_sync(rref.owner(), add, (rref.to_here(), 5))

    @torch.jit.script
    def twice(to: str, x: Tensor) -> Tensor:
        first = rpc.rpc_sync(to, add, (x,))
        return torch.jit._wait(torch.jit._fork(add, first)) + rpc.rpc_sync(to, add, (x,), {"y": 0})

    @torch.jit.script
    def train_in_script(context_id: int, to: str, x: Tensor) -> Tensor:
        loss = twice(to, x).sum()
        dist_autograd.backward(context_id, [loss])
        return dist_autograd.get_gradients(context_id)[x]

    @torch.jit.script
    def wait_for(future: Future[Tensor]) -> Tensor:
        return future.wait() + 1

    @torch.jit.script
    def call_with_a_future(to: str, x: Tensor, timeout: float) -> Future[Tensor]:
        return rpc.rpc_async(to, add, (x,), {"y": 3}, timeout)

    @torch.jit.ignore
    def nap(seconds: float) -> None:
        time.sleep(seconds)

    @torch.jit.script
    def slow(x: Tensor) -> Tensor:
        nap(3.0)
        return x

    @torch.jit.script
    def call_without_patience(to: str) -> Tensor:
        return rpc.rpc_sync(to, slow, (torch.zeros(1),), {}, 0.1)

    @torch.jit.script
    def call_a_number() -> Tensor:
        return rpc.rpc_sync(1, add, (torch.zeros(1),))

    class Holder(torch.nn.Module):
        def __init__(self, rref):
            super().__init__()
            self.rref = rref
            self.table = {"a": rref}

        def forward(self) -> Tensor:
            return self.rref.to_here() + self.table["a"].to_here(5.0)

    def add_in_python(x):
        return x + 10

    def use_in_python(rref):
        return type(rref) is RRef, rref.to_here().item()

    checks = {}

    def check(function):
        checks[function.__name__] = function

    @check
    def references_on_threads_of_torchscript():
        return [ask_on_other_threads("w1", "w1").item(), ask_on_other_threads("w1", "w0").item()]

    @check
    def references_in_containers():
        return ask_for_two("w1", "w0").item()

    @check
    def references_of_several_types():
        there, here = rpc.remote("w1", numbers), rpc.RRef([5, 6])
        one = rpc.RRef(torch.ones(1))
        return [fetch_both(give("w1"), there).item(), fetch_both(one, here).item(), look_at_both(one, here).item()]

    @check
    def references_in_objects():
        return [ask_for_boxes("w1", "w0").item(), ask_for_boxes("w1", "w1").item()]

    @check
    def references_that_scripts_return():
        rref = give("w1")
        return [isinstance(rref, RRef), isinstance(rref, rpc.RRef), str(rref)[:8], rref.owner_name(),
                rref.to_here().item(), *rpc.rpc_sync("w1", use_in_python, (rref,)), call_its_owner(rref).item()]

    @check
    def what_scripts_know_of_references():
        return [about(rpc.rpc_sync("w1", give, ("w1",))), about(rpc.RRef(torch.ones(1)))]

    @check
    def values_that_scripts_change():
        there, here = rpc.remote("w1", numbers), rpc.RRef([5])
        lengths = [rpc.rpc_sync("w1", append, (there, 2)), rpc.rpc_sync("w1", append, (there, 3)), append(here, 6)]
        return [lengths, there.to_here(), here.local_value()]

    @check
    def references_as_attributes():
        return torch.jit.script(Holder(give("w1")))().item()

    @check
    def contexts():
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            return train_in_script(context_id, "w1", x).tolist()

    @check
    def futures():
        of_python = rpc.rpc_async("w1", add_in_python, (torch.ones(1),))
        of_script = call_with_a_future("w1", torch.ones(1), -1.0)
        return [wait_for(of_python).item(), wait_for(of_script).item(), of_script.wait().item()]

    @check
    def what_is_remembered():
        from farcall.rpc import schemas as matching
        call_with_a_future("w1", torch.ones(1), -1.0).wait()
        before = len(matching._named)
        for _ in range(10):
            call_with_a_future("w1", torch.ones(1), -1.0).wait()
        return len(matching._named) - before

    @check
    def errors():
        texts = []
        for wrong in (lambda: call_without_patience("w1"), lambda: ask("nobody", "w1"), lambda: call_its_owner(3),
                      lambda: call_a_number()):
            try:
                wrong()
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    if __name__ == "__main__":
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
        results = {name: function() for name, function in checks.items()} if rank == 0 else {}
        with open(f"{sys.argv[1]}.{rank}", "w") as file:
            json.dump(results, file)
        rpc.shutdown()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torchscript")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "run", "--workers", "2", str(folder / "program.py"), str(folder / "results")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "results.0").read_text())
    return found


def test_references_come_to_the_threads_that_torchscript_goes_on_with(results: dict[str, Any]) -> None:
    assert results["references_on_threads_of_torchscript"] == [6, 6]


def test_references_come_in_containers(results: dict[str, Any]) -> None:
    assert results["references_in_containers"] == 6


def test_each_reference_of_a_function_has_its_own_type(results: dict[str, Any]) -> None:
    assert results["references_of_several_types"] == [4, 3, 3]


def test_references_come_in_objects_of_script_classes(results: dict[str, Any]) -> None:
    assert results["references_in_objects"] == [9, 9]


def test_what_a_script_returns_is_a_reference_in_python(results: dict[str, Any]) -> None:
    assert results["references_that_scripts_return"] == [True, True, "UserRRef", "w1", 3, True, 3, 8]


def test_scripts_know_whose_a_reference_is(results: dict[str, Any]) -> None:
    assert results["what_scripts_know_of_references"] == [[False, "w1", True], [True, "w0", True]]


def test_what_a_script_changes_in_place_is_changed_for_all(results: dict[str, Any]) -> None:
    assert results["values_that_scripts_change"] == [[2, 3, 2], [1, 2, 3], [5, 6]]


def test_modules_have_references_as_attributes(results: dict[str, Any]) -> None:
    assert results["references_as_attributes"] == 6


def test_gradients_flow_through_calls_of_scripts(results: dict[str, Any]) -> None:
    assert results["contexts"] == [2, 2]


def test_scripts_wait_for_futures_of_python_and_python_for_those_of_scripts(results: dict[str, Any]) -> None:
    assert results["futures"] == [12, 5, 4]


def test_a_script_function_is_matched_once_however_often_scripts_call_it(results: dict[str, Any]) -> None:
    assert results["what_is_remembered"] == 0


def test_errors_of_calls_reach_the_caller_of_the_script(results: dict[str, Any]) -> None:
    late, nobody, wrong, number = results["errors"]
    assert "RPC ran for more than set timeout" in late
    assert "nobody" in nobody
    assert "Expected a value of type 'RRef[Tensor]' for argument 'rref' but instead found type 'int'" in wrong
    assert "a script calls a worker by its name or WorkerInfo, not by Int" in number


# ---------------------------------------------------------------------- at the callee


SLOTS = torch.zeros(8)


@torch.jit.ignore
def slots_of_this_process() -> torch.Tensor:
    return SLOTS


slots_of_this_process.__annotations__["return"] = torch.Tensor  # TorchScript takes no text for a type


def meet(mine: int) -> float:
    slots = slots_of_this_process()
    while bool(slots.sum() < len(slots)):
        slots[mine] = 1
    return float(slots.sum())


def script_meet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so
        return torch.jit.script(meet)


def meet_at(rank: int) -> list[float]:
    script = script_meet()
    farcall.barrier({"w0", "w1"})
    if rank != 0:
        return []
    futures = [farcall.rpc_async("w1", script, (mine,)) for mine in range(len(SLOTS))]
    return [future.wait() for future in futures]


def test_eight_script_functions_run_at_the_same_time() -> None:
    """Each waits for all others, without the interpreter: one at a time, none would end."""
    assert run_cluster(2, meet_at)[0] == [8.0] * 8


@pytest.fixture(scope="module")
def _extension() -> None:
    """Built, and seen to work; some compilers make one that does not, and then nothing here can be tried."""
    try:
        build()
    except RpcError as error:
        pytest.skip(str(error))
