"""Code that no other worker can import: of a REPL, a lambda, a closure. It travels by value."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until
from tests.kit.wheel import Installed

import farcall
from farcall.runtime.node import runtime_of
from farcall.serialize import code, units
from farcall.testing.cluster import run_cluster
from farcall.testing.faults import Faults

needs_cloudpickle = pytest.mark.skipif(
    importlib.util.find_spec("cloudpickle") is None, reason="the notebook extra is not installed"
)

# What is typed into a REPL: its __main__ is no file. The other worker is a program that knows nothing of it.
SESSION = """
import os, subprocess, sys
import torch
import farcall

store = "file://" + sys.argv[1]
worker = subprocess.Popen([sys.executable, sys.argv[2], store])
farcall.init_rpc("repl", rank=0, world_size=2, rpc_backend_options=farcall.RpcBackendOptions(init_method=store))

def scale(x):
    return factor * x

factor = 2
print(farcall.rpc_sync("worker", scale, args=(torch.ones(2),)).tolist())
factor = 3
print(farcall.rpc_sync("worker", scale, args=(torch.ones(2),)).tolist())

def scale(x):
    return -x

print(farcall.rpc_sync("worker", scale, args=(torch.ones(2),)).tolist())

class Table:
    def __init__(self):
        self.rows = {}
    def put(self, key, value):
        self.rows[key] = value
        return self

table = farcall.remote("worker", Table)
print(table.rpc_sync().put("a", 1).rows, isinstance(table.to_here(), Table))
farcall.shutdown()
worker.wait()
"""
WORKER = """
import sys
import farcall

options = farcall.RpcBackendOptions(init_method=sys.argv[1])
farcall.init_rpc("worker", rank=1, world_size=2, rpc_backend_options=options)
farcall.shutdown()
"""


@needs_cloudpickle
def test_a_session_at_a_prompt(installed: Installed, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    done = installed.run(installed.python, "-c", SESSION, tmp_path / "meeting", worker)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["[2.0, 2.0]", "[3.0, 3.0]", "[-1.0, -1.0]", "{'a': 1} True"]


def call_closures(rank: int) -> None:
    if rank == 1:
        return
    weight = torch.ones(3, requires_grad=True)
    reference = farcall.remote("w1", list, args=((1, 2),))
    assert farcall.rpc_sync("w1", lambda x: 2 * x, args=(21,)) == 42
    assert farcall.rpc_sync("w1", lambda: len(reference.to_here())) == 2  # a reference in a closure is counted
    assert farcall.rpc_sync("w1", sorted, args=([1, 3, 2],), kwargs={"key": lambda x: -x}) == [3, 2, 1]
    with farcall.autograd.context() as context_id:
        loss = farcall.rpc_sync("w1", lambda: (2 * weight).sum())
        farcall.autograd.backward(context_id, [loss])
        assert farcall.autograd.get_gradients(context_id)[weight].tolist() == [2.0, 2.0, 2.0]
    make = farcall.rpc_sync("w1", lambda: lambda x: x + 1)
    assert make(1) == 2


@needs_cloudpickle
def test_lambdas_and_closures() -> None:
    run_cluster(2, call_closures)


def module_level() -> None:
    """Importable everywhere."""


def test_what_can_be_imported_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "is_available", lambda: True)
    assert not code.goes_by_value(module_level)
    assert not code.goes_by_value(Path)
    assert code.goes_by_value(lambda: None)
    for file, is_of_session in (("program.py", False), ("<stdin>", True), (None, True)):
        main = ModuleType("__main__")
        if file is not None:
            main.__file__ = file
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert code.is_of_session("__main__", "scale") is is_of_session


def test_a_worker_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(farcall.errors.FunctionNotFound, match=r"this worker lacks cloudpickle: pip install 'farcall"):
        code.load_code(b"", importlib.util.MAGIC_NUMBER, platform.python_version())


def send_bytecode_of_another_python(rank: int) -> None:
    if rank == 1:
        return
    own = platform.python_version()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "MAGIC_NUMBER", b"\xf3\r\r\n")
        patch.setattr(platform, "python_version", lambda: "3.99.0")
        with pytest.raises(
            farcall.errors.SerializationError,
            match=rf"Python 3\.99\.0, and this worker runs Python {re.escape(own)}, .*: put it into a module",
        ):
            farcall.rpc_sync("w1", lambda: 1)
        with pytest.raises(farcall.errors.SerializationError, match=r"Python 3\.99\.0"):
            farcall.rpc_sync("w1", sorted, args=([1, 3, 2],), kwargs={"key": lambda x: -x})
    assert farcall.rpc_sync("w1", lambda: 1) == 1


@needs_cloudpickle
def test_bytecode_of_another_python_is_refused() -> None:
    run_cluster(2, send_bytecode_of_another_python)


# ---------------------------------------------------------------------- code travels once

ran: Counter[str] = Counter()
"""Of this process, in which both nodes of a team are: functions by name are counted here whoever runs them."""


def note(name: str) -> str:
    ran[name] += 1
    return name


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def nodes(faults: Faults) -> Iterator[list[farcall.Node]]:
    with team(faults, rpc_timeout=LONG_S) as started:
        yield started
    started.clear()  # pytest holds what a fixture gave, and the first node holds the store


def questions(node: farcall.Node) -> int:
    """How many units the node knows: each was asked for once."""
    found = runtime_of(node).server.code
    return 0 if found is None else sum(map(len, found._known.values()))


@needs_cloudpickle
def test_every_kind_of_call_sends_it_once(nodes: list[farcall.Node]) -> None:
    caller, callee = nodes
    worker = caller["w1"]
    factor = 2

    def scale(x: int) -> int:
        return factor * x

    def count(upto: int) -> Iterator[int]:
        yield from range(upto)

    assert [worker.call(scale, x) for x in range(3)] == [0, 2, 4]
    factor = 3
    assert worker.start(scale, 5).result() == 15
    assert worker.create(scale, 6).to_here() == 18
    assert list(farcall.map(scale, range(4), workers=[worker])) == [0, 3, 6, 9]
    assert questions(callee) == 1
    assert [list(worker.stream(count, upto)) for upto in (2, 3)] == [[0, 1], [0, 1, 2]]
    assert questions(callee) == 2
    assert caller["w0"].call(scale, 7) == 21  # itself, by its own units
    assert questions(caller) == 1


@needs_cloudpickle
def test_a_function_without_values_is_the_same_at_each_call(nodes: list[farcall.Node]) -> None:
    worker = nodes[0]["w1"]

    def times() -> int:
        times.ran = getattr(times, "ran", 0) + 1  # type: ignore[attr-defined]
        return times.ran  # type: ignore[attr-defined]

    assert [worker.call(times) for _ in range(3)] == [1, 2, 3]
    values = [0]
    assert [worker.call(lambda: (values.append(1), len(values))[1]) for _ in range(3)] == [2, 2, 2]


@needs_cloudpickle
def test_calls_that_meet_at_a_new_function_run_once_each(nodes: list[farcall.Node]) -> None:
    worker = nodes[0]["w1"]
    for _ in range(5):
        ran.clear()
        function: Any = eval(f"lambda name: note(name + '{_}')", globals())  # new code each time
        calls = [worker.start(function, str(number)) for number in range(50)]
        assert [call.result() for call in calls] == [f"{number}{_}" for number in range(50)]
        assert set(ran.values()) == {1}


@needs_cloudpickle
def test_a_call_whose_code_does_not_come_ends_at_its_deadline(faults: Faults, nodes: list[farcall.Node]) -> None:
    caller, callee = nodes
    rule = faults.drop(kind="CodeTold", sender="w0")
    with pytest.raises(farcall.errors.RpcTimeout):
        caller["w1"].options(timeout=0.2).call(lambda: note("late"))
    waits = caller["w1"].start(lambda: note("cancelled"))
    rule.wait_hits(2)
    waits.cancel()
    assert ran["late"] == ran["cancelled"] == 0
    rule.lift()
    assert caller["w1"].call(lambda: note("next")) == "next"
    assert runtime_of(callee).server.code is not None
    runtime_of(callee).server.code.forget(runtime_of(caller).peer("w1"))  # not of that peer: they go on waiting
    runtime_of(callee).server.code.forget(runtime_of(callee).peer("w0"))
    wait_until(lambda: not runtime_of(callee).server.active)
    assert ran["late"] == ran["cancelled"] == 0


@needs_cloudpickle
def test_a_unit_that_had_to_go_is_asked_for_again(nodes: list[farcall.Node]) -> None:
    caller, callee = nodes

    def function(x: int) -> int:
        return x + 1

    assert caller["w1"].call(function, 1) == 2
    runtime_of(callee).server.code.forget(runtime_of(callee).peer("w0"))  # type: ignore[union-attr]
    assert caller["w1"].call(function, 2) == 3


@needs_cloudpickle
def test_a_failure_to_load_is_told_and_not_remembered(
    nodes: list[farcall.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = nodes[0]["w1"]
    (tmp_path / "comes_later.py").write_text("def answer(): return 42")
    monkeypatch.syspath_prepend(tmp_path)
    comes_later = importlib.import_module("comes_later")
    try:
        function: Any = eval("lambda: comes_later.answer()", {"comes_later": comes_later})
        units.split(function)
        del sys.modules["comes_later"]
        monkeypatch.undo()
        with pytest.raises(farcall.errors.FunctionNotFound, match="comes_later"):
            worker.call(function)
        monkeypatch.syspath_prepend(tmp_path)
        assert worker.call(function) == 42
    finally:
        sys.modules.pop("comes_later", None)


@needs_cloudpickle
def test_tensors_and_references_among_the_values(nodes: list[farcall.Node]) -> None:
    worker = nodes[0]["w1"]
    strided, whole = torch.arange(12).reshape(3, 4).T, torch.arange(12)
    large = torch.ones(1 << 18)
    reference = worker.create(list, (1, 2))
    for _ in range(2):
        assert worker.call(lambda: (strided.tolist(), whole.sum().item(), large.sum().item())) == (
            strided.tolist(),
            66,
            float(1 << 18),
        )
        assert worker.call(lambda: reference.to_here()) == [1, 2]
        large[0] = 1


@needs_cloudpickle
def test_threads_that_change_a_value_send_each_their_own(nodes: list[farcall.Node]) -> None:
    worker = nodes[0]["w1"]
    failures: list[Any] = []

    def many(own: int) -> None:
        def function(x: int) -> tuple[int, int]:
            return own, x

        failures.extend(found for x in range(100) if (found := worker.call(function, x)) != (own, x))

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert failures == []


@needs_cloudpickle
@pytest.mark.parametrize(("kind", "sender"), [("CodeWanted", "w1"), ("CodeTold", "w0"), ("request", "w0")])
def test_a_connection_that_breaks_around_the_question_costs_no_call_and_doubles_none(
    faults: Faults, nodes: list[farcall.Node], kind: str, sender: str
) -> None:
    worker = nodes[0]["w1"]
    ran.clear()
    rule = faults.cut(kind=kind, sender=sender, count=1)
    calls = [worker.start(eval("lambda name: note(name)", globals()), f"{kind} {number}") for number in range(20)]
    assert [call.result() for call in calls] == [f"{kind} {number}" for number in range(20)]
    rule.wait_hits()
    assert set(ran.values()) == {1}
    assert len(ran) == 20


SCRIPT = """
import farcall

class Point:
    def __init__(self, x):
        self.x = x

count = 0

def bump():
    global count
    count += 1
    return count

def double(x):
    return 2 * x

def quadruple(x):
    return double(double(x))

def move(x):
    return Point(x).x + 1

if __name__ == "__main__":
    with farcall.launch(1) as cluster:
        worker = cluster[0]
        print([worker.call(quadruple, x) for x in range(3)], [worker.call(bump) for _ in range(3)])
        count = 5
        print(worker.call(bump), worker.call(move, 1))
        served = worker.call(farcall.metrics).served
        print(sorted({row.function for row in served} & {"quadruple", "bump"}))
"""


@needs_cloudpickle
def test_functions_of_a_script(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = installed.run(installed.python, tmp_path / "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["[0, 4, 8] [1, 1, 1]", "6 2", "['bump', 'quadruple']"]


CLASSES = """
import dataclasses
import torch
import farcall

class Net(torch.nn.Module):
    made = 0
    def __init__(self):
        super().__init__()
        Net.made += 1
    def forward(self, x):
        return 2 * x

@dataclasses.dataclass
class Point:
    x: int = 1

def run(x):
    return Net()(x), Net.made

def kind():
    global Net
    return Net

def same(one):
    return type(one) is Point

def same_net(one):
    return one is Net

def size():
    return sum(len(known) for known in farcall.api.current_runtime().server.code._known.values())

if __name__ == "__main__":
    with farcall.launch(1) as cluster:
        worker = cluster[0]
        print([worker.call(run, x) for x in range(3)], worker.call(size))
        Net.made = 5
        print(worker.call(run, 1), worker.call(same, Point()), worker.call(same_net, Net))
        forward = Net.forward
        Net.forward = lambda self, x: 3 * x
        print(worker.call(run, 1))
        Net.forward = forward
        print(worker.call(run, 1))
        Net.forward = lambda self, x: 4 * x
        print(worker.call(same_net, Net))
        Net.forward = forward
        print(worker.call(run, 1))
        print([worker.create(Point, x).to_here().x for x in (1, 2)], worker.call(Point, 3))

        class Net(torch.nn.Module):
            made = 0
            def forward(self, x):
                return 7 * x

        print(worker.call(run, 1))
"""


@needs_cloudpickle
def test_classes_of_a_script_travel_once_and_are_never_stale(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CLASSES)
    done = installed.run(installed.python, tmp_path / "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "[(0, 1), (2, 1), (4, 1)] 2",
        "(2, 6) True True",
        "(3, 6)",
        "(2, 6)",
        "True",
        "(2, 6)",
        "[1, 2] Point(x=3)",
        "(7, 0)",
    ]
