"""farcall in the place of torch.distributed.rpc, by a variable or where torch has none, and torch's own back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.processes.compat_program import SOURCES, TIMEOUT_S, environment, run


def test_installed_by_a_variable(tmp_path: Path) -> None:
    # As at the start of an interpreter, which reads the .pth files of site-packages; processes inherit the variable.
    program = f"""
        import site
        site.addsitedir({str(SOURCES)!r})
        site.addsitedir({str(SOURCES)!r})  # as in an environment made with --system-site-packages
        assert importlib.util.find_spec("torch") is not None  # as programs ask that can do without
        assert "torch" not in sys.modules, "nobody has asked for torch yet"
        from torch.distributed.rpc import rpc_sync
        print(rpc_sync.__module__)
    """
    path = tmp_path / "program.py"
    path.write_text("import importlib.util, sys\n" + textwrap.dedent(program))
    for value, expected in (("1", "farcall.compat.rpc.api"), ("0", "torch.distributed.rpc.api")):
        done = subprocess.run(
            [sys.executable, str(path)],
            env=environment(FARCALL_INSTALL=value),
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        assert done.stdout.split() == [expected]


def test_what_torch_loaded_meanwhile_is_its_own_after_uninstall(tmp_path: Path) -> None:
    program = """
        import warnings
        import farcall.compat
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's optimizers are TorchScript
            import torch.distributed.nn, torch.distributed.optim
            from torch.distributed._shard.sharded_tensor import api as sharded
            assert sharded.rpc is rpc
            assert torch.distributed.optim.DistributedOptimizer is farcall.optim.DistributedOptimizer
            farcall.compat.uninstall()
        assert sharded.rpc is torch.distributed.rpc is sys.modules["torch.distributed.rpc"]
        say(
            sharded.rpc.__name__,
            torch.distributed.nn.RemoteModule.__module__,
            torch.distributed.nn.api.remote_module.__name__,
            torch.distributed.optim.DistributedOptimizer.__module__,
            torch.distributed.optim.optimizer.__name__,
        )
        farcall.compat.install()
        assert torch.distributed.optim.DistributedOptimizer is farcall.optim.DistributedOptimizer
    """
    modules = ["rpc", "nn.api.remote_module", "nn.api.remote_module", "optim.optimizer", "optim.optimizer"]
    assert run(tmp_path, program) == [" ".join(f"torch.distributed.{name}" for name in modules)]


HIDE_RPC = """
import importlib.machinery, importlib.util, sys

class Hiding:
    def find_spec(self, name, path, target=None):
        if name != "torch._C":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            for name in ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                delattr(module, name)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hiding())
import torch
import torch.distributed.rpc as stock
assert not stock.is_available() and not hasattr(stock, "init_rpc")
import farcall.compat
farcall.compat.install()
"""


def test_where_torch_was_built_without_rpc(tmp_path: Path) -> None:
    program = """
        import multiprocessing
        import torch.distributed.autograd as dist_autograd
        import torch.distributed.rpc as rpc
        from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set
        from torch.distributed.nn import RemoteModule
        from torch.distributed.optim import DistributedOptimizer
        from torch.nn.parallel import distributed

        def add(x):
            return x + 1

        def work(rank):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            assert _is_current_rpc_agent_set()
            if rank == 0:
                assert type(rpc.remote("worker1", add, args=(1,))) is PyRRef
                module = RemoteModule("worker1/cpu", torch.nn.Linear, args=(2, 1))
                optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
                with dist_autograd.context() as context_id:
                    dist_autograd.backward(context_id, [module(torch.ones(2)).sum()])
                    optimizer.step(context_id)
            rpc.shutdown()

        @torch.jit.script
        def takes_a_reference(rref: PyRRef[torch.Tensor]) -> bool:
            return True

        if __name__ == "__main__":
            assert rpc.is_available() and stock.is_available() and stock.init_rpc is rpc.init_rpc
            assert distributed.RPC_AVAILABLE and distributed.RRef is rpc.RRef
            child = multiprocessing.get_context("fork").Process(target=work, args=(1,))
            child.start()
            work(0)
            child.join()
            assert child.exitcode == 0
            farcall.compat.uninstall()
            assert not stock.is_available() and not hasattr(stock, "init_rpc")
            assert not hasattr(distributed, "RRef") and not hasattr(torch._jit_internal, "RRef")
            assert not hasattr(torch.distributed.nn, "RemoteModule")
            print("served")
    """
    path = tmp_path / "program.py"
    path.write_text(HIDE_RPC + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(path)], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.stdout.split() == ["served"], done.stdout + done.stderr


def test_installed_by_a_variable_and_by_the_program(tmp_path: Path) -> None:
    """The hook that waits for torch is met by the import of torch inside install(), as in a spawned child."""
    program = """
    from farcall import compat
    compat.install_when_torch_comes()
    from farcall.compat import install, is_installed, uninstall
    install()
    import torch.distributed.rpc as rpc
    assert is_installed() and rpc.__name__.startswith("farcall"), rpc
    uninstall()
    assert not is_installed()
    import torch
    assert torch.distributed.rpc.__name__ == "torch.distributed.rpc"
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_a_process_group_is_complete_before_a_rank_that_has_it_calls_another(tmp_path: Path) -> None:
    program = """
        import pathlib, threading
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        waits = pathlib.Path("waits")
        called = threading.Event()
        set_default, wait_for_all = c10d._update_default_pg, c10d._store_based_barrier

        def set_late(group):
            while not called.is_set() and not waits.exists():
                called.wait(0.01)
            set_default(group)

        def tell_and_wait(*args, **options):
            waits.touch()
            wait_for_all(*args, **options)

        def has_group():
            called.set()
            return dist.is_initialized()

        def work(rank):
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
            if rank == 0:
                c10d._store_based_barrier = tell_and_wait
            else:
                c10d._update_default_pg = set_late
            dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
            c10d._update_default_pg = set_default
            if rank == 0:
                say("has its group:", rpc_sync("w1", has_group))
            rpc.shutdown()
            dist.destroy_process_group()

        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=work, args=(1,))
            child.start()
            work(0)
            child.join()
            assert child.exitcode == 0
    """
    assert run(tmp_path, program) == ["has its group: True"]
