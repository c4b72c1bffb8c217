"""Becoming a member: every way to meet, every way for bytes, and each mistake with its own clear error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.ports import held_port, tcp_url
from tests.kit.stopped_clock import StoppedClock
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import PATIENCE_S, wait_until

import farcall
from farcall import api
from farcall.errors import BadRank, DuplicateName, InitError, MissingPeers, RpcError, UnknownWorker
from farcall.options import MemoryOptions
from farcall.runtime.node.current import slot
from farcall.testing.cluster import context, finish, run_cluster, start_processes, temporary_file_url


def options(url: str, **more: Any) -> farcall.RpcBackendOptions:
    return farcall.RpcBackendOptions(init_method=url, **more)


def see_everybody(size: int) -> list[str]:
    """Call every member, oneself included; their names in order of rank."""
    names = [farcall.rpc_sync(rank, farcall.get_worker_info).name for rank in range(size)]
    value = torch.arange(1 << 16)
    for name in names:
        assert torch.equal(farcall.rpc_sync(name, torch.neg, (value,)), -value)
    return names


# --- ways to meet


def meet(rank: int, size: int, url: str, **more: Any) -> list[str]:
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options(url, **more))
    names = see_everybody(size)
    farcall.shutdown()
    return names


def meet_by_environment(rank: int, size: int, port: int) -> list[str]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    farcall.init_rpc(f"w{rank}")
    names = see_everybody(size)
    farcall.shutdown()
    return names


def test_env() -> None:
    assert finish(start_processes(3, meet_by_environment, 3, held_port())) == [["w0", "w1", "w2"]] * 3


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_tcp(host: str) -> None:
    assert finish(start_processes(3, meet, 3, f"tcp://{host}:{held_port()}")) == [["w0", "w1", "w2"]] * 3


def test_file() -> None:
    url = temporary_file_url()
    try:
        assert finish(start_processes(3, meet, 3, url)) == [["w0", "w1", "w2"]] * 3
        assert finish(start_processes(3, meet, 3, url)) == [["w0", "w1", "w2"]] * 3  # and again at the same file
    finally:
        shutil.rmtree(Path(url.removeprefix("file://")).parent)


TORCHRUN_PROGRAM = """
import os
import farcall

rank = int(os.environ["RANK"])
farcall.init_rpc(f"w{rank}")
names = [farcall.rpc_sync(other, farcall.get_worker_info).name for other in range(3)]
farcall.shutdown()
with open(f"{os.environ['RESULTS']}/{rank}", "w") as file:
    file.write(" ".join(names))
"""


def test_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TORCHRUN_PROGRAM))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--master-port",
        str(held_port()),
    ]
    environment = {**os.environ, "RESULTS": str(tmp_path)}
    ran = subprocess.run([*command, str(program)], env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["w0 w1 w2"] * 3


def share_the_port(rank: int, port: int, order: str) -> list[float]:
    """farcall and a process group, one port."""
    url = f"tcp://127.0.0.1:{port}"
    sums = []
    for step in order:
        if step == "g":
            torch.distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
        elif step == "f":
            farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(url))
        elif step == "F":
            farcall.shutdown()
        elif step == "G":
            torch.distributed.destroy_process_group()
        if torch.distributed.is_initialized():
            value = torch.tensor([float(rank + 1)])
            torch.distributed.all_reduce(value)
            sums.append(value.item())
        if slot.runtime is not None:
            see_everybody(2)
    return sums


@pytest.mark.parametrize("order", ["gfFG", "fgGF", "fgFG", "gfGF", "fFgG", "gGfF", "fFfgGF"])
def test_port_is_shared_with_a_process_group(order: str) -> None:
    for sums in finish(start_processes(2, share_the_port, held_port(), order)):
        assert set(sums) <= {3.0}
        assert sums


# --- ways for bytes


def describe_ways(rank: int) -> list[str]:
    for _ in range(3):  # that memory was accepted is told behind the answer to the first call, at times
        see_everybody(2)
    node = api.current_runtime()
    peer = node.links.peers.remotes[1 - rank]
    return [peer.link.transport.kind, "shared" if peer.lending is not None and peer.lending.is_used else "inline"]


def test_one_host_uses_unix_sockets_and_shared_memory() -> None:
    assert run_cluster(2, describe_ways) == [["unix", "shared"]] * 2


def test_tcp_can_be_forced() -> None:
    assert run_cluster(2, describe_ways, transports=("tcp",)) == [["tcp", "inline"]] * 2


def test_shared_memory_can_be_switched_off() -> None:
    assert run_cluster(2, describe_ways, memory=MemoryOptions(shared_memory=False)) == [["unix", "inline"]] * 2


def test_ipv6() -> None:
    found = run_cluster(2, describe_ways, url=f"tcp://[::1]:{held_port()}", transports=("tcp",))
    assert found == [["tcp", "inline"]] * 2


def on_a_poor_system(rank: int, port: int, lacks: str, poor: int) -> list[str]:
    """One of two lacks something; the other does not know."""
    if rank == poor:
        if lacks == "memfd":

            def refuse(*args: Any) -> int:
                raise OSError(1, "Operation not permitted")

            os.memfd_create = refuse
        elif lacks == "unix dial":
            from farcall.transport import address
            from farcall.transport.interface import DialFailed

            def fail(where: str, timeout_s: float) -> Any:
                raise DialFailed("not in this sandbox")

            address.SCHEMES["unix"] = address.SCHEMES["unix"]._replace(dial=fail)
        elif lacks == "unix listen":
            import socket

            really_bind = socket.socket.bind

            class Poor(socket.socket):
                def bind(self, where: Any) -> None:
                    if self.family == socket.AF_UNIX:
                        raise OSError(13, "Permission denied")
                    really_bind(self, where)

            socket.socket = Poor  # type: ignore[misc]
    url = f"tcp://127.0.0.1:{port}"
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(url))
    found = describe_ways(rank)
    farcall.shutdown()
    return found


@pytest.mark.parametrize("poor", [0, 1])
@pytest.mark.parametrize("lacks", ["memfd", "unix listen", "unix dial"])
def test_fast_way_that_cannot_be_set_up_is_no_error(lacks: str, poor: int) -> None:
    ways = finish(start_processes(2, on_a_poor_system, held_port(), lacks, poor))
    assert ways[0][0] == ways[1][0]
    if lacks != "memfd":
        # Rank 1 dials: it must be able to, and rank 0 must listen.
        assert ways[0][0] == ("tcp" if poor == ("unix listen", "unix dial").index(lacks) else "unix")


def unlike_transports(rank: int, port: int) -> list[str]:
    transports = ("tcp",) if rank == 1 else ("unix", "tcp")
    url = f"tcp://127.0.0.1:{port}"
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(url, transports=transports))
    found = describe_ways(rank)
    farcall.shutdown()
    return found


def test_members_with_different_transports_take_what_both_have() -> None:
    assert finish(start_processes(2, unlike_transports, held_port())) == [["tcp", "inline"]] * 2


def advertise(rank: int, port: int, how: str) -> list[str]:
    url = f"tcp://127.0.0.1:{port}"
    if how == "variable":
        os.environ["FARCALL_ADVERTISE"] = "127.0.0.2"
    host = "127.0.0.2" if how == "option" else None
    farcall.init_rpc(
        f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(url, advertise=host, transports=("tcp",))
    )
    see_everybody(2)
    found = [member.addresses[0] for member in api.current_runtime().membership.members]
    farcall.shutdown()
    return found


@pytest.mark.parametrize("how", ["option", "variable", "neither"])
def test_advertised_address_is_the_users_choice(how: str) -> None:
    host = "127.0.0.1" if how == "neither" else "127.0.0.2"
    for found in finish(start_processes(2, advertise, held_port(), how)):
        assert all(address.startswith(f"tcp://{host}:") for address in found)


# --- names


def ask_for_infos(rank: int) -> None:
    me = farcall.get_worker_info()
    assert (me.name, me.id) == (f"w{rank}", rank)
    for other in range(2):
        info = farcall.get_worker_info(f"w{other}")
        assert farcall.get_worker_info(other) == info == farcall.get_worker_info(info)
        assert farcall.rpc_sync(info, farcall.get_worker_info) == info
    for unknown in ("nobody", 7, -1):
        with pytest.raises(UnknownWorker, match=re.escape(repr(unknown))):
            farcall.get_worker_info(unknown)
        with pytest.raises(UnknownWorker):
            farcall.rpc_sync(unknown, os.getpid)
    with pytest.raises(RpcError, match="already initialized"):
        farcall.init_rpc("again", rank=0, world_size=1)
    assert farcall.rpc_sync(1 - rank, os.getpid) != os.getpid()  # the second init did no harm


def test_workers_are_known_by_name_rank_and_info_and_a_second_init_is_refused() -> None:
    run_cluster(2, ask_for_infos)


# --- mistakes


def try_to_meet(
    rank: int, url: str, names: list[str], ranks: list[int], sizes: list[int], start_timeout_s: float, all_run: Barrier
) -> tuple[str, str, float]:
    all_run.wait(PATIENCE_S)  # or one would be late for the others
    started = time.monotonic()
    try:
        farcall.init_rpc(
            names[rank],
            rank=ranks[rank],
            world_size=sizes[rank],
            rpc_backend_options=options(url, start_timeout_s=start_timeout_s),
        )
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    farcall.shutdown(graceful=False)
    return "in", "", time.monotonic() - started


def attempt(
    names: list[str], ranks: list[int], sizes: list[int], start_timeout_s: float = 12.0
) -> list[tuple[str, str, float]]:
    all_run = context().Barrier(len(names))
    return finish(start_processes(len(names), try_to_meet, tcp_url(), names, ranks, sizes, start_timeout_s, all_run))


def test_duplicate_name_is_told_to_both() -> None:
    for error, text, seconds in attempt(["same", "same"], [0, 1], [2, 2], LONG_S):
        assert error == DuplicateName.__name__
        assert "'same'" in text
        assert seconds < AT_ONCE_S


def test_duplicate_rank_is_told_to_the_second() -> None:
    found = attempt(["a", "b", "c"], [0, 1, 1], [3, 3, 3])
    assert BadRank.__name__ in {error for error, _, _ in found}
    assert all(seconds < 12.0 + AT_ONCE_S for _, _, seconds in found)


def test_unlike_world_sizes_are_told() -> None:
    found = attempt(["a", "b"], [0, 1], [2, 3])
    assert all(error in (BadRank.__name__, MissingPeers.__name__) for error, _, _ in found)
    assert any("world_size" in text for _, text, _ in found)


@pytest.mark.parametrize(
    ("name", "rank", "size", "error"),
    [
        ("a", 2, 2, BadRank),
        ("a", -2, 2, BadRank),
        ("a", 0, 0, BadRank),
        ("a b", 0, 1, ValueError),
        ("", 0, 1, ValueError),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(name: str, rank: int, size: int, error: type[Exception]) -> None:
    started = time.monotonic()
    with pytest.raises(error):
        farcall.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options("tcp://127.0.0.1:1"))
    assert time.monotonic() - started < AT_ONCE_S


def test_missing_peer_is_named_in_time() -> None:
    found = attempt(["a", "c"], [0, 2], [3, 3])
    for error, text, seconds in found:
        assert error == MissingPeers.__name__
        assert "rank 1" in text
        assert seconds < 12.0 + AT_ONCE_S


def test_missing_rank_0_is_named_in_time() -> None:
    ((error, text, seconds),) = attempt(["b"], [1], [2])
    assert error == MissingPeers.__name__
    assert "rank 0" in text
    assert seconds < 12.0 + AT_ONCE_S


def start_late(rank: int, url: str, marker: str) -> list[str]:
    """Rank 1 comes when rank 0 has given up once already, and is met at the second attempt."""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            StoppedClock(patch, turned_by_waiting_s=LONG_S)
            with pytest.raises(MissingPeers):
                farcall.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options(url, start_timeout_s=LONG_S))
        Path(marker).touch()
    else:
        wait_until(lambda: os.path.exists(marker))
    return meet(rank, 2, url)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_second_attempt_after_a_missing_peer_works(tmp_path: Path, scheme: str) -> None:
    url = f"file://{tmp_path}/store" if scheme == "file" else tcp_url()
    assert finish(start_processes(2, start_late, url, str(tmp_path / "marker"))) == [["w0", "w1"]] * 2


def meet_over(rank: int, port: int, transports: tuple[str, ...]) -> str:
    options = farcall.RpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", transports=transports[rank : rank + 1], start_timeout_s=10.0
    )
    try:
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    except InitError as error:
        return str(error)
    return "met"


def test_members_without_a_transport_in_common() -> None:
    waited, dialled = finish(start_processes(2, meet_over, held_port(), ("unix", "tcp")))
    assert "w1 may use tcp only, which does not reach w0 (rank 0)" in dialled
    assert "w1 (rank 1)" in waited


def test_options_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"farcall\.RpcBackendOptions, not dict"):
        farcall.init_rpc("w0", rank=0, world_size=1, rpc_backend_options={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="write rank=0"):
        farcall.init_rpc("w0", 0, 1)
