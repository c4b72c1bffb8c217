"""Programs of the shapes in which ``torch.distributed.rpc`` is taught: same numbers over its own agent and farcall.

Each is run twice, untouched: by ``python program.py`` and by ``python -m farcall program.py``. A program is written so
that its numbers do not depend on who comes first; the last digits may, where gradients are added as they arrive.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.processes.compat_program import numbers_and_words, said_by_both
from torch import nn


def test_parameter_server(tmp_path: Path) -> None:
    # One model at the server, made by whoever asks first; trainers hold references to it and to its parameters.
    program = """
        class Served(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
                self.turn, self.changed = 0, threading.Condition()

            def forward(self, x):
                return nn.functional.log_softmax(self.layers(x.to("cpu")), dim=1).to("cpu")

            def gradients(self, context_id):
                found = dist_autograd.get_gradients(context_id)
                return {parameter.to("cpu"): gradient.to("cpu") for parameter, gradient in found.items()}

            def references(self):
                return references(self.layers)

            def wait_for_turn(self, turn):
                with self.changed:
                    self.changed.wait_for(lambda: self.turn == turn)

            def end_turn(self):
                with self.changed:
                    self.turn += 1
                    self.changed.notify_all()

            def __reduce__(self):
                raise AssertionError("the model stays where it is")

        served, making = None, threading.Lock()

        def the_server():
            global served
            with making:
                if served is None:
                    served = Served()
            return served

        class Seen(nn.Module):
            # What a trainer has of the model.
            def __init__(self):
                super().__init__()
                self.rref = remote("server", the_server)

            def forward(self, x):
                return at_owner(Served.forward, self.rref, x)

        def train(rank):
            model = Seen()
            optimizer = DistributedOptimizer(torch.optim.SGD, at_owner(Served.references, model.rref), lr=0.1)
            chance = torch.Generator().manual_seed(rank)
            for turn in range(3):
                at_owner(Served.wait_for_turn, model.rref, 2 * turn + rank - 1)
                x, y = torch.randn(8, 1, 6, 6, generator=chance), torch.arange(8) % 4
                with dist_autograd.context() as context_id:
                    loss = nn.functional.nll_loss(model(x), y)
                    dist_autograd.backward(context_id, [loss])
                    gradients = at_owner(Served.gradients, model.rref, context_id)
                    assert gradients != {} and all(p.shape == g.shape for p, g in gradients.items())
                    optimizer.step(context_id)
                say("trainer", rank, turn, loss.item(), sum(g.abs().sum().item() for g in gradients.values()))
                at_owner(Served.end_turn, model.rref)
            model.eval()
            at_owner(Served.wait_for_turn, model.rref, 6)
            with torch.no_grad():
                say("after", rank, *model(torch.ones(1, 1, 6, 6))[0].tolist())

        def work(rank, size):
            rpc.init_rpc(name="server" if rank == 0 else f"trainer_{rank}", rank=rank, world_size=size)
            if rank:
                train(rank)
            rpc.shutdown()

        if __name__ == "__main__":
            start(work, 3)
    """
    lines = said_by_both(tmp_path, program)
    assert len(lines) == 8
    first, second = (line.split()[2:] for line in lines[:2])
    assert first == second, "both trainers see the same model"


def test_updates_in_batches(tmp_path: Path) -> None:
    # The server answers all trainers of a round at once: a future that the last call of the round completes.
    program = """
        import torch.distributed as dist

        class Server:
            def __init__(self, trainers):
                torch.manual_seed(2)
                self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
                self.lock, self.updated = threading.Lock(), torch.futures.Future()
                self.trainers, self.reported = trainers, 0
                for parameter in self.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)

            def get_model(self):
                return self.model

            @staticmethod
            @rpc.functions.async_execution
            def update(rref, gradients):
                self = rref.local_value()
                with self.lock:
                    for parameter, gradient in zip(self.model.parameters(), gradients):
                        parameter.grad += gradient / self.trainers
                    self.reported += 1
                    updated = self.updated
                    if self.reported == self.trainers:
                        self.optimizer.step()
                        self.optimizer.zero_grad(set_to_none=False)
                        self.reported, self.updated = 0, torch.futures.Future()
                        updated.set_result(self.model)
                return updated

        def train(rref, seed):
            chance = torch.Generator().manual_seed(seed)
            model = rref.rpc_sync().get_model()
            losses = []
            for _ in range(4):
                x, y = torch.randn(8, 6, generator=chance), torch.ones(8, 2)
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                losses.append(loss.item())
                gradients = [parameter.grad for parameter in model.cpu().parameters()]
                model = rpc_sync(rref.owner(), Server.update, args=(rref, gradients))
            return losses, model

        def work(rank, size):
            dist.init_process_group(backend="gloo", rank=rank, world_size=size)
            options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=60)
            name = f"trainer{rank}" if rank else "server"
            rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
            if rank == 0:
                rref = rpc.RRef(Server(size - 1))
                futures = [rpc_async(f"trainer{to}", train, args=(rref, to)) for to in range(1, size)]
                for losses, model in torch.futures.wait_all(futures):
                    say("losses", *losses, "weights", *model[3].weight.flatten().tolist())
            rpc.shutdown()
            dist.destroy_process_group()

        if __name__ == "__main__":
            start(work, 4)
    """
    lines = said_by_both(tmp_path, program)
    assert len(lines) == 3
    assert len({line.partition("weights")[2] for line in lines}) == 1, "all trainers end with the same model"


@pytest.mark.parametrize("manner", ["each", "batch"])
def test_agent_and_observers(tmp_path: Path, manner: str) -> None:
    # Observers, one of them at the agent itself, run episodes; the agent chooses for each, or for all at a time.
    program = """
        import numpy

        class World:
            def __init__(self, seed):
                self.chance = numpy.random.default_rng(seed)

            def reset(self):
                self.state = self.chance.standard_normal(4).astype(numpy.float32)
                return self.state

            def step(self, action):
                self.state = (0.9 * self.state + (0.1 if action else -0.1)).astype(numpy.float32)
                return self.state, numpy.float32(1 - abs(self.state.mean()))

        class Observer:
            def __init__(self, batch):
                self.id = rpc.get_worker_info().id
                self.world = World(self.id)
                self.choose = Agent.choose_for_all if batch else Agent.choose

            def run_episode(self, agent, steps):
                state, total = self.world.reset(), 0.0
                for _ in range(steps):
                    action = rpc_sync(agent.owner(), self.choose, args=(agent, self.id, state))
                    state, reward = self.world.step(action)
                    at_owner(Agent.report, agent, self.id, reward)
                    total += float(reward)
                return total

        class Agent:
            def __init__(self, size, batch):
                self.rref = RRef(self)
                torch.manual_seed(3)
                self.policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=-1))
                self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
                infos = [rpc.get_worker_info(f"worker{rank}") for rank in range(size)]
                self.observers = [remote(info, Observer, args=(batch,)) for info in infos]
                self.chances = [torch.Generator().manual_seed(info.id) for info in infos]
                self.rewards = {info.id: [] for info in infos}
                self.logs = {info.id: [] for info in infos}
                self.lock, self.actions = threading.Lock(), torch.futures.Future()
                self.states, self.missing = torch.zeros(size, 4), size

            def choose_by(self, state, id):
                likely = self.policy(state)
                action = torch.multinomial(likely, 1, generator=self.chances[id]).item()
                self.logs[id].append(likely[action].log())
                return action

            @staticmethod
            def choose(rref, id, state):
                return rref.local_value().choose_by(torch.from_numpy(state), id)

            @staticmethod
            @rpc.functions.async_execution
            def choose_for_all(rref, id, state):
                self = rref.local_value()
                with self.lock:
                    self.states[id].copy_(torch.from_numpy(state))
                    mine = self.actions.then(lambda actions: actions.wait()[id].item())
                    self.missing -= 1
                    if self.missing == 0:
                        actions, self.actions = self.actions, torch.futures.Future()
                        self.missing = len(self.observers)
                        states = self.states.clone()  # which the next round writes over
                        actions.set_result(torch.tensor([self.choose_by(s, i) for i, s in enumerate(states)]))
                return mine

            def report(self, id, reward):
                self.rewards[id].append(reward)

            def run_episode(self, steps):
                totals = torch.futures.wait_all(
                    [observer.rpc_async().run_episode(self.rref, steps) for observer in self.observers]
                )
                loss = 0.0
                for id, rewards in self.rewards.items():
                    left = torch.tensor(numpy.array(rewards)).flip(0).cumsum(0).flip(0)
                    assert len(rewards) == len(self.logs[id]) == steps
                    loss = loss - (torch.stack(self.logs[id]) * (left - left.mean())).sum()
                    self.rewards[id], self.logs[id] = [], []
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                return loss.item(), totals

        def work(rank, size):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            if rank == 0:
                agent = Agent(size, sys.argv[1] == "batch")
                for episode in range(3):
                    loss, totals = agent.run_episode(20)
                    say("episode", episode, "loss", loss, "rewards", *totals)
                say("references", agent.rref.is_owner(), *[o.owner().id for o in agent.observers])
            rpc.shutdown()

        if __name__ == "__main__":
            start(work, 3)
    """
    lines = said_by_both(tmp_path, program, manner)
    assert len(lines) == 4
    assert lines[-1] == "references True 0 1 2"


def test_recurrent_model_on_two_workers(tmp_path: Path) -> None:
    # Spawned processes, a module of the program's own beside it, a chain of remote, local and remote layers.
    layers = """
        import torch
        from torch import nn

        class Table(nn.Module):
            def __init__(self, tokens, width, dropout):
                super().__init__()
                torch.manual_seed(4)
                self.drop, self.table = nn.Dropout(dropout), nn.Embedding(tokens, width)

            def forward(self, tokens):
                return self.drop(self.table(tokens)).cpu()

        class Decoder(nn.Module):
            def __init__(self, tokens, hidden, dropout):
                super().__init__()
                torch.manual_seed(5)
                self.drop, self.decoder = nn.Dropout(dropout), nn.Linear(hidden, tokens)

            def forward(self, x):
                return self.decoder(self.drop(x))
    """
    program = """
        import layers

        class Model(nn.Module):
            def __init__(self, server, tokens, width, hidden):
                super().__init__()
                self.table = remote(server, layers.Table, args=(tokens, width), kwargs={"dropout": 0.3})
                self.table.rpc_sync().train()  # it is there: both seed the same generator
                self.decoder = remote(server, layers.Decoder, args=(tokens, hidden, 0.3))
                self.decoder.rpc_sync().train()
                self.rnn = nn.LSTM(width, hidden, 2, dropout=0.3)

            def forward(self, tokens, hidden):
                embedded = at_owner(layers.Table.forward, self.table, tokens)
                output, hidden = self.rnn(embedded, hidden)
                return at_owner(layers.Decoder.forward, self.decoder, output), hidden

            def references(self):
                return at_owner(references, self.table) + references(self.rnn) + at_owner(references, self.decoder)

        def train():
            torch.manual_seed(6)
            model = Model("server", 7, 3, 4)
            optimizer = DistributedOptimizer(torch.optim.SGD, model.references(), lr=0.5)
            hidden = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
            criterion = nn.CrossEntropyLoss()
            for step in range(6):
                tokens, target = torch.randint(7, (5, 6)), torch.randint(6, (5, 7))
                with dist_autograd.context() as context_id:
                    hidden[0].detach_()
                    hidden[1].detach_()
                    output, hidden = model(tokens, hidden)
                    loss = criterion(output, target)
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                say("step", step, loss.item())
            say("weights", *model.decoder.to_here().decoder.weight.flatten().tolist())

        def work(rank, size):
            rpc.init_rpc("trainer" if rank == 1 else "server", rank=rank, world_size=size)
            if rank == 1:
                train()
            rpc.shutdown()

        if __name__ == "__main__":
            say("over", rpc.__name__)
            mp.spawn(work, args=(2,), nprocs=2, join=True)
    """
    assert len(said_by_both(tmp_path, program, layers=layers)) == 7


def pipeline_in_one_process(width: int) -> list[str]:
    """What the pipeline below must say."""

    def shard(seed: int, *sizes: int) -> nn.Module:
        torch.manual_seed(seed)
        pairs = itertools.pairwise(sizes)
        return nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh())])

    with torch.random.fork_rng():
        model = nn.Sequential(shard(0, 8, 16, 16), shard(1, 16, 16, 4))
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        lines = []
        for batch in range(3):
            xs, ys = torch.randn(32, 8), torch.randn(32, 4)
            outputs = torch.cat([model(x) for x in xs.split(width)])
            loss = nn.functional.mse_loss(outputs, ys)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lines.append(" ".join(map(str, ("width", width, batch, loss.item(), *outputs[0].tolist()))))
    return lines


def test_pipeline_of_shards(tmp_path: Path) -> None:
    # Micro-batches go from shard to shard as references to results that may not be there yet. torch's agent sometimes
    # loses gradients of micro-batches that pass a shard at the same time.
    program = """
        class Shard(nn.Module):
            def __init__(self, seed, *sizes, device):
                super().__init__()
                torch.manual_seed(seed)
                self.lock, self.device = threading.Lock(), device
                pairs = zip(sizes, sizes[1:])
                self.layers = nn.Sequential(*[
                    layer for a, b in pairs for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh())
                ]).to(device)

            def forward(self, rref):
                x = rref.to_here().to(self.device)
                with self.lock:
                    y = self.layers(x)
                return y.cpu()

            def references(self):
                return references(self)

        class Pipeline(nn.Module):
            def __init__(self, width, workers):
                super().__init__()
                self.width = width
                sizes = (8, 16, 16), (16, 16, 4)
                self.shards = [
                    remote(worker, Shard, args=(seed, *size), kwargs={"device": "cpu"})
                    for seed, (worker, size) in enumerate(zip(workers, sizes))
                ]

            def forward(self, xs):
                first, second = self.shards
                futures = []
                for x in xs.split(self.width):
                    y = first.remote().forward(RRef(x))
                    futures.append(second.rpc_async().forward(y))
                return torch.cat(torch.futures.wait_all(futures))

            def references(self):
                return [rref for shard in self.shards for rref in shard.remote().references().to_here()]

        def train(width):
            torch.manual_seed(7)
            model = Pipeline(width, ["worker1", "worker2"])
            optimizer = DistributedOptimizer(torch.optim.SGD, model.references(), lr=0.05)
            for batch in range(3):
                xs, ys = torch.randn(32, 8), torch.randn(32, 4)
                with dist_autograd.context() as context_id:
                    outputs = model(xs)
                    loss = nn.functional.mse_loss(outputs, ys)
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                say("width", width, batch, loss.item(), *outputs[0].tolist())

        def work(rank, size):
            options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=64, rpc_timeout=300)
            name = f"worker{rank}" if rank else "master"
            rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
            if rank == 0:
                for width in (2, 8):
                    train(width)
            rpc.shutdown()

        if __name__ == "__main__":
            start(work, 3)
    """
    truth = [*pipeline_in_one_process(2), *pipeline_in_one_process(8)]
    assert len(said_by_both(tmp_path, program, truth=truth)) == 6


def test_replicated_layers_and_a_remote_table(tmp_path: Path) -> None:
    # Data parallel trainers over gloo, one table at the server; each trainer has its own rows of it.
    program = """
        import torch.distributed as dist
        from torch.distributed.nn import RemoteModule
        from torch.nn.parallel import DistributedDataParallel

        class Hybrid(nn.Module):
            def __init__(self, table):
                super().__init__()
                self.table = table
                torch.manual_seed(8)
                self.dense = DistributedDataParallel(nn.Linear(6, 3))

            def forward(self, indices, offsets):
                return self.dense(self.table.forward(indices, offsets))

        def train(table, rank):
            model = Hybrid(table)
            parameters = model.table.remote_parameters()
            parameters += references(model.dense)
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.2)
            criterion = nn.CrossEntropyLoss()
            chance = torch.Generator().manual_seed(rank)
            losses = []
            for _ in range(5):
                indices = torch.randint(10, (12,), generator=chance) + 10 * rank
                offsets, target = torch.arange(0, 12, 3), torch.randint(3, (4,), generator=chance)
                with dist_autograd.context() as context_id:
                    loss = criterion(model(indices, offsets), target)
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                losses.append(loss.item())
            return losses, model.dense.module.weight.flatten().tolist()

        def work(rank, size):
            options = rpc.TensorPipeRpcBackendOptions()
            options.init_method = f"tcp://localhost:{os.environ['OTHER_PORT']}"
            if rank < 2:
                dist.init_process_group("gloo", rank=rank, world_size=2)
            name = {2: "master", 3: "server"}.get(rank, f"trainer{rank}")
            if rank == 3:
                torch.manual_seed(9)
            rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
            if rank == 2:
                table = RemoteModule("server", nn.EmbeddingBag, args=(20, 6), kwargs={"mode": "sum"})
                futures = [rpc_async(f"trainer{to}", train, args=(table, to)) for to in range(2)]
                for losses, weights in [future.wait() for future in futures]:
                    say("losses", *losses, "weights", *weights)
                say("table", *table.get_module_rref().to_here().weight[::7].flatten().tolist())
            rpc.shutdown()

        if __name__ == "__main__":
            start(work, 4)
    """
    first, second, _ = said_by_both(tmp_path, program)
    assert numbers_and_words(first.partition("weights")[2]) == numbers_and_words(second.partition("weights")[2])
