"""How soon a caller knows that its callee was killed, and how much of that the kernel takes.

    python benchmarks/deaths.py [ROUNDS]

A process that is killed first gives its memory back; only then its connections end, and its parent hears of it. torch
maps much memory. The callee holds a bare socket besides: its end is the first that anybody can know. Milliseconds after
SIGKILL, by one clock, while a call is under way.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

BOUND_S = 60.0


def sleeper(witness: socket.socket) -> None:
    """A process that has imported nothing."""
    witness.send(b"x")
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
        sleeper(end)
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


def _ends_after(victim: int, witness: socket.socket) -> tuple[float, float, float]:
    """When ``victim`` was killed; seconds until its connections ended, and until it was gone."""
    process = os.pidfd_open(victim)
    poller = select.poll()
    for descriptor in (witness.fileno(), process):
        poller.register(descriptor, select.POLLIN)
    times: dict[int, float] = {}
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while len(times) < 2:
        found = poller.poll(BOUND_S * 1000)
        if not found:
            raise TimeoutError(f"process {victim} did not end within {BOUND_S} s")
        for descriptor, _ in found:
            times[descriptor] = time.monotonic() - killed
            poller.unregister(descriptor)
    os.close(process)
    return killed, times[witness.fileno()], times[process]


def measure(system: str) -> tuple[float, float, float]:
    """Milliseconds until the connections of the callee ended, it was gone, and the caller knew."""
    context = multiprocessing.get_context("spawn")
    witness, held = socket.socketpair()
    here, there = context.Pipe()
    with TemporaryDirectory() as folder:
        url = f"file://{Path(folder) / 'store'}"
        if system == "none":
            processes = [context.Process(target=sleeper, args=(held,))]
        else:
            processes = [
                context.Process(target=member, args=(system, rank, url, (there, held)[rank])) for rank in (0, 1)
            ]
        for process in processes:
            process.start()
        held.close()
        try:
            witness.settimeout(BOUND_S)
            witness.recv(1)
            if system != "none" and (not here.poll(BOUND_S) or here.recv() != "ready"):
                raise TimeoutError("the caller is not ready")
            victim = processes[-1].pid
            assert victim is not None
            killed, ended_s, gone_s = _ends_after(victim, witness)
            knew_s = ended_s
            if system != "none":
                if not here.poll(BOUND_S):
                    raise TimeoutError("the caller did not hear of the death")
                knew_s = here.recv() - killed
                here.send("enough")
            return ended_s * 1e3, gone_s * 1e3, knew_s * 1e3
        finally:
            witness.close()
            for process in processes:
                process.join(5.0)
                process.kill()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rows: dict[str, list[tuple[float, float, float]]] = {"none": [], "stock": [], "farcall": []}
    for _ in range(rounds):
        for system, row in rows.items():
            row.append(measure(system))
    print("median (least to most)    connections ended      process gone           caller knew            of that ours")
    for system, row in rows.items():
        columns = [[ended for ended, _, _ in row], [gone for _, gone, _ in row], [knew for *_, knew in row]]
        columns.append([knew - ended for ended, _, knew in row])
        cells = [f"{median(each):7.1f} ({min(each):.1f} to {max(each):.1f})".ljust(23) for each in columns]
        print(f"{'without torch' if system == 'none' else system:24}", *(cells[:2] if system == "none" else cells))


if __name__ == "__main__":
    main()
