"""New weights from one process to three: farcall, a broadcast of each tensor, the state dict in a call, and the floor.

    python benchmarks/weights.py                                  # 256 MiB in 200 tensors, a quarter of an hour
    python benchmarks/weights.py --kills 0                        # without tests of faults, two minutes
    python benchmarks/weights.py --mib 16 --rounds 3 --kills 0 --out -      # a glance

One publisher and three subscribers, all on this host. A round begins when the publisher begins to push, and ends when
the last subscriber has the values in its own tensors; all read one clock (CLOCK_MONOTONIC). The contenders take turns,
round by round, in the same four processes, so that whatever else the machine does meets all of them.

    farcall     push(), then wait() and load_into() at each subscriber
    gloo        torch.distributed.broadcast of each tensor, in place
    calls       rpc_sync of the state dict to each subscriber, which loads it: one after the other, and all at once
    floor       one memcpy per tensor into shared memory, then one out of it at each subscriber, all three at once
    get         push() returns until get() has, on the main thread of each subscriber, which does nothing else: no copy
    step        a matrix product at the publisher: alone, while the subscribers load again and again, and while they
                copy the same bytes by memcpy alone, so that what farcall adds is seen

The floor is what any way through memory must do. Best and median of all rounds are told; ratios are of medians.
`weights_table.py` prints it all, with targets, beside what tests of faults record.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from weights_table import report, run_faults

import farcall

SUBSCRIBERS = 3
WAIT_S = 120.0
GETS = 30
WARM_ROUNDS = 4
"""Until the pages of all blocks have been touched."""
RESULTS = Path(__file__).parent / "results" / "weights.json"
STEP_S = 3.0

_state: dict[str, Any] = {}


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def tensors(mib: int, count: int) -> dict[str, torch.Tensor]:
    """A model, in so many tensors of the same size."""
    numel = (mib << 20) // count // 4
    return {f"layers.{index}.weight": torch.zeros(numel) for index in range(count)}


def check(values: dict[str, torch.Tensor], stamp: float) -> None:
    for name, tensor in values.items():
        assert tensor[0] == stamp, f"{name} is not of this round"
        assert tensor[-1] == stamp, f"{name} is not of this round"


# ------------------------------------------------------------------ at the subscribers: called by the publisher


def load_farcall(newer_than: Any, stamp: float) -> float:
    subscription = _state["subscription"]
    subscription.wait(newer_than=newer_than, timeout=WAIT_S)
    subscription.load_into(_state["values"])
    ended = now()
    check(_state["values"], stamp)
    return ended


def get_each(version: Any, rounds: int) -> dict[int, float]:
    """Get so many versions, one after the other; when each was there, by its number."""
    subscription, ended = _state["subscription"], {}
    while len(ended) < rounds:
        version = subscription.wait(newer_than=version, timeout=WAIT_S)
        got = subscription.get()
        ended[version.number] = now()
        assert len({float(tensor[0]) for tensor in got.values()}) == 1, f"{version} is torn"
        del got
    return ended


def load_gloo(stamp: float) -> float:
    for tensor in _state["values"].values():
        dist.broadcast(tensor, 0)
    ended = now()
    check(_state["values"], stamp)
    return ended


def load_call(given: dict[str, torch.Tensor]) -> float:
    for name, tensor in _state["values"].items():
        tensor.copy_(given[name])
    ended = now()
    del given
    return ended


def load_floor(stamp: float) -> float:
    """The shared memory has been filled: copy out of it."""
    copy_floor()
    ended = now()
    check(_state["values"], stamp)
    return ended


def copy_floor() -> None:
    shared = _state["shared"]
    for name, tensor in _state["values"].items():
        ctypes.memmove(tensor.data_ptr(), shared[name].data_ptr(), tensor.nbytes)


def keep_loading(until: float) -> int:
    loads = 0
    while now() < until:
        _state["subscription"].load_into(_state["values"])
        loads += 1
    return loads


def keep_copying(until: float) -> int:
    copies = 0
    while now() < until:
        copy_floor()
        copies += 1
    return copies


# ------------------------------------------------------------------ at the publisher


class Rounds:
    """The contenders, each a function that runs one round and returns the seconds it took."""

    def __init__(self, values: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> None:
        self._values = values
        self._shared = shared
        self._stamp = 0.0
        self._publication = farcall.publish("bench", values)
        self._version = self._publication.push()
        self._others = [f"w{rank}" for rank in range(1, SUBSCRIBERS + 1)]
        for other in self._others:
            farcall.rpc_sync(other, load_farcall, args=(None, 0.0), timeout=WAIT_S)

    def _next(self) -> float:
        self._stamp += 1.0
        for tensor in self._values.values():
            tensor.fill_(self._stamp)
        return self._stamp

    def _ask(self, function: Callable[..., float], *args: Any) -> list[Any]:
        """Have all subscribers begin, and wait until each has: what the round measures starts afterwards."""
        return [farcall.rpc_async(other, function, args=args, timeout=WAIT_S) for other in self._others]

    def farcall(self) -> float:
        stamp = self._next()
        ended = self._ask(load_farcall, self._version, stamp)
        time.sleep(0.02)  # all of them wait by now
        begun = now()
        self._version = self._publication.push()
        return max(future.wait() for future in ended) - begun

    def gets(self, rounds: int) -> dict[str, list[float]]:
        """What `get_each` takes at the subscribers after each push; and at the last of them."""
        farcall.all_gather(self._version, timeout=WAIT_S)
        pushed: dict[int, float] = {}
        for _ in range(rounds):
            self._next()
            time.sleep(0.02)  # all of them wait by now
            self._version = self._publication.push()
            pushed[self._version.number] = now()
            while any(version != self._version for version in self._publication.subscribers.values()):
                time.sleep(1e-3)
        ended = farcall.all_gather(None, timeout=WAIT_S)
        took = [[ended[other][number] - begun for other in self._others] for number, begun in pushed.items()]
        return {"get": [max(one) for one in took], "get, each": [seconds for one in took for seconds in one]}

    def push(self) -> float:
        self._next()
        begun = now()
        self._version = self._publication.push()
        return now() - begun

    def gloo(self) -> float:
        stamp = self._next()
        ended = self._ask(load_gloo, stamp)
        time.sleep(0.02)
        begun = now()
        for tensor in self._values.values():
            dist.broadcast(tensor, 0)
        return max(future.wait() for future in ended) - begun

    def calls_in_turn(self) -> float:
        self._next()
        begun = now()
        return max(farcall.rpc_sync(o, load_call, args=(self._values,), timeout=WAIT_S) for o in self._others) - begun

    def calls_at_once(self) -> float:
        self._next()
        begun = now()
        return max(future.wait() for future in self._ask(load_call, self._values)) - begun

    def floor(self) -> float:
        stamp = self._next()
        begun = now()
        for name, tensor in self._values.items():
            ctypes.memmove(self._shared[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return max(future.wait() for future in self._ask(load_floor, stamp)) - begun

    def steps(self) -> dict[str, float]:
        """The median of a step alone, and while all subscribers load or copy; and how often they did per second."""
        x = torch.randn(512, 512)
        found = {"step_alone_s": _step_s(x, now() + STEP_S)}
        for what, keep_on in (("loads", keep_loading), ("copies", keep_copying)):
            until = now() + STEP_S
            counts = self._ask(keep_on, until)
            found[f"step_beside_{what}_s"] = _step_s(x, until)
            found[f"{what}_per_s"] = sum(future.wait() for future in counts) / STEP_S
        return found


def _step_s(x: torch.Tensor, until: float) -> float:
    took = []
    while now() < until:
        begun = time.perf_counter()
        torch.mm(x, x)
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def worker(rank: int, chosen: argparse.Namespace, folder: str, shared: dict[str, torch.Tensor], out: Any) -> None:
    torch.set_num_threads(1)
    values = tensors(chosen.mib, chosen.tensors)
    options = farcall.RpcBackendOptions(init_method=f"file://{folder}/farcall", rpc_timeout=WAIT_S)
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=SUBSCRIBERS + 1, rpc_backend_options=options)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/gloo",
        rank=rank,
        world_size=SUBSCRIBERS + 1,
        timeout=timedelta(seconds=WAIT_S),
    )
    _state["values"], _state["shared"] = values, shared
    if rank:
        _state["subscription"] = farcall.subscribe("bench")
        farcall.barrier()
        newest = farcall.all_gather(None, timeout=None)["w0"]
        farcall.all_gather(get_each(newest, GETS))
    else:
        farcall.barrier()
        out.put(measure(Rounds(values, shared), chosen))
    farcall.barrier(timeout=None)
    _state.clear()
    dist.destroy_process_group()
    farcall.shutdown()


def measure(rounds: Rounds, chosen: argparse.Namespace) -> dict[str, Any]:
    """All contenders in turns."""
    contenders: dict[str, Callable[[], float]] = {
        "floor": rounds.floor,
        "farcall": rounds.farcall,
        "gloo": rounds.gloo,
        "calls in turn": rounds.calls_in_turn,
        "calls at once": rounds.calls_at_once,
        "push alone": rounds.push,
    }
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(WARM_ROUNDS + chosen.rounds):
        for name, run in contenders.items():
            seconds = run()
            if number >= WARM_ROUNDS:
                took[name].append(seconds)
        print(".", end="", file=sys.stderr, flush=True)
    steps = rounds.steps()
    print(file=sys.stderr)
    return {"seconds": took | rounds.gets(GETS), **steps}


def stock(rank: int, chosen: argparse.Namespace, folder: str, out: Any) -> None:
    """The same call over torch's own RPC."""
    from torch.distributed import rpc

    torch.set_num_threads(1)
    values = tensors(chosen.mib, chosen.tensors)
    _state["values"] = values
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/stock", rpc_timeout=WAIT_S)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=SUBSCRIBERS + 1, rpc_backend_options=options)
    if rank == 0:
        took: dict[str, list[float]] = {"stock calls in turn": [], "stock calls at once": []}
        others = [f"w{other}" for other in range(1, SUBSCRIBERS + 1)]
        for number in range(2 + chosen.rounds):
            begun = now()
            in_turn = max(rpc.rpc_sync(other, load_call, args=(values,)) for other in others) - begun
            begun = now()
            futures = [rpc.rpc_async(other, load_call, args=(values,)) for other in others]
            at_once = max(future.wait() for future in futures) - begun
            if number >= 2:
                took["stock calls in turn"].append(in_turn)
                took["stock calls at once"].append(at_once)
        out.put(took)
    rpc.shutdown()


def run_all(target: Callable[..., None], *args: Any) -> Any:
    """Four processes that run ``target``; what the first of them has to tell."""
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        made = [context.Process(target=target, args=(rank, args[0], folder, *args[1:], out)) for rank in range(4)]
        for process in made:
            process.start()
        for process in made:
            process.join()
        if any(process.exitcode for process in made):
            raise SystemExit(f"a process failed: exit codes {[process.exitcode for process in made]}")
        return out.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kills", type=int, default=1000, help="rounds of deaths; 0: run no test of faults")
    parser.add_argument("--out", default=str(RESULTS), help="where the figures go; -: nowhere")
    chosen = parser.parse_args()
    shared = {name: tensor.share_memory_() for name, tensor in tensors(chosen.mib, chosen.tensors).items()}
    figures = run_all(worker, chosen, shared)
    try:
        figures["seconds"] |= run_all(stock, chosen)
    except (SystemExit, ImportError) as error:  # torch's own RPC is not everywhere
        print(f"stock torch.distributed.rpc was not measured: {error}", file=sys.stderr)
    figures |= {
        "faults": run_faults(chosen.kills) if chosen.kills else {},
        "mib": chosen.mib,
        "tensors": chosen.tensors,
        "rounds": chosen.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_at_end": os.getloadavg()[0],
    }
    if chosen.out != "-":
        Path(chosen.out).write_text(json.dumps(figures, indent=1) + "\n")
    report(figures)


if __name__ == "__main__":
    main()
