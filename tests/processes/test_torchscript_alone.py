"""TorchScript in a process by itself: without a compiler, from files, compiled, interrupted, at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from farcall.errors import RpcError
from farcall.torchscript.extension import build, why_not

MISSING = why_not()
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("_extension")]
TIMEOUT_S = 250.0
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
        env={**os.environ, **environment},
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
        from farcall.compat.nn import _write_methods

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
            written = _write_methods(Interface, moves, has_map)
            source = str(written.run_forward.code)
            word = written.run_forward(rref, "cpu", torch.ones(1), 3, "it's")[1][0]
            print(word, source.count("to("), source.count("cpu("))
        rpc.shutdown()
    """
    assert run_alone(tmp_path, program).splitlines() == ["it's 0 0", "it's 1 2", "it's 1 0"]


def test_the_command_builds_once_and_says_where_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "farcall", "torchscript", "build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    environment = {**os.environ, "FARCALL_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "needs a C++ compiler" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def _extension() -> None:
    """Built, and seen to work; some compilers make one that does not, and then nothing here can be tried."""
    try:
        build()
    except RpcError as error:
        pytest.skip(str(error))
