"""Where programs that were written for torch.distributed.rpc look for errors, and what a shutdown leaves behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

TIMEOUT_S = 250.0
START = """
import gc, tempfile, warnings
import torch
import torch.distributed.rpc as rpc
from farcall.runtime.node import Runtime

def start():
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mktemp()}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
"""


def run(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(START + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-m", "farcall", str(path)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_missing_method_is_an_error_of_the_call(tmp_path: Path) -> None:
    program = """
        start()
        rref = rpc.remote("alone", torch.ones, args=(2,))
        for call in (rref.rpc_sync, rref.remote):
            try:
                call().no_such_method()
            except AttributeError as error:
                print(error)
        del rref, call
        rpc.shutdown()
    """
    assert run(tmp_path, program).stdout.count("has no attribute 'no_such_method'") == 2


def test_what_a_function_raises_is_printed_where_it_ran(tmp_path: Path) -> None:
    program = """
        def fail():
            raise ValueError("said twice")

        start()
        try:
            rpc.rpc_sync("alone", fail)
        except ValueError:
            pass
        rpc.shutdown()
    """
    printed = run(tmp_path, program).stderr
    assert "On WorkerInfo(id=0, name=alone):" in printed
    assert "ValueError: said twice" in printed


def test_a_node_is_gone_after_its_shutdown(tmp_path: Path) -> None:
    program = """
        for _ in range(3):
            start()
            rpc.rpc_sync("alone", torch.ones, args=(2,))
            rpc.shutdown()
        gc.collect()
        print(sum(type(thing).__mro__.count(Runtime) for thing in gc.get_objects()))
    """
    assert run(tmp_path, program).stdout.split() == ["0"]
