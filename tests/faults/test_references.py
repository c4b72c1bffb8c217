"""Members that die while they hold, own, send or await references: what they held is freed, what they owned is lost."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tests.kit.times import AT_ONCE_S, LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import ReferenceLost
from farcall.testing.cluster import finish, start_cluster

kept: dict[str, Any] = {}


def identity(value: Any) -> Any:
    return value


def keep(name: str, value: Any) -> None:
    kept[name] = value


def owned_here() -> int:
    gc.collect()
    return len(farcall.debug.references().owned)


def make_and_keep(owner: str, count: int) -> None:
    kept[owner] = [farcall.remote(owner, identity, (number,)) for number in range(count)]
    kept[owner][-1].to_here()


def send_on(to: str, rref: farcall.RRef[Any]) -> None:
    farcall.rpc_sync(to, keep, ("sent on", rref))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@farcall.functions.async_execution
def never() -> torch.futures.Future[None]:
    """No answer, and no thread that would wait for one."""
    kept["never"] = torch.futures.Future()
    return kept["never"]


def kill(worker: str) -> float:
    """Kill a worker; when."""
    killed_at = time.monotonic()
    farcall.rpc_async(worker, die)
    return killed_at


# ---------------------------------------------------------------------- a user dies


def outlive_a_user(rank: int) -> None:
    if rank == 1:
        time.sleep(LONG_S * 10)
    if rank != 0:
        return
    mine = farcall.RRef("mine")
    farcall.rpc_sync("w1", keep, ("it", mine))
    farcall.rpc_sync("w1", make_and_keep, ("w0", 100))
    farcall.rpc_sync("w1", make_and_keep, ("w2", 100))
    # Through the dead: w2 holds forks that w1 sent on, and these must stay.
    farcall.rpc_sync("w1", send_on, ("w2", mine))
    theirs = farcall.remote("w2", identity, ("theirs",))
    farcall.rpc_sync("w1", keep, ("theirs", theirs))
    farcall.rpc_sync("w1", send_on, ("w0", theirs))
    farcall.rpc_sync("w1", send_on, ("w2", mine))
    del mine, theirs
    wait_until(lambda: owned_here() == 101)
    killed_at = kill("w1")
    wait_until(lambda: owned_here() == 1)
    wait_until(lambda: farcall.rpc_sync("w2", owned_here) == 1)
    assert time.monotonic() - killed_at < AT_ONCE_S
    assert kept["sent on"].to_here() == "theirs"
    assert farcall.rpc_sync("w2", use_sent_on) == "mine"
    kept.clear()
    farcall.rpc_sync("w2", keep, ("sent on", None))
    wait_until(lambda: owned_here() == 0)
    wait_until(lambda: farcall.rpc_sync("w2", owned_here) == 0)


def use_sent_on() -> Any:
    return kept["sent on"].to_here()


def test_what_a_dead_user_held_is_freed_and_what_it_sent_on_is_not() -> None:
    finish(start_cluster(3, outlive_a_user, membership=PATIENT), may_fail=[1])


# ---------------------------------------------------------------------- an owner dies


def outlive_an_owner(rank: int) -> list[float]:
    if rank == 1:
        time.sleep(LONG_S * 10)
    if rank != 0:
        return []
    pending = farcall.remote("w1", never)
    there = farcall.remote("w1", identity, ("value",))
    assert there.to_here() == "value"
    farcall.rpc_sync("w2", keep, ("it", there))
    ended: list[float] = []
    raised: list[BaseException] = []

    def wait(use: Callable[[], object]) -> None:
        try:
            use()
        except ReferenceLost as error:
            raised.append(error)
        ended.append(time.monotonic())

    uses: list[Callable[[], object]] = [
        pending.to_here,
        lambda: pending.to_here(timeout=None),
        pending.rpc_sync(timeout=None).anything,
        lambda: pending.rpc_async(timeout=None).anything().wait(),
        lambda: pending.remote(timeout=None).anything().to_here(timeout=None),
        lambda: pending._get_type(timeout=None),
        lambda: pending._get_future().wait(),
    ]
    threads = [threading.Thread(target=wait, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    wait_until(lambda: farcall.rpc_sync("w1", is_waited_for, (4,)))
    killed_at = kill("w1")
    for thread in threads:
        thread.join(LONG_S)
    assert len(raised) == len(uses), raised
    assert all("create it again" in str(error) or "RRef creation" in str(error) for error in raised), raised
    # And afterwards: here, at others, when made, when sent.
    for use in (
        *uses,
        there.to_here,
        there.rpc_sync().upper,
        lambda: there.rpc_async().upper().wait(),
        lambda: there.remote().upper().to_here(),
        lambda: farcall.remote("w1", identity, (1,)).to_here(),
        lambda: farcall.rpc_sync("w2", identity, (there,)),
        lambda: farcall.rpc_sync("w2", use_kept),
    ):
        count = len(raised)
        wait(use)
        assert len(raised) == count + 1, use
    assert "w1" in repr(there)
    wait_until(lambda: farcall.debug.references().used == [])
    return [moment - killed_at for moment in ended]


def is_waited_for(count: int) -> bool:
    node = farcall.api.current_runtime()
    return len(node.server.active) > count


def use_kept() -> Any:
    return kept["it"].to_here()


def test_a_dead_owner_is_told_at_once_to_whoever_waits_or_asks_later() -> None:
    took_s = finish(start_cluster(3, outlive_an_owner, membership=PATIENT), may_fail=[1])[0]
    assert max(took_s) < AT_ONCE_S


# ---------------------------------------------------------------------- in the middle of it


def lose_a_creator(rank: int) -> None:
    """w1 creates at w2, sends the reference here, and dies at any point in between."""
    if rank == 1:
        time.sleep(LONG_S * 10)
    if rank != 0:
        return
    calls = [farcall.rpc_async("w1", create_and_send, ("w2", "w0", number)) for number in range(50)]
    wait_until(lambda: any(name.startswith("got") for name in list(kept)))  # while others come in
    kill("w1")
    for call in calls:
        with contextlib.suppress(ConnectionError):
            call.wait()
    for name in [name for name in list(kept) if name.startswith("got")]:
        with contextlib.suppress(ReferenceLost):  # it made it out of the dying process, its creating call did not
            assert kept[name].to_here() == int(name.removeprefix("got"))

    def nothing_is_left() -> bool:
        kept.clear()  # a message of the dead one may come late
        return owned_here() == 0 and not farcall.debug.references().used and farcall.rpc_sync("w2", owned_here) == 0

    wait_until(nothing_is_left)


def create_and_send(owner: str, to: str, number: int) -> None:
    farcall.rpc_sync(to, keep, (f"got{number}", farcall.remote(owner, identity, (number,))))


def test_a_creator_that_dies_leaves_nothing_behind_but_what_others_hold() -> None:
    finish(start_cluster(3, lose_a_creator), may_fail=[1])


def die_while_everybody_sends(rank: int) -> None:
    if rank == 1:
        time.sleep(LONG_S * 10)
    for number in range(200):
        try:
            rref = farcall.remote((rank + number) % 4, identity, (number,))
            farcall.rpc_sync((rank + number + 1) % 4, identity, ([rref, farcall.RRef(number)],))
        except (ConnectionError, ReferenceLost):
            pass
        if rank == 0 and number == 50:
            kill("w1")
    rref = None
    wait_until(lambda: owned_here() == 0)
    wait_until(lambda: not farcall.debug.references().used)


def test_everything_is_freed_when_one_dies_while_everybody_sends() -> None:
    finish(start_cluster(4, die_while_everybody_sends), may_fail=[1])


def freeze(rank: int) -> None:
    """A shutdown with references under way to somebody who is gone must not wait for him."""
    if rank == 1:
        time.sleep(LONG_S * 10)
    if rank == 0:
        farcall.api._ignore_rref_leak = False
        rref = farcall.remote("w2", identity, (1,))
        kept["mine"] = farcall.RRef(2)
        farcall.rpc_async("w1", keep, ("it", [rref, kept["mine"]]))
        kill("w1")


def test_a_shutdown_does_not_wait_for_what_was_sent_to_the_dead() -> None:
    finish(start_cluster(3, freeze, membership=PATIENT), may_fail=[1])
