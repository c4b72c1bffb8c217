"""Weights that cross to other hosts: once to each, also when members die and links are cut on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import pytest
import torch
from tests.faults.namespaces import NOBODY, Hosts, address, enter, hosts
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.protocol.weights import fetching as machine
from farcall.runtime.node import current_runtime
from farcall.testing.cluster import finish, start_processes
from farcall.weights import fetching as driver
from farcall.weights.fetching import Fetch
from farcall.weights.node import Weights

TENSORS = 8
SIZE_BYTES = 24 << 20
ONCE_BYTES = SIZE_BYTES * 5 // 4
"""More than all bytes once, with headers and acknowledgements, and less than twice a good part of them."""
AT_CHUNK = 6
LINK_BITS_PER_S = 10**9


class Crossed(NamedTuple):
    """What a member saw: bytes that its host received and sent, and bytes of weights that it fetched itself.

    ``at``: when it began to push, or had loaded.
    """

    received: int
    sent: int
    fetched: int
    at: float


def model(value: float) -> dict[str, torch.Tensor]:
    count = SIZE_BYTES // 4 // TENSORS
    return {f"layer{index}": torch.arange(float(count)) + value + index for index in range(TENSORS)}


def link_bytes() -> tuple[int, int]:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[0]), int(numbers.split()[8])
    raise AssertionError("no eth0")


def at_chunk(number: int, act) -> None:  # type: ignore[no-untyped-def]
    """Have ``act()`` called when this process gets that many chunks."""
    count = 0
    before = Fetch._on_chunk

    def on_chunk(self, ask, future) -> None:  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count == number:
            act()
        before(self, ask, future)

    Fetch._on_chunk = on_chunk  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut(spaces: list[str], one: int, other: int) -> None:
    for sender, receiver in ((one, other), (other, one)):
        words = ("neigh", "replace", address(receiver), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        subprocess.run(["ip", "-n", spaces[sender], *words], check=True)


def limit(space: str) -> bool:
    words = f"tc qdisc add dev eth0 root tbf rate {LINK_BITS_PER_S:d}bit burst 256kb latency 50ms"
    return subprocess.run(["ip", "netns", "exec", space, *words.split()], check=False).returncode == 0


def take_part(rank: int, spaces: list[str], directory: str, places: list[int], trouble: tuple[str, int]) -> Crossed:
    """Member ``rank`` on host ``places[rank]``; w0 publishes, the others load. ``trouble``: what, and to whom."""
    torch.set_num_threads(1)
    host = places[rank]
    enter(spaces[host])
    options = farcall.RpcBackendOptions(
        init_method=f"file://{directory}/store", advertise=address(host), membership=PATIENT, rpc_timeout=4 * LONG_S
    )
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=len(places), rpc_backend_options=options)
    kind, victim = trouble
    if kind != "cut":  # where no silence is to be borne, a busy machine must not look like one
        machine.STALL_S = driver.ANSWER_S = 10 * LONG_S  # type: ignore[misc]
    living = [f"w{other}" for other in range(len(places)) if kind != "die" or other != victim]
    if rank == victim and kind == "die":
        at_chunk(AT_CHUNK, die)
    if rank == victim and kind == "cut":
        at_chunk(AT_CHUNK, lambda: cut(spaces, host, places[rank - 1]))
    weights = None if rank == 0 else farcall.subscribe("policy")
    farcall.barrier()
    before = link_bytes()
    at = monotonic()
    if weights is None:
        policy = farcall.publish("policy", model(1.0))
        policy.push()
    else:
        version = weights.wait(timeout=2 * LONG_S)
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0.0).items()}
        assert weights.load_into(mine) == version
        at = monotonic()
        assert all(torch.equal(mine[name], tensor) for name, tensor in model(1.0).items())
    after = link_bytes()
    Path(directory, f"done {rank}").touch()
    if kind == "cut":  # not all reach each other
        wait_until(lambda: all(Path(directory, f"done {other}").exists() for other in range(len(places))))
    elif f"w{rank}" in living:
        farcall.barrier(living)
        after = link_bytes()
        farcall.barrier(living)
    fetched = current_runtime().part(Weights).fetcher.received_bytes
    farcall.shutdown(graceful=kind != "cut" and f"w{rank}" in living)
    return Crossed(after[0] - before[0], after[1] - before[1], fetched, at)


def run(network: Hosts, directory: Path, places: list[int], trouble: tuple[str, int] = ("", -1)) -> list[Crossed]:
    members = start_processes(len(places), take_part, network.spaces, str(directory), places, trouble)
    return finish(members, 8 * LONG_S, may_fail=[trouble[1]] if trouble[0] == "die" else [])


def test_a_version_crosses_once_and_is_shared_there(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Over a link of 1 Gbit/s, where `tc` can make one of it; `benchmarks/weights.py` tells what is recorded."""
    with hosts(2) as network:
        is_limited = shutil.which("tc") is not None and all(limit(space) for space in network.spaces)
        crossed = run(network, tmp_path, [0, 1, 1, 1, 1])
    record_property("crossed", crossed[1].received / SIZE_BYTES)
    if is_limited:
        took_s = max(member.at for member in crossed[1:]) - crossed[0].at
        record_property("share_of_link", 8 * SIZE_BYTES / LINK_BITS_PER_S / took_s)
    assert SIZE_BYTES < crossed[1].received < ONCE_BYTES
    assert sorted(member.fetched for member in crossed[1:]) == [0, 0, 0, SIZE_BYTES]


def test_hosts_hand_a_version_on(tmp_path: Path) -> None:
    with hosts(4) as network:
        crossed = run(network, tmp_path, [0, 1, 2, 3, 3])
    assert SIZE_BYTES < crossed[0].sent < ONCE_BYTES, "the publisher sends it once"
    for member in crossed[1:]:
        assert SIZE_BYTES < member.received < ONCE_BYTES
    assert crossed[3].fetched + crossed[4].fetched == SIZE_BYTES


@pytest.mark.parametrize("victim", [1, 2])
def test_a_member_that_dies_on_the_way(tmp_path: Path, victim: int) -> None:
    """Whoever hands on, or leads its host: the others go on elsewhere."""
    with hosts(3) as network:
        crossed = run(network, tmp_path, [0, 1, 1, 2], ("die", victim))
    assert crossed[3].fetched < ONCE_BYTES


def test_a_link_that_is_cut_on_the_way(tmp_path: Path) -> None:
    """The source of the last host is out of reach: it goes on at another, with the chunks that it lacks."""
    with hosts(3) as network:
        crossed = run(network, tmp_path, [0, 1, 2], ("cut", 2))
    assert crossed[2].fetched >= SIZE_BYTES
