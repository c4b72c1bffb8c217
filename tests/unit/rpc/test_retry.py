"""`Retry` by itself: which errors it is for, and how long it waits."""

from __future__ import annotations

import threading
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock

from farcall import Retry
from farcall.errors import AnswerLost, Cancelled, Delivery, NetworkError, Overloaded, PeerDead, RpcTimeout
from farcall.rpc.retry import Pauses, _Surroundings

NEVER = float("inf")


@pytest.mark.parametrize(
    ("error", "again", "if_executed"),
    [
        (NetworkError("", Delivery.NOT_SENT), True, True),
        (PeerDead("", Delivery.UNKNOWN), True, True),
        (Overloaded(""), True, True),
        (AnswerLost(""), False, True),
        (RpcTimeout(""), False, False),
        (Cancelled(""), False, False),
        (ValueError(""), False, False),
    ],
)
def test_it_is_for_failures_of_the_network(error: Exception, again: bool, if_executed: bool) -> None:
    assert (Retry().pause_s(1, error, NEVER) is not None) == again
    assert (Retry(executed=True).pause_s(1, error, NEVER) is not None) == if_executed


def test_a_failure_that_was_raised_there_is_of_a_function_that_ran() -> None:
    for error in (NetworkError("", Delivery.NOT_SENT), Overloaded("")):
        error.remote_traceback = "..."  # type: ignore[union-attr]
        assert Retry().pause_s(1, error, NEVER) is None


def test_pauses_grow_up_to_a_bound_and_the_last_attempt_has_none() -> None:
    retry = Retry(attempts=5, backoff_s=1.0, factor=3.0, longest_backoff_s=5.0, jitter=0.0)
    error = NetworkError("", Delivery.NOT_SENT)
    assert [retry.pause_s(attempt, error, NEVER) for attempt in range(1, 6)] == [1.0, 3.0, 5.0, 5.0, None]
    jittered = [Retry(backoff_s=1.0, jitter=0.5).pause_s(1, error, NEVER) for _ in range(100)]
    assert all(pause is not None and 0.5 <= pause <= 1.0 for pause in jittered)
    assert len(set(jittered)) > 1


def test_no_pause_goes_beyond_the_deadline() -> None:
    error = NetworkError("", Delivery.NOT_SENT)
    assert Retry(backoff_s=10.0).pause_s(1, error, monotonic() + 1.0) is None


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"attempts": 1.5}, {"attempts": True}, {"backoff_s": -1}, {"factor": 0.5}, {"jitter": 2}],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Retry(**wrong)


def test_two_attempts_under_way_at_once_leave_each_its_own_surroundings() -> None:
    """The first is failed by another thread, which makes the second, before it has returned."""
    surroundings = _Surroundings()
    with surroundings.entered():
        thread = threading.Thread(target=_enter_and_leave, args=(surroundings,))
        thread.start()
        thread.join()


def _enter_and_leave(surroundings: _Surroundings) -> None:
    with surroundings.entered():
        pass


def test_a_call_that_fails_while_its_node_ends_is_not_forgotten() -> None:
    hooks = SimpleNamespace(unsettled=[], ended=[])
    node: Any = SimpleNamespace(hooks=hooks, timer=Clock().timer)
    pauses, given_up = Pauses(node), list[BaseException]()
    hooks.ended[0]()
    pauses.after(0.0, lambda: None, given_up.append)  # it saw the node run a moment ago
    assert isinstance(given_up[0], Cancelled)
