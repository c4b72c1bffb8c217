"""Meeting over real stores: TCP and file, beside process groups, under torchrun's environment, and Ctrl-C."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.kit.ports import held_port
from tests.kit.stopped_clock import StoppedClock
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until
from tests.kit.wheel import ROOT

import farcall
import farcall.options
from farcall.errors import BadRank, InitError, MissingPeers
from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member, new_incarnation
from farcall.runtime.rendezvous import static
from farcall.runtime.rendezvous import store as stores
from farcall.runtime.rendezvous.agreement import Membership
from farcall.runtime.rendezvous.meeting_place import find_meeting_place
from farcall.runtime.rendezvous.records import Proofs

GROUP_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*GROUP_VARIABLES, "FARCALL_SECRET", "FARCALL_ADVERTISE", "FARCALL_TRANSPORTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> int:
    return held_port()


def join(name: str, rank: int, world_size: int | None, options: RpcBackendOptions, addresses: list[str]) -> Membership:
    """Meet the others as ``name``."""
    place = find_meeting_place(rank, world_size, options.init_method)
    me = Member(name, place.rank, new_incarnation(secrets.randbits(62)), tuple(addresses))
    return static.join(place, me, options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedClock:
    return StoppedClock(monkeypatch)


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Membership]]]:
    with ThreadPoolExecutor(16) as pool:

        def start_join(name: str, rank: int, size: int, url: str, timeout_s: float = LONG_S) -> Future[Membership]:
            options = RpcBackendOptions(None, url, start_timeout_s=timeout_s)
            return pool.submit(join, name, rank, size, options, ["tcp://127.0.0.1:1"])

        yield start_join


def close(futures: list[Future[Membership]]) -> list[Membership]:
    memberships = [future.result(2 * LONG_S) for future in futures]
    for membership in memberships:
        membership.close()
    return memberships


@pytest.mark.parametrize("scheme", ["tcp", "tcp6", "file"])
def test_meeting_again_and_again_at_one_place(scheme: str, start: Any, port: int, tmp_path: Path) -> None:
    if scheme == "tcp6" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    url = {
        "tcp": f"tcp://127.0.0.1:{port}",
        "tcp6": f"tcp://[::1]:{port}",
        "file": f"file://{tmp_path}/store",
    }[scheme]
    clusters = set()
    for _ in range(3):
        memberships = close([start(f"w{rank}", rank, 3, url) for rank in (2, 0, 1)])
        assert [m.name for m in memberships[0].members] == ["w0", "w1", "w2"]
        assert len({(m.cluster_id, m.secret.values) for m in memberships}) == 1
        clusters.add(memberships[0].cluster_id)
    assert len(clusters) == 3

    def nothing_is_left() -> bool:
        gc.collect()
        return not list(tmp_path.iterdir())

    wait_until(nothing_is_left)  # a thread that met may still be on its last lines


def test_one_keeps_its_store_while_others_meet_anew(start: Any, tmp_path: Path) -> None:
    """A file outlives a meeting as long as one process holds it: the next finds the old keys."""
    url = f"file://{tmp_path}/store"
    holder = dist.FileStore(f"{tmp_path}/store", 4)
    key = "farcall/0/generation"
    for next_generation in (1, 2):
        one, _ = close([start("a", 0, 2, url), start("b", 1, 2, url)])
        assert int(Proofs(one.secret, True, "here").open(key, holder.get(key))) == next_generation
    del holder


def test_a_missing_member_is_named_and_the_port_is_free_again(start: Any, port: int, clock: StoppedClock) -> None:
    url = f"tcp://127.0.0.1:{port}"
    alone = start("a", 0, 2, url)
    clock.wait_until_waits("a")
    clock.turn(LONG_S)
    with pytest.raises(MissingPeers) as caught:
        alone.result(2 * LONG_S)
    assert caught.value.missing == (1,)
    gc.collect()
    socket.create_server(("127.0.0.1", port)).close()
    assert len(close([start("a", 0, 2, url), start("b", 1, 2, url)])) == 2


def test_a_missing_rank_0_is_named(start: Any, port: int, clock: StoppedClock) -> None:
    alone = start("b", 1, 2, f"tcp://127.0.0.1:{port}")
    clock.wait_read()
    clock.turn(LONG_S)
    with pytest.raises(MissingPeers, match=rf"rank 0 is missing.*127\.0\.0\.1:{port}") as caught:
        alone.result(2 * LONG_S)
    assert caught.value.missing == (0,)


def test_a_host_that_is_not_there(start: Any) -> None:
    with pytest.raises(MissingPeers, match=r"nowhere\.invalid"):
        start("b", 1, 2, "tcp://nowhere.invalid:29500", 2.0).result(40)


def test_those_left_by_rank_0_say_who_was_missing(start: Any, port: int, clock: StoppedClock) -> None:
    """Rank 0 gives up first and takes the store along."""
    url = f"tcp://127.0.0.1:{port}"
    patient, first = start("b", 1, 3, url, 2 * LONG_S), start("a", 0, 3, url, LONG_S)
    for name in ("a", "b"):
        clock.wait_until_waits(name)
    clock.turn(LONG_S)
    with pytest.raises(MissingPeers):
        first.result(2 * LONG_S)
    clock.turn(LONG_S)
    with pytest.raises(MissingPeers, match=r"missing: rank 2;.*rank 0 \(a\) came and gave up") as caught:
        patient.result(4 * LONG_S)
    assert caught.value.missing == (2,)


def test_a_store_of_this_program_at_the_port_is_used(start: Any, port: int) -> None:
    own = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    url = f"tcp://127.0.0.1:{port}"
    assert len(close([start("a", 0, 2, url), start("b", 1, 2, url)])) == 2
    both = {start("a", 0, 2, url), start("z", 0, 2, url)}
    [refused] = wait(both, 2 * LONG_S, FIRST_COMPLETED).done
    assert isinstance(refused.exception(), BadRank)
    assert isinstance(refused.exception(), InitError)
    assert len(close([*(both - {refused}), start("b", 1, 2, url)])) == 2
    del own


# ---------------------------------------------------------------- processes of their own

PRELUDE = """
import os, sys, time, datetime
import torch, torch.distributed as dist
import farcall
from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member
from farcall.runtime.rendezvous.static import join
from farcall.runtime.rendezvous.meeting_place import find_meeting_place
rank = int(os.environ["RANK"]); size = int(os.environ["WORLD_SIZE"])
def meet(name=None):
    options = RpcBackendOptions(None, start_timeout_s=100)
    place = find_meeting_place(-1, None, options.init_method)
    return join(place, Member(name or f"w{rank}", place.rank, os.getpid()), options)
def begin():
    farcall.init_rpc(f"w{rank}", rpc_backend_options=RpcBackendOptions(start_timeout_s=100))
    assert farcall.rpc_sync(f"w{1 - rank}", max, (1, 2)) == 2
def group():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    one = torch.ones(1); dist.all_reduce(one); assert one.item() == size
"""


def run_ranks(code: str, size: int, variables: dict[str, str]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout_s: float = 240) -> list[str]:
    deadline = time.monotonic() + timeout_s
    try:
        outputs = [p.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def test_the_port_is_shared_with_process_groups(port: int) -> None:
    """Process group first or second or between, all at one MASTER_PORT."""
    code = """
        begin()
        group()
        farcall.shutdown()
        begin()
        dist.destroy_process_group()
        farcall.shutdown()
        group()
        begin()
        dist.barrier()
        farcall.shutdown()
        dist.barrier()
        dist.destroy_process_group()
        print("done")
    """
    outputs = finish(run_ranks(code, 2, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}))
    assert all("done" in output for output in outputs)


def test_meeting_anew_at_once_after_the_server_left(port: int) -> None:
    """Rank 1 may find rank 0's old server for a moment: it must not get stuck there."""
    code = """
        for _ in range(8):
            membership = meet()
            if rank == 0:
                time.sleep(0.02)
            membership.close()
        print("done")
    """
    finish(run_ranks(code, 2, {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}))


def test_under_torchruns_environment(port: int) -> None:
    """The agent serves the store, also for rank 0, and outlives a killed set of workers."""
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    killed = run_ranks("meet()", 2, {**variables, "WORLD_SIZE": "3"})
    try:
        deadline = time.monotonic() + 4 * LONG_S
        while not agent.check(["farcall/0/0/slot/0", "farcall/0/0/slot/1"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        for process in killed:
            process.kill()
            process.communicate()
    # The same restart count: only their silence tells that they are dead.
    outputs = finish(run_ranks("m = meet(); print('done', len(m.members))", 2, variables))
    assert all("done" in output for output in outputs)
    del agent


def test_ctrl_c_ends_the_wait(port: int) -> None:
    code = """
        print("waiting", flush=True)
        meet()
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    (process,) = run_ranks(code, 1, variables)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "waiting"
        watcher = _wait_for_port(port)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=2 * LONG_S)  # it would wait for longer
    finally:
        process.kill()
        process.wait()
    assert watcher
    assert "KeyboardInterrupt" in output


def _wait_for_port(port: int, timeout_s: float = 4 * LONG_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.02)
    return False


def test_a_port_where_something_else_listens_is_told(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InitError, match="does not answer"):
            start("b", 1, 2, url, 2.0).result(40)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_ends_well_after_it_met_a_port_that_says_nothing(rank: int) -> None:
    """torch's client would wait for an answer in a thread without an end, and abort the process when that ends."""
    code = """
        import socket
        sys.silent = silent = socket.create_server(("127.0.0.1", 0))  # closed by the very end of the interpreter
        os.environ["MASTER_PORT"] = str(silent.getsockname()[1])
        try:
            farcall.init_rpc("w", rpc_backend_options=farcall.RpcBackendOptions(start_timeout_s=1.0))
        except farcall.errors.InitError as error:
            print("handled", error)
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    variables["PYTHONPATH"] = str(ROOT / "src")  # with the tests' quick start it ends before that thread notices
    (process,) = run_ranks(code, 1, variables)
    (output,) = finish([process])
    assert process.returncode == 0, output
    assert "handled" in output


def test_the_store_of_members_on_this_machine_is_on_loopback_and_closed_when_all_have_met(port: int) -> None:
    code = """
        import farcall.runtime.rendezvous.store as stores
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        def listening():
            rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}")]
            return [row[1] for row in rows if row[3] == "0A" and row[1].endswith(port)]
        seen = []
        serve = stores._serve_tcp
        stores._serve_tcp = lambda *args: (serve(*args), seen.append(listening()))[0]
        begin()
        assert rank or seen == [["0100007F" + port]], seen
        assert listening() == []
        print("closed")
        farcall.shutdown()
    """
    outputs = finish(run_ranks(code, 2, {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}))
    assert all("closed" in output for output in outputs)


def test_a_busy_port_is_told_at_once_and_by_name(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(InitError, match=rf"in use here by .*\(process {os.getpid()}\).*choose another"):
            start("a", 0, 2, url, 4 * LONG_S).result(4 * LONG_S)
        assert time.monotonic() - began < LONG_S


# ---------------------------------------------------------------------- with and without a size


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_one_that_gave_no_world_size_is_named_at_once(scheme: str, tmp_path: Path, port: int) -> None:
    """Whoever comes second: without a size it founds a group of its own, or finds a group that has one."""
    url = f"file://{tmp_path}/store" if scheme == "file" else f"tcp://127.0.0.1:{port}"
    options = RpcBackendOptions(init_method=url, start_timeout_s=LONG_S)
    with farcall.Node("forgetful", 0, options=options):
        since = time.monotonic()
        with pytest.raises(InitError, match="forgetful gave none"):
            farcall.Node("w1", 1, 2, options).start()
        took_s = time.monotonic() - since
    assert took_s < AT_ONCE_S


def test_one_without_a_world_size_does_not_found_a_group_beside_one_that_is_meeting(tmp_path: Path) -> None:
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/store", start_timeout_s=LONG_S)
    nodes = [farcall.Node(f"w{rank}", rank, 2, options) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(nodes[0].start)
        while b"slot/0" not in (tmp_path / "store").read_bytes() if (tmp_path / "store").exists() else True:
            time.sleep(0.01)
        with pytest.raises(InitError, match="gave no world_size"):
            farcall.Node("forgetful", 1, options=options).start()
        nodes[1].start()
        first.result()
        list(pool.map(farcall.Node.shutdown, nodes))


SURVIVOR = """
import sys, time
import farcall

rank, port = int(sys.argv[1]), sys.argv[2]
options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", secret="a secret of the test")
farcall.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options)
while len(farcall.members()) < 3:
    time.sleep(0.05)
print("ready", flush=True)
while rank == 0 or len(farcall.members()) > 2:
    time.sleep(0.05)
farcall.shutdown()
"""


def test_survivors_of_the_stores_host_print_no_stack(port: int) -> None:
    """torch's client does, where it is asked for something after the server died."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SURVIVOR, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        processes[0].kill()
        for process in processes[1:]:
            _, errors = process.communicate(timeout=2 * LONG_S)
            assert process.returncode == 0, errors
            told = ("lost w0", "Are all workers started?")
            assert [line for line in errors.splitlines() if not any(text in line for text in told)] == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()
