"""TorchScript: called, calling, and with references; in programs written for torch.distributed.rpc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall
from farcall.testing.cluster import run_cluster
from farcall.torchscript.extension import why_not

MISSING = why_not()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
TIMEOUT_S = 100.0
SOURCES = Path(__file__).parents[2] / "src"
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
        nap(1.0)
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
        from farcall.remote import matching
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
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
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


# ---------------------------------------------------------------------- one process

ALONE = """
    import tempfile

    import torch
    import torch.distributed.rpc as rpc
    from torch import Tensor
    from torch.distributed.rpc import RRef

    @torch.jit.script
    def add(x: Tensor, y: int = 2) -> Tensor:
        return x + y

    def start():
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mktemp()}")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
"""


def run_alone(tmp_path: Path, program: str, **environment: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(ALONE) + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-m", "farcall", str(path)],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_compiler_only_calls_of_code_that_needs_the_extension_fail(tmp_path: Path) -> None:
    """Compiling such code is no error: whoever imports a library may need something else of it."""
    program = """
        import torch.distributed.autograd as dist_autograd
        import farcall.compat

        @torch.jit.script
        def issue(x: Tensor) -> Tensor:
            return rpc.rpc_sync("alone", add, (x,))

        @torch.jit.script
        def take(rref: RRef[Tensor]) -> Tensor:
            return rref.to_here()

        @torch.jit.script
        def differentiate(context_id: int, loss: Tensor) -> None:
            dist_autograd.backward(context_id, [loss])

        class Holder(torch.nn.Module):
            def __init__(self, rref):
                super().__init__()
                self.rref = rref

            def forward(self) -> Tensor:
                return self.rref.to_here()

        def is_refused(wrong):
            try:
                wrong()
            except RuntimeError as error:
                return "needs a C++ compiler" in str(error) and "farcall torchscript build" in str(error)

        def try_all():
            print(rpc.rpc_sync("alone", add, (torch.ones(1),)).item(), torch.jit.script(add)(torch.ones(1)).item())
            print(is_refused(lambda: issue(torch.ones(1))),
                  is_refused(lambda: rpc.rpc_sync("alone", issue, (torch.ones(1),))),
                  is_refused(lambda: take(rpc.RRef(torch.ones(1)))),
                  is_refused(lambda: differentiate(1, torch.ones(1))),
                  is_refused(lambda: torch.jit.script(Holder(rpc.RRef(torch.ones(1))))))
            print(rpc.remote("alone", add, (torch.ones(1),)).to_here().item())

        start()
        try_all()
        rpc.shutdown()
        farcall.compat.uninstall()
        farcall.compat.install()
        start()
        try_all()
        rpc.shutdown()
    """
    printed = run_alone(tmp_path, program, FARCALL_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert printed.splitlines() == ["3.0 3.0", "True True True True True", "3.0"] * 2


def test_a_file_with_references_is_loaded_as_any_other(tmp_path: Path) -> None:
    """Nothing in the process that loads it has compiled anything that needs the extension."""
    writing = """
        from torch.distributed.rpc import _enable_jit_rref_pickle

        class Holder(torch.nn.Module):
            def __init__(self, rref):
                super().__init__()
                self.rref = rref

            def forward(self) -> Tensor:
                return self.rref.to_here()

            @torch.jit.export
            def take(self, rref: RRef[Tensor]) -> Tensor:
                return rref.to_here()

        start()
        _enable_jit_rref_pickle()
        torch.jit.save(torch.jit.script(Holder(rpc.RRef(torch.ones(1)))), FILE)
        rpc.shutdown()
    """
    reading = """
        import io

        start()
        for file in (FILE, io.BytesIO(open(FILE, "rb").read())):
            module = torch.jit.load(file)
            print(module.take(rpc.RRef(torch.ones(1))).item())
            try:
                module()
            except RuntimeError as error:
                print("has not written a reference" in str(error))  # whoever wrote it is gone
        rpc.shutdown()
    """
    file = f"FILE = {str(tmp_path / 'holder.pt')!r}\n"
    run_alone(tmp_path, file + textwrap.dedent(writing))
    assert run_alone(tmp_path, file + textwrap.dedent(reading)).split() == ["1.0", "True"] * 2


def test_ctrl_c_is_heard_in_a_script_that_waits(tmp_path: Path) -> None:
    program = """
        import os, signal, threading, time

        @torch.jit.ignore
        def wait_for_interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            while not over.is_set():
                time.sleep(0.01)

        @torch.jit.script
        def slow() -> int:
            wait_for_interrupt()
            return 1

        @torch.jit.script
        def ask() -> int:
            return rpc.rpc_sync("alone", slow)

        over = threading.Event()
        start()
        try:
            ask()
            print("not heard")
        except KeyboardInterrupt:
            print("heard")
        over.set()
        rpc.shutdown()
    """
    assert run_alone(tmp_path, program).split() == ["heard"]


def test_a_process_ends_while_its_scripts_make_calls(tmp_path: Path) -> None:
    program = """
        from torch.futures import Future

        @torch.jit.script
        def call_again_and_again(count: int) -> Tensor:
            total = torch.zeros(1)
            for _ in range(count):
                rref = rpc.remote("alone", add, (total,))
                total = rpc.rpc_sync("alone", add, (rref.to_here(),))
            return total

        @torch.jit.script
        def begin() -> Future[Tensor]:
            return torch.jit._fork(call_again_and_again, 1_000_000_000)

        start()
        future = begin()
        rpc.rpc_sync("alone", add, (torch.ones(1),))
        print("ends")
    """
    assert run_alone(tmp_path, program).split() == ["ends"]


def test_torchs_own_operators_are_back_when_farcall_is_gone(tmp_path: Path) -> None:
    program = """
        import farcall.compat

        @torch.jit.script
        def issue(x: Tensor) -> Tensor:
            return rpc.rpc_sync("alone", add, (x,))

        @torch.jit.script
        def give(x: Tensor) -> RRef[Tensor]:
            return rpc.remote("alone", add, (x,))

        def theirs():
            return type(held).__getattribute__ is object.__getattribute__ or "__getattribute__" not in vars(type(held))

        for _ in range(2):
            start()
            held = give(torch.ones(1))
            print(issue(torch.ones(1)).item(), held.to_here().item(), theirs())
            kind = type(held)
            rpc.shutdown()
        farcall.compat.uninstall()
        print(theirs())
        try:
            issue(torch.ones(1))
        except RuntimeError as error:
            print("RPC agent is not set" in str(error))
        farcall.compat.install()
        start()
        print(issue(torch.ones(1)).item(), give(torch.ones(1)).to_here().item())  # compiled long ago
        rpc.shutdown()
    """
    assert run_alone(tmp_path, program).split() == ["3.0", "3.0", "False"] * 2 + ["True", "True", "3.0", "3.0"]


def test_calls_in_compiled_functions(tmp_path: Path) -> None:
    program = """
        import farcall
        from farcall.torchscript import call

        def double(x):
            return 2 * x

        def ordinary(x):
            return rpc.rpc_sync("alone", double, (x.sin(),)).cos()

        def with_future(x):
            future = rpc.rpc_async("alone", double, (x.sin(),))
            between = x.exp()
            return future.wait() + between

        def with_reference(x):
            rref = rpc.remote("alone", double, (x.sin(),))
            between = x.exp()
            return rref.to_here() + between

        @torch.jit.script
        def issue(x: Tensor) -> Tensor:
            return rpc.rpc_sync("alone", add, (x,))

        def with_script(x):
            return issue(x.sin()).cos()

        def in_a_loop(x):
            for _ in range(3):
                x = ordinary(x)
            return x

        def operator(x):
            return call("alone", "__main__.double", [x.sin()]).cos()

        start()
        x = torch.ones(3)
        for function in (ordinary, with_future, with_reference, with_script, in_a_loop, operator):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=function is operator)
            print(torch.equal(compiled(x), function(x)), torch._dynamo.explain(function)(x).graph_break_count)
        print(call("alone", "torch.argmax", [x], shape=[], dtype=torch.int64).item())
        try:
            call("alone", "torch.argmax", [x])
        except RuntimeError as error:
            print("returned torch.int64 of shape []" in str(error))
        rpc.shutdown()
    """
    *breaks, looked, said = run_alone(tmp_path, program).splitlines()
    assert breaks == ["True 1", "True 2", "True 2", "True 1", "True 1", "True 0"]
    assert (looked, said) == ("0", "True")


def test_remote_modules_for_scripts_move_tensors_to_their_device_and_back(tmp_path: Path) -> None:
    program = """
        from typing import Tuple
        from farcall.compat.scriptable_module import _written

        @torch.jit.interface
        class Interface(torch.nn.Module):
            def forward(self, x: Tensor, times: int, word: str) -> Tuple[Tensor, Tuple[str, Tensor]]:
                pass

        class Module(torch.nn.Module):
            def forward(self, x: Tensor, times: int, word: str) -> Tuple[Tensor, Tuple[str, Tensor]]:
                assert x.device.type == "cpu"
                return x * times, (word, x)

        start()
        rref = rpc.RRef(torch.jit.script(Module()), type_hint=Interface)
        for moves, has_map in ((False, False), (True, False), (True, True)):
            written = _written(Interface, moves, has_map)
            source = str(written.run_forward.code)
            word = written.run_forward(rref, "cpu", torch.ones(1), 3, "it's")[1][0]
            print(word, source.count("to("), source.count("cpu("))
        rpc.shutdown()
    """
    assert run_alone(tmp_path, program).splitlines() == ["it's 0 0", "it's 1 2", "it's 1 0"]


def test_the_command_builds_once_and_says_where_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "farcall", "torchscript", "build"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    environment |= {"FARCALL_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "needs a C++ compiler" in done.stderr
    assert "Traceback" not in done.stderr


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
    farcall._barrier({"w0", "w1"})
    if rank != 0:
        return []
    futures = [farcall.rpc_async("w1", script, (mine,)) for mine in range(len(SLOTS))]
    return [future.wait() for future in futures]


def test_eight_script_functions_run_at_the_same_time() -> None:
    """Each waits for all others, without the interpreter: one at a time, none would end."""
    assert run_cluster(2, meet_at)[0] == [8.0] * 8
