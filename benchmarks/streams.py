"""Streams beside gRPC and Ray, awaited calls beside `rpc_async`, batches beside batching by hand, with verdicts.

    python benchmarks/streams.py [--grpc VENV/bin/python] [--ray VENV/bin/python]

Processes of one machine; each system runs in the interpreter named for it, one at a time, and those not named are left
out. farcall runs in this one. All systems send the same items, from a generator to a loop that takes them. Two ways
that are compared take turns within one process; a verdict is about the median ratio of all rounds.

    figure                  what is timed
    calls/s                 one blocking call per item; by a handle, and by `rpc_sync`
    ints/s                  items of a stream, a whole number each
    1 MiB tensors/s         items of a stream; and results of calls with 8 in flight
    p99 of calls, ms        10,000 calls to 4 workers, from the call until its result is here: by tasks of one event
                            loop, and by one thread that waits for the oldest; all at once, and 64 in flight
    actions/s               16 callers ask for actions, as PyTorch's batch reinforcement learning example does: by a
                            list of futures under a lock (40 lines), and by `farcall.batched` (10 lines)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import torch

TURNS = 5
BLOCKING = 3000
INTS = 100_000
TENSORS = 500
CALLS = 10_000
CALLERS = 16
ACTIONS = 300
IN_FLIGHT = 8
SIZE = 64
_TENSOR = torch.ones(1 << 18)
Figures = dict[str, float]


def noop(number: int) -> int:
    return number


def count(until: int) -> Iterator[int]:
    yield from range(until)


def tensors(until: int) -> Iterator[torch.Tensor]:
    for _ in range(until):
        yield _TENSOR


def one_tensor() -> torch.Tensor:
    return _TENSOR


def rate(amount: int, work: Callable[[], Any]) -> float:
    """How many of ``amount`` in a second; once before, to warm up."""
    work()
    return _rate(amount, work)


def _rate(amount: int, work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return amount / (time.perf_counter() - began)


def in_turns(measures: dict[str, Callable[[], float]]) -> Figures:
    """The median of each measure; they take turns, the first of which warms up."""
    turns = [{name: measure() for name, measure in measures.items()} for _ in range(TURNS + 1)]
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in measures}


# ---------------------------------------------------------------------- farcall


def measure_farcall() -> Figures:
    import farcall

    url = f"tcp://127.0.0.1:{_free_port()}"
    callees = [subprocess.Popen([sys.executable, __file__, "--callee", f"{rank} {url}"]) for rank in range(1, 5)]
    options = farcall.RpcBackendOptions(init_method=url)
    farcall.init_rpc("caller", rank=0, world_size=5, rpc_backend_options=options)
    workers = [farcall.worker(f"callee{rank}") for rank in range(1, 5)]
    ps = workers[0]

    def in_flight() -> None:
        waiting: deque[Any] = deque()
        for _ in range(TENSORS):
            waiting.append(ps.start(one_tensor))
            if len(waiting) == IN_FLIGHT:
                waiting.popleft().result()
        for future in waiting:
            future.result()

    def calls() -> None:
        for number in range(BLOCKING):
            ps.call(noop, number)

    def rpc_sync() -> None:
        for number in range(BLOCKING):
            farcall.rpc_sync("callee1", noop, args=(number,))

    found = in_turns(
        {
            "calls/s": lambda: _rate(BLOCKING, calls),
            "calls/s, rpc_sync": lambda: _rate(BLOCKING, rpc_sync),
        }
    )
    # By itself: the calls that come right after such a stream are a tenth slower.
    found |= in_turns({"ints/s": lambda: _rate(INTS, lambda: sum(1 for _ in ps.stream(count, INTS)))})
    found |= in_turns(
        {
            "1 MiB tensors/s": lambda: _rate(TENSORS, lambda: sum(1 for _ in ps.stream(tensors, TENSORS))),
            "1 MiB tensors/s, calls, 8 in flight": lambda: _rate(TENSORS, in_flight),
        }
    )
    for most in (CALLS, 64):
        found |= in_turns(
            {
                f"p99 of awaited calls, {most:,} in flight, ms": lambda: 1e3 * asyncio.run(_awaited(workers, most)),  # noqa: B023
                f"p99 of rpc_async, {most:,} in flight, ms": lambda: 1e3 * _by_rpc_async(workers, most),  # noqa: B023
            }
        )
    policies = {"actions/s, batched": ps.create(Batched), "actions/s, by hand": ps.create(ByHand)}
    found |= in_turns({name: functools.partial(_actions, policy) for name, policy in policies.items()})
    policies.clear()
    farcall.shutdown()
    for callee in callees:
        callee.wait(60)
    return found


async def _awaited(workers: list[Any], in_flight: int) -> float:
    """From the call until its result is here, by tasks of one event loop."""
    took: list[float] = []

    async def caller(numbers: Iterator[int]) -> None:
        for number in numbers:
            began = time.perf_counter()
            await workers[number % len(workers)].start(noop, number)
            took.append(time.perf_counter() - began)

    numbers = iter(range(CALLS))
    await asyncio.gather(*[caller(numbers) for _ in range(in_flight)])
    return sorted(took)[CALLS * 99 // 100]


def _by_rpc_async(workers: list[Any], in_flight: int) -> float:
    """The same by one thread that waits for the oldest one."""
    took: list[float] = []
    waiting: deque[tuple[float, Any]] = deque()
    for number in range(CALLS + in_flight):
        if number >= in_flight:
            began, future = waiting.popleft()
            future.result()
            took.append(time.perf_counter() - began)
        if number < CALLS:
            waiting.append((time.perf_counter(), workers[number % len(workers)].start(noop, number)))
    return sorted(took)[CALLS * 99 // 100]


# The policy of the reinforcement learning example, twice: from the observation of one caller to its action.


def _policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, 2))


def _choose(policy: torch.nn.Module, observations: list[torch.Tensor]) -> list[int]:
    with torch.no_grad():
        return policy(torch.stack(observations)).argmax(1).tolist()  # type: ignore[no-any-return]


class ByHand:
    """A future for each caller, all under one lock, completed when the last caller of a round has come."""

    def __init__(self) -> None:
        self._policy = _policy()
        self._lock = threading.Lock()
        self._waiting: list[tuple[torch.Tensor, torch.futures.Future[int]]] = []

    def act(self, observation: torch.Tensor) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        with self._lock:
            self._waiting.append((observation, future))
            if len(self._waiting) < CALLERS:
                return future
            batch, self._waiting = self._waiting, []
        for (_, waiting), action in zip(batch, _choose(self._policy, [one for one, _ in batch]), strict=True):
            waiting.set_result(action)
        return future


class Batched:
    def __init__(self) -> None:
        self._policy = _policy()


def _decorate() -> None:
    import farcall

    ByHand.act = farcall.functions.async_execution(ByHand.act)  # type: ignore[assignment, method-assign]

    def act(self: Batched, observations: list[torch.Tensor]) -> list[int]:
        return _choose(self._policy, observations)

    Batched.act = farcall.batched(max_size=CALLERS, within_s=0.01)(act)  # type: ignore[attr-defined]


def _actions(policy: Any) -> float:
    def caller() -> None:
        observation = torch.rand(SIZE)
        for _ in range(ACTIONS):
            policy.call.act(observation)

    def all_callers() -> None:
        threads = [threading.Thread(target=caller) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return _rate(CALLERS * ACTIONS, all_callers)


def serve_farcall(rank: int, url: str) -> None:
    import farcall

    options = farcall.RpcBackendOptions(init_method=url)
    farcall.init_rpc(f"callee{rank}", rank=rank, world_size=5, rpc_backend_options=options)
    farcall.shutdown()


# ---------------------------------------------------------------------- gRPC


def measure_grpc() -> Figures:
    """grpc.aio with messages of bytes: a number as text, a tensor as its memory. No protobuf, which would cost more."""
    import grpc

    address = f"127.0.0.1:{_free_port()}"
    server = subprocess.Popen([sys.executable, __file__, "--grpc-server", address])

    async def program() -> Figures:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=unlimited) as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
            call = channel.unary_unary("/s/noop")
            stream = {name: channel.unary_stream(f"/s/{name}") for name in ("count", "tensors")}

            async def timed(amount: int, work: Callable[[], Any]) -> float:
                await work()
                began = time.perf_counter()
                await work()
                return amount / (time.perf_counter() - began)

            async def calls() -> None:
                for number in range(2000):
                    int(await call(b"%d" % number))

            async def ints() -> None:
                async for item in stream["count"](b"%d" % INTS):
                    int(item)

            async def large() -> None:
                async for item in stream["tensors"](b"%d" % TENSORS):
                    torch.frombuffer(bytearray(item), dtype=torch.float32)

            return {
                "calls/s": await timed(2000, calls),
                "ints/s": await timed(INTS, ints),
                "1 MiB tensors/s": await timed(TENSORS, large),
            }

    try:
        return asyncio.run(program())
    finally:
        server.kill()
        server.wait(30)


def serve_grpc(address: str) -> None:
    import grpc

    async def answer(request: bytes, _: Any) -> bytes:
        return request

    async def ints(request: bytes, _: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    async def large(request: bytes, _: Any) -> AsyncIterator[bytes]:
        for _index in range(int(request)):
            yield _TENSOR.numpy().tobytes()

    async def serve() -> None:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(options=unlimited)
        handlers = {
            "noop": grpc.unary_unary_rpc_method_handler(answer),
            "count": grpc.unary_stream_rpc_method_handler(ints),
            "tensors": grpc.unary_stream_rpc_method_handler(large),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


# ---------------------------------------------------------------------- Ray


def measure_ray() -> Figures:
    """An actor with streaming generators (num_returns="streaming")."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    class Callee:
        def noop(self, number: int) -> int:
            return number

        def count(self, until: int) -> Iterator[int]:
            for number in range(until):  # noqa: UP028 (Ray sends to what it iterates over, and a range takes nothing)
                yield number

        def tensors(self, until: int) -> Iterator[torch.Tensor]:
            for _ in range(until):
                yield torch.ones(1 << 18)

    actor = ray.remote(num_cpus=1)(Callee).remote()
    few = 3000  # its items take a millisecond each

    def items(name: str, amount: int) -> None:
        for reference in getattr(actor, name).options(num_returns="streaming").remote(amount):
            ray.get(reference)

    found = {
        "calls/s": rate(1000, lambda: [ray.get(actor.noop.remote(number)) for number in range(1000)]),
        "ints/s": rate(few, lambda: items("count", few)),
        "1 MiB tensors/s": rate(TENSORS, lambda: items("tensors", TENSORS)),
    }
    ray.shutdown()
    return found


# ---------------------------------------------------------------------- all of them


MEASURE: dict[str, Callable[[], Figures]] = {"farcall": measure_farcall, "grpc": measure_grpc, "ray": measure_ray}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpc", metavar="PYTHON", help="an interpreter with grpcio and torch")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter with ray and torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the figures of all rounds, as JSON")
    parser.add_argument("--only", choices=sorted(MEASURE), help=argparse.SUPPRESS)
    parser.add_argument("--callee", help=argparse.SUPPRESS)
    parser.add_argument("--grpc-server", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    _decorate_if_there()
    if asked.callee:
        rank, url = asked.callee.split()
        serve_farcall(int(rank), url)
    elif asked.grpc_server:
        serve_grpc(asked.grpc_server)
    elif asked.only:
        print(json.dumps(MEASURE[asked.only]()))
    else:
        pythons = {"farcall": sys.executable, "grpc": asked.grpc, "ray": asked.ray}
        rounds: dict[str, list[Figures]] = {name: [] for name, python in pythons.items() if python}
        for _ in range(asked.rounds):
            for name in rounds:
                done = subprocess.run(
                    [pythons[name], __file__, "--only", name],
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=900,
                    check=True,
                )
                rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
        _show(rounds)
        if asked.out is not None:
            asked.out.write_text(json.dumps(rounds, indent=1) + "\n")


def _decorate_if_there() -> None:
    try:
        _decorate()
    except ImportError:
        pass  # an environment for one of the others


def _show(rounds: dict[str, list[Figures]]) -> None:
    ours = rounds["farcall"]
    for figure in ours[0]:
        cells = []
        for name, found in rounds.items():
            if figure in found[0]:
                cells.append(f"{name} {statistics.median(one[figure] for one in found):,.1f}")
        print(f"{figure:46} " + "   ".join(cells))
    print(f"\n{'promise':54} {'target':>8} {'measured':>9}   verdict")

    def promise(name: str, ratios: list[float], target: float, at_most: bool = False) -> None:
        found = statistics.median(ratios)
        holds = found <= target if at_most else found >= target
        wanted = f"{'<=' if at_most else '>='} {target:g}"
        print(f"{name:54} {wanted:>8} {found:9.2f}   {'holds' if holds else 'MISSED'}")

    def against(other: str) -> list[float]:
        return [one["ints/s"] / theirs["ints/s"] for one, theirs in zip(ours, rounds[other], strict=True)]

    def between(figure: str, other: str) -> list[float]:
        return [one[figure] / one[other] for one in ours]

    promise("call by a handle / rpc_sync", between("calls/s", "calls/s, rpc_sync"), 0.97)
    promise("ints of a stream / one call for each", between("ints/s", "calls/s"), 5)
    for other in ("grpc", "ray"):
        if other in rounds:
            promise(f"ints of a stream / of {other}'s stream", against(other), 3)
    tensors_by = [f"1 MiB tensors/s{way}" for way in ("", ", calls, 8 in flight")]
    promise("1 MiB tensors of a stream / of calls, 8 in flight", between(*tensors_by), 0.9)
    for most in (f"{CALLS:,}", "64"):
        p99s = [f"p99 of {how}, {most} in flight, ms" for how in ("awaited calls", "rpc_async")]
        promise(f"p99 of awaited calls / of rpc_async, {most} in flight", between(*p99s), 2, at_most=True)
    promise("actions, batched / by hand", between("actions/s, batched", "actions/s, by hand"), 1)


if __name__ == "__main__":
    main()
