"""A publisher that leaves: how long it waits for those who lack its newest versions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.protocol.weights.messages import Claim, Key
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node.hooks import Hooks
from farcall.weights import fetcher as fetcher_module
from farcall.weights import node as module
from farcall.weights.node import LAST_VERSION_S, Weights

ME, LATE, READY = 1, 2, 3


class Leaving:
    """A node that leaves, and its clock, which turns while it waits; after each wait ``meanwhile`` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.meanwhile: Callable[[], None] = lambda: None
        for one in (module, fetcher_module):
            monkeypatch.setattr(one, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "Gate", lambda: self)
        peers = [SimpleNamespace(incarnation=one, broken=False, info=SimpleNamespace(name=f"w{one}")) for one in (2, 3)]
        node: Any = SimpleNamespace(
            me=SimpleNamespace(incarnation=ME, broken=False),
            info=SimpleNamespace(name="w1"),
            is_static=False,
            pool=None,
            hooks=Hooks(),
            timer=lambda call: None,
            others=lambda: peers,
            lifecycle=SimpleNamespace(verdict=None),
        )
        self.lifecycle = node.lifecycle
        self.weights = Weights(node)
        self.awaited = [LATE]
        lender = SimpleNamespace(awaited=self.awaited)
        publication: Any = SimpleNamespace(machine=SimpleNamespace(lender=lender))
        self.weights._publications["policy"] = publication

    def wait(self, timeout_s: float) -> bool:
        """As its gate."""
        self.now += timeout_s
        assert self.now < 2000.0, "it waits without a bound"
        self.meanwhile()
        return False

    def leave(self, timeout_s: float = NEVER) -> float:
        """How long it waited."""
        began = self.now
        for hook in self.weights.node.hooks.agreed:
            hook(began + timeout_s)
        return self.now - began

    def ask(self, member: int) -> None:
        self.weights.fetcher.route("policy", Key(Claim(1, ME), 1), member, "host", ())


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Leaving:
    return Leaving(monkeypatch)


def test_it_waits_until_all_have_them(leaving: Leaving) -> None:
    leaving.meanwhile = leaving.awaited.clear
    assert leaving.leave() == 1.0


def test_one_that_asks_for_nothing_is_given_up(leaving: Leaving, caplog: pytest.LogCaptureFixture) -> None:
    assert leaving.leave() == LAST_VERSION_S
    assert "w1 leaves; these lack its last versions: w2" in caplog.text


def test_one_that_fetches_is_waited_for(leaving: Leaving) -> None:
    def fetch() -> None:
        if leaving.now < 1050.0:
            leaving.ask(LATE)

    leaving.meanwhile = fetch
    assert leaving.leave() == 49.0 + LAST_VERSION_S


def test_one_that_has_them_and_asks_on_puts_nothing_off(leaving: Leaving) -> None:
    leaving.meanwhile = lambda: leaving.ask(READY)
    assert leaving.leave() == LAST_VERSION_S


def test_the_timeout_of_the_shutdown_is_kept(leaving: Leaving, caplog: pytest.LogCaptureFixture) -> None:
    leaving.meanwhile = lambda: leaving.ask(LATE)
    assert leaving.leave(timeout_s=2.5) == 2.5
    assert "these lack its last versions: w2" in caplog.text


def test_one_that_is_expelled_waits_no_more(leaving: Leaving) -> None:
    def expel() -> None:
        leaving.lifecycle.verdict = RuntimeError("expelled")

    leaving.meanwhile = expel
    assert leaving.leave() == 1.0
