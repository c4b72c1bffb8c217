"""Actors and a learner: reinforcement learning on a small environment of its own, a cart that balances a pole.

    python examples/actor_learner.py

Each actor owns carts and plays them with the policy it was last sent; the learner owns the policy, and learns from
what the actors bring. Nobody waits for everybody: the learner takes the result of the actor that it asked longest
ago, learns, and sends that actor on with the newest policy, while the other one plays. An actor's policy is thus one
update old, which a policy gradient bears. As the learner takes turns, the run is the same each time.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from typing import Any

import torch
import torch.multiprocessing
from torch import nn

import farcall

ACTORS = ("actor0", "actor1")
CARTS = 16
STEPS = 100
UPDATES = 60


class CartPoles:
    """Some carts, each with a pole on it that is to be kept upright by pushing left or right."""

    GRAVITY, FORCE, CART_KG, POLE_KG, HALF_POLE_M, STEP_S = 9.8, 10.0, 1.0, 0.1, 0.5, 0.02

    def __init__(self, count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self.fresh(count)

    def fresh(self, count: int) -> torch.Tensor:
        """Carts near the middle, poles nearly upright: position, speed, angle and angular speed."""
        return torch.rand(count, 4, generator=self.generator) * 0.1 - 0.05

    def push(self, right: torch.Tensor) -> torch.Tensor:
        """Move all carts on; which of them have failed and begin anew."""
        _, speed, angle, turning = self.state.unbind(1)
        force = torch.where(right, self.FORCE, -self.FORCE)
        mass = self.CART_KG + self.POLE_KG
        pull = (force + self.POLE_KG * self.HALF_POLE_M * turning**2 * angle.sin()) / mass
        lever = self.HALF_POLE_M * (4 / 3 - self.POLE_KG * angle.cos() ** 2 / mass)
        falling = (self.GRAVITY * angle.sin() - angle.cos() * pull) / lever
        moving = pull - self.POLE_KG * self.HALF_POLE_M * falling * angle.cos() / mass
        change = torch.stack([speed, moving, turning, falling], 1)
        self.state = self.state + self.STEP_S * change
        failed = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state = torch.where(failed[:, None], self.fresh(len(failed)), self.state)
        return failed


def make_policy() -> nn.Module:
    """From a cart's state to how much it wants to go right."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


class Actor:
    """At an actor: carts, and a copy of the policy."""

    def __init__(self, seed: int) -> None:
        self.carts = CartPoles(CARTS, seed)
        self.policy = make_policy()

    @torch.no_grad()
    def play(self, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Play on with this policy: states, pushes to the right, and failures, step by step."""
        self.policy.load_state_dict(weights)
        states, pushes, failures = [], [], []
        for _ in range(STEPS):
            states.append(self.carts.state)
            wish = self.policy(self.carts.state).squeeze(-1).sigmoid()
            pushes.append(torch.rand(CARTS, generator=self.carts.generator) < wish)
            failures.append(self.carts.push(pushes[-1]))
        return torch.stack(states), torch.stack(pushes), torch.stack(failures)


class Learner:
    """The policy, and how it becomes better."""

    def __init__(self) -> None:
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)

    def learn(self, states: torch.Tensor, pushes: torch.Tensor, failures: torch.Tensor) -> None:
        """A policy gradient: pushes after which the pole stood for long are made more likely."""
        advantage = torch.zeros(failures.shape)
        ahead = torch.zeros(CARTS)
        for step in reversed(range(STEPS)):
            ahead = torch.where(failures[step], -1.0, 0.95 * ahead)  # a failure hurts, and less the later it comes
            advantage[step] = ahead
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        wish = self.policy(states).squeeze(-1)
        surprise = nn.functional.binary_cross_entropy_with_logits(wish, pushes.float(), reduction="none")
        self.optimizer.zero_grad()
        (surprise * advantage).mean().backward()
        self.optimizer.step()


def learn() -> None:
    learner = Learner()
    actors: list[Any] = [farcall.worker(name).create(Actor, seed) for seed, name in enumerate(ACTORS)]
    playing = deque((actor, actor.start.play(learner.policy.state_dict())) for actor in actors)
    stood = []
    for update in range(UPDATES):
        actor, future = playing.popleft()
        states, pushes, failures = future.wait()
        learner.learn(states, pushes, failures)
        playing.append((actor, actor.start.play(learner.policy.state_dict())))
        stood.append(CARTS * STEPS / max(1, int(failures.sum())))
        if update % 10 == 9:
            print(f"after {update + 1} updates: a pole stands for {sum(stood[-10:]) / 10:.0f} steps", flush=True)
    for _, future in playing:
        future.wait()
    first, last = sum(stood[:10]) / 10, sum(stood[-10:]) / 10
    assert last > 3 * first, "nothing was learned"
    print(f"poles stand {last / first:.1f} times as long as at first", flush=True)


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
    torch.set_num_threads(1)  # the workers share this machine
    names = ("learner", *ACTORS)
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if rank == 0:
        learn()
    farcall.shutdown()  # the actors play in here until the learner is done


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, args=(f"file://{directory}/meeting",), nprocs=1 + len(ACTORS))


if __name__ == "__main__":
    main()
