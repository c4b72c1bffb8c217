"""`map` over workers that are not there: who gets which item, and when it is done again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.errors import Delivery, NetworkError, PeerDead
from farcall.rpc import mapping
from farcall.rpc.retry import Retry
from farcall.rpc.timeouts import UNSET_TIMEOUT

FOR_EVER = Retry(attempts=2, backoff_s=1e6, longest_backoff_s=1e6)
AT_ONCE = Retry(attempts=3, backoff_s=0.0)


class Done:
    """A future that is done."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.wait = result

    def when_done(self, gate: Any) -> None:
        gate.open()

    def cancel(self) -> bool:
        return False


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which worker was given which item, in order. An item is the function of its worker."""
    calls: list[tuple[str, int]] = []

    def call_async(node: Any, to: str, func: Any, args: tuple[int], *_: Any) -> Done:
        calls.append((to, *args))
        return Done(lambda: func(to, *args))

    monkeypatch.setattr(mapping, "call_async", call_async)
    return calls


def results(func: Callable[[str, int], Any], count: int, retry: Retry, ordered: bool = False) -> Any:
    node: Any = SimpleNamespace()
    workers: dict[Any, Any] = {name: SimpleNamespace(name=name, _node=node, _timeout=1.0) for name in ("a", "b")}
    roster: Any = SimpleNamespace(look_s=None, now=lambda: workers, wait=lambda: False)
    return mapping.map_over(
        roster, func, range(count), in_flight=1, ordered=ordered, timeout=UNSET_TIMEOUT, retry=retry, progress=False
    )


def lost(*_: Any) -> int:
    raise NetworkError("lost", Delivery.NOT_SENT)


def test_one_item_that_pauses_holds_up_no_other(given: list[tuple[str, int]]) -> None:
    """The worker that failed it pauses, too: it would fail the others likewise."""
    found = results(lambda worker, item: lost() if worker == "a" else item, 10, FOR_EVER)
    assert [next(found) for _ in range(9)] == list(range(1, 10))
    found.close()
    assert given == [("a", 0), *(("b", item) for item in range(1, 10))]


@pytest.mark.parametrize("ordered", [False, True])
def test_items_are_done_again_after_their_pause(given: list[tuple[str, int]], ordered: bool) -> None:
    failed: set[int] = set()

    def fail_once(worker: str, item: int) -> int:
        if item % 3 == 0 and item not in failed:
            failed.add(item)
            lost()
        return item

    found = list(results(fail_once, 10, AT_ONCE, ordered))
    assert (found if ordered else sorted(found)) == list(range(10))
    assert len(given) == 14


def test_who_fails_as_often_as_allowed_fails_the_whole(given: list[tuple[str, int]]) -> None:
    with pytest.raises(NetworkError, match="lost"):
        list(results(lost, 1, AT_ONCE))
    assert len(given) == 3


def test_an_item_whose_worker_died_is_done_by_another_at_once(given: list[tuple[str, int]]) -> None:
    def die(worker: str, item: int) -> int:
        if worker == "a":
            raise PeerDead("gone", Delivery.NOT_SENT)
        return item

    assert sorted(results(die, 4, FOR_EVER)) == [0, 1, 2, 3]
