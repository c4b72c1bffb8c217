"""Code that no other worker can import: of a REPL, a lambda, a closure. It travels by value."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.kit.wheel import Installed

import farcall
from farcall.serialize import code
from farcall.testing.cluster import run_cluster

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
