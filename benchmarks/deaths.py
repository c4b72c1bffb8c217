"""How soon a caller knows that its callee was killed, and how much of that the kernel takes.

    python benchmarks/deaths.py [ROUNDS]

A process that is killed first gives its memory back, and only then its connections end: that is the first that anybody
can know. torch maps much memory. The callee holds a bare socket besides, whose end the benchmark sees for itself.
Milliseconds after SIGKILL, while a call is under way; and the processor time of dying, which is the same on a busy
machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

BOUND_S = 60.0
SECONDS = struct.Struct("d")


class Death(NamedTuple):
    """Milliseconds."""

    dying: float
    """Processor time, from the signal to the end."""
    ended: float
    """Until its connections ended."""
    known: float
    """Until the caller had the error."""


def sleep_until_killed(witness: socket.socket) -> None:
    """The callee, or a process that has imported nothing."""
    witness.send(SECONDS.pack(time.process_time()))
    time.sleep(BOUND_S)


def member(system: str, rank: int, url: str, end: socket.socket | Connection) -> None:
    """Rank 0 calls, and tells when the call failed; rank 1 is killed meanwhile."""
    if system == "farcall":
        import farcall as rpc

        options: object = rpc.RpcBackendOptions(init_method=url)
    else:
        from torch.distributed import rpc  # type: ignore[no-redef]

        options = rpc.TensorPipeRpcBackendOptions(init_method=url)  # type: ignore[attr-defined]
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[arg-type]
    if isinstance(end, socket.socket):
        sleep_until_killed(end)
        return
    future = rpc.rpc_async("w1", time.sleep, (BOUND_S,))
    time.sleep(0.3)  # the call is under way
    end.send("ready")
    try:
        future.wait()
    except RuntimeError:
        end.send(time.monotonic())
    end.recv()
    os._exit(0)  # neither system is asked how it ends


def measure(system: str) -> Death:
    """One death of a callee of ``system``, or, without one, of a bare process."""
    context = multiprocessing.get_context("spawn")
    witness, held = socket.socketpair()
    here, there = context.Pipe()
    with TemporaryDirectory() as folder:
        url = f"file://{Path(folder) / 'store'}"
        if system:
            ends = (there, held)
            processes = [context.Process(target=member, args=(system, rank, url, ends[rank])) for rank in (0, 1)]
        else:
            processes = [context.Process(target=sleep_until_killed, args=(held,))]
        for process in processes:
            process.start()
        held.close()
        try:
            witness.settimeout(BOUND_S)
            (used_s,) = SECONDS.unpack(witness.recv(SECONDS.size))
            if system and (not here.poll(BOUND_S) or here.recv() != "ready"):
                raise TimeoutError("the caller is not ready")
            used_s += _used_by_children_s()  # with those that ended before
            victim = processes[-1]
            assert victim.pid is not None
            killed = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            if not select.select([witness], [], [], BOUND_S)[0]:
                raise TimeoutError(f"process {victim.pid} did not end within {BOUND_S} s")
            ended = known = time.monotonic()
            if system:
                if not here.poll(BOUND_S):
                    raise TimeoutError("the caller did not hear of the death")
                known = here.recv()
            victim.join(BOUND_S)
            used_s = _used_by_children_s() - used_s
            return Death(*(1e3 * seconds for seconds in (used_s, ended - killed, known - killed)))
        finally:
            witness.close()
            here.close()
            for process in processes:
                process.kill()
                process.join(BOUND_S)


def _used_by_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    deaths: dict[str, list[Death]] = {"": [], "stock": [], "farcall": []}
    for _ in range(rounds):
        for system, row in deaths.items():
            row.append(measure(system))
    names = ("dying, processor time", "connections ended", "caller knew", "of that its own part")
    print("median (least to most), ms", *(name.rjust(24) for name in names))
    for system, row in deaths.items():
        columns = [[death.dying for death in row], [death.ended for death in row]]
        if system:
            columns += [[death.known for death in row], [death.known - death.ended for death in row]]
        cells = [f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})".rjust(24) for each in columns]
        print((system or "a process without torch").ljust(26), *cells)


if __name__ == "__main__":
    main()
