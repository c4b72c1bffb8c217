"""Programs that were written for torch.distributed.rpc, over farcall, untouched: one test for each kind."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.kit.ports import held_port, tcp_url
from tests.processes.compat_program import run


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_started_in_each_way_have_farcall(tmp_path: Path, method: str) -> None:
    program = """
        def work(rank, size):
            assert rpc_sync.__module__ == "farcall.compat.rpc.api"
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            if rank == 0:
                rref = rpc.remote("worker1", double, args=(torch.ones(2),))
                assert type(rref) is RRef
                say(rref.to_here().tolist(), rpc_sync("worker1", pid) != os.getpid())
            rpc.shutdown()

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[1])
            children = [context.Process(target=work, args=(rank, 2)) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            sys.exit(any(child.exitcode for child in children))
    """
    assert run(tmp_path, program, method) == ["[2.0, 2.0] True"]


def test_a_program_is_compiled_for_itself(tmp_path: Path) -> None:
    # Not with the __future__ of whoever runs it: then annotations would be text.
    program = """
        def typed(x: int):
            pass

        say(typed.__annotations__)
    """
    assert run(tmp_path, program) == ["{'x': <class 'int'>}"]


def test_a_peer_that_is_quicker_may_gather_at_once(tmp_path: Path) -> None:
    program = """
        def work(rank):
            if rank == 0:  # the leader of gathers: not done with init_rpc when the other is
                go_on = rpc.api._init_rpc_states

                def wait(agent):
                    rpc.api._init_rpc_states = go_on
                    while not rpc.api._all_gather_sequence_id_to_states:
                        os.sched_yield()
                    go_on(agent)

                rpc.api._init_rpc_states = wait
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            rpc.shutdown(timeout=100)

        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=work, args=(1,))
            child.start()
            work(0)
            child.join()
            sys.exit(child.exitcode)
    """
    assert run(tmp_path, program) == []


def test_torch_multiprocessing_spawn(tmp_path: Path) -> None:
    program = """
        import torch.multiprocessing as mp

        def work(rank, size):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            say(rpc_sync(f"worker{(rank + 1) % size}", double, args=(rank,)))
            rpc.shutdown()

        if __name__ == "__main__":
            mp.spawn(work, args=(3,), nprocs=3)
    """
    assert run(tmp_path, program) == ["0", "2", "4"]


def test_a_worker_forks_a_pool(tmp_path: Path) -> None:
    program = """
        def in_pool(x):
            return x * x

        def work(rank):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            rref = rpc.remote(f"worker{1 - rank}", double, args=(torch.ones(1),))
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(in_pool, range(8)) == [x * x for x in range(8)]
                # The connections are still this process's alone.
                assert rpc_sync(f"worker{1 - rank}", double, args=(4,)) == 8
                assert pool.map(in_pool, range(8)) == [x * x for x in range(8)]
            assert rref.to_here().item() == 2
            rpc.shutdown()

        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=work, args=(1,))
            child.start()
            work(0)
            child.join()
            say(child.exitcode)
    """
    assert run(tmp_path, program) == ["0"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_second_world_in_child_processes(tmp_path: Path, method: str) -> None:
    program = """
        def inner(rank, port):
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
            rpc.init_rpc(f"inner{rank}", rank=rank, world_size=2, rpc_backend_options=options)
            assert {info.name for info in rpc._get_current_rpc_agent().get_worker_infos()} == {"inner0", "inner1"}
            assert rpc_sync(f"inner{1 - rank}", double, args=(rank,)) == 2 * rank
            rpc.shutdown()

        if __name__ == "__main__":
            rpc.init_rpc("outer", rank=0, world_size=1)
            context = multiprocessing.get_context(sys.argv[1])
            port = sys.argv[2]
            children = [context.Process(target=inner, args=(rank, port)) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            say([child.exitcode for child in children], rpc_sync("outer", double, args=(3,)))
            rpc.shutdown()
    """
    assert run(tmp_path, program, method, str(held_port())) == ["[0, 0] 6"]


@pytest.mark.parametrize("first", ["gloo", "rpc"])
def test_gloo_beside_rpc_at_the_same_port(tmp_path: Path, first: str) -> None:
    program = """
        import torch.distributed as dist

        def work(rank, first):
            def start_gloo():
                dist.init_process_group("gloo", rank=rank, world_size=2)

            def start_rpc():
                rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)

            for start in (start_gloo, start_rpc) if first == "gloo" else (start_rpc, start_gloo):
                start()
            value = torch.tensor([float(rank + 1)])
            dist.all_reduce(value)
            assert value.item() == 3
            assert rpc_sync(f"worker{1 - rank}", double, args=(value,)).item() == 6
            rpc.shutdown()
            dist.barrier()
            dist.destroy_process_group()

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            sys.exit(any(child.exitcode for child in children))
    """
    assert run(tmp_path, program, first) == []


def test_torchrun(tmp_path: Path) -> None:
    program = """
        if __name__ == "__main__":
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            say(rpc_sync(f"worker{(rank + 1) % size}", double, args=(rank,)), sys.argv[1:])
            rpc.shutdown()
    """
    by = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(held_port()), "-m", "farcall")
    assert run(tmp_path, program, "--own", by=by) == ["0 ['--own']", "2 ['--own']"]


def test_exit_without_shutdown(tmp_path: Path) -> None:
    program = """
        def work(rank, both):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            rref = rpc.remote(f"worker{1 - rank}", double, args=(torch.ones(1),))
            assert rref.to_here().item() == 2
            both.wait()  # not at a barrier of theirs: one may end before its last answer to the other is out

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            both = context.Barrier(2)
            children = [context.Process(target=work, args=(rank, both)) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            sys.exit(any(child.exitcode for child in children))
    """
    assert run(tmp_path, program) == []


def test_a_shutdown_tells_once_of_one_that_died_in_it(tmp_path: Path) -> None:
    """It had come to the shutdown, as servers do at once, and died there."""
    program = """
        def die():
            os._exit(3)

        def work(rank, size):
            logging.getLogger("farcall").addHandler(handler := Handler())
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            if rank == 0:
                while len(next(iter(rpc.api._all_gather_sequence_id_to_states.values()), Nobody).gathered_objects) < 2:
                    time.sleep(0.01)
                try:
                    rpc_sync("worker2", die)
                except RuntimeError:
                    pass
            try:
                rpc.shutdown()
                say(f"worker{rank} left")
            except RuntimeError as error:
                say(f"worker{rank}", type(error).__name__, error)
            assert handler.tracebacks == 0

        class Nobody:
            gathered_objects = ()

        class Handler(logging.Handler):
            tracebacks = 0

            def emit(self, record):
                self.tracebacks += record.exc_info is not None

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            workers = [context.Process(target=work, args=(rank, 3)) for rank in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            say("codes", [worker.exitcode for worker in workers])
    """
    told = "shutdown: lost worker2 in _all_gather; shutdown(graceful=False) leaves without the dead"
    assert run(tmp_path, "import logging, time\n" + textwrap.dedent(program)) == [
        "codes [0, 0, 3]",
        f"worker0 PeerDead {told}",
        "worker1 left",
    ]


def test_a_death_does_not_make_a_server_leave_the_others_alone(tmp_path: Path) -> None:
    program = """
        def work(rank, size, died):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            if rank == 1:
                rpc_sync("worker0", double, args=(1,))
                os._exit(3)
            if rank == 2:
                died.wait()
                assert [rpc_sync("worker0", double, args=(number,)) for number in range(100)]
                say("worker2 is done")
            try:
                rpc.shutdown()
            except RuntimeError as error:
                say(f"worker{rank}", "lost worker1" in str(error))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            died = context.Event()
            workers = [context.Process(target=work, args=(rank, 3, died)) for rank in range(3)]
            for worker in workers:
                worker.start()
            workers[1].join()
            died.set()
            for worker in workers:
                worker.join()
            say("codes", [worker.exitcode for worker in workers])
    """
    assert run(tmp_path, program) == ["codes [0, 3, 0]", "worker0 True", "worker2 True", "worker2 is done"]


def test_a_module_with_tensors_that_are_no_leaves(tmp_path: Path) -> None:
    program = """
        from torch import nn

        class Normed(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))
                self.normed = self.weight / self.weight.norm()  # cannot be deep-copied, and is not a leaf

            def forward(self, x):
                return (x * self.normed).sum()

        def parameters(rref):
            return [RRef(parameter) for parameter in rref.local_value().parameters()]

        def work(rank):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            if rank == 0:
                import torch.distributed.autograd as dist_autograd
                from torch.distributed.optim import DistributedOptimizer

                rref = rpc.remote("worker1", Normed)
                own = RRef(Normed())
                assert not own.local_value().normed.is_leaf
                optimizer = DistributedOptimizer(torch.optim.SGD, rpc_sync("worker1", parameters, (rref,)), lr=0.1)
                with dist_autograd.context() as context_id:
                    loss = rref.rpc_sync().forward(torch.tensor([1.0, 2.0, 3.0]))
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                say([round(weight, 3) for weight in rref.to_here().weight.tolist()])
            rpc.shutdown()

        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=work, args=(1,))
            child.start()
            work(0)
            child.join()
            sys.exit(child.exitcode)
    """
    weight = [1 + 0.1 * 0.577350269 * (2 - x) for x in (1.0, 2.0, 3.0)]
    assert run(tmp_path, program) == [str([round(w, 3) for w in weight])]


def test_sharded_tensors_of_torch_refer_to_remote_shards(tmp_path: Path) -> None:
    program = """
        import torch.distributed as dist
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        def work(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            placement = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
            tensor = sharded_tensor.ones(placement, 4, 2, init_rrefs=True)
            dist.barrier()  # torch fills the shards after it has made the references
            ((other, (rref,)),) = tensor.remote_shards().items()
            assert type(rref) is RRef and rref.owner().id == other == 1 - rank
            assert rref.to_here().tensor.tolist() == [[1.0, 1.0], [1.0, 1.0]]
            rpc.shutdown()
            dist.destroy_process_group()

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=work, args=(rank,)) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            sys.exit(any(child.exitcode for child in children))
    """
    assert run(tmp_path, program) == []


def test_data_parallel_beside_rpc(tmp_path: Path) -> None:
    program = """
        import torch.distributed as dist
        import torch.distributed.autograd as dist_autograd
        from torch.distributed.nn import RemoteModule
        from torch.distributed.optim import DistributedOptimizer
        from torch.nn.parallel import DistributedDataParallel

        def train(embedding, rank):
            local = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
            with torch.no_grad():
                local.module.weight.fill_(1.0)
            parameters = [*embedding.remote_parameters(), *map(RRef, local.parameters())]
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
            with dist_autograd.context() as context_id:
                loss = local(embedding.forward(torch.tensor([rank, 2]), torch.tensor([0]))).sum()
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            return local.module.weight[0].tolist()

        def work(rank):
            if rank < 2:
                dist.init_process_group("gloo", rank=rank, world_size=2)
            options = rpc.TensorPipeRpcBackendOptions()
            options.init_method = sys.argv[1]
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=4, rpc_backend_options=options)
            if rank == 3:
                table = torch.arange(12.0).reshape(3, 4)
                embedding = RemoteModule("worker2", torch.nn.EmbeddingBag.from_pretrained, (table, False))
                futures = [rpc.rpc_async(f"worker{to}", train, args=(embedding, to)) for to in range(2)]
                say(*torch.futures.wait_all(futures))
            rpc.shutdown()

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=work, args=(rank,)) for rank in range(4)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            sys.exit(any(child.exitcode for child in children))
    """
    # The mean over both of the looked-up rows' mean, as gradient of the replicated weight: 1 - (4 + 6) / 2 ...
    weight = [1.0 - (4.0 + 6.0) / 2 - column for column in range(4)]
    assert run(tmp_path, program, tcp_url()) == [f"{weight} {weight}"]


def test_a_remote_module_is_called_as_any_module(tmp_path: Path) -> None:
    """torch.fx replaces nn.Module.__call__, global hooks hang there; at the owner it is `forward` that runs."""
    said = run(
        tmp_path,
        """
        import torch.fx
        from torch.distributed.nn import RemoteModule

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_forward_hook(lambda module, inputs, result: result * 0)

            def forward(self, x):
                return x * 0.95

        class Whole(torch.nn.Module):
            def __init__(self, far):
                super().__init__()
                self.__dict__["far"] = far  # no child: torch asks children for theirs, which a RemoteModule refuses

            def forward(self, x):
                return self.far(x) + 1

        class Tracer(torch.fx.Tracer):
            def is_leaf_module(self, module, name):
                return isinstance(module, RemoteModule)

            def path_of_module(self, module):
                return "far"

        def use(module, x):
            return module(x)

        def work(rank):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            if rank == 0:
                far, x = RemoteModule("worker1", Net), torch.ones(1)
                say("results", *(round(run(x).item(), 2) for run in (far, far.forward)))
                say("arrived", round(rpc_sync("worker1", use, (far, x)).item(), 2))
                say("traced", *(node.op for node in Tracer().trace(Whole(far)).nodes))
                torch.nn.modules.module.register_module_forward_hook(lambda m, i, r: say("seen", type(m).__name__))
                far(x)
            rpc.shutdown()

        if __name__ == "__main__":
            workers = [multiprocessing.get_context("spawn").Process(target=work, args=(rank,)) for rank in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        """,
    )
    assert said == [
        "arrived 0.95",
        "results 0.95 0.95",
        "seen RemoteModule",
        "traced placeholder call_module call_function output",
    ]
