"""A trainer and rollout workers: the workers generate with the newest weights, while some are killed and replaced.

    python examples/rollout.py

The trainer publishes its policy and pushes a version of it every few steps. Three rollout workers subscribe to it. They
generate sequences as streams, each with the newest version that has arrived, and the trainer learns from them. One
rollout worker is killed, and then the trainer. The main process, a supervisor, starts both again: the worker subscribes
and has the newest version at once; the new trainer begins with the version that the rollout workers still have, and
takes the name over. Nobody waits for anybody who is dead.

The policy is to count: each token should be the one after the token before it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import farcall

ROLLOUTS = ("rollout0", "rollout1", "rollout2")
RANKS = {"supervisor": 0, "trainer": 1, **{name: 2 + index for index, name in enumerate(ROLLOUTS)}}
TOKENS = 8
LENGTH = 12
SEQUENCES = 8
STEPS = 40
LEARNING_RATE = 2.0
PUSH_EVERY = 3
KILL_ROLLOUT_AT, KILL_TRAINER_AT = 8, 16
PATIENCE_S = 60.0
COMES_BACK = farcall.Retry(attempts=1000, backoff_s=0.05, longest_backoff_s=0.2)
"""How to call a worker that may have to be started again first; the call's timeout says how long to hope."""


def make_policy() -> nn.Module:
    """From a token to the wish for each next one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(TOKENS, 16), nn.Tanh(), nn.Linear(16, TOKENS))


# ---------------------------------------------------------------------- a rollout worker


class Generator:
    """At a rollout worker: a policy, and the versions that it may be loaded with."""

    here: Generator | None = None
    making = threading.Lock()

    def __init__(self) -> None:
        self.policy = make_policy()
        self.state: dict[str, Any] = {"policy": self.policy.state_dict(), "step": 0, "rewards": []}
        self.weights = farcall.subscribe("policy")
        self.version: Any = self.weights.wait(timeout=PATIENCE_S)
        self.weights.load_into(self.state)
        self.random = torch.Generator().manual_seed(os.getpid())

    @torch.no_grad()
    def sequence(self) -> torch.Tensor:
        if self.weights.version != self.version:  # asks nobody: what has arrived is here
            self.version = self.weights.load_into(self.state)
        tokens = [int(torch.randint(TOKENS, (), generator=self.random))]
        for _ in range(LENGTH):
            wish = self.policy(torch.tensor(tokens[-1])).softmax(0)
            tokens.append(int(torch.multinomial(wish, 1, generator=self.random)))
        return torch.tensor(tokens)


def generator() -> Generator:
    with Generator.making:
        if Generator.here is None:
            Generator.here = Generator()
        return Generator.here


def generate(count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Sequences, and the number of the version that each was made with; a stream."""
    here = generator()
    for _ in range(count):
        yield here.sequence(), here.version.number


def last_version() -> tuple[dict[str, Any], int]:
    """What this worker has been sent last, for a trainer that begins."""
    here = generator()
    return here.weights.get(), here.weights.wait().number


# ---------------------------------------------------------------------- the trainer


class Training:
    """At the trainer: the policy, and how far it has come."""

    here: Training
    stepped = threading.Condition()

    def __init__(self) -> None:
        self.policy = make_policy()
        self.state: dict[str, Any] = {"policy": self.policy.state_dict(), "step": 0, "rewards": []}
        self.missed: set[str] = set()

    def take_over(self) -> None:
        """Begin where the trainer before ended: the rollout workers have its last version."""
        for name in ROLLOUTS:
            try:
                found, number = farcall.worker(name).options(timeout=PATIENCE_S).call(last_version)
            except (farcall.errors.NetworkError, farcall.errors.UnknownWorker):
                continue
            self.policy.load_state_dict(found["policy"])
            self.state.update(step=found["step"], rewards=found["rewards"])
            print(f"trainer: begins at step {found['step']}, with version {number}", flush=True)
            return

    def collect(self) -> torch.Tensor:
        """Sequences of all rollout workers that live."""
        streams = {}
        for name in ROLLOUTS:
            try:
                streams[name] = farcall.worker(name).stream(generate, SEQUENCES)
            except farcall.errors.UnknownWorker:
                pass  # it is dead, and its successor is not there yet
        sequences: list[torch.Tensor] = []
        for name, stream in streams.items():
            numbers = []
            try:
                for tokens, number in stream:
                    sequences.append(tokens)
                    numbers.append(number)
            except farcall.errors.NetworkError as error:
                if name not in self.missed:
                    print(f"trainer: goes on without {name} ({type(error).__name__})", flush=True)
                self.missed.add(name)
            assert numbers == sorted(numbers), "a worker went back to an older version"
        return torch.stack(sequences) if sequences else torch.empty(0, LENGTH + 1, dtype=torch.int64)

    def learn(self, sequences: torch.Tensor) -> float:
        """A policy gradient: next tokens that were right are made more likely."""
        before, after = sequences[:, :-1].flatten(), sequences[:, 1:].flatten()
        rewards = (after == (before + 1) % TOKENS).float()
        surprise = nn.functional.cross_entropy(self.policy(before), after, reduction="none")
        loss = ((rewards - rewards.mean()) * surprise).mean()
        gradients = torch.autograd.grad(loss, list(self.policy.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.policy.parameters(), gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
        return float(rewards.mean())

    def run(self) -> None:
        with farcall.publish("policy", self.state) as policy:
            policy.push()
            while self.state["step"] < STEPS:
                sequences = self.collect()
                if not len(sequences):
                    time.sleep(0.05)
                    continue
                reward = self.learn(sequences)
                with self.stepped:
                    self.state.update(step=self.state["step"] + 1, rewards=[*self.state["rewards"], reward])
                    self.stepped.notify_all()
                if self.state["step"] % PUSH_EVERY == 0:
                    policy.push()


def wait_for_step(number: int) -> list[float]:
    """At the trainer: the rewards, once so many steps are done."""
    with Training.stepped:
        Training.stepped.wait_for(lambda: Training.here.state["step"] >= number, PATIENCE_S / 2)
        return list(Training.here.state["rewards"])


# ---------------------------------------------------------------------- processes

may_end = threading.Event()


def end() -> None:
    may_end.set()


def join(name: str, directory: str) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/meeting")
    farcall.init_rpc(name, rank=RANKS[name], rpc_backend_options=options)


def work(name: str, directory: str, is_successor: bool) -> None:
    torch.set_num_threads(1)  # the workers share this machine
    if name == "trainer":
        Training.here = Training()  # before anybody can call
    join(name, directory)
    if name == "trainer":
        if is_successor:
            Training.here.take_over()
        Training.here.run()
    may_end.wait()
    Generator.here = None
    farcall.shutdown()


class Supervisor:
    """Starts workers, and starts again whoever dies."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.forking = multiprocessing.get_context("forkserver")  # has torch loaded, so that workers start at once
        self.forking.set_forkserver_preload(["torch", "farcall.api"])
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self.replaced: list[str] = []

    def start(self, name: str) -> None:
        process = self.forking.Process(target=work, args=(name, self.directory, name in self.processes))
        process.start()
        self.processes[name] = process

    def on_member(self, event: farcall.MemberEvent) -> None:
        if event.kind == "dead":
            print(f"supervisor: {event.worker.name} is dead, starting it again", flush=True)
            self.replaced.append(event.worker.name)
            self.start(event.worker.name)

    def kill(self, name: str) -> None:
        os.kill(self.processes[name].pid or 0, signal.SIGKILL)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        join("supervisor", directory)
        supervisor = Supervisor(directory)
        farcall.on_member(supervisor.on_member)
        for name in ("trainer", *ROLLOUTS):
            supervisor.start(name)
        while len(farcall.members()) < len(RANKS):
            time.sleep(0.01)

        def reached(step: int) -> list[float]:
            rewards: list[float] = []
            while len(rewards) < step:
                rewards = (
                    farcall.worker("trainer").options(timeout=PATIENCE_S, retry=COMES_BACK).call(wait_for_step, step)
                )
            return rewards

        reached(KILL_ROLLOUT_AT)
        supervisor.kill("rollout1")
        reached(KILL_TRAINER_AT)
        supervisor.kill("trainer")
        rewards = reached(STEPS)
        for name in ("trainer", *ROLLOUTS):
            farcall.worker(name).options(retry=COMES_BACK).call(end)
        for process in supervisor.processes.values():
            process.join()
        farcall.shutdown()
        assert [process.exitcode for process in supervisor.processes.values()] == [0] * 4
    assert sorted(supervisor.replaced) == ["rollout1", "trainer"]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"of 100 tokens {100 * first:.0f} were right at first, {100 * last:.0f} at last")
    assert last > 0.7 > 2 * first, "nothing was learned"
    print("learned, although a rollout worker and the trainer were killed")


if __name__ == "__main__":
    main()
