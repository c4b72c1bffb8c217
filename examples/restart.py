"""A parameter server that is killed in the middle of training, started again, and goes on where its checkpoint was.

    python examples/restart.py

The main process is the supervisor: a member of the group, which hears of deaths (`farcall.on_member`) and starts
whoever died again, under the same name. The server keeps a checkpoint; the trainers catch the failure, wait until the
name is back, and go on from the step that the server is at. The result is the same, bit for bit, as that of one process
that nobody disturbed: the program trains both and compares them.

Members come and go here, so the group has no fixed size: `init_rpc` is given no ``world_size``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time

import torch
from torch import nn

import farcall

RANKS = {"supervisor": 0, "server": 1, "trainer0": 2, "trainer1": 3}
TRAINERS = ("trainer0", "trainer1")
STEPS = 40
CHECKPOINT_EVERY = 10
KILL_AT = 25
COMES_BACK = farcall.Retry(attempts=1000, backoff_s=0.05, longest_backoff_s=0.2)
"""How to call a worker that may have to be started again first; the call's timeout says how long to hope."""


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a step: points, and on which side of a curve they are."""
    points = torch.randn(32, 2, generator=torch.Generator().manual_seed(number % 7))
    return points, (points[:, 1] > torch.sin(2 * points[:, 0])).float()


class Training:
    """The model, its optimizer and how far they have come: what must survive."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.losses: list[float] = []

    def save(self, path: str) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)  # whoever dies in here leaves the old one or the new one, and nothing between

    def load(self, path: str) -> None:
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]


class Server:
    """At the server; trainers have references to it."""

    here: Server

    def __init__(self, path: str) -> None:
        self.path = path
        self.training = Training()
        self.changed = threading.Condition()
        self.may_end = threading.Event()
        if os.path.exists(path):
            self.training.load(path)

    def wait_for_step(self, number: int) -> None:
        """Return when so many steps are done."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.training.losses) >= number)

    def wait_for_turn(self, trainer: int) -> int | None:
        """The number of the next step, when it is this trainer's turn; None: there is no more."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.training.losses) % len(TRAINERS) == trainer or self.done)
            return None if self.done else len(self.training.losses)

    @property
    def done(self) -> bool:
        return len(self.training.losses) >= STEPS

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.training.model(points)

    def step(self, number: int, context_id: int, loss: float) -> None:
        """Apply the gradients of a backward pass."""
        with self.changed:
            if number != len(self.training.losses):
                return  # from before a restart
            gradients = farcall.autograd.get_gradients(context_id)
            for parameter in self.training.model.parameters():
                parameter.grad = gradients[parameter]
            self.training.optimizer.step()
            self.training.losses.append(loss)
            if len(self.training.losses) % CHECKPOINT_EVERY == 0:
                self.training.save(self.path)
            self.changed.notify_all()

    def end(self) -> list[float]:
        """All is done: the losses of all steps."""
        self.may_end.set()
        return self.training.losses


def find_server() -> farcall.RRef[Server]:
    return farcall.RRef(Server.here)


def train(trainer: int) -> None:
    server = farcall.worker("server").options(retry=COMES_BACK).call(find_server)
    while True:
        try:
            number = server.call.wait_for_turn(trainer)
            if number is None:
                return
            points, wanted = batch(number)
            with farcall.autograd.context() as context_id:
                loss = nn.functional.binary_cross_entropy_with_logits(server.call.forward(points), wanted)
                farcall.autograd.backward(context_id, [loss])
                server.call.step(number, context_id, loss.item())
        except farcall.errors.NetworkError as error:
            # The server died, and with it what the old reference stood for: find the new one.
            print(f"trainer{trainer}: {type(error).__name__}; waiting for the server", flush=True)
            server = farcall.worker("server").options(retry=COMES_BACK).call(find_server)


def join(name: str, directory: str) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/meeting")
    farcall.init_rpc(name, rank=RANKS[name], rpc_backend_options=options)


def work(name: str, directory: str) -> None:
    if name == "server":
        Server.here = Server(f"{directory}/checkpoint")  # before anybody can call
        print(f"server: begins at step {len(Server.here.training.losses)}", flush=True)
    join(name, directory)
    if name == "server":
        Server.here.may_end.wait()
    else:
        train(TRAINERS.index(name))
    farcall.shutdown()


class Supervisor:
    """Starts workers, and starts again whoever dies."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.forking = multiprocessing.get_context("forkserver")  # has torch loaded, so that workers start at once
        self.forking.set_forkserver_preload(["torch", "farcall.api"])
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self.restarts = 0

    def start(self, name: str) -> None:
        process = self.forking.Process(target=work, args=(name, self.directory))
        process.start()
        self.processes[name] = process

    def on_member(self, event: farcall.MemberEvent) -> None:
        if event.kind == "dead":
            print(f"supervisor: {event.worker.name} is dead, starting it again", flush=True)
            self.restarts += 1
            self.start(event.worker.name)


def train_alone() -> list[float]:
    """The twin, in one process."""
    training = Training()
    for number in range(STEPS):
        points, wanted = batch(number)
        training.optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(training.model(points), wanted)
        loss.backward()
        training.optimizer.step()
        training.losses.append(loss.item())
    return training.losses


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        join("supervisor", directory)
        supervisor = Supervisor(directory)
        farcall.on_member(supervisor.on_member)
        supervisor.start("server")
        while all(worker.name != "server" for worker in farcall.members()):
            time.sleep(0.01)
        for name in TRAINERS:
            supervisor.start(name)
        server = farcall.worker("server").call(find_server)
        server.call.wait_for_step(KILL_AT)
        os.kill(supervisor.processes["server"].pid or 0, signal.SIGKILL)
        server = farcall.worker("server").options(retry=COMES_BACK).call(find_server)
        server.call.wait_for_step(STEPS)
        for name in TRAINERS:
            supervisor.processes[name].join()
        losses = server.call.end()
        supervisor.processes["server"].join()
        farcall.shutdown()
        assert [process.exitcode for process in supervisor.processes.values()] == [0, 0, 0]
    assert supervisor.restarts == 1
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last, after {supervisor.restarts} restart")
    assert losses == train_alone(), "not the losses of one process"
    print("the same, bit for bit, as in one process that nobody disturbed")


if __name__ == "__main__":
    main()
