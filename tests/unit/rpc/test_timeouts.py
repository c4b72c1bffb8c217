"""What a program may write as a timeout."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

import farcall
from farcall import Retry
from farcall.ids import WorkerInfo
from farcall.option_checks import some_seconds
from farcall.rpc import gather, retry, timeouts
from farcall.rpc.outcome import DerivedFuture
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout, check_wait, from_torch
from farcall.runtime.io.timers import NEVER

BAD: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "not -1: write timeout=None"),
    (-1.0, ValueError, "leave it out for the default"),
    (float("nan"), ValueError, "not nan"),
    (True, TypeError, "a number of seconds, not bool"),
    ("3", TypeError, "a number of seconds, not str"),
]


@pytest.mark.parametrize("check", [check_timeout, check_wait])
@pytest.mark.parametrize(("given", "kind", "text"), BAD)
def test_only_numbers_above_0_are_timeouts(check: Any, given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check(given)


def test_a_wait_may_be_none_at_all_and_a_call_not() -> None:
    assert check_wait(0) == 0
    for zero in (0, 0.0):
        with pytest.raises(ValueError, match=f"more than 0 seconds, not {zero}: write timeout=None for no limit, or"):
            check_timeout(zero)
    done: DerivedFuture[int] = DerivedFuture()
    with pytest.raises(TimeoutError):
        done.result(timeout=0)
    with pytest.raises(TimeoutError):
        next(farcall.as_completed([done], timeout=0))
    done.set_result(1)
    assert done.result(timeout=0) == done.wait(0) == 1


@pytest.mark.parametrize("check", [check_timeout, check_wait])
def test_none_and_very_long_timeouts_are_no_limit(check: Any) -> None:
    assert [check(given) for given in (None, 1e10, 2, 0.5)] == [NEVER, NEVER, 2, 0.5]


def test_what_is_left_out_is_so_after_a_journey() -> None:
    for travelled in (
        copy.copy(UNSET_TIMEOUT),
        copy.deepcopy(UNSET_TIMEOUT),
        pickle.loads(pickle.dumps(UNSET_TIMEOUT)),
    ):
        assert travelled is UNSET_TIMEOUT


def test_torchs_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_torch(-1) is UNSET_TIMEOUT
    assert (from_torch(0), from_torch(2.5)) == (None, 2.5)
    monkeypatch.setattr(timeouts, "torchs_numbers", True)
    assert check_timeout(0) == 0.0
    with pytest.raises(ValueError, match="not -2"):
        check_timeout(-2)


def test_torchs_0_is_no_limit_for_calls_inside_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They passed on that it was left out, and so had the node's default as their limit."""
    given: list[Any] = []
    for module in (retry, gather):
        monkeypatch.setattr(module, "call_sync", lambda *arguments, **_: given.append(arguments[-1]))
    monkeypatch.setattr(timeouts, "torchs_numbers", True)
    node: Any = SimpleNamespace(
        timeout_s=60.0,
        info=WorkerInfo("w0", 0),
        workers=lambda: [WorkerInfo("w0", 0)],
        peer=lambda name: SimpleNamespace(incarnation=1),
        part=lambda kind: SimpleNamespace(next_number=lambda group: 0),
    )
    retry.sync_with(Retry(), node, "w0", len, ("abc",), None, 0)
    gather.gather(node, "mine", None, 0)
    assert given == [0, 0]
    node.timeout_s = 0.0
    gather.gather(node, "mine", None, UNSET_TIMEOUT)
    assert given[-1] is UNSET_TIMEOUT


def test_installing_compat_brings_torchs_numbers() -> None:
    farcall.compat.install()
    assert timeouts.torchs_numbers
    farcall.compat.uninstall()
    assert not timeouts.torchs_numbers


@pytest.mark.parametrize("bad", [0, -1])
def test_doors_that_need_no_node(bad: float) -> None:
    done: DerivedFuture[int] = DerivedFuture()
    done.set_result(1)
    waits = [
        lambda: farcall.as_completed([], timeout=bad),
        lambda: farcall.gather().result(timeout=bad),
        lambda: done.wait(bad),
        lambda: done.exception(bad),
    ]
    doors = [
        *(waits if bad else ()),
        lambda: farcall.worker("ps").options(timeout=bad),
        lambda: farcall.map(len, [], workers=["ps"], timeout=bad),
        lambda: farcall.launch(1, start_timeout=bad),
        lambda: farcall.RpcBackendOptions(rpc_timeout=bad),
        lambda: some_seconds("start_timeout_s", bad),
    ]
    for door in doors:
        with pytest.raises(ValueError, match=r"(more than|at least) 0"):
            door()
